"""QSA in a network: plugin layers where the flavour has them, native layers elsewhere.

The network calls `prepare`, `select` and `attend`; the capability record decides what they add.
Only networks with plugin layers need Triton.
"""

from __future__ import annotations

from plugins.qsa import lowering
from plugins.qsa.site import Memory, Norms, Prepared, Projections, Site
from plugins.trt.types import Tensor


def prepare(site: Site, projections: Projections, norms: Norms, memory: Memory) -> Prepared:
    """Norms, rotary embedding, cache writes and the keys of blocks that the call completes.

    Every cache becomes the network output `X.updated`; the state's successor is the caller's to
    output.
    """
    if site.plugins:
        from plugins.qsa import chain

        return chain.prepare(site, projections, norms, memory)
    return lowering.prepare(site, projections, norms, memory)


def select(site: Site, index_query: Tensor, block_keys: Tensor) -> Tensor:
    """The best visible blocks of each query.

    Args:
        site: where.
        index_query: [B, Hi, S, Di].
        block_keys: [B, 1, NB, Di], the whole cache.

    Returns:
        int32 [B, S, K], -1 = unused. Of equal scores plugin layers keep the lower block ids,
        native layers any.
    """
    calls, g = site.calls, site.geometry
    net = calls.net
    if calls.context:
        block_keys = net.narrow(block_keys, 2, 0, net.dim_floor_div(calls.span, g.ratio))
    if site.plugins:
        from plugins.qsa import chain

        return chain.select(site, index_query, block_keys)
    visible = lowering.visible_blocks(net, calls.queries, g.ratio)
    kept = min(g.blocks, calls.rows // g.ratio)
    return lowering.select_blocks(net, index_query, block_keys, visible, kept)


def attend(
    site: Site, query: Tensor, keys: Tensor, values: Tensor, block_ids: Tensor, q_gate: Tensor
) -> Tensor:
    """Gated attention of each query over its blocks and the tail.

    Args:
        site: where.
        query: [B, Hq, S, D].
        keys, values: the caches [B, Hk, C, D], with the new tokens.
        block_ids: int32 [B, S, K] as `select` gives them.
        q_gate: [B, S, Hq * 2D], per head D query columns, then its D gate columns.

    Returns:
        [B, S, Hq * D].
    """
    calls, g = site.calls, site.geometry
    net = calls.net
    if site.plugins:
        from plugins.qsa import chain

        return chain.attend(site, query, keys, values, block_ids, q_gate)
    attend_ = lowering.attend_generation
    if calls.context:
        attend_ = lowering.attend_context
        keys, values = (net.narrow(cache, 2, 0, calls.span) for cache in (keys, values))
    return attend_(
        net,
        query,
        keys,
        values,
        block_ids,
        calls.queries,
        ratio=g.ratio,
        scale=g.width**-0.5,
        q_gate=q_gate,
    )
