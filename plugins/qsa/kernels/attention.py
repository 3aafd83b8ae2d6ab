# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Decode attention over selected blocks: each query row reads its own blocks.

The work of a row and a key head is cut into `splits` runs of columns; a column is one token of one
selected block, the incomplete tail being the block behind the last selected one. Scores are
computed transposed, tokens x heads: the tokens then fill the long side of the matrix instruction
and the 12 heads of a group its short side, where heads x tokens would leave most of it empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Finite stand-in for minus infinity: the difference of two of them is 0, not NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _tokens(block, column, kept, visible, position, last_column, RATIO: tl.constexpr):
    """Tokens of a tile's columns and which of them count; the others stand for token 0.

    Token 0 is always there when any token is, so tiles are loaded without masks.
    """
    block = tl.where(column // RATIO == kept, visible, block)
    token = block * RATIO + column % RATIO
    used = (block >= 0) & (token <= position) & (column < last_column)
    return tl.where(used, token, 0).to(tl.int64), used


@triton.jit
def weigh(score, used, maximum, normalizer):
    """One online-softmax step over scores [LINES, TOKENS] in powers of two.

    used: which of them count, [LINES, TOKENS] or [1, TOKENS]. Returns the probabilities, the factor
    on earlier sums, the new maximum and the new normalizer.
    """
    score = tl.where(used, score, LOWEST)
    highest = tl.maximum(maximum, tl.max(score, axis=1))
    decay = tl.exp2(maximum - highest)
    weight = tl.where(used, tl.exp2(score - highest[:, None]), 0.0)
    return weight, decay, highest, normalizer * decay + tl.sum(weight, axis=1)


@triton.jit
def _walk(
    low_query,
    high_query,
    blocks,
    block,
    keys,
    values,
    first_column,
    last_column,
    kept,
    visible,
    position,
    scale,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over the columns [first_column, last_column) of one row and key head.

    The queries are [HEADS, D / 2], the low and the high half of the channels: two half as long
    chains of dependent products. Returns the sum [HEADS, D], the maximum and the normalizer
    [HEADS], in powers of two. block: `_first_blocks` of the first column.
    """
    lanes = tl.arange(0, TOKENS)
    half = tl.arange(0, D // 2)
    dims = tl.arange(0, D)
    maximum = tl.full((HEADS,), LOWEST, tl.float32)
    normalizer = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, D), tl.float32)
    # Block ids run one tile ahead in registers: were they part of the pipeline, its in-order waits
    # would hold back the tiles that are in flight.
    for start in tl.range(first_column, last_column, TOKENS, num_stages=STAGES):
        column = start + lanes
        token, used = _tokens(block, column, kept, visible, position, last_column, RATIO)
        ahead = (column + TOKENS) // RATIO
        block = tl.load(blocks + ahead, mask=ahead < kept, other=-1)
        at = token[:, None] * D
        low_key = tl.load(keys + at + half[None, :]).to(DOT)
        high_key = tl.load(keys + at + D // 2 + half[None, :]).to(DOT)
        score = tl.dot(low_query, tl.trans(low_key)) + tl.dot(high_query, tl.trans(high_key))
        weight, decay, maximum, normalizer = weigh(
            score * scale, used[None, :], maximum, normalizer
        )
        value = tl.load(values + at + dims[None, :]).to(DOT)
        total = tl.dot(weight.to(DOT), value, acc=total * decay[:, None])
    return total, maximum, normalizer


@triton.jit
def _halves(pair, DOT: tl.constexpr):
    """The two e4m3 values in 16-bit words, as DOT (exact): low byte, high byte."""
    if DOT == tl.float16:  # noqa: SIM300
        # Two words at a time: gather the low and the high bytes, then convert both pairs.
        low, high = tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 sorted;
            .reg .b16 lows, highs;
            prmt.b32 sorted, $2, $2, 0x3120;
            mov.b32 {lows, highs}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lows;
            cvt.rn.f16x2.e4m3x2 $1, highs;
            }
            """,
            constraints="=r,=r,r",
            args=[pair],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (pair & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DOT)
        high = ((pair >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DOT)
    return low, high


@triton.jit
def _walk_fp8(
    even_query,
    odd_query,
    blocks,
    block,
    keys,
    values,
    first_column,
    last_column,
    kept,
    visible,
    position,
    scale,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`_walk` over e4m3 caches; channels come in pairs, even and odd ones in separate tiles.

    Hardware transposes tiles of 16-bit elements only. Two neighbouring channels are therefore
    moved as one 16-bit word and parted in registers.
    """
    lanes = tl.arange(0, TOKENS)
    pairs = tl.arange(0, D // 2)
    key_pairs = keys.to(tl.pointer_type(tl.int16))
    value_pairs = values.to(tl.pointer_type(tl.int16))
    maximum = tl.full((HEADS,), LOWEST, tl.float32)
    normalizer = tl.zeros((HEADS,), tl.float32)
    even_total = tl.zeros((HEADS, D // 2), tl.float32)
    odd_total = tl.zeros((HEADS, D // 2), tl.float32)
    for start in tl.range(first_column, last_column, TOKENS, num_stages=STAGES):
        column = start + lanes
        token, used = _tokens(block, column, kept, visible, position, last_column, RATIO)
        ahead = (column + TOKENS) // RATIO
        block = tl.load(blocks + ahead, mask=ahead < kept, other=-1)
        at = token[:, None] * (D // 2) + pairs[None, :]
        even_key, odd_key = _halves(tl.trans(tl.load(key_pairs + at)), DOT)
        score = tl.dot(even_query, even_key) + tl.dot(odd_query, odd_key)
        weight, decay, maximum, normalizer = weigh(
            score * scale, used[None, :], maximum, normalizer
        )
        even_value, odd_value = _halves(tl.load(value_pairs + at), DOT)
        weight = weight.to(DOT)
        even_total = tl.dot(weight, even_value, acc=even_total * decay[:, None])
        odd_total = tl.dot(weight, odd_value, acc=odd_total * decay[:, None])
    return even_total, odd_total, maximum, normalizer


@triton.jit
def _row(past, new, row, S, RATIO: tl.constexpr, K: tl.constexpr):
    """Position, visible and kept blocks of a row; a padding row has position -1."""
    slot = row // S
    step = row % S
    position = tl.where(step < tl.load(new + slot), tl.load(past + slot) + step, -1)
    visible = (position + 1) // RATIO
    return slot, step, position, visible, tl.minimum(visible, K)


@triton.jit
def _columns(position, visible, kept, split, splits, RATIO: tl.constexpr, TOKENS: tl.constexpr):
    """First and last column of a split. Whole tiles per split; the tail goes to the last one."""
    columns = position + 1 - (visible - kept) * RATIO
    run = tl.cdiv(tl.cdiv(kept * RATIO, splits), TOKENS) * TOKENS
    first = split * run
    last = tl.where(split == splits - 1, columns, tl.minimum(first + run, columns))
    return tl.minimum(first, last), last


@triton.jit
def _first_blocks(blocks, first, kept, RATIO: tl.constexpr, TOKENS: tl.constexpr):
    """Block ids of the first tile's columns, -1 behind the `kept` ones."""
    entry = (first + tl.arange(0, TOKENS)) // RATIO
    return tl.load(blocks + entry, mask=entry < kept, other=-1)


@triton.jit
def _load_query(
    q, slot, step, S, first_head, FIRST: tl.constexpr, STRIDE: tl.constexpr, HQ: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Half of the channels, FIRST, FIRST + STRIDE, ..., of a group's queries: [HEADS, D / 2]."""
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, D // 2) * STRIDE + FIRST
    at = ((slot * HQ + first_head + heads[:, None]).to(tl.int64) * S + step) * D + dims[None, :]
    return tl.load(q + at, mask=heads[:, None] < GROUP, other=0.0).to(DOT)


@triton.jit
def _store_partial(
    partial, at, total, factor, FIRST: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, D // STRIDE) * STRIDE + FIRST
    place = at[:, None] * D + dims[None, :]
    tl.store(partial + place, total * factor[:, None], mask=heads[:, None] < GROUP)


@triton.jit
def _store_gated(
    out, gate, at, total, factor, FIRST: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, HEADS: tl.constexpr, GATE_STRIDE: tl.constexpr, GATE_OFFSET: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, D // STRIDE) * STRIDE + FIRST
    live = heads[:, None] < GROUP
    gate_at = at[:, None] * GATE_STRIDE + GATE_OFFSET + dims[None, :]
    opened = tl.sigmoid(tl.load(gate + gate_at, mask=live, other=0.0).to(tl.float32))
    result = total * factor[:, None] * opened
    tl.store(out + at[:, None] * D + dims[None, :], result.to(out.dtype.element_ty), mask=live)


@triton.jit
def attend_split(
    q,
    k_cache,
    v_cache,
    blocks,
    past,
    new,
    S,
    C,
    rows,
    splits,
    partial,
    partial_lse,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    FP8: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One split of one row and key head: partial output and base-2 log-sum-exp.

    Grid (rows * HK, splits). q [B, HQ, S, D]; caches [B, HK, C, D]; blocks int32 [B, S, K];
    past, new int32 [B]. partial float32 [splits, rows, HQ, D], partial_lse [splits, rows, HQ].
    """
    row = tl.program_id(0) // HK
    kv_head = tl.program_id(0) % HK
    split = tl.program_id(1)
    GROUP: tl.constexpr = HQ // HK
    heads = tl.arange(0, HEADS)
    mine = blocks + row.to(tl.int64) * K
    # Where a row begins that keeps the whole budget: read before anything is known about it.
    likely = split * tl.cdiv(tl.cdiv(K * RATIO, splits), TOKENS) * TOKENS
    block = _first_blocks(mine, likely, K, RATIO, TOKENS)
    slot, step, position, visible, kept = _row(past, new, row, S, RATIO, K)
    first, last = _columns(position, visible, kept, split, splits, RATIO, TOKENS)
    if kept < K:
        block = _first_blocks(mine, first, kept, RATIO, TOKENS)
    cache_at = (slot * HK + kv_head).to(tl.int64) * C * D
    keys = k_cache + cache_at
    values = v_cache + cache_at
    at = (split * rows + row).to(tl.int64) * HQ + kv_head * GROUP + heads
    if FP8:
        even_query = _load_query(q, slot, step, S, kv_head * GROUP, 0, 2, HQ, GROUP, D, HEADS, DOT)
        odd_query = _load_query(q, slot, step, S, kv_head * GROUP, 1, 2, HQ, GROUP, D, HEADS, DOT)
        even, odd, maximum, normalizer = _walk_fp8(
            even_query, odd_query, mine, block, keys, values, first, last, kept, visible, position,
            SCALE * LOG2_E, RATIO, D, HEADS, TOKENS, DOT, STAGES,
        )  # fmt: skip
        safe = tl.where(normalizer > 0, normalizer, 1.0)
        _store_partial(partial, at, even, V_SCALE / safe, 0, 2, GROUP, D, HEADS)
        _store_partial(partial, at, odd, V_SCALE / safe, 1, 2, GROUP, D, HEADS)
    else:
        low = _load_query(q, slot, step, S, kv_head * GROUP, 0, 1, HQ, GROUP, D, HEADS, DOT)
        high = _load_query(q, slot, step, S, kv_head * GROUP, D // 2, 1, HQ, GROUP, D, HEADS, DOT)
        total, maximum, normalizer = _walk(
            low, high, mine, block, keys, values, first, last, kept, visible, position,
            SCALE * LOG2_E, RATIO, D, HEADS, TOKENS, DOT, STAGES,
        )  # fmt: skip
        safe = tl.where(normalizer > 0, normalizer, 1.0)
        _store_partial(partial, at, total, V_SCALE / safe, 0, 1, GROUP, D, HEADS)
    lse = tl.where(normalizer > 0, maximum + tl.log2(safe), LOWEST)
    tl.store(partial_lse + at, lse, mask=heads < GROUP)


@triton.jit
def attend_whole(
    q,
    k_cache,
    v_cache,
    blocks,
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
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    FP8: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    GATE_OFFSET: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Like `attend_split` with one split, gated and final. Grid (rows * HK,).

    gate: [B, S, HQ * GATE_STRIDE], head h's D gate values at h * GATE_STRIDE + GATE_OFFSET.
    out: [B, S, HQ * D].
    """
    row = tl.program_id(0) // HK
    kv_head = tl.program_id(0) % HK
    GROUP: tl.constexpr = HQ // HK
    heads = tl.arange(0, HEADS)
    mine = blocks + row.to(tl.int64) * K
    block = _first_blocks(mine, 0, K, RATIO, TOKENS)
    slot, step, position, visible, kept = _row(past, new, row, S, RATIO, K)
    block = tl.where(tl.arange(0, TOKENS) // RATIO < kept, block, -1)
    last = position + 1 - (visible - kept) * RATIO
    cache_at = (slot * HK + kv_head).to(tl.int64) * C * D
    keys = k_cache + cache_at
    values = v_cache + cache_at
    at = row.to(tl.int64) * HQ + kv_head * GROUP + heads
    if FP8:
        even_query = _load_query(q, slot, step, S, kv_head * GROUP, 0, 2, HQ, GROUP, D, HEADS, DOT)
        odd_query = _load_query(q, slot, step, S, kv_head * GROUP, 1, 2, HQ, GROUP, D, HEADS, DOT)
        even, odd, _, normalizer = _walk_fp8(
            even_query, odd_query, mine, block, keys, values, 0, last, kept, visible, position,
            SCALE * LOG2_E, RATIO, D, HEADS, TOKENS, DOT, STAGES,
        )  # fmt: skip
        factor = V_SCALE / tl.where(normalizer > 0, normalizer, 1.0)
        _store_gated(out, gate, at, even, factor, 0, 2, GROUP, D, HEADS, GATE_STRIDE, GATE_OFFSET)
        _store_gated(out, gate, at, odd, factor, 1, 2, GROUP, D, HEADS, GATE_STRIDE, GATE_OFFSET)
    else:
        low = _load_query(q, slot, step, S, kv_head * GROUP, 0, 1, HQ, GROUP, D, HEADS, DOT)
        high = _load_query(q, slot, step, S, kv_head * GROUP, D // 2, 1, HQ, GROUP, D, HEADS, DOT)
        total, _, normalizer = _walk(
            low, high, mine, block, keys, values, 0, last, kept, visible, position,
            SCALE * LOG2_E, RATIO, D, HEADS, TOKENS, DOT, STAGES,
        )  # fmt: skip
        factor = V_SCALE / tl.where(normalizer > 0, normalizer, 1.0)
        _store_gated(out, gate, at, total, factor, 0, 1, GROUP, D, HEADS, GATE_STRIDE, GATE_OFFSET)


@triton.jit
def attend_once(
    q,
    k_cache,
    v_cache,
    blocks,
    past,
    new,
    S,
    C,
    rows,
    partial,
    partial_lse,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    DOT: tl.constexpr,
):
    """`attend_split` with one tile per split and no loop: the least latency for a few rows.

    Grid (rows * HK, cdiv(K * RATIO + RATIO - 1, TOKENS)).
    """
    row = tl.program_id(0) // HK
    kv_head = tl.program_id(0) % HK
    split = tl.program_id(1)
    GROUP: tl.constexpr = HQ // HK
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, D)
    column = split * TOKENS + tl.arange(0, TOKENS)
    entry = column // RATIO
    # Read before anything is known about the row: the addresses do not depend on its position.
    block = tl.load(blocks + row.to(tl.int64) * K + entry, mask=entry < K, other=-1)
    slot, step, position, visible, kept = _row(past, new, row, S, RATIO, K)
    live = heads[:, None] < GROUP
    query_at = (slot * HQ + kv_head * GROUP + heads[:, None]).to(tl.int64) * S + step
    query = tl.load(q + query_at * D + dims[None, :], mask=live, other=0.0).to(DOT)
    block = tl.where(entry < kept, block, -1)
    columns = position + 1 - (visible - kept) * RATIO
    token, used = _tokens(block, column, kept, visible, position, columns, RATIO)
    at_token = (slot * HK + kv_head).to(tl.int64) * C * D + token[:, None] * D + dims[None, :]
    key = tl.load(k_cache + at_token, mask=used[:, None], other=0.0).to(DOT)
    value = tl.load(v_cache + at_token, mask=used[:, None], other=0.0).to(DOT)
    score = tl.dot(query, tl.trans(key))
    lowest = tl.full((HEADS,), LOWEST, tl.float32)
    weight, _, maximum, normalizer = weigh(
        score * (SCALE * LOG2_E), used[None, :], lowest, tl.zeros((HEADS,), tl.float32)
    )
    total = tl.dot(weight.to(DOT), value)
    safe = tl.where(normalizer > 0, normalizer, 1.0)
    at = (split * rows + row).to(tl.int64) * HQ + kv_head * GROUP + heads
    _store_partial(partial, at, total, V_SCALE / safe, 0, 1, GROUP, D, HEADS)
    lse = tl.where(normalizer > 0, maximum + tl.log2(safe), LOWEST)
    tl.store(partial_lse + at, lse, mask=heads < GROUP)


@triton.jit
def merge_splits(
    partial,
    partial_lse,
    gate,
    rows,
    splits,
    out,
    HQ: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    SPLITS: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    GATE_OFFSET: tl.constexpr,
):
    """Weighted sum of the splits of one row and head, gated. Grid (rows, HQ * D / PART).

    SPLITS: power of two, at least `splits`. gate and out as in `attend_whole`.
    """
    at = tl.program_id(0).to(tl.int64) * HQ + tl.program_id(1) // (D // PART)
    dims = tl.program_id(1) % (D // PART) * PART + tl.arange(0, PART)
    opened = tl.load(gate + at * GATE_STRIDE + GATE_OFFSET + dims)
    split = tl.arange(0, SPLITS)
    there = split < splits
    part = split.to(tl.int64) * rows * HQ + at
    lse = tl.load(partial_lse + part, mask=there, other=LOWEST)
    value = tl.load(partial + part[:, None] * D + dims[None, :], mask=there[:, None], other=0.0)
    # A row without any token has LOWEST everywhere: equal weights on zeros give zeros.
    weight = tl.exp2(lse - tl.max(lse, axis=0))
    result = tl.sum(value * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    result *= tl.sigmoid(opened.to(tl.float32))
    tl.store(out + at * D + dims, result.to(out.dtype.element_ty))
