# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Index scores: how well every visible block fits a query."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def padded(count):
    """Length of a row of scores: selecting loads four at once."""
    return tl.cdiv(count, 4) * 4


@triton.jit
def _score(
    index_query,
    index_keys,
    past,
    new,
    S,
    NB,
    tiles,
    scores,
    maxima,
    RATIO: tl.constexpr,
    HI: tl.constexpr,
    DI: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    slot = tl.program_id(2)
    first_row = tl.program_id(1) * ROWS
    first = tl.program_id(0) * tiles * BLOCKS
    count = tl.minimum(tl.load(new + slot), S)
    past_length = tl.load(past + slot)
    seen = past_length + tl.minimum(first_row + ROWS, count)
    visible = tl.where(first_row < count, seen // RATIO, 0)
    last = tl.minimum(first + tiles * BLOCKS, tl.minimum(visible, NB))
    # Column order [ROWS, HI]: the heads of a row are neighbours for the sum below.
    column = tl.arange(0, ROWS * HI)
    row = first_row + column // HI
    dims = tl.arange(0, DI)
    head = (slot * HI + column % HI).to(tl.int64)
    query_at = (head[None, :] * S + row[None, :]) * DI + dims[:, None]
    query = tl.load(index_query + query_at, mask=row[None, :] < count, other=0.0).to(DOT)
    lanes = tl.arange(0, BLOCKS)
    keys = index_keys + slot.to(tl.int64) * NB * DI
    rows = first_row + tl.arange(0, ROWS)
    out = scores + (slot.to(tl.int64) * S + rows)[None, :] * padded(NB)
    for start in tl.range(first, last, BLOCKS, num_stages=STAGES):
        block = start + lanes
        key_at = block[:, None].to(tl.int64) * DI + dims[None, :]
        key = tl.load(keys + key_at, mask=block[:, None] < last, other=0.0).to(DOT)
        dots = tl.maximum(tl.dot(key, query), 0.0)
        score = tl.sum(tl.reshape(dots, (BLOCKS, ROWS, HI)), axis=2) * SCALE
        tl.store(out + block[:, None], score, mask=(block[:, None] < last) & (rows < S)[None, :])
        if GROUP > 0:
            shown = tl.where(rows < count, (past_length + rows + 1) // RATIO, 0)
            score = tl.where(block[:, None] < shown[None, :], score, 0.0)
            top = tl.max(tl.reshape(score, (BLOCKS // GROUP, GROUP, ROWS)), axis=1)
            group = start // GROUP + tl.arange(0, BLOCKS // GROUP)
            wide = padded(tl.cdiv(NB, GROUP))
            top_at = (slot.to(tl.int64) * S + rows)[None, :] * wide + group[:, None]
            there = (group[:, None] * GROUP < last) & (rows < S)[None, :]
            tl.store(maxima + top_at, top, mask=there)


@triton.jit
def score_blocks(
    index_query,
    index_keys,
    past,
    new,
    S,
    NB,
    tiles,
    scores,
    RATIO: tl.constexpr,
    HI: tl.constexpr,
    DI: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALE: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of `tiles` x BLOCKS block keys for ROWS queries of one slot.

    Grid (cdiv(NB, BLOCKS * tiles), cdiv(S, ROWS), B). index_query [B, HI, S, DI]; index_keys
    [B, NB, DI]; scores float32 [B, S, padded(NB)]: sum over heads of relu(q . k) * SCALE. Scores of
    blocks that no query of the tile sees are not written. ROWS * HI is at least 16.
    """
    _score(
        index_query, index_keys, past, new, S, NB, tiles, scores, scores, RATIO, HI, DI, ROWS,
        BLOCKS, 0, SCALE, DOT, STAGES,
    )  # fmt: skip


@triton.jit
def score_groups(
    index_query,
    index_keys,
    past,
    new,
    S,
    NB,
    tiles,
    scores,
    maxima,
    RATIO: tl.constexpr,
    HI: tl.constexpr,
    DI: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`score_blocks`, and the largest visible score of every GROUP neighbouring blocks.

    maxima float32 [B, S, padded(cdiv(NB, GROUP))]; GROUP divides BLOCKS. Where a query sees no
    block of a group its maximum is zero or not written.
    """
    _score(
        index_query, index_keys, past, new, S, NB, tiles, scores, maxima, RATIO, HI, DI, ROWS,
        BLOCKS, GROUP, SCALE, DOT, STAGES,
    )  # fmt: skip
