# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Exact top-k of block scores.

Scores are not negative, so their bit patterns order like the scores. The k-th best is found with
histograms of the patterns between two bounds: each one narrows the bounds to one of its bins, and
the bounds are such that one histogram is mostly enough. The row stays in registers meanwhile.

A long row is selected in two steps: first the k best groups of neighbouring blocks by their largest
score, which the scoring kernel provides, then the k best blocks of those groups. That is exact: a
block outside of them comes after the best block of each of the k groups.

Equal scores: the lower block id is kept. Ids come out ascending, -1 behind the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plugins.qsa.kernels.index import padded


@triton.jit
def _cover(width, LOG2_BINS: tl.constexpr):
    """The least shift for which width >> shift is the number of a bin."""
    # An integer's length is its exponent as a float, exact below 2^24.
    length = (width >> LOG2_BINS).to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return tl.maximum(length - 126, 0)


@triton.jit
def _bin_of(bits, live, low, shift, wanted, K: tl.constexpr, LOG2_BINS: tl.constexpr):
    """The bin with the wanted-th largest of the live `bits`, wanted <= K.

    Bins are 2^shift wide and begin at `low`; the last one has no end. Returns the bin, the number
    of live elements above it, and whether it ends with the wanted one.
    """
    BINS: tl.constexpr = 1 << LOG2_BINS
    counts = tl.histogram(tl.minimum((bits - low) >> shift, BINS - 1), BINS, mask=live)
    reached = tl.cumsum(counts, axis=0, reverse=True)
    above = reached - counts
    here = (reached >= wanted) & (above < wanted)
    # All three as one integer: one sum over the program.
    word = (tl.arange(0, BINS) * K + above) * 2 + (reached == wanted).to(tl.int32)
    found = tl.sum(tl.where(here, word, 0), axis=0)
    return found // (2 * K), found // 2 % K, found % 2


