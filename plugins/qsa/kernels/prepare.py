# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Everything between a layer's projections and its attention, in one pass.

Per token: centred norms and rotary embedding of queries, keys and index queries, cache writes, the
key of a block that the token completes, and the raw index keys kept for the next call.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed(x, weight, eps, D: tl.constexpr, TYPE: tl.constexpr):
    """Centred RMS norm of float32 rows [H, D], rounded to TYPE and back."""
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    return (x * factor[:, None] * (1.0 + weight)[None, :]).to(TYPE).to(tl.float32)


@triton.jit
def _angles(
    positions,
    at,
    axis_stride,
    rank,
    frequencies,
    channel,
    AXES: tl.constexpr,
    SECTION_H: tl.constexpr,
    SECTION_W: tl.constexpr,
    ROTARY: tl.constexpr,
    TYPE: tl.constexpr,
):
    """cos and sin of every channel's pair, sine signed for the half-split rotation.

    Channels behind ROTARY get 1 and 0. With three axes, frequency i turns by the height position
    when i % 3 == 1 and i < 3 * SECTION_H, by the width position when i % 3 == 2 and
    i < 3 * SECTION_W, else by the temporal one.
    """
    HALF: tl.constexpr = ROTARY // 2
    pair = channel % HALF
    turned = channel < ROTARY
    if AXES == 3:
        height = (pair % 3 == 1) & (pair < 3 * SECTION_H)
        width = (pair % 3 == 2) & (pair < 3 * SECTION_W)
        axis = tl.where(height, 1, tl.where(width, 2, 0))
        position = tl.load(positions + at + axis * axis_stride, mask=turned, other=0)
    else:
        position = tl.zeros_like(channel) + rank
    angle = position.to(tl.float32) * tl.load(frequencies + pair, mask=turned, other=0.0)
    cos = tl.where(turned, tl.cos(angle).to(TYPE).to(tl.float32), 1.0)
    sin = tl.where(turned, tl.sin(angle).to(TYPE).to(tl.float32), 0.0)
    return cos, tl.where(channel < HALF, -sin, sin)


@triton.jit
def _partner(channel, ROTARY: tl.constexpr):
    """The channel that `channel` is rotated with; itself behind ROTARY."""
    HALF: tl.constexpr = ROTARY // 2
    swapped = tl.where(channel < HALF, channel + HALF, channel - HALF)
    return tl.where(channel < ROTARY, swapped, channel)


