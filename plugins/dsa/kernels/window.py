"""Absorbed attention over a sliding window of latents, in two products.

The sum of 64 heads times 1024 channels fills the register file of a multiprocessor, so one fused
pass would leave no room to work. Instead the first kernel makes unnormalised probabilities, tile by
tile, and the second multiplies them with the latents, some channels per program. Both work on the
cache as it lies: the token at position p is in row (p - base) mod R.

Queries are taken BLOCK_Q at a time; such a block sees the W - 1 + BLOCK_Q tokens up to its last
query, called its span and counted from its oldest token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plugins.dsa.kernels.attention import LOG2_E, LOWEST


@triton.jit
def _span_rows(past, base, slot, first_query, entry, R, WINDOW: tl.constexpr):
    """Positions of span entries and the cache rows they live in."""
    position = tl.load(past + slot) + first_query - (WINDOW - 1) + entry
    shifted = tl.maximum(position, 0) - tl.load(base + slot)
    row = shifted % R
    # The remainder takes the sign of the dividend; a base may lie ahead of an unused position.
    return position, tl.where(row < 0, row + R, row)


@triton.jit
def window_scores(
    q_latent,
    q_rope,
    cache,
    past,
    new,
    base,
    S,
    R,
    query_blocks,
    probabilities,
    tile_max,
    tile_sum,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """exp2(score - tile maximum) of one tile of a span. Grid (TILES, query blocks, B).

    q_latent [B, S, H, L]; q_rope [B, S, H, ROPE]; cache [B, 1, R, L + ROPE]; past, new, base int32
    [B]. With M = BLOCK_Q * BLOCK_H rows per query block: probabilities [B, query_blocks, M,
    TILES * BLOCK_N], tile_max and tile_sum float32 [B, query_blocks, TILES, M], base 2.
    """
    tile = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.program_id(2)
    first_query = block * BLOCK_Q
    queries = tl.minimum(tl.load(new + slot), S)
    line = tl.arange(0, BLOCK_Q * BLOCK_H)
    query = first_query + line // BLOCK_H
    head = line % BLOCK_H
    live = (query < queries) & (head < HEADS)
    at = (slot.to(tl.int64) * S + query) * HEADS + head
    entry = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    position, row = _span_rows(past, base, slot, first_query, entry, R, WINDOW)
    # A block of padding queries has an empty span, and reads nothing.
    span = tl.where(first_query < queries, WINDOW - 1 + BLOCK_Q, 0)
    present = (position >= 0) & (entry < span)
    keys = cache + (slot.to(tl.int64) * R + row)[:, None] * (LATENT + ROPE)
    lanes = tl.arange(0, BLOCK_K)
    score = tl.zeros((BLOCK_Q * BLOCK_H, BLOCK_N), tl.float32)
    for start in tl.range(0, LATENT, BLOCK_K, num_stages=STAGES):
        lane = start + lanes
        q = tl.load(
            q_latent + at[:, None] * LATENT + lane[None, :],
            mask=live[:, None] & (lane < LATENT)[None, :],
            other=0.0,
        ).to(DOT)
        key = tl.load(
            keys + lane[None, :], mask=present[:, None] & (lane < LATENT)[None, :], other=0.0
        ).to(DOT)
        score = tl.dot(q, tl.trans(key), acc=score)
    lane = tl.arange(0, BLOCK_R)
    q = tl.load(
        q_rope + at[:, None] * ROPE + lane[None, :],
        mask=live[:, None] & (lane < ROPE)[None, :],
        other=0.0,
    ).to(DOT)
    key = tl.load(
        keys + LATENT + lane[None, :], mask=present[:, None] & (lane < ROPE)[None, :], other=0.0
    ).to(DOT)
    score = tl.dot(q, tl.trans(key), acc=score) * (SCALE * LOG2_E)

    # Query q of the block sees the span entries q .. q + W - 1.
    age = entry[None, :] - (query - first_query)[:, None]
    used = present[None, :] & live[:, None] & (age >= 0) & (age < WINDOW)
    score = tl.where(used, score, LOWEST)
    highest = tl.max(score, axis=1)
    weight = tl.where(used, tl.exp2(score - highest[:, None]), 0.0)
    part = slot.to(tl.int64) * query_blocks + block
    M: tl.constexpr = BLOCK_Q * BLOCK_H
    tl.store(
        probabilities + (part * M + line)[:, None] * (TILES * BLOCK_N) + entry[None, :],
        weight.to(probabilities.dtype.element_ty),
    )
    at_tile = (part * TILES + tile) * M + line
    tl.store(tile_max + at_tile, highest)
    tl.store(tile_sum + at_tile, tl.sum(weight, axis=1))


@triton.jit
def window_values(
    probabilities,
    tile_max,
    tile_sum,
    cache,
    past,
    new,
    base,
    gate,
    S,
    R,
    query_blocks,
    out,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Probabilities times latents, normalised and gated. Grid (channel blocks, query blocks, B).

    BLOCK_T: power of two, at least TILES. gate [B, S, H], before the logistic function. out
    [B, S, H, L]; every row is written, padding rows with zeros.
    """
    block = tl.program_id(1)
    slot = tl.program_id(2)
    first_query = block * BLOCK_Q
    queries = tl.minimum(tl.load(new + slot), S)
    M: tl.constexpr = BLOCK_Q * BLOCK_H
    line = tl.arange(0, M)
    query = first_query + line // BLOCK_H
    head = line % BLOCK_H
    live = (query < queries) & (head < HEADS)
    part = slot.to(tl.int64) * query_blocks + block
    tile = tl.arange(0, BLOCK_T)
    at_tile = (part * TILES + tile)[:, None] * M + line[None, :]
    some = (tile < TILES)[:, None]
    tops = tl.load(tile_max + at_tile, mask=some, other=LOWEST)
    sums = tl.load(tile_sum + at_tile, mask=some, other=0.0)
    highest = tl.max(tops, axis=0)
    normalizer = tl.sum(sums * tl.exp2(tops - highest[None, :]), axis=0)

    channel = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    total = tl.zeros((M, BLOCK_V), tl.float32)
    tiles = tl.where(first_query < queries, TILES, 0)
    for step in tl.range(0, tiles, num_stages=STAGES):
        entry = step * BLOCK_N + tl.arange(0, BLOCK_N)
        position, row = _span_rows(past, base, slot, first_query, entry, R, WINDOW)
        present = (position >= 0) & (entry < WINDOW - 1 + BLOCK_Q)
        weight = tl.load(
            probabilities + (part * M + line)[:, None] * (TILES * BLOCK_N) + entry[None, :]
        )
        top = tl.load(tile_max + (part * TILES + step) * M + line)
        value = tl.load(
            cache + (slot.to(tl.int64) * R + row)[:, None] * (LATENT + ROPE) + channel[None, :],
            mask=present[:, None] & (channel < LATENT)[None, :],
            other=0.0,
        ).to(DOT)
        scaled = weight.to(tl.float32) * tl.exp2(top - highest)[:, None]
        total = tl.dot(scaled.to(DOT), value, acc=total)
    at = (slot.to(tl.int64) * S + query) * HEADS + head
    opened = tl.load(gate + at, mask=live, other=0.0).to(tl.float32)
    factor = tl.where(live, tl.sigmoid(opened) / tl.where(normalizer > 0, normalizer, 1.0), 0.0)
    tl.store(
        out + at[:, None] * LATENT + channel[None, :],
        (total * factor[:, None]).to(out.dtype.element_ty),
        mask=((query < S) & (head < HEADS))[:, None] & (channel < LATENT)[None, :],
    )