@triton.jit
def _bounds(bits, K: tl.constexpr, N: tl.constexpr, LOG2_BINS: tl.constexpr):
    """Bounds of the K-th largest of `bits` [N], -1 = absent, more than K present."""
    FOUR: tl.constexpr = 4 if N >= 4 * K else 1
    tops = bits
    if FOUR > 1:
        tops = tl.max(tl.reshape(bits, (N // FOUR, FOUR)), axis=1)
    # K groups of elements: each has one element that is at least the least of their maxima, so the
    # K-th largest is not below it.
    grouped = tl.max(tl.reshape(tops, (N // (FOUR * K), K)), axis=0)
    low = tl.maximum(tl.min(grouped, axis=0), 0)
    high = tl.max(grouped, axis=0)
    if N >= 8 * K:
        # Nor is it below the K-th largest of more groups' maxima.
        shift = _cover(high - low, LOG2_BINS)
        place, _above, _whole = _bin_of(tops, tops >= low, low, shift, K, K, LOG2_BINS)
        low += place << shift
    return low, high


@triton.jit
def _threshold(bits, low, high, K: tl.constexpr, CLOSE: tl.constexpr, LOG2_BINS: tl.constexpr):
    """Of `bits`, -1 = absent, with the K-th largest in [low, high]: all above the result are among
    the K largest, and so are the returned number of those equal to it.

    CLOSE: few elements lie between `low` and the K-th largest.
    """
    shift = _cover(high - low, LOG2_BINS)
    if CLOSE:
        # Narrow bins, and an open last one for most of the elements that are certain.
        shift = tl.maximum(shift - 4, 0)
    wanted = tl.full((), K, tl.int32)
    while shift >= 0:
        live = (bits >= low) & (bits <= high)
        place, above, whole = _bin_of(bits, live, low, shift, wanted, K, LOG2_BINS)
        wanted -= above
        low += place << shift
        end = tl.minimum(high, low + (1 << shift) - 1)
        high = tl.where(place == (1 << LOG2_BINS) - 1, high, end)
        shift = tl.where((whole != 0) | (high == low), -1, _cover(high - low, LOG2_BINS))
        low -= whole
        wanted = tl.where(whole != 0, 0, wanted)
    return low, wanted


@triton.jit
def _store_best(
    bits,
    ids,
    out,
    low,
    high,
    K: tl.constexpr,
    N: tl.constexpr,
    CLOSE: tl.constexpr,
    LOG2_BINS: tl.constexpr,
):
    """Store the ids of the K largest of `bits` [N], more than K present, in their order.

    low, high: bounds of the K-th largest; CLOSE as in `_threshold`. Returns it.
    """
    threshold, missing = _threshold(bits, low, high, K, CLOSE, LOG2_BINS)
    above = bits > threshold
    equal = bits == threshold
    # Two counts in one word; N may exceed 2^15 only where 64 bits are used.
    WORD: tl.constexpr = tl.int32 if N <= 16384 else tl.int64
    unit = above.to(WORD) + (equal.to(WORD) << 16)
    before = tl.cumsum(unit, axis=0) - unit
    equals = (before >> 16).to(tl.int32)
    place = (before & 0xFFFF).to(tl.int32) + tl.minimum(equals, missing)
    place = tl.where(above | (equal & (equals < missing)), place, -1)
    tl.debug_barrier()
    # More than K only where a score is NaN: whatever the scores, nothing else is overwritten.
    tl.store(out + place, ids, mask=(place >= 0) & (place < K))
    return threshold + (missing == 0).to(tl.int32)


@triton.jit
def _bits(score, there):
    """Bit patterns of scores, -1 where there is none."""
    # The sign bit only ever comes from a negative zero.
    return tl.where(there, score.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)


@triton.jit
def _visible(past, new, row, S, NB, RATIO: tl.constexpr):
    """Blocks that a row may choose from."""
    slot = row // S
    step = row % S
    position = tl.where(step < tl.load(new + slot), tl.load(past + slot) + step, -1)
    return tl.minimum((position + 1) // RATIO, NB)


@triton.jit
def _store_all(out, count, K: tl.constexpr):
    lane = tl.arange(0, K)
    tl.store(out + lane, tl.where(lane < count, lane, -1))


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
    N: tl.constexpr,
    LOG2_BINS: tl.constexpr,
):
    """Top K of a row of at most N blocks. Grid (rows,). scores [B, S, NB]; ids [B, S, K].

    K and N are powers of two, N at least K; NB is a multiple of 4.
    """
    row = tl.program_id(0)
    block = tl.arange(0, N)
    mine = scores + tl.multiple_of(row.to(tl.int64) * NB, 4)
    # Read before it is known how much of it counts.
    score = tl.load(mine + block, mask=block < NB, other=0.0)
    visible = _visible(past, new, row, S, NB, RATIO)
    out = ids + row.to(tl.int64) * K
    if visible <= K:
        _store_all(out, visible, K)
        return
    bits = _bits(score, block < visible)
    low, high = _bounds(bits, K, N, LOG2_BINS)
    _store_best(bits, block, out, low, high, K, N, N >= 8 * K, LOG2_BINS)


@triton.jit
def select_grouped(
    scores,
    maxima,
    past,
    new,
    S,
    NB,
    ids,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    LOG2_BINS: tl.constexpr,
):
    """Top K of a row of at most N groups of GROUP blocks. Grid (rows,).

    maxima float32 [B, S, padded(cdiv(NB, GROUP))]: largest visible score of each group. Other
    arguments as in `select_row`.
    """
    row = tl.program_id(0)
    group = tl.arange(0, N)
    tops = maxima + tl.multiple_of(row.to(tl.int64) * padded(tl.cdiv(NB, GROUP)), 4)
    # Read before it is known how much of it counts.
    top = tl.load(tops + group, mask=group < tl.cdiv(NB, GROUP), other=0.0)
    visible = _visible(past, new, row, S, NB, RATIO)
    out = ids + row.to(tl.int64) * K
    if visible <= K:
        _store_all(out, visible, K)
        return
    groups = tl.cdiv(visible, GROUP)
    bits = _bits(top, group < groups)
    if groups <= K:
        _store_all(out, groups, K)
        low = tl.zeros((), tl.int32)
        high = tl.max(bits, axis=0)
    else:
        low, high = _bounds(bits, K, N, LOG2_BINS)
        low = _store_best(bits, group, out, low, high, K, N, N >= 8 * K, LOG2_BINS)
    tl.debug_barrier()
    lane = tl.arange(0, K * GROUP)
    chosen = tl.load(out + lane // GROUP)
    block = chosen * GROUP + lane % GROUP
    there = (chosen >= 0) & (block < visible)
    mine = scores + tl.multiple_of(row.to(tl.int64) * NB, 4)
    score = tl.load(mine + block, mask=there, other=0.0)
    # The K-th best block is not below the K-th best group.
    _store_best(_bits(score, there), block, out, low, high, K, K * GROUP, True, LOG2_BINS)