@triton.jit
def _norm_rope(
    source,
    weight,
    heads,
    HEAD_STRIDE: tl.constexpr,
    live,
    cos,
    sin,
    eps,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Normed and rotated heads [H, D] of one token, float32 holding values of TYPE."""
    channel = tl.arange(0, D)
    other = _partner(channel, ROTARY)
    at = heads[:, None] * HEAD_STRIDE
    x = tl.load(source + at + channel[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    # The partner channel is loaded again: registers cannot be permuted along an axis.
    y = tl.load(source + at + other[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    straight = _normed(x, tl.load(weight + channel).to(tl.float32), eps, D, TYPE)
    crossed = _normed(y, tl.load(weight + other).to(tl.float32), eps, D, TYPE)
    return straight * cos[None, :] + crossed * sin[None, :]


@triton.jit
def _to_cache(x, inverse_scale, FP8: tl.constexpr, TYPE: tl.constexpr):
    if FP8:
        # Saturate: e4m3 has no infinity, and NaN in a cache would poison every later query.
        return tl.minimum(tl.maximum(x * inverse_scale, -448.0), 448.0).to(TYPE)
    return x.to(TYPE)


@triton.jit
def _raw_key(
    index_qk,
    state,
    past_length,
    slot,
    rank,
    S,
    channel,
    HI: tl.constexpr,
    DI: tl.constexpr,
    RATIO: tl.constexpr,
):
    """Raw index key of the token at `rank`: from this call's rows or from the kept state."""
    step = rank - past_length
    row = slot.to(tl.int64) * S + step
    # Masks are vectors: the interpreter takes no scalar ones.
    steps = step + channel * 0
    fresh = tl.load(index_qk + (row * (HI + 1) + HI) * DI + channel, mask=steps >= 0, other=0.0)
    kept = tl.load(
        state + (slot * (RATIO - 1) + step + RATIO - 1) * DI + channel, mask=steps < 0, other=0.0
    )
    return fresh.to(tl.float32) + kept.to(tl.float32)


@triton.jit
def _block_key(
    index_qk,
    index_k_weight,
    index_frequencies,
    positions,
    position_state,
    index_state,
    past_length,
    slot,
    rank,
    S,
    axis_stride,
    EPS: tl.constexpr,
    RATIO: tl.constexpr,
    HI: tl.constexpr,
    DI: tl.constexpr,
    INDEX_ROTARY: tl.constexpr,
    AXES: tl.constexpr,
    SECTION_H: tl.constexpr,
    SECTION_W: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Key [1, DI] of the block whose last token has `rank`: mean, norm, rotary embedding."""
    channel = tl.arange(0, DI)
    other = _partner(channel, INDEX_ROTARY)
    mean = tl.zeros((DI,), tl.float32)
    crossed = tl.zeros((DI,), tl.float32)
    first = rank - (RATIO - 1)
    for back in tl.static_range(RATIO):
        mean += _raw_key(
            index_qk, index_state, past_length, slot, first + back, S, channel, HI, DI, RATIO
        )
        crossed += _raw_key(
            index_qk, index_state, past_length, slot, first + back, S, other, HI, DI, RATIO
        )
    step = first - past_length
    if (AXES == 1) | (step >= 0):
        cos, sin = _angles(
            positions, slot.to(tl.int64) * S + step, axis_stride, first, index_frequencies,
            channel, AXES, SECTION_H, SECTION_W, INDEX_ROTARY, ROUND,
        )  # fmt: skip
    else:
        at = (slot.to(tl.int64) * (RATIO - 1) + step + RATIO - 1) * AXES
        cos, sin = _angles(
            position_state, at, 1, first, index_frequencies, channel,
            AXES, SECTION_H, SECTION_W, INDEX_ROTARY, ROUND,
        )  # fmt: skip
    mean = (mean / RATIO).to(ROUND).to(tl.float32)
    crossed = (crossed / RATIO).to(ROUND).to(tl.float32)
    weight = tl.load(index_k_weight + channel).to(tl.float32)
    other_weight = tl.load(index_k_weight + other).to(tl.float32)
    straight = _normed(mean[None, :], weight, EPS, DI, ROUND)
    turned = _normed(crossed[None, :], other_weight, EPS, DI, ROUND)
    return straight * cos[None, :] + turned * sin[None, :]


@triton.jit
def _keep_state(
    index_qk,
    positions,
    position_state,
    index_state,
    past_length,
    count,
    slot,
    S,
    axis_stride,
    next_index_state,
    next_position_state,
    RATIO: tl.constexpr,
    HI: tl.constexpr,
    DI: tl.constexpr,
    AXES: tl.constexpr,
):
    """Store the last RATIO - 1 raw index keys and their positions for the next call."""
    channel = tl.arange(0, DI)
    axis = tl.arange(0, 4)
    for back in tl.static_range(RATIO - 1):
        rank = past_length + count - (RATIO - 1) + back
        raw = _raw_key(index_qk, index_state, past_length, slot, rank, S, channel, HI, DI, RATIO)
        at = slot * (RATIO - 1) + back
        tl.store(next_index_state + at * DI + channel, raw.to(next_index_state.dtype.element_ty))
        if AXES == 3:
            step = rank - past_length
            new_position = tl.load(
                positions + axis * axis_stride + slot * S + step,
                mask=(axis < 3) & (step + axis * 0 >= 0),
                other=0,
            )
            old_position = tl.load(
                position_state + (slot * (RATIO - 1) + step + RATIO - 1) * AXES + axis,
                mask=(axis < 3) & (step + axis * 0 < 0),
                other=0,
            )
            tl.store(
                next_position_state + at * AXES + axis, new_position + old_position, mask=axis < 3
            )


@triton.jit
def prepare(
    q_gate,
    key,
    value,
    index_qk,
    q_weight,
    k_weight,
    index_q_weight,
    index_k_weight,
    frequencies,
    index_frequencies,
    positions,
    position_state,
    index_state,
    key_cache_before,
    value_cache_before,
    index_keys_before,
    past,
    new,
    S,
    C,
    NB,
    batch,
    query,
    key_cache,
    value_cache,
    index_query,
    index_keys,
    next_index_state,
    next_position_state,
    EPS: tl.constexpr,
    RATIO: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HI: tl.constexpr,
    DI: tl.constexpr,
    ROTARY: tl.constexpr,
    INDEX_ROTARY: tl.constexpr,
    AXES: tl.constexpr,
    SECTION_H: tl.constexpr,
    SECTION_W: tl.constexpr,
    INVERSE_K_SCALE: tl.constexpr,
    INVERSE_V_SCALE: tl.constexpr,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Grid (B * S, cdiv(HQ, HEADS) + 2): parts of the query heads, keys and values, the index.

    q_gate [B, S, HQ * 2D] (per head D query, D gate columns), key and value [B, S, HK * D],
    index_qk [B, S, (HI + 1) * DI], weights [D] or [DI], frequencies float32 [ROTARY / 2].
    positions int32 [AXES, B, S] and position_state int32 [B, RATIO - 1, AXES] are read with three
    axes only; with one a token's position is its rank. index_state [B, RATIO - 1, DI]: the raw
    index keys of the last ranks before `past`; past, new int32 [B].
    query [B, HQ, S, D], index_query [B, HI, S, DI]; key_cache, value_cache [B, HK, C, D] and
    index_keys [B, NB, DI] are written in place (`_before` is the same tensor), rows of padding
    tokens not at all. ROUND is the activation type to which norms, cosines and rotated values are
    rounded.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    QUERY_PARTS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    slot = row // S
    step = row % S
    past_length = tl.load(past + slot)
    count = tl.load(new + slot)
    rank = past_length + step
    valid = step < count
    # As a vector: the interpreter takes no scalar masks.
    there = tl.arange(0, HEADS) * 0 + step < count
    at = row.to(tl.int64)
    head = tl.arange(0, HEADS)
    channel = tl.arange(0, D)
    index_channel = tl.arange(0, DI)
    axis_stride = batch * S
    if part < QUERY_PARTS:
        heads = part * HEADS + head
        cos, sin = _angles(
            positions, at, axis_stride, rank, frequencies, channel,
            AXES, SECTION_H, SECTION_W, ROTARY, ROUND,
        )  # fmt: skip
        rotated = _norm_rope(
            q_gate + at * HQ * 2 * D, q_weight, heads, 2 * D, (heads < HQ) & there, cos, sin, EPS,
            D, ROTARY, ROUND,
        )  # fmt: skip
        place = ((slot * HQ + heads).to(tl.int64) * S + step)[:, None] * D + channel[None, :]
        tl.store(query + place, rotated.to(query.dtype.element_ty), mask=(heads < HQ)[:, None])
    elif part == QUERY_PARTS:
        live = (head < HK) & there
        cos, sin = _angles(
            positions, at, axis_stride, rank, frequencies, channel,
            AXES, SECTION_H, SECTION_W, ROTARY, ROUND,
        )  # fmt: skip
        rotated = _norm_rope(
            key + at * HK * D, k_weight, head, D, live, cos, sin, EPS, D, ROTARY, ROUND
        )
        plain = tl.load(
            value + at * HK * D + head[:, None] * D + channel[None, :],
            mask=live[:, None],
            other=0.0,
        ).to(tl.float32)
        place = ((slot * HK + head).to(tl.int64) * C + rank)[:, None] * D + channel[None, :]
        type: tl.constexpr = key_cache.dtype.element_ty
        rotated = rotated.to(ROUND).to(tl.float32)
        tl.store(
            key_cache + place, _to_cache(rotated, INVERSE_K_SCALE, FP8, type), mask=live[:, None]
        )
        tl.store(
            value_cache + place, _to_cache(plain, INVERSE_V_SCALE, FP8, type), mask=live[:, None]
        )
    else:
        index_cos, index_sin = _angles(
            positions, at, axis_stride, rank, index_frequencies, index_channel,
            AXES, SECTION_H, SECTION_W, INDEX_ROTARY, ROUND,
        )  # fmt: skip
        index_rotated = _norm_rope(
            index_qk + at * (HI + 1) * DI, index_q_weight, head, DI, (head < HI) & there,
            index_cos, index_sin, EPS, DI, INDEX_ROTARY, ROUND,
        )  # fmt: skip
        index_at = ((slot * HI + head).to(tl.int64) * S + step)[:, None] * DI
        tl.store(
            index_query + index_at + index_channel[None, :],
            index_rotated.to(index_query.dtype.element_ty),
            mask=(head < HI)[:, None],
        )
        if valid & (rank % RATIO == RATIO - 1):
            pooled = _block_key(
                index_qk, index_k_weight, index_frequencies, positions, position_state,
                index_state, past_length, slot, rank, S, axis_stride,
                EPS, RATIO, HI, DI, INDEX_ROTARY, AXES, SECTION_H, SECTION_W, ROUND,
            )  # fmt: skip
            key_at = (slot.to(tl.int64) * NB + rank // RATIO) * DI + index_channel[None, :]
            tl.store(index_keys + key_at, pooled.to(index_keys.dtype.element_ty))
        # The last valid token's program keeps the state; of a padding slot, the first one's.
        if (step == count - 1) | ((count == 0) & (step == 0)):
            _keep_state(
                index_qk, positions, position_state, index_state, past_length, count, slot, S,
                axis_stride, next_index_state, next_position_state, RATIO, HI, DI, AXES,
            )  # fmt: skip
