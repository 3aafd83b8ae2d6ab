"""DSA out of native TensorRT layers: the same operations as `plugins.dsa.reference`.

A generation step has few queries: their latents are gathered and attended to in the absorbed form,
and nothing else of the cache is touched. A context chunk has many, whose union is most of the
cache: the cached latents are expanded to keys and values, and the selection becomes the mask of a
dense attention. Sliding layers gather their window and do the same two things without a selection.

Sizes are named as in the reference. `visible` int32 [B, S] says how many tokens a query sees, 0 for
padding, whose output is zero. Caches must hold finite values in every row.
"""

from __future__ import annotations

import torch

from plugins.support.errors import BuildError
from plugins.trt.network import Network
from plugins.trt.shapes import Dim
from plugins.trt.types import Tensor

# Below every score, above the most negative float32.
_HIDDEN_SCORE = -1e30
# Heads whose scores are stored at a time where attention is not fused.
_HEAD_GROUP = 16
# The smallest normal float32: scores of exactly zero are told apart by multiples of it.
_TINY = 2.0**-126


def visible_counts(net: Network, past: Tensor, new: Tensor, queries: Dim) -> Tensor:
    """Tokens that each query sees: int32 [B, S] from int32 [B] lengths, 0 for padding."""
    step = net.unsqueeze(net.iota(queries), [0])
    counts = net.add(net.unsqueeze(past, [1]), net.add(step, 1))
    return net.select(net.less(step, net.unsqueeze(new, [1])), counts, 0)


def select_tokens(
    net: Network,
    index_query: Tensor,
    index_keys: Tensor,
    head_weights: Tensor,
    visible: Tensor,
    kept: int,
    head_groups: int = 1,
) -> Tensor:
    """The best visible tokens of each query.

    Args:
        index_query: [B, S, Hi, Di].
        index_keys: [B, 1, N, Di].
        head_weights: [B, S, Hi], as projected.
        visible: int32 [B, S], at most N.
        kept: K.
        head_groups: parts in which the heads are scored, one after the other; bounds the
            float32 [B, S, Hi / parts, N] that exists at a time.

    Returns:
        int32 [B, S, min(K, N)], -1 = unused, in no particular order. Scores of exactly zero: the
        lower index is kept; other equal scores: any.
    """
    batch, queries, tokens = (
        net.dim(index_query, 0),
        net.dim(index_query, 1),
        net.dim(index_keys, 2),
    )
    _, _, heads, width = net.shape(index_query)
    keys = net.cast(index_keys, "float32")
    part = heads // head_groups
    scores = None
    for first in range(0, heads, part):
        query = net.cast(net.narrow(index_query, 2, first, part), "float32")
        weights = net.cast(net.narrow(head_weights, 2, first, part), "float32")
        lines = net.reshape(query, [batch, 1, net.dim_mul(queries, part), width])
        dots = net.relu(net.matmul(lines, keys, transpose_b=True))
        by_head = net.reshape(dots, [batch, queries, part, tokens])
        mixed = net.squeeze(net.matmul(net.unsqueeze(weights, [2]), by_head), [2])
        scores = mixed if scores is None else net.add(scores, mixed)
    # The positive constant (Hi Di)^-1/2 of the definition does not change the order.
    index = net.unsqueeze(net.iota(tokens), [0, 1])
    seen = net.unsqueeze(visible, [2])
    by_index = net.mul(net.cast(net.add(index, 1), "float32"), -_TINY)
    scores = net.select(net.equal(scores, 0.0), by_index, scores)
    scores = net.select(net.less(index, seen), scores, _HIDDEN_SCORE)
    _, chosen = net.topk(scores, net.dim_min(tokens, kept), axis=2)
    return net.select(net.less(chosen, seen), chosen, -1)


def scaled(net: Network, x: Tensor, factor: float) -> Tensor:
    """x times a constant that is not rounded to x's type; the product is, once."""
    return net.cast(net.mul(net.cast(x, "float32"), factor), net.dtype(x))


def absorb(net: Network, q_nope: Tensor, key_up: Tensor) -> Tensor:
    """Take queries [B, S, H, nope] through the key up-projection [H, nope, L]: [B, S, H, L]."""
    return _per_head(net, q_nope, key_up)


def project(net: Network, latent: Tensor, value_up: Tensor) -> Tensor:
    """Take latent outputs [B, S, H, L] through the value up-projection [H, L, V]: [B, S, H, V]."""
    return _per_head(net, latent, value_up)


def _per_head(net: Network, x: Tensor, weights: Tensor) -> Tensor:
    batch, queries = net.dim(x, 0), net.dim(x, 1)
    _, _, heads, width = net.shape(x)
    lines = net.reshape(x, [net.dim_mul(batch, queries), heads, width])
    out = net.matmul(net.transpose(lines, (1, 0, 2)), weights)
    apart = net.transpose(out, (1, 0, 2))
    return net.reshape(apart, [batch, queries, heads, net.shape(out)[2]])


