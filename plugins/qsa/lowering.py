"""QSA out of native TensorRT layers: the same operation as `plugins.qsa.reference`.

`prepare` makes queries and writes the caches, `select_blocks` decides what each query reads, one of
the two `attend_*` functions reads it. A generation step has few queries, so their blocks are
gathered and nothing else of the cache is touched; a context chunk has many, whose union is most of
the cache, so the selection becomes the mask of a dense attention. Sizes are named as in the
reference. Query positions of -1 mark padding and give zeros; block ids of -1 are unused.
"""

from __future__ import annotations

import torch

from plugins.qsa.site import Memory, Norms, Prepared, Projections, Site
from plugins.trt.network import Network
from plugins.trt.norms import rms_norm
from plugins.trt.rows import last_rows
from plugins.trt.types import Tensor

# Below every score, above the most negative float32.
_HIDDEN_SCORE = -1e30


def prepare(site: Site, projections: Projections, norms: Norms, memory: Memory) -> Prepared:
    """As `plugins.qsa.layer.prepare`; a padding slot writes to rows behind the visible ones."""
    calls, g = site.calls, site.geometry
    net = calls.net

    def heads(x: Tensor, count: int, width: int) -> Tensor:
        return net.reshape(x, [net.dim(x, 0), net.dim(x, 1), count, width])

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        """Centred norm per head, heads before tokens, rotation: [B, S, N, D] to [B, N, S, D]."""
        normed = rms_norm(net, x, weight, calls.eps, centered=True)
        return calls.rope.rotate(net.transpose(normed, (0, 2, 1, 3)), calls.angles)

    both = heads(projections.q_gate, g.heads, 2 * g.width)
    query = turned(net.narrow(both, -1, 0, g.width), norms.query)
    key = turned(heads(projections.key, g.kv_heads, g.width), norms.key)
    value = net.transpose(heads(projections.value, g.kv_heads, g.width), (0, 2, 1, 3))
    keys = net.kv_cache_update(memory.keys, key, calls.token_row)
    values = net.kv_cache_update(memory.values, value, calls.token_row)
    with net.scope("indexer"):
        index_width = g.index_heads * g.index_width
        index_query = net.narrow(projections.index_qk, -1, 0, index_width)
        index_query = turned(heads(index_query, g.index_heads, g.index_width), norms.index_query)
        fresh = net.narrow(projections.index_qk, -1, index_width, g.index_width)
        rows = net.concat([memory.state, fresh], axis=1)
        state = last_rows(net, rows, calls.new, g.ratio - 1)
        pooled = _block_keys(site, rows, norms.index_key)
        block_keys = net.kv_cache_update(memory.block_keys, pooled, calls.block_row)
    return Prepared(query, index_query, Memory(keys, values, block_keys, state))


def _block_keys(site: Site, rows: Tensor, weight: Tensor) -> Tensor:
    """Keys [B, 1, n, Di] of the blocks that the call may complete, from raw [B, R - 1 + S, Di].

    A block of which a part is padding gets a key too, but no query sees it before it is written
    again.
    """
    calls, ratio, width = site.calls, site.geometry.ratio, site.geometry.index_width
    net = calls.net
    count = net.dim(calls.positions, 1)
    blocks = net.dim_floor_div(net.dim_add(count, ratio - 1), ratio)
    offset = net.sub(calls.past, net.mul(calls.first_block, ratio))
    first = net.unsqueeze(net.sub(ratio - 1, offset), [1])
    taken = net.add(first, net.unsqueeze(net.iota(net.dim_mul(blocks, ratio)), [0]))
    if isinstance(count, int):
        # A few tokens may finish no block; what is read instead is never seen.
        taken = net.minimum(taken, count + ratio - 2)
    raw = net.gather(rows, taken, axis=1, elementwise_dims=1)
    raw = net.reshape(raw, [net.dim(rows, 0), blocks, ratio, width])
    pooled = net.reduce_mean(net.cast(raw, "float32"), axes=[2], keepdims=False)
    pooled = rms_norm(net, net.cast(pooled, calls.dtype), weight, calls.eps, centered=True)
    block = net.add(net.unsqueeze(calls.first_block, [1]), net.unsqueeze(net.iota(blocks), [0]))
    angles = calls.rope.at(net.mul(block, ratio))
    return calls.rope.rotate(net.unsqueeze(pooled, [1]), angles)


