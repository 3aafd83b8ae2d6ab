"""Absorbed attention of each query over its own list of cached latents (decode and prefill).

One program takes one query, one block of heads and one run of the query's token list. A latent
tile is read once and serves twice, as keys and as values; all heads of the block share it.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Finite stand-in for minus infinity: the difference of two of them is 0, not NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def tokens_of(past, new, row, S, K):
    """Slot of a query row and the length of its token list, 0 for a padding row."""
    slot = row // S
    step = row % S
    kept = tl.minimum(tl.load(past + slot) + step + 1, K)
    return slot, tl.where(step < tl.load(new + slot), kept, 0)


@triton.jit
def _walk(
    q_latent,
    q_rope,
    rows,
    tokens,
    first,
    last,
    SCALE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over entries [first, last) of a token list.

    Returns the sum [BLOCK_H, BLOCK_L], the maximum and the normalizer [BLOCK_H], in powers of two.
    """
    lanes = tl.arange(0, BLOCK_L)
    rope_lanes = tl.arange(0, BLOCK_R)
    maximum = tl.full((BLOCK_H,), LOWEST, tl.float32)
    normalizer = tl.zeros((BLOCK_H,), tl.float32)
    total = tl.zeros((BLOCK_H, BLOCK_L), tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        entry = start + tl.arange(0, BLOCK_N)
        used = entry < last
        token = tl.load(tokens + entry, mask=used, other=0)
        at = rows + token.to(tl.int64)[:, None] * (LATENT + ROPE)
        latent = tl.load(
            at + lanes[None, :], mask=used[:, None] & (lanes < LATENT)[None, :], other=0.0
        ).to(DOT)
        rope = tl.load(
            at + LATENT + rope_lanes[None, :],
            mask=used[:, None] & (rope_lanes < ROPE)[None, :],
            other=0.0,
        ).to(DOT)
        score = tl.dot(q_latent, tl.trans(latent))
        score = tl.dot(q_rope, tl.trans(rope), acc=score) * (SCALE * LOG2_E)
        score = tl.where(used[None, :], score, LOWEST)
        highest = tl.maximum(maximum, tl.max(score, axis=1))
        decay = tl.exp2(maximum - highest)
        weight = tl.where(used[None, :], tl.exp2(score - highest[:, None]), 0.0)
        normalizer = normalizer * decay + tl.sum(weight, axis=1)
        total = tl.dot(weight.to(DOT), latent, acc=total * decay[:, None])
        maximum = highest
    return total, maximum, normalizer


@triton.jit
def _part(
    q_latent,
    q_rope,
    cache,
    tokens,
    past,
    new,
    row,
    heads,
    split,
    splits,
    S,
    C,
    K,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    slot, count = tokens_of(past, new, row, S, K)
    lanes = tl.arange(0, BLOCK_L)
    rope_lanes = tl.arange(0, BLOCK_R)
    at = (row.to(tl.int64) * HEADS + heads)[:, None]
    live = (heads < HEADS)[:, None]
    latent_query = tl.load(
        q_latent + at * LATENT + lanes[None, :], mask=live & (lanes < LATENT)[None, :], other=0.0
    ).to(DOT)
    rope_query = tl.load(
        q_rope + at * ROPE + rope_lanes[None, :],
        mask=live & (rope_lanes < ROPE)[None, :],
        other=0.0,
    ).to(DOT)
    # Whole tiles per split, shared out by what the row really has.
    run = tl.cdiv(tl.cdiv(count, BLOCK_N), splits) * BLOCK_N
    first = tl.minimum(split * run, count)
    return _walk(
        latent_query,
        rope_query,
        cache + slot.to(tl.int64) * C * (LATENT + ROPE),
        tokens + row.to(tl.int64) * K,
        first,
        tl.minimum(first + run, count),
        SCALE,
        LATENT,
        ROPE,
        BLOCK_H,
        BLOCK_L,
        BLOCK_R,
        BLOCK_N,
        DOT,
        STAGES,
    )


@triton.jit
def attend_whole(
    q_latent,
    q_rope,
    cache,
    tokens,
    past,
    new,
    gate,
    S,
    C,
    K,
    out,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Whole token lists, gated and final. Grid (head blocks, rows).

    q_latent [B, S, H, L]; q_rope [B, S, H, R]; cache [B, 1, C, L + R]; tokens int32 [B, S, K], the
    first min(K, visible) of a row used; past, new int32 [B]; gate [B, S, H], before the logistic
    function. out [B, S, H, L].
    """
    row = tl.program_id(1)
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    total, _, normalizer = _part(
        q_latent, q_rope, cache, tokens, past, new, row, heads, 0, 1, S, C, K,
        SCALE, HEADS, LATENT, ROPE, BLOCK_H, BLOCK_L, BLOCK_R, BLOCK_N, DOT, STAGES,
    )  # fmt: skip
    lanes = tl.arange(0, BLOCK_L)
    at = row.to(tl.int64) * HEADS + heads
    opened = tl.load(gate + at, mask=heads < HEADS, other=0.0).to(tl.float32)
    factor = tl.sigmoid(opened) / tl.where(normalizer > 0, normalizer, 1.0)
    tl.store(
        out + at[:, None] * LATENT + lanes[None, :],
        (total * factor[:, None]).to(out.dtype.element_ty),
        mask=(heads < HEADS)[:, None] & (lanes < LATENT)[None, :],
    )


@triton.jit
def attend_split(
    q_latent,
    q_rope,
    cache,
    tokens,
    past,
    new,
    S,
    C,
    K,
    splits,
    partial,
    partial_lse,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One run of each token list. Grid (head blocks, splits, rows).

    partial float32 [B, S, splits, H, L]; partial_lse float32 [B, S, splits, H], base 2.
    """
    row = tl.program_id(2)
    split = tl.program_id(1)
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    total, maximum, normalizer = _part(
        q_latent, q_rope, cache, tokens, past, new, row, heads, split, splits, S, C, K,
        SCALE, HEADS, LATENT, ROPE, BLOCK_H, BLOCK_L, BLOCK_R, BLOCK_N, DOT, STAGES,
    )  # fmt: skip
    lanes = tl.arange(0, BLOCK_L)
    some = normalizer > 0
    safe = tl.where(some, normalizer, 1.0)
    at = (row.to(tl.int64) * splits + split) * HEADS + heads
    tl.store(
        partial + at[:, None] * LATENT + lanes[None, :],
        total / safe[:, None],
        mask=(heads < HEADS)[:, None] & (lanes < LATENT)[None, :],
    )
    lse = tl.where(some, maximum + tl.log2(safe), LOWEST)
    tl.store(partial_lse + at, lse, mask=heads < HEADS)


@triton.jit
def merge_splits(
    partial,
    partial_lse,
    gate,
    splits,
    out,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Weighted sum of the splits of one row and BLOCK_H heads, gated. Grid (head blocks, rows).

    SPLITS: power of two, at least `splits`. gate [B, S, H]; out [B, S, H, L].
    """
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    lanes = tl.arange(0, BLOCK_L)
    split = tl.arange(0, SPLITS)
    there = (split < splits)[:, None] & (head < HEADS)[None, :]
    part = (row * splits + split)[:, None] * HEADS + head[None, :]
    lse = tl.load(partial_lse + part, mask=there, other=LOWEST)
    value = tl.load(
        partial + part[:, :, None] * LATENT + lanes[None, None, :],
        mask=there[:, :, None] & (lanes < LATENT)[None, None, :],
        other=0.0,
    )
    opened = tl.load(gate + row * HEADS + head, mask=head < HEADS, other=0.0).to(tl.float32)
    # A row without any token has LOWEST everywhere: equal weights on zeros give zeros.
    weight = tl.where(there, tl.exp2(lse - tl.max(lse, axis=0)[None, :]), 0.0)
    norm = tl.sum(weight, axis=0)
    factor = tl.sigmoid(opened) / tl.where(norm > 0, norm, 1.0)
    result = tl.sum(value * weight[:, :, None], axis=0) * factor[:, None]
    tl.store(
        out + (row * HEADS + head)[:, None] * LATENT + lanes[None, :],
        result.to(out.dtype.element_ty),
        mask=(head < HEADS)[:, None] & (lanes < LATENT)[None, :],
    )