def expand(net: Network, rows: Tensor, key_up: Tensor, value_up: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, H, N, nope + R] and values [B, H, N, V] of cached rows.

    Args:
        rows: [B, 1, N, L + R].
        key_up: [H, nope, L].
        value_up: [H, L, V].
    """
    batch, tokens, width = net.dim(rows, 0), net.dim(rows, 2), net.shape(rows)[3]
    heads, _, latent_width = net.shape(key_up)
    latent = net.narrow(rows, 3, 0, latent_width)
    rope = net.narrow(rows, 3, latent_width, width - latent_width)
    nope = net.matmul(latent, net.unsqueeze(key_up, [0]), transpose_b=True)
    shared = net.expand(rope, [batch, heads, tokens, width - latent_width])
    return net.concat([nope, shared], 3), net.matmul(latent, net.unsqueeze(value_up, [0]))


def attend_generation(
    net: Network,
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    token_ids: Tensor,
    visible: Tensor,
    *,
    scale: float,
    gate: Tensor | None = None,
) -> Tensor:
    """Absorbed attention of a few queries over their gathered rows.

    Args:
        q_latent: [B, T, H, L]; q_rope: [B, T, H, R]; T static.
        cache: [B, 1, C, L + R].
        token_ids: int32 [B, T, K], -1 = unused.
        visible: int32 [B, T].
        scale: factor on the dot products.
        gate: [B, T, H]; outputs are multiplied by its logistic function.

    Returns:
        [B, T, H, L].
    """
    batch = net.dim(q_latent, 0)
    _, queries, heads, latent = net.shape(q_latent)
    width = latent + net.shape(q_rope)[3]
    kept = net.dim(token_ids, 2)
    lines = net.dim_mul(batch, queries)
    read = net.reshape(net.maximum(token_ids, 0), [batch, net.dim_mul(kept, queries)])
    rows = net.gather(net.squeeze(cache, [1]), read, axis=1, elementwise_dims=1)
    rows = net.reshape(rows, [lines, kept, width])
    used = net.reshape(net.logical_not(net.less(token_ids, 0)), [lines, 1, kept])
    query = net.reshape(net.concat([q_latent, q_rope], 3), [lines, heads, width])
    mixed = _absorbed(net, query, rows, used, latent, scale)
    return _finish(net, net.reshape(mixed, [batch, queries, heads, latent]), visible, gate)


def attend_context(
    net: Network,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    scale: float,
    token_ids: Tensor | None = None,
    window: int | None = None,
    past: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Attention of many queries over expanded keys and values, through a mask.

    Args:
        query: [B, H, S, nope + R].
        keys: [B, H, N, nope + R]; values: [B, H, N, V], V <= nope + R. Row j is the token at
            position j; with a window, at position past - (W - 1) + j.
        visible: int32 [B, S].
        scale: factor on the dot products.
        token_ids: int32 [B, S, K] as `select_tokens` gives them; None = every visible token.
        window: tokens a query sees, itself included; needs `past`, int32 [B].
        gate: [B, S, H]; outputs are multiplied by its logistic function.

    Returns:
        [B, S, H, V].
    """
    rows = net.dim(keys, 2)
    index = net.unsqueeze(net.iota(rows), [0, 1])
    seen = net.unsqueeze(visible, [2])
    if window is not None:
        mask = _window_mask(net, index, past, visible, window)
    elif token_ids is None:
        mask = net.less(index, seen)
    else:
        # Unused entries occur only where every visible token is chosen: they name the newest.
        newest = net.maximum(net.sub(seen, 1), 0)
        named = net.select(net.less(token_ids, 0), newest, token_ids)
        batch, queries = net.dim(query, 0), net.dim(query, 2)
        zeros = net.expand(net.literal(torch.zeros(1, 1, 1)), [batch, queries, rows])
        ones = net.literal(torch.ones(1, 1, 1))
        ones = net.expand(ones, [batch, queries, net.dim(token_ids, 2)])
        marked = net.greater(net.scatter_elements(zeros, named, ones, 2), 0.5)
        mask = net.logical_and(marked, net.less(index, seen))
    width, value_width = net.shape(query)[3], net.shape(values)[3]
    if value_width < width:
        # The fused attention takes one width for all three.
        sizes = [net.dim(values, 0), net.shape(values)[1], rows, width - value_width]
        pad = net.cast(net.literal(torch.zeros(1, 1, 1, 1)), net.dtype(values))
        values = net.concat([values, net.expand(pad, sizes)], 3)
    mask = net.unsqueeze(mask, [1])
    query = scaled(net, query, scale)
    if token_ids is None:
        mixed = net.attention(query, keys, values, mask)
    else:
        # TensorRT for RTX 1.7 does not find its fused kernels again when layers with two kinds of
        # masks stand between loops; either it says so or it crashes.
        heads, parts = net.shape(query)[1], []
        for first in range(0, heads, _HEAD_GROUP):
            q, k, v = (
                net.narrow(x, 1, first, min(_HEAD_GROUP, heads - first))
                for x in (query, keys, values)
            )
            parts.append(net.attention(q, k, v, mask, fused=False))
        mixed = net.concat(parts, 1) if len(parts) > 1 else parts[0]
    mixed = net.transpose(mixed, (0, 2, 1, 3))
    if value_width < width:
        mixed = net.narrow(mixed, 3, 0, value_width)
    return _finish(net, mixed, visible, gate)


