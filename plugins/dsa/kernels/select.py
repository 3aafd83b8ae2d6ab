"""Exact top-k of signed scores.

A row is cut into chunks that fit in registers. The k-th best score of a chunk is found by bisecting
on its bit pattern, mapped so that signed floats order like integers; the chunks' winners are then
selected from in the same way, level by level, until one chunk is left.

Equal scores: the lower token index is kept. Indices come out ascending, -1 behind the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Below the pattern of every number: marks what cannot be chosen.
ABSENT = tl.constexpr(-0x80000000)


@triton.jit
def ordered(score):
    """int32 that orders like the float32, with -0.0 equal to 0.0 and above ABSENT."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def best(bits, K: tl.constexpr):
    """Which of `bits` (int32) are the K largest, and the rank of each among the chosen.

    Earlier elements win among equals. Returns (chosen, rank, number chosen).
    """
    there = tl.sum((bits != ABSENT).to(tl.int32), axis=0)
    # Invariant: at least K elements are >= low (low_count of them), fewer than K are > high.
    low = tl.min(tl.where(bits != ABSENT, bits, 0x7FFFFFFF), axis=0)
    high = tl.max(bits, axis=0)
    low_count = there
    while (low_count > K) & (low < high):
        # The upper middle, without overflow.
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        count = tl.sum((bits >= middle).to(tl.int32), axis=0)
        enough = count >= K
        low = tl.where(enough, middle, low)
        low_count = tl.where(enough, count, low_count)
        high = tl.where(enough, high, middle - 1)
    above = ((bits > low) & (bits != ABSENT)).to(tl.int32)
    equal = ((bits == low) & (bits != ABSENT)).to(tl.int32)
    # Both running counts in one scan: `above` never exceeds K, `equal` never the chunk.
    packed = above * 65536 + equal
    before = tl.cumsum(packed, axis=0) - packed
    wanted = K - tl.sum(above, axis=0)
    equal_before = before % 65536
    chosen = (above > 0) | ((equal > 0) & (equal_before < wanted))
    rank = before // 65536 + tl.minimum(equal_before, wanted)
    return chosen, rank, tl.minimum(there, K)


@triton.jit
def _visible(past, new, row, S, N):
    slot = row // S
    step = row % S
    seen = tl.minimum(tl.load(past + slot) + step + 1, N)
    return tl.where(step < tl.load(new + slot), seen, 0)


@triton.jit
def select_row(
    scores,
    past,
    new,
    S,
    N,
    tokens,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Top K of rows of at most CHUNK tokens. Grid (rows,). scores [B, S, N]; tokens [B, S, K]."""
    row = tl.program_id(0)
    visible = _visible(past, new, row, S, N)
    out = tokens + row.to(tl.int64) * K
    lane = tl.arange(0, K)
    if visible <= K:
        tl.store(out + lane, tl.where(lane < visible, lane, -1))
    else:
        token = tl.arange(0, CHUNK)
        seen = token < visible
        score = tl.load(scores + row.to(tl.int64) * N + token, mask=seen, other=0.0)
        chosen, rank, _ = best(tl.where(seen, ordered(score), ABSENT), K)
        tl.store(out + rank, token, mask=chosen)


@triton.jit
def select_chunk(
    scores,
    past,
    new,
    S,
    N,
    chunks,
    candidates,
    candidate_bits,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Top K of each chunk of a row. Grid (chunks, rows). Outputs int32 [B, S, chunks, K]."""
    row = tl.program_id(1)
    chunk = tl.program_id(0)
    visible = _visible(past, new, row, S, N)
    at = (row.to(tl.int64) * chunks + chunk) * K
    lane = tl.arange(0, K)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    seen = token < visible
    score = tl.load(scores + row.to(tl.int64) * N + token, mask=seen, other=0.0)
    bits = tl.where(seen, ordered(score), ABSENT)
    chosen, rank, count = best(bits, K)
    tl.store(candidates + at + rank, token, mask=chosen)
    tl.store(candidate_bits + at + rank, bits, mask=chosen)
    tl.store(candidates + at + lane, -1, mask=lane >= count)
    tl.store(candidate_bits + at + lane, ABSENT, mask=lane >= count)


@triton.jit
def select_among(
    candidates,
    candidate_bits,
    width,
    parts,
    chosen_tokens,
    chosen_bits,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Top K of each run of CHUNK candidates. Grid (parts, rows).

    candidates, candidate_bits int32 [rows, width]; outputs int32 [rows, parts, K]. Candidates are
    in ascending order of tokens, so that earlier means lower.
    """
    row = tl.program_id(1)
    part = tl.program_id(0)
    lanes = part * CHUNK + tl.arange(0, CHUNK)
    at = row.to(tl.int64) * width + lanes
    bits = tl.load(candidate_bits + at, mask=lanes < width, other=ABSENT)
    token = tl.load(candidates + at, mask=lanes < width, other=-1)
    chosen, rank, count = best(bits, K)
    out = (row.to(tl.int64) * parts + part) * K
    lane = tl.arange(0, K)
    tl.store(chosen_tokens + out + rank, token, mask=chosen)
    tl.store(chosen_bits + out + rank, bits, mask=chosen)
    tl.store(chosen_tokens + out + lane, -1, mask=lane >= count)
    tl.store(chosen_bits + out + lane, ABSENT, mask=lane >= count)
