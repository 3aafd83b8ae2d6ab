"""DSA in a network: plugin layers where the flavour has them, native layers elsewhere.

The network calls `select`, `attend` and `attend_window`; the capability record decides what they
add. Only networks with plugin layers need Triton.
"""

from __future__ import annotations

from plugins.dsa import lowering
from plugins.dsa.site import Site
from plugins.trt.network import Network
from plugins.trt.types import Tensor


def select(site: Site, index_query: Tensor, index_keys: Tensor, head_weights: Tensor) -> Tensor:
    """The best visible tokens of each query.

    Args:
        site: where.
        index_query: [B, S, Hi, Di].
        index_keys: [B, 1, C, Di], the whole cache.
        head_weights: [B, S, Hi], as projected.

    Returns:
        int32 [B, S, K], less where fewer rows are looked at; -1 behind the last. Of equal scores
        plugin layers keep the lower tokens; native layers do so for zeros, and any of others.
    """
    net, g = site.net, site.geometry
    if site.expanded:
        index_keys = net.narrow(index_keys, 2, 0, site.span)
    # The kernels keep a power of two.
    if site.plugins and g.kept & (g.kept - 1) == 0:
        from plugins.dsa import chain

        return chain.select(site, index_query, index_keys, head_weights)
    return lowering.select_tokens(net, index_query, index_keys, head_weights, site.visible, g.kept)


def attend(
    site: Site,
    q_nope: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    token_ids: Tensor,
    up: Tensor,
    gate: Tensor,
) -> Tensor:
    """Gated attention of each query over its tokens.

    Args:
        site: where.
        q_nope: [B, S, H, nope]; q_rope: [B, S, H, R], rotated.
        cache: [B, 1, C, L + R], with the new tokens.
        token_ids: int32 [B, S, K] as `select` gives them.
        up: [H, nope + V, L], the up-projection of keys and values.
        gate: [B, S, H], before the logistic function.

    Returns:
        [B, S, H, V].
    """
    net, g = site.net, site.geometry
    key_up, value_up = _halves(site, up)
    if not site.plugins and site.expanded:
        rows = net.narrow(cache, 2, 0, site.span)
        keys, values = lowering.expand(net, rows, key_up, value_up)
        return lowering.attend_context(
            net,
            _whole_heads(net, q_nope, q_rope),
            keys,
            values,
            site.visible,
            scale=g.scale,
            token_ids=token_ids,
            gate=gate,
        )
    q_latent = lowering.absorb(net, q_nope, key_up)
    if site.plugins:
        from plugins.dsa import chain

        mixed = chain.attend(site, q_latent, q_rope, cache, token_ids, gate)
    else:
        mixed = lowering.attend_generation(
            net, q_latent, q_rope, cache, token_ids, site.visible, scale=g.scale, gate=gate
        )
    return lowering.project(net, mixed, value_up)


def attend_window(
    site: Site, q_nope: Tensor, q_rope: Tensor, rows: Tensor, up: Tensor, gate: Tensor
) -> Tensor:
    """Gated attention of each query over the last W tokens.

    Args:
        site: where; its geometry has a window.
        q_nope: [B, S, H, nope]; q_rope: [B, S, H, R], rotated.
        rows: [B, 1, W - 1 + S, L + R], row j of the token at position past - (W - 1) + j.
        up, gate: as in `attend`.

    Returns:
        [B, S, H, V].
    """
    net, g = site.net, site.geometry
    key_up, value_up = _halves(site, up)
    if site.expanded:
        if site.plugins:
            from plugins.dsa import chain

            return chain.attend_dense(site, q_nope, q_rope, rows, up, gate)
        keys, values = lowering.expand(net, rows, key_up, value_up)
        return lowering.attend_context(
            net,
            _whole_heads(net, q_nope, q_rope),
            keys,
            values,
            site.visible,
            scale=g.scale,
            window=g.window,
            past=site.past,
            gate=gate,
        )
    q_latent = lowering.absorb(net, q_nope, key_up)
    if site.plugins:
        from plugins.dsa import chain

        mixed = chain.attend_window(site, q_latent, q_rope, rows, gate)
    else:
        mixed = lowering.attend_window(
            net,
            q_latent,
            q_rope,
            rows,
            site.past,
            site.visible,
            window=g.window,
            scale=g.scale,
            gate=gate,
        )
    return lowering.project(net, mixed, value_up)


def _halves(site: Site, up: Tensor) -> tuple[Tensor, Tensor]:
    """Key [H, nope, L] and value [H, L, V] halves of the joined up-projection."""
    net, g = site.net, site.geometry
    value_up = net.narrow(up, 1, g.nope, g.value)
    return net.narrow(up, 1, 0, g.nope), net.transpose(value_up, (0, 2, 1))


def _whole_heads(net: Network, q_nope: Tensor, q_rope: Tensor) -> Tensor:
    """Query [B, H, S, nope + R] from its two parts [B, S, H, ...]."""
    return net.transpose(net.concat([q_nope, q_rope], 3), (0, 2, 1, 3))
