"""Exact top-k of signed scores.

A chunk of a row stays in the registers of one program while the k-th best score is found by
bisecting on its bit pattern, mapped so that signed floats order like integers. The winners of
several chunks are selected from in the same way, level by level, until one chunk is left.

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
def _threshold(bits, K: tl.constexpr):
    """The K-th largest of `bits` that are not ABSENT, or less when fewer are there.

    Below the result lies nothing of the K largest; above it lie fewer than K or exactly those.
    """
    # K groups of every K-th element: each holds one element that is at least the least of the
    # groups' maxima, so the K-th largest is not below it.
    groups = tl.reshape(bits, (bits.shape[0] // K, K))
    low = tl.maximum(tl.min(tl.max(groups, axis=0)), ABSENT + 1)
    high = tl.max(bits)
    # Invariant: at least K elements are >= low (low_count of them), fewer than K are > high.
    low_count = tl.sum((bits >= low).to(tl.int32))
    while (low_count > K) & (low < high):
        # The upper middle, without overflow.
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        count = tl.sum((bits >= middle).to(tl.int32))
        enough = count >= K
        low = tl.where(enough, middle, low)
        low_count = tl.where(enough, count, low_count)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _load(scores, candidates, lanes, end, LISTED: tl.constexpr):
    """Tokens and the bits of their scores; ABSENT from lane `end` on and for tokens of -1."""
    if LISTED:
        token = tl.load(candidates + lanes, mask=lanes < end, other=-1)
        there = token >= 0
    else:
        token = lanes
        there = lanes < end
    score = tl.load(scores + token, mask=there, other=0.0)
    return token, tl.where(there, ordered(score), ABSENT)


@triton.jit
def _select(
    scores,
    candidates,
    first,
    end,
    out,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Top K of the lanes [first, min(first + CHUNK, end)), -1 behind the last.

    PART: lanes that are put in place at a time; they are loaded again for it.
    """
    _, bits = _load(scores, candidates, first + tl.arange(0, CHUNK), end, LISTED)
    low = _threshold(bits, K)
    wanted = K - tl.sum((bits > low).to(tl.int32))
    before = 0
    for start in range(0, CHUNK, PART):
        lanes = first + start + tl.arange(0, PART)
        token, part = _load(scores, candidates, lanes, end, LISTED)
        above = (part > low).to(tl.int32)
        equal = ((part == low) & (part != ABSENT)).to(tl.int32)
        # Both running counts in one scan: `above` never exceeds K, `equal` never the chunk.
        packed = above * 65536 + equal
        running = before + tl.cumsum(packed, axis=0) - packed
        equal_before = running % 65536
        chosen = (above > 0) | ((equal > 0) & (equal_before < wanted))
        rank = running // 65536 + tl.minimum(equal_before, wanted)
        tl.store(out + rank, token, mask=chosen)
        before += tl.sum(packed)
    found = before // 65536 + tl.minimum(before % 65536, wanted)
    lane = tl.arange(0, K)
    tl.store(out + lane, -1, mask=lane >= found)


@triton.jit
def _visible(past, new, row, S, N):
    slot = row // S
    step = row % S
    seen = tl.minimum(tl.load(past + slot) + step + 1, N)
    return tl.where(step < tl.load(new + slot), seen, 0)


@triton.jit
def select_chunk(
    scores,
    past,
    new,
    S,
    N,
    chunks,
    chosen,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """Top K of each chunk of a row. Grid (chunks, rows).

    scores [B, S, N]; chosen int32 [B * S, chunks, K]. K is a power of two; so are CHUNK, at least
    K, at most 32768, and PART, at most CHUNK.
    """
    row = tl.program_id(1)
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    visible = _visible(past, new, row, S, N)
    out = chosen + (row.to(tl.int64) * chunks + chunk) * K
    if visible - first <= K:
        token = first + tl.arange(0, K)
        tl.store(out + tl.arange(0, K), tl.where(token < visible, token, -1))
    else:
        mine = scores + row.to(tl.int64) * N
        _select(mine, chosen, first, visible, out, K, CHUNK, PART, False)


@triton.jit
def select_among(
    scores,
    candidates,
    N,
    width,
    parts,
    chosen,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """Top K of each run of CHUNK candidates. Grid (parts, rows).

    scores [rows, N]; candidates int32 [rows, width], in ascending order of tokens, -1 = none;
    chosen int32 [rows, parts, K].
    """
    row = tl.program_id(1)
    part = tl.program_id(0)
    mine = scores + row.to(tl.int64) * N
    found = candidates + row.to(tl.int64) * width
    out = chosen + (row.to(tl.int64) * parts + part) * K
    _select(mine, found, part * CHUNK, width, out, K, CHUNK, PART, True)
