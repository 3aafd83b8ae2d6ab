# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Index scores: how well every visible block fits a query."""

from __future__ import annotations

import triton
import triton.language as tl


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
    [B, NB, DI]; scores float32 [B, S, NB]: sum over heads of relu(q . k) * SCALE. Scores of blocks
    that no query of the tile sees are not written. ROWS * HI is at least 16.
    """
    slot = tl.program_id(2)
    first_row = tl.program_id(1) * ROWS
    first = tl.program_id(0) * tiles * BLOCKS
    count = tl.minimum(tl.load(new + slot), S)
    seen = tl.load(past + slot) + tl.minimum(first_row + ROWS, count)
    visible = tl.where(first_row < count, seen // RATIO, 0)
    last = tl.minimum(first + tiles * BLOCKS, tl.minimum(visible, NB))
    # Column order [ROWS, HI]: the heads of a row are neighbours for the sum below.
    column = tl.arange(0, ROWS * HI)
    row = first_row + column // HI
    dims = tl.arange(0, DI)
    query_at = ((slot * HI + column % HI)[None, :] * S + row[None, :]) * DI + dims[:, None]
    query = tl.load(index_query + query_at, mask=row[None, :] < count, other=0.0).to(DOT)
    lanes = tl.arange(0, BLOCKS)
    keys = index_keys + slot.to(tl.int64) * NB * DI
    rows = first_row + tl.arange(0, ROWS)
    out = scores + (slot.to(tl.int64) * S + rows)[None, :] * NB
    for start in tl.range(first, last, BLOCKS, num_stages=STAGES):
        block = start + lanes
        key_at = block[:, None].to(tl.int64) * DI + dims[None, :]
        key = tl.load(keys + key_at, mask=block[:, None] < last, other=0.0).to(DOT)
        dots = tl.maximum(tl.dot(key, query), 0.0)
        score = tl.sum(tl.reshape(dots, (BLOCKS, ROWS, HI)), axis=2) * SCALE
        tl.store(out + block[:, None], score, mask=(block[:, None] < last) & (rows < S)[None, :])