def visible_blocks(net: Network, positions: Tensor, ratio: int) -> Tensor:
    """Complete blocks each query sees: int32 [B, S] from int32 positions [B, S]."""
    return net.floor_div(net.add(positions, 1), ratio)


def select_blocks(
    net: Network, index_query: Tensor, block_keys: Tensor, visible: Tensor, blocks: int
) -> Tensor:
    """The best visible blocks of each query.

    Args:
        index_query: [B, Hi, S, Di].
        block_keys: [B, 1, NB, Di], NB >= blocks at run time.
        visible: int32 [B, S].
        blocks: K.

    Returns:
        int32 [B, S, K], -1 = unused, in no particular order. Of equal scores (in practice zeros:
        all heads negative) TensorRT keeps any, where the reference keeps the lower block id.
    """
    dots = net.matmul(
        net.cast(index_query, "float32"), net.cast(block_keys, "float32"), transpose_b=True
    )
    # The constant 1 / sqrt(Di) of the definition does not change the order.
    scores = net.reduce_sum(net.relu(dots), axes=[1], keepdims=False)
    index = net.unsqueeze(net.iota(net.dim(block_keys, 2)), [0, 1])
    seen = net.unsqueeze(visible, [2])
    scores = net.select(net.less(index, seen), scores, _HIDDEN_SCORE)
    _, chosen = net.topk(scores, blocks, axis=2)
    return net.select(net.less(chosen, seen), chosen, -1)


def attend_context(
    net: Network,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_ids: Tensor,
    positions: Tensor,
    *,
    ratio: int,
    scale: float,
    q_gate: Tensor | None = None,
) -> Tensor:
    """Attention of many queries through a mask.

    Args:
        query: [B, Hq, S, D].
        keys, values: [B, Hk, N, D], the first N cache rows; N a multiple of the ratio.
        block_ids: int32 [B, S, K], K <= N / ratio.
        positions: int32 [B, S].
        ratio: tokens per block.
        scale: factor on the dot products.
        q_gate: [B, S, Hq * 2D], per head D other columns, then D gate columns; the output is
            multiplied by their logistic function.

    Returns:
        [B, S, Hq * D].
    """
    batch, queries, rows = net.dim(query, 0), net.dim(query, 2), net.dim(keys, 2)
    blocks = net.dim_floor_div(rows, ratio)
    tail = net.unsqueeze(visible_blocks(net, positions, ratio), [2])
    # The tail block is always read, so that an unused entry may name it once more.
    named = net.select(net.less(block_ids, 0), tail, block_ids)
    zeros = net.expand(net.literal(torch.zeros(1, 1, 1)), [batch, queries, blocks])
    ones = net.expand(net.literal(torch.ones(1, 1, 1)), [batch, queries, net.dim(block_ids, 2)])
    marked = net.greater(net.scatter_elements(zeros, named, ones, 2), 0.5)
    is_tail = net.equal(net.unsqueeze(net.iota(blocks), [0, 1]), tail)
    whole = net.unsqueeze(net.logical_or(marked, is_tail), [3])
    tokens = net.reshape(net.expand(whole, [batch, queries, blocks, ratio]), [batch, queries, rows])
    future = net.greater(net.unsqueeze(net.iota(rows), [0, 1]), net.unsqueeze(positions, [2]))
    mask = net.unsqueeze(net.logical_and(tokens, net.logical_not(future)), [1])
    mixed = net.attention(_scaled(net, query, scale), keys, values, mask)
    return _joined(net, net.transpose(mixed, (0, 2, 1, 3)), positions, q_gate)


