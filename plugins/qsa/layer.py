"""QSA in a network: plugin layers where the flavour has them, native layers elsewhere.

The network calls `select` and `attend`; the capability record decides what they add. Only networks
with plugin layers need Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from plugins.qsa import lowering
from plugins.qsa.geometry import Geometry
from plugins.trt.network import Dim, Network
from plugins.trt.types import Tensor


@dataclass(frozen=True)
class Site:
    """Where QSA stands: one engine's calls.

    Attributes:
        net: the network.
        geometry: of the layer.
        context: many queries per slot, any number of them; else a fixed few.
        past, new: int32 [B], cached tokens before the call and valid ones in it.
        positions: int32 [B, S], -1 for padding.
        span: cache rows that a context call looks at.
        rows: most tokens of a sequence.
        slots, steps: slots and queries per slot of the largest call.
    """

    net: Network
    geometry: Geometry
    context: bool
    past: Tensor
    new: Tensor
    positions: Tensor
    span: Dim
    rows: int
    slots: int
    steps: int

    @property
    def plugins(self) -> bool:
        """Whether plugin layers are added: the kernels take powers of two."""
        g = self.geometry
        sizes = (g.width, g.index_width, g.blocks, g.ratio)
        powers = all(size & (size - 1) == 0 for size in sizes)
        return self.net.capability.has_plugins and powers and min(g.width, g.index_width) >= 16


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
    net, g = site.net, site.geometry
    if site.context:
        block_keys = net.narrow(block_keys, 2, 0, net.dim_floor_div(site.span, g.ratio))
    if site.plugins:
        from plugins.qsa import chain

        return chain.select(site, index_query, block_keys)
    visible = lowering.visible_blocks(net, site.positions, g.ratio)
    kept = min(g.blocks, site.rows // g.ratio)
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
    net, g = site.net, site.geometry
    if site.plugins:
        from plugins.qsa import chain

        return chain.attend(site, query, keys, values, block_ids, q_gate)
    attend_ = lowering.attend_generation
    if site.context:
        attend_ = lowering.attend_context
        keys, values = (net.narrow(cache, 2, 0, site.span) for cache in (keys, values))
    return attend_(
        net,
        query,
        keys,
        values,
        block_ids,
        site.positions,
        ratio=g.ratio,
        scale=g.width**-0.5,
        q_gate=q_gate,
    )