def gather_window(
    net: Network, cache: Tensor, past: Tensor, base: Tensor, *, window: int, queries: Dim
) -> Tensor:
    """The rows [B, 1, W - 1 + S, D] that S queries see, from position past - (W - 1) on.

    Args:
        cache: [B, 1, R, D], the token at position p in row (p - base) mod R, R static and at least
            W - 1 + S; no visible position lies R or more before the base.
        past, base: int32 [B].

    Rows before position 0 are those of arbitrary other tokens; the masks leave them out.
    """
    capacity = net.shape(cache)[2]
    offset = net.unsqueeze(net.iota(net.dim_add(queries, window - 1)), [0])
    position = net.add(net.sub(net.unsqueeze(past, [1]), window - 1), offset)
    shifted = net.sub(net.maximum(position, 0), net.unsqueeze(base, [1]))
    # Negative dividends are kept away from the integer division.
    ahead = net.add(shifted, capacity)
    row = net.sub(ahead, net.mul(net.floor_div(ahead, capacity), capacity))
    row = net.select(net.less(ahead, 0), 0, row)
    return net.gather(cache, row, axis=2, elementwise_dims=1)


def attend_window(
    net: Network,
    q_latent: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    past: Tensor,
    visible: Tensor,
    *,
    window: int,
    scale: float,
    gate: Tensor | None = None,
) -> Tensor:
    """Absorbed attention of a few queries over their common window.

    Args:
        q_latent: [B, T, H, L]; q_rope: [B, T, H, R]; T static.
        rows: [B, 1, W - 1 + T, L + R] as `gather_window` gives them.
        past: int32 [B]; visible: int32 [B, T].
        window: W.
        scale, gate: as in `attend_generation`.

    Returns:
        [B, T, H, L].
    """
    batch = net.dim(q_latent, 0)
    _, queries, heads, latent = net.shape(q_latent)
    width = latent + net.shape(q_rope)[3]
    span = window - 1 + queries
    index = net.unsqueeze(net.iota(span), [0, 1])
    used = net.unsqueeze(_window_mask(net, index, past, visible, window), [2])
    used = net.reshape(
        net.expand(used, [batch, queries, heads, span]), [batch, queries * heads, span]
    )
    query = net.reshape(net.concat([q_latent, q_rope], 3), [batch, queries * heads, width])
    mixed = _absorbed(net, query, net.squeeze(rows, [1]), used, latent, scale)
    return _finish(net, net.reshape(mixed, [batch, queries, heads, latent]), visible, gate)


def _window_mask(
    net: Network, index: Tensor, past: Tensor | None, visible: Tensor, window: int
) -> Tensor:
    """Bool [B, S, N]: rows of a window from position past - (W - 1) on that a query sees."""
    if past is None:
        raise BuildError("a window needs the past lengths", where=net.scope_name)
    # The newest row of a query: its position plus W - 1 minus past.
    before = net.unsqueeze(past, [1, 2])
    newest = net.add(net.sub(net.unsqueeze(visible, [2]), before), window - 2)
    oldest = net.maximum(net.sub(newest, window - 1), net.sub(window - 1, before))
    return net.logical_and(net.less_equal(index, newest), net.greater_equal(index, oldest))


def _absorbed(
    net: Network, query: Tensor, rows: Tensor, used: Tensor, latent: int, scale: float
) -> Tensor:
    """[n, H, L] from queries [n, H, W], their rows [n, K, W] and which count, bool [n, 1|H, K]."""
    dtype = net.dtype(query)
    scores = net.matmul(scaled(net, query, scale), rows, transpose_b=True)
    scores = net.select(used, net.cast(scores, "float32"), _HIDDEN_SCORE)
    weights = net.cast(net.softmax(scores, 2), dtype)
    return net.matmul(weights, net.narrow(rows, 2, 0, latent))


def _finish(net: Network, mixed: Tensor, visible: Tensor, gate: Tensor | None) -> Tensor:
    """Gate the heads of [B, S, H, n] and clear padding queries.

    Padding rows had everything masked, for which kernels return anything, also NaN.
    """
    if gate is not None:
        opened = net.unsqueeze(net.sigmoid(net.cast(gate, "float32")), [3])
        mixed = net.cast(net.mul(net.cast(mixed, "float32"), opened), net.dtype(mixed))
    padding = net.less(net.unsqueeze(visible, [2, 3]), 1)
    return net.select(padding, 0.0, mixed)