def attend_generation(
    net: Network,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_ids: Tensor,
    positions: Tensor,
    *,
    ratio: int,
    scale: float,
    q_gate: Tensor | None = None,
) -> Tensor:
    """Attention of a few queries over their gathered blocks.

    Args:
        query: [B, Hq, T, D], T static.
        keys, values: [B, Hk, C, D], the caches, C static and a multiple of the ratio.
        block_ids: int32 [B, T, K].
        positions: int32 [B, T], below C.
        ratio, scale, q_gate: as in `attend_context`.

    Returns:
        [B, T, Hq * D].
    """
    batch = net.dim(query, 0)
    _, heads, queries, width = net.shape(query)
    _, kv_heads, rows, _ = net.shape(keys)
    blocks = net.shape(block_ids)[2] + 1
    tail = net.unsqueeze(visible_blocks(net, positions, ratio), [2])
    used = net.expand(
        net.unsqueeze(net.logical_not(net.less(block_ids, 0)), [3]),
        [batch, queries, blocks - 1, ratio],
    )
    lanes = net.literal(torch.arange(ratio, dtype=torch.int32)[None, None])
    beyond = net.greater(net.add(net.mul(tail, ratio), lanes), net.unsqueeze(positions, [2]))
    in_tail = net.unsqueeze(net.logical_not(beyond), [2])
    rows_of_batch = net.dim_mul(batch, queries)
    mask = net.reshape(net.concat([used, in_tail], 2), [rows_of_batch, 1, 1, blocks * ratio])
    # Behind the last row there is no tail, and nothing of the block read instead is attended to.
    inside = net.minimum(tail, rows // ratio - 1)
    read = net.concat([net.maximum(block_ids, 0), inside], 2)
    read = net.reshape(read, [batch, queries * blocks])

    def gathered(cache: Tensor) -> Tensor:
        by_block = net.reshape(cache, [batch, kv_heads, rows // ratio, ratio * width])
        chosen = net.gather(by_block, read, axis=2, elementwise_dims=1)
        if queries > 1:
            apart = net.reshape(chosen, [batch, kv_heads, queries, blocks * ratio, width])
            chosen = net.transpose(apart, (0, 2, 1, 3, 4))
        return net.reshape(chosen, [rows_of_batch, kv_heads, blocks * ratio, width])

    single = _scaled(net, query, scale)
    if queries > 1:
        by_query = net.transpose(single, (0, 2, 1, 3))
        single = net.reshape(by_query, [rows_of_batch, heads, 1, width])
    mixed = net.attention(single, gathered(keys), gathered(values), mask)
    return _joined(net, net.reshape(mixed, [batch, queries, heads, width]), positions, q_gate)


def _scaled(net: Network, query: Tensor, scale: float) -> Tensor:
    """query * scale, rounded once: a constant in the query's own type would be rounded too."""
    return net.cast(net.mul(net.cast(query, "float32"), scale), net.dtype(query))


def _joined(net: Network, mixed: Tensor, positions: Tensor, q_gate: Tensor | None) -> Tensor:
    """[B, S, Hq, D] to [B, S, Hq * D], gated, with zeros for padding queries.

    Their rows had everything masked, for which kernels return anything, also NaN.
    """
    _, _, heads, width = net.shape(mixed)
    batch, queries = net.dim(mixed, 0), net.dim(mixed, 1)
    joined = net.reshape(mixed, [batch, queries, heads * width])
    if q_gate is not None:
        both = net.reshape(q_gate, [batch, queries, heads, 2 * width])
        opened = net.sigmoid(net.cast(net.narrow(both, -1, width, width), "float32"))
        opened = net.reshape(opened, [batch, queries, heads * width])
        joined = net.cast(net.mul(net.cast(joined, "float32"), opened), net.dtype(mixed))
    padding = net.unsqueeze(net.less(positions, 0), [2])
    return net.select(padding, 0.0, joined)
