# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Prefill attention: neighbouring queries read the union of their blocks together.

Neighbours of one sequence choose mostly the same blocks. A tile of ROWS queries therefore walks
the union of their blocks once, with one mask bit per query; ROWS x 12 heads fill the long side of
the matrix instruction. The incomplete tails of a tile lie in one short run of tokens, which is
handled apart, so that only that step compares token positions.

Where neighbours share so little that the union has more than LIMIT blocks, walking it costs more
than it saves: `attend_tile` leaves such tiles out and `attend_apart` takes exactly those.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plugins.qsa.kernels.attention import LOG2_E, LOWEST, weigh
from plugins.qsa.kernels.dense import first_sparse


@triton.jit
def unite_blocks(
    blocks,
    past,
    new,
    S,
    words,
    counts,
    entries,
    marks,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Union of the blocks of each tile of ROWS queries. Grid (cdiv(S, ROWS), B).

    blocks int32 [B, S, K]. Three runs per tile: blocks that only the first half of its queries
    keeps, only the second half, both. counts int32 [B, tiles, 3]; entries int32
    [B, tiles, 3, ROWS / 2 * K]: block id * 2^ROWS + the bits of the queries that keep it, ids
    ascending. Queries whose attention is dense keep nothing here. marks int32 [B, tiles, words] is
    working space of one word per block.
    """
    tile = tl.program_id(0)
    slot = tl.program_id(1)
    place = slot * tl.num_programs(0) + tile
    lanes = tl.arange(0, WORDS)
    first_row = tile * ROWS
    past_length = tl.load(past + slot)
    count = tl.minimum(tl.load(new + slot), S)
    sparse = first_sparse(past_length, count, K, RATIO)
    last_row = tl.minimum(first_row + ROWS, count)
    seen = tl.where(last_row > tl.maximum(first_row, sparse), (past_length + last_row) // RATIO, 0)
    seen = tl.minimum(seen, words)
    if seen == 0:
        for run in tl.static_range(3):
            tl.store(counts + place * 3 + run, 0)
        return
    mark = marks + place.to(tl.int64) * words
    for start in range(0, seen, WORDS):
        tl.store(mark + start + lanes, 0, mask=start + lanes < seen)
    row = tl.arange(0, ROWS_PADDED)
    entry = tl.arange(0, K)
    step = first_row + row
    kept = tl.where((step >= sparse) & (step < count), K, 0)
    live = (row[:, None] < ROWS) & (entry[None, :] < kept[:, None])
    at = (slot.to(tl.int64) * S + step)[:, None] * K + entry[None, :]
    block = tl.load(blocks + at, mask=live, other=-1)
    bit = tl.full((ROWS_PADDED, K), 1, tl.int32) << row[:, None]
    inside = live & (block >= 0) & (block < seen)
    tl.debug_barrier()
    tl.atomic_or(mark + tl.where(inside, block, 0), bit, mask=inside, sem="relaxed", scope="cta")
    tl.debug_barrier()
    HALF: tl.constexpr = ROWS // 2
    # Lengths of the three runs, 20 bits each.
    total = tl.zeros((), tl.int64)
    one = tl.full((WORDS,), 1, tl.int64)
    out = entries + place.to(tl.int64) * (3 * HALF * K)
    for start in range(0, seen, WORDS):
        word = start + lanes
        # Atomics wrote the marks past this multiprocessor's cache.
        bits = tl.load(mark + word, mask=word < seen, other=0, cache_modifier=".cg")
        run = tl.where(bits >> HALF == 0, 0, tl.where(bits % (1 << HALF) == 0, 1, 2))
        unit = tl.where(bits != 0, one << (run * 20), 0)
        rank = (total + tl.cumsum(unit, axis=0) - unit) >> (run * 20)
        rank = (rank & 0xFFFFF).to(tl.int32)
        tl.store(out + run * (HALF * K) + rank, (word << ROWS) | bits, mask=bits != 0)
        total += tl.sum(unit, axis=0)
    for run in tl.static_range(3):
        tl.store(counts + place * 3 + run, ((total >> (run * 20)) & 0xFFFFF).to(tl.int32))


@triton.jit
def _listed(entry, alone_first, alone_second, RUN: tl.constexpr):
    """Place of the entry-th entry in a list of three runs of at most RUN entries."""
    second = entry - alone_first
    both = second - alone_second
    place = tl.where(both >= 0, both + 2 * RUN, second + RUN)
    return tl.where(second >= 0, place, entry)


@triton.jit
def _fold(score, used, weight_type: tl.constexpr, value, total, maximum, normalizer):
    """One online-softmax step: score [M, N] (base 2), used [M, N], value [N, D]."""
    weight, decay, highest, normalizer = weigh(score, used, maximum, normalizer)
    total = tl.dot(weight.to(weight_type), value, acc=total * decay[:, None])
    return total, highest, normalizer


@triton.jit
def _attend(
    q,
    k_cache,
    v_cache,
    list_,
    alone_first,
    alone_second,
    both,
    past_length,
    count,
    gate,
    slot,
    first_step,
    kv_head,
    sparse,
    S,
    C,
    out,
    RATIO: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    RUN: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    TAIL: tl.constexpr,
    SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    GATE_OFFSET: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of ROWS neighbouring queries over the entries of a list and their tails.

    The list has three runs, see `unite_blocks`. An entry is a block id with BITS mask bits below
    it, one per query; without mask bits every query keeps the block. Steps before `sparse` are
    left alone.
    """
    GROUP: tl.constexpr = HQ // HK
    line = tl.arange(0, M)
    row = line // GROUP
    head = kv_head * GROUP + line % GROUP
    step = first_step + row
    inside = (row < ROWS) & (step >= sparse) & (step < S)
    valid = (row < ROWS) & (step < count)
    position = tl.where(valid, past_length + step, -1)
    dims = tl.arange(0, D)
    lanes = tl.arange(0, TOKENS)
    query_at = ((slot * HQ + head).to(tl.int64) * S + step)[:, None] * D + dims[None, :]
    query = tl.load(q + query_at, mask=valid[:, None], other=0.0).to(DOT)
    cache_at = (slot * HK + kv_head).to(tl.int64) * C * D
    keys = k_cache + cache_at
    values = v_cache + cache_at
    scale = SCALE * LOG2_E
    maximum = tl.full((M,), LOWEST, tl.float32)
    normalizer = tl.zeros((M,), tl.float32)
    total = tl.zeros((M, D), tl.float32)

    first_tail = (past_length + first_step + 1) // RATIO * RATIO
    newer = first_tail + tl.arange(0, TAIL)
    newest = past_length + tl.minimum(first_step + ROWS, count) - 1
    there = (newer <= newest)[:, None]
    newer_at = newer[:, None].to(tl.int64) * D + dims[None, :]
    newer_key = tl.load(keys + newer_at, mask=there, other=0.0).to(DOT)
    newer_value = tl.load(values + newer_at, mask=there, other=0.0).to(DOT)
    newer_score = tl.dot(query, tl.trans(newer_key)) * scale
    tail_start = (position + 1) // RATIO * RATIO
    in_tail = (newer[None, :] <= position[:, None]) & (newer[None, :] >= tail_start[:, None])
    total, maximum, normalizer = _fold(
        newer_score, in_tail, DOT, newer_value, total, maximum, normalizer
    )

    columns = (alone_first + alone_second + both) * RATIO
    # Entries run one tile ahead in registers, see `attention._walk`.
    place = _listed(lanes // RATIO, alone_first, alone_second, RUN)
    word = tl.load(list_ + place, mask=lanes < columns, other=0)
    for start in tl.range(0, columns, TOKENS, num_stages=STAGES):
        if BITS > 0:
            used = ((word[None, :] >> row[:, None]) & 1) != 0
        else:
            used = ((start + lanes)[None, :] < columns) & (row[:, None] < ROWS)
        token = (word >> BITS) * RATIO + lanes % RATIO
        ahead = start + TOKENS + lanes
        place = _listed(ahead // RATIO, alone_first, alone_second, RUN)
        word = tl.load(list_ + place, mask=ahead < columns, other=0)
        offset = token[:, None].to(tl.int64) * D + dims[None, :]
        key = tl.load(keys + offset).to(DOT)
        score = tl.dot(query, tl.trans(key)) * scale
        value = tl.load(values + offset).to(DOT)
        total, maximum, normalizer = _fold(score, used, DOT, value, total, maximum, normalizer)

    safe = tl.where(normalizer > 0, normalizer, 1.0)
    at = (slot.to(tl.int64) * S + step) * HQ + head
    opened = tl.load(
        gate + at[:, None] * GATE_STRIDE + GATE_OFFSET + dims[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    result = total * (V_SCALE / safe)[:, None] * tl.sigmoid(opened.to(tl.float32))
    tl.store(
        out + at[:, None] * D + dims[None, :], result.to(out.dtype.element_ty), mask=inside[:, None]
    )


@triton.jit
def attend_tile(
    q,
    k_cache,
    v_cache,
    counts,
    entries,
    past,
    new,
    gate,
    S,
    C,
    out,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    TAIL: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    GATE_OFFSET: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of ROWS queries of one slot over the union of their blocks and their tails.

    Grid (cdiv(S, ROWS), HK, B). M >= ROWS * HQ / HK and TAIL >= ROWS + RATIO - 1 are powers of
    two, at least 16. Queries whose attention is dense are left to `dense.attend_dense`. Other
    arguments as in `unite_blocks` and `attention.attend_whole`.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = tl.program_id(2)
    RUN: tl.constexpr = ROWS // 2 * K
    place = slot * tl.num_programs(0) + tile
    first = tl.load(counts + place * 3)
    second = tl.load(counts + place * 3 + 1)
    both = tl.load(counts + place * 3 + 2)
    past_length = tl.load(past + slot)
    count = tl.minimum(tl.load(new + slot), S)
    sparse = first_sparse(past_length, count, K, RATIO)
    if (first + second + both > LIMIT) | (tl.minimum(tile * ROWS + ROWS, S) <= sparse):
        return
    _attend(
        q, k_cache, v_cache, entries + place.to(tl.int64) * (3 * RUN), first, second, both,
        past_length, count, gate, slot, tile * ROWS, kv_head, sparse, S, C, out,
        RATIO, HQ, HK, D, ROWS, ROWS, RUN, M, TOKENS, TAIL, SCALE, V_SCALE, GATE_STRIDE,
        GATE_OFFSET, DOT, STAGES,
    )  # fmt: skip


@triton.jit
def attend_apart(
    q,
    k_cache,
    v_cache,
    blocks,
    counts,
    past,
    new,
    gate,
    together,
    S,
    C,
    out,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    TAIL: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    GATE_OFFSET: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Row by row, the tiles of ROWS queries whose union has more than LIMIT blocks.

    Grid (B * S, HK). `together`, the same tensor as `out`, holds what `attend_tile` stored; M and
    TAIL are those of one row; other arguments as there.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = row // S
    step = row % S
    place = (slot * tl.cdiv(S, ROWS) + step // ROWS) * 3
    union = tl.load(counts + place) + tl.load(counts + place + 1) + tl.load(counts + place + 2)
    past_length = tl.load(past + slot)
    count = tl.minimum(tl.load(new + slot), S)
    sparse = first_sparse(past_length, count, K, RATIO)
    if (union <= LIMIT) | (step < sparse):
        return
    kept = tl.where(step < count, K, 0)
    _attend(
        q, k_cache, v_cache, blocks + row.to(tl.int64) * K, kept, 0, 0, past_length, count, gate,
        slot, step, kv_head, sparse, S, C, out, RATIO, HQ, HK, D, 1, 0, K, M, TOKENS, TAIL, SCALE,
        V_SCALE, GATE_STRIDE, GATE_OFFSET, DOT, STAGES,
    )  # fmt: skip
