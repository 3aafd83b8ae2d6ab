# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Exact top-k of block scores.

The k best scores of a row are found by bisecting on the bit pattern of the k-th best: scores are
not negative, so their bit patterns order like the scores. The row stays in registers meanwhile.
Rows longer than one chunk are selected per chunk first, then among the chunks' winners.

Equal scores: the lower block id is kept. Ids come out ascending, -1 behind the last.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _popcount(x):
    """Number of set bits of uint32 values."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _threshold(bits, K: tl.constexpr, N: tl.constexpr):
    """The K-th largest of `bits` [N / 32, 32] (-1 = not there), or less when fewer are there.

    Below the result lies nothing of the K largest; above it lie fewer than K or exactly those.
    """
    # K groups of every K-th element: each holds one element that is at least the least of the
    # groups' maxima, so the K-th largest is not below it.
    groups = tl.reshape(bits, (N // K, K // 32, 32)) if K >= 32 else tl.reshape(bits, (N // K, K))
    low = tl.maximum(tl.min(tl.max(groups, axis=0)), 0)
    high = tl.max(bits) + 1
    low_count = tl.sum((bits >= low).to(tl.int32))
    while (low_count > K) & (high - low > 1):
        middle = low + (high - low) // 2
        count = tl.sum((bits >= middle).to(tl.int32))
        enough = count >= K
        low = tl.where(enough, middle, low)
        low_count = tl.where(enough, count, low_count)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _choose(bits, K: tl.constexpr, N: tl.constexpr):
    """The K largest of `bits` [N / 32, 32] as one bit each.

    Returns the words (uint32 [N / 32]), the number of chosen bits before each, and in all.
    """
    low = _threshold(bits, K, N)
    lane = tl.arange(0, 32)[None, :].to(tl.uint32)
    one = (lane * 0 + 1) << lane
    zero = lane * 0
    above = tl.sum(tl.where(bits > low, one, zero), axis=1)
    equal = tl.sum(tl.where((bits == low), one, zero), axis=1)
    wanted = K - tl.sum(_popcount(above))
    in_word = _popcount(equal)
    missing = wanted - (tl.cumsum(in_word, axis=0) - in_word)
    # Where a word holds more equal bits than are missing, its highest ones go.
    surplus = tl.minimum(in_word, tl.maximum(in_word - missing, 0))
    for _ in range(tl.max(surplus)):
        highest = equal
        highest |= highest >> 1
        highest |= highest >> 2
        highest |= highest >> 4
        highest |= highest >> 8
        highest |= highest >> 16
        highest = highest ^ (highest >> 1)
        equal = tl.where(surplus > 0, equal ^ highest, equal)
        surplus -= 1
    chosen = above | equal
    count = _popcount(chosen)
    before = tl.cumsum(count, axis=0) - count
    return chosen, count, before


@triton.jit
def _row_bits(scores, past, new, row, chunk, S, NB, RATIO: tl.constexpr, CHUNK: tl.constexpr):
    """Block ids and score bits [CHUNK / 32, 32] of a chunk; -1 for blocks that are not visible."""
    slot = row // S
    step = row % S
    position = tl.where(step < tl.load(new + slot), tl.load(past + slot) + step, -1)
    visible = tl.minimum((position + 1) // RATIO, NB)
    word = tl.arange(0, CHUNK // 32)
    block = chunk * CHUNK + word[:, None] * 32 + tl.arange(0, 32)[None, :]
    score = tl.load(scores + row.to(tl.int64) * NB + block, mask=block < visible, other=0.0)
    # The sign bit only ever comes from a negative zero.
    bits = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(block < visible, bits, -1)


@triton.jit
def _pop(word):
    """Index of the lowest set bit of uint32 words, and the words without it."""
    rest = word & (word - 1)
    return _popcount((word ^ rest) - 1), rest


@triton.jit
def select_row(
    scores,
    past,
    new,
    S,
    NB,
    ids,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Top K of a row of at most CHUNK blocks. Grid (rows,). scores [B, S, NB]; ids [B, S, K].

    K is a power of two, CHUNK one of at least K and 32.
    """
    row = tl.program_id(0)
    bits = _row_bits(scores, past, new, row, 0, S, NB, RATIO, CHUNK)
    word, count, place = _choose(bits, K, CHUNK)
    first = tl.arange(0, CHUNK // 32) * 32
    out = ids + row.to(tl.int64) * K
    for _ in range(tl.max(count)):
        bit, rest = _pop(word)
        tl.store(out + place, first + bit, mask=word != 0)
        place += 1
        word = rest
    lane = tl.arange(0, K)
    tl.store(out + lane, -1, mask=lane >= tl.sum(count))


@triton.jit
def select_chunk(
    scores,
    past,
    new,
    S,
    NB,
    chunks,
    candidates,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Top K of one chunk of a row. Grid (rows, chunks). candidates int32 [B, S, chunks, K]."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    bits = _row_bits(scores, past, new, row, chunk, S, NB, RATIO, CHUNK)
    word, count, place = _choose(bits, K, CHUNK)
    first = chunk * CHUNK + tl.arange(0, CHUNK // 32) * 32
    out = candidates + (row.to(tl.int64) * chunks + chunk) * K
    for _ in range(tl.max(count)):
        bit, rest = _pop(word)
        tl.store(out + place, first + bit, mask=word != 0)
        place += 1
        word = rest
    lane = tl.arange(0, K)
    tl.store(out + lane, -1, mask=lane >= tl.sum(count))


@triton.jit
def select_among(
    scores,
    candidates,
    NB,
    width,
    ids,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Top K of the chunks' winners. Grid (rows,). width = chunks * K <= WIDTH, a power of two."""
    row = tl.program_id(0)
    mine = candidates + row.to(tl.int64) * width
    first = tl.arange(0, WIDTH // 32) * 32
    lanes = first[:, None] + tl.arange(0, 32)[None, :]
    block = tl.load(mine + lanes, mask=lanes < width, other=-1)
    score = tl.load(scores + row.to(tl.int64) * NB + block, mask=block >= 0, other=0.0)
    bits = tl.where(block >= 0, score.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    word, count, place = _choose(bits, K, WIDTH)
    out = ids + row.to(tl.int64) * K
    for _ in range(tl.max(count)):
        bit, rest = _pop(word)
        chosen = tl.load(mine + first + bit, mask=word != 0, other=-1)
        tl.store(out + place, chosen, mask=word != 0)
        place += 1
        word = rest
    lane = tl.arange(0, K)
    tl.store(out + lane, -1, mask=lane >= tl.sum(count))
