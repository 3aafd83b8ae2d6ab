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
def _best(bits, K: tl.constexpr):
    """Which of `bits` (int32, -1 = not there) are the K largest, and the rank of each among them.

    Earlier elements win among equals. Returns (chosen, rank, number chosen).
    """
    there = tl.sum((bits >= 0).to(tl.int32), axis=0)
    # Invariant: at least K elements are >= low (low_count of them), fewer than K are >= high.
    low = tl.min(tl.where(bits >= 0, bits, 0x7FFFFFFF), axis=0)
    high = tl.max(bits, axis=0) + 1
    low_count = there
    while (low_count > K) & (high - low > 1):
        middle = low + (high - low) // 2
        count = tl.sum((bits >= middle).to(tl.int32), axis=0)
        enough = count >= K
        low = tl.where(enough, middle, low)
        low_count = tl.where(enough, count, low_count)
        high = tl.where(enough, high, middle)
    above = ((bits > low) & (bits >= 0)).to(tl.int32)
    equal = ((bits == low) & (bits >= 0)).to(tl.int32)
    # Both running counts in one scan: `above` never exceeds K, `equal` never the chunk.
    packed = above * 65536 + equal
    before = tl.cumsum(packed, axis=0) - packed
    wanted = K - tl.sum(above, axis=0)
    equal_before = before % 65536
    chosen = (above > 0) | ((equal > 0) & (equal_before < wanted))
    rank = before // 65536 + tl.minimum(equal_before, wanted)
    return chosen, rank, tl.minimum(there, K)


@triton.jit
def _row_bits(scores, past, new, row, chunk, S, NB, RATIO: tl.constexpr, CHUNK: tl.constexpr):
    slot = row // S
    step = row % S
    position = tl.where(step < tl.load(new + slot), tl.load(past + slot) + step, -1)
    visible = tl.minimum((position + 1) // RATIO, NB)
    block = chunk * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(scores + row.to(tl.int64) * NB + block, mask=block < visible, other=0.0)
    # The sign bit only ever comes from a negative zero.
    bits = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return block, tl.where(block < visible, bits, -1)


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
    """Top K of a row of at most CHUNK blocks. Grid (rows,). scores [B, S, NB]; ids [B, S, K]."""
    row = tl.program_id(0)
    block, bits = _row_bits(scores, past, new, row, 0, S, NB, RATIO, CHUNK)
    chosen, rank, count = _best(bits, K)
    out = ids + row.to(tl.int64) * K
    tl.store(out + rank, block, mask=chosen)
    lane = tl.arange(0, K)
    tl.store(out + lane, -1, mask=lane >= count)


@triton.jit
def select_chunk(
    scores,
    past,
    new,
    S,
    NB,
    chunks,
    candidate_ids,
    candidate_bits,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Top K of one chunk of a row. Grid (rows, chunks). Outputs int32 [B, S, chunks, K]."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    block, bits = _row_bits(scores, past, new, row, chunk, S, NB, RATIO, CHUNK)
    chosen, rank, count = _best(bits, K)
    at = (row.to(tl.int64) * chunks + chunk) * K
    tl.store(candidate_ids + at + rank, block, mask=chosen)
    tl.store(candidate_bits + at + rank, bits, mask=chosen)
    lane = tl.arange(0, K)
    tl.store(candidate_ids + at + lane, -1, mask=lane >= count)
    tl.store(candidate_bits + at + lane, -1, mask=lane >= count)


@triton.jit
def select_among(
    candidate_ids,
    candidate_bits,
    width,
    ids,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Top K of the chunks' winners. Grid (rows,). width = chunks * K <= WIDTH, a power of two."""
    row = tl.program_id(0)
    lanes = tl.arange(0, WIDTH)
    at = row.to(tl.int64) * width + lanes
    bits = tl.load(candidate_bits + at, mask=lanes < width, other=-1)
    block = tl.load(candidate_ids + at, mask=lanes < width, other=-1)
    chosen, rank, count = _best(bits, K)
    out = ids + row.to(tl.int64) * K
    tl.store(out + rank, block, mask=chosen)
    lane = tl.arange(0, K)
    tl.store(out + lane, -1, mask=lane >= count)
