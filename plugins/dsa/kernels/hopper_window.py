"""Windowed latent attention scheduled for Hopper's matrix units (compute capability 9.0).

The same operation as `window.window_scores` and `window_values`, in one pass over the latents. A
program takes one query, 64 heads and one half of the output channels; the two programs of a query
run side by side and share the latents through the L2 cache. The scores need all 1088 channels of a
tile of 64 tokens, more than fits twice beside the queries, so the tile streams through a ring of
64-channel pieces: first those that only the scores need, which are given back at once, then the
program's own half, which stays until the output has used it.

Three groups of four warps work side by side: a loader, a consumer for the scores and the first
quarter of the output, and a consumer for the second quarter. Sizes are Dots3's: a latent of 1024
and a rotary part of 64, heads a multiple of 64, bfloat16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from plugins.dsa.kernels.attention import LOG2_E, LOWEST
from plugins.dsa.kernels.hopper import (
    _COPY,
    _HEADS_IN_SCORES,
    _SCORES,
    _TILE,
    _VECTOR,
    BLOCK_H,
    BLOCK_N,
    _gather,
    hand_over,
)

LATENT = gl.constexpr(1024)
ROPE = gl.constexpr(64)
WIDTH = gl.constexpr(1088)
HALF = gl.constexpr(512)
# Channels per piece, pieces per tile, pieces of a tile that only the scores need, ring slots.
PIECE = gl.constexpr(64)
PIECES = gl.constexpr(17)
PASSING = gl.constexpr(9)
SLOTS = gl.constexpr(10)
# Pieces of the output per consumer.
OWN = gl.constexpr(4)


@gluon.jit
def _loader(
    q_latent, q_rope, rows, oldest, count, base, R, half, tiles, queries, ring, full, empty,
):  # fmt: skip
    """The pieces of every tile, in the order of use; with the first tile also the queries."""
    line = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _COPY))
    lane = gl.arange(0, PIECE, layout=gl.SliceLayout(0, _COPY))
    slot = 0
    phase = 1
    for tile in range(tiles):
        entry = tile * BLOCK_N + line
        used = (entry < count)[:, None]
        shifted = oldest + entry - base
        row = shifted % R
        row = gl.where(row < 0, row + R, row)
        at = rows + gl.where(entry < count, row, 0).to(gl.int64)[:, None] * WIDTH
        for piece in gl.static_range(PIECES):
            if piece < 8:
                first = (1 - half) * HALF + piece * PIECE
            elif piece > 8:
                first = half * HALF + (piece - PASSING) * PIECE
            else:
                first = LATENT + 0 * half
            mbarrier.wait(empty.index(slot), phase)
            if tile == 0:
                if piece == 8:
                    query = q_rope + line[:, None] * ROPE + lane[None, :]
                else:
                    query = q_latent + line[:, None] * LATENT + (first + lane)[None, :]
                _gather(queries.index(piece), query)
            _gather(ring.index(slot), at + (first + lane)[None, :], mask=used)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            slot += 1
            phase = gl.where(slot == SLOTS, phase ^ 1, phase)
            slot = gl.where(slot == SLOTS, 0, slot)


@gluon.jit
def _add_pieces(weights, ring, empty, position, decay, t0, t1, t2, t3):
    """Four pieces of the output: faded sums plus probabilities times latents."""
    factor = decay[:, None]
    t0 = t0 * factor
    t1 = t1 * factor
    t2 = t2 * factor
    t3 = t3 * factor
    f0 = warpgroup_mma(weights, ring.index(position % SLOTS), t0, is_async=True)
    f1 = warpgroup_mma(weights, ring.index((position + 1) % SLOTS), t1, is_async=True)
    f2 = warpgroup_mma(weights, ring.index((position + 2) % SLOTS), t2, is_async=True)
    f3 = warpgroup_mma(weights, ring.index((position + 3) % SLOTS), t3, is_async=True)
    t0, t1, t2, t3 = warpgroup_mma_wait(0, deps=[f0, f1, f2, f3])
    for piece in gl.static_range(OWN):
        mbarrier.arrive(empty.index((position + piece) % SLOTS), count=1)
    return t0, t1, t2, t3


@gluon.jit
def _scores(queries, ring, full, empty, position):
    """The scores of the tile whose first piece is `position`; gives passing pieces back."""
    dots = gl.zeros((BLOCK_H, BLOCK_N), gl.float32, layout=_SCORES)
    bystander = gl.zeros((BLOCK_H,), gl.float32, layout=_HEADS_IN_SCORES)
    for piece in gl.static_range(PIECES):
        slot = (position + piece) % SLOTS
        mbarrier.wait(full.index(slot), ((position + piece) // SLOTS) & 1)
        fence_async_shared()
        dots = warpgroup_mma(
            queries.index(piece),
            ring.index(slot).permute((1, 0)),
            dots,
            use_acc=piece > 0,
            is_async=True,
        )
        if piece > 0 and piece <= PASSING:
            # Only the newest product is in flight now: the piece before is read. The wait must not
            # name the sum, or the assembler makes every product wait.
            bystander = warpgroup_mma_wait(1, deps=[bystander])
            mbarrier.arrive(empty.index((position + piece - 1) % SLOTS), count=1)
    return warpgroup_mma_wait(0, deps=[dots])


@gluon.jit
def _first_consumer(
    tiles, count, opened, queries, ring, weights, factors, full, empty, made, taken,
    FACTOR: gl.constexpr,
):  # fmt: skip
    """Scores, probabilities and the first quarter of the output, in pieces of 64 channels."""
    maximum = gl.full((BLOCK_H,), LOWEST, gl.float32, layout=_HEADS_IN_SCORES)
    normalizer = gl.zeros((BLOCK_H,), gl.float32, layout=_HEADS_IN_SCORES)
    t0 = gl.zeros((BLOCK_H, BLOCK_N), gl.float32, layout=_SCORES)
    t1 = t0
    t2 = t0
    t3 = t0
    for tile in range(tiles):
        score = _scores(queries, ring, full, empty, tile * PIECES)
        decay, maximum, normalizer = hand_over(
            score, tile * BLOCK_N, count, maximum, normalizer, weights, factors, made, taken, tile,
            FACTOR,
        )  # fmt: skip
        own = tile * PIECES + PASSING
        t0, t1, t2, t3 = _add_pieces(weights, ring, empty, own, decay, t0, t1, t2, t3)
    mbarrier.wait(taken, (tiles & 1) ^ 1)
    last = opened / normalizer
    factors.store(last)
    mbarrier.arrive(made, count=1)
    factor = last[:, None]
    lse = maximum + gl.log2(normalizer)
    return t0 * factor, t1 * factor, t2 * factor, t3 * factor, lse


@gluon.jit
def _second_consumer(tiles, out, ring, weights, factors, full, empty, made, taken):
    """The second quarter of the output, stored."""
    t0 = gl.zeros((BLOCK_H, BLOCK_N), gl.float32, layout=_SCORES)
    t1 = t0
    t2 = t0
    t3 = t0
    for tile in range(tiles):
        own = tile * PIECES + PASSING + OWN
        mbarrier.wait(made, tile & 1)
        for piece in gl.static_range(OWN):
            mbarrier.wait(full.index((own + piece) % SLOTS), ((own + piece) // SLOTS) & 1)
        decay = factors.load(_HEADS_IN_SCORES)
        fence_async_shared()
        t0, t1, t2, t3 = _add_pieces(weights, ring, empty, own, decay, t0, t1, t2, t3)
        mbarrier.arrive(taken, count=1)
    mbarrier.wait(made, tiles & 1)
    factor = factors.load(_HEADS_IN_SCORES)[:, None]
    _store(out, t0 * factor, OWN * PIECE)
    _store(out, t1 * factor, (OWN + 1) * PIECE)
    _store(out, t2 * factor, (OWN + 2) * PIECE)
    _store(out, t3 * factor, (OWN + 3) * PIECE)


@gluon.jit
def _store(out, piece, first: gl.constexpr):
    line = gl.arange(0, BLOCK_H, layout=_HEADS_IN_SCORES)
    lane = first + gl.arange(0, PIECE, layout=gl.SliceLayout(0, _SCORES))
    gl.store(out + line[:, None] * LATENT + lane[None, :], piece.to(out.dtype.element_ty))


@gluon.jit
def _program(
    q_latent, q_rope, cache, base, slot, row, first_head, half, oldest, count, opened, out, R,
    HEADS: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """One query, 64 heads, one half of the channels, `count` tokens from position `oldest` on."""
    queries = gl.allocate_shared_memory(gl.bfloat16, [PIECES, BLOCK_H, PIECE], _TILE)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK_N, PIECE], _TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], _TILE)
    factors = gl.allocate_shared_memory(gl.float32, [BLOCK_H], _VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for index in gl.static_range(SLOTS):
        # Each thread of the loader reports its own copies; one consumer gives a slot back.
        mbarrier.init(full.index(index), count=128)
        mbarrier.init(empty.index(index), count=1)
    mbarrier.init(made, count=1)
    mbarrier.init(taken, count=1)
    at = row.to(gl.int64) * HEADS + first_head
    # An empty window still is one tile, of which nothing is loaded: zeros, and so is the output.
    tiles = gl.maximum(gl.cdiv(count, BLOCK_N), 1)
    t0, t1, t2, t3, lse = gl.warp_specialize(
        [
            (
                _first_consumer,
                (
                    tiles, count, opened, queries, ring, weights, factors, full, empty, made,
                    taken, SCALE * LOG2_E,
                ),
            ),
            (
                _second_consumer,
                (tiles, out, ring, weights, factors, full, empty, made, taken),
            ),
            (
                _loader,
                (
                    q_latent + at * LATENT, q_rope + at * ROPE,
                    cache + slot.to(gl.int64) * R * WIDTH, oldest, count, base, R, half, tiles,
                    queries, ring, full, empty,
                ),
            ),
        ],
        [4, 4],
        [168, 80],
    )  # fmt: skip
    _store(out, t0, 0)
    _store(out, t1, PIECE)
    _store(out, t2, 2 * PIECE)
    _store(out, t3, 3 * PIECE)
    return lse


@gluon.jit
def _window_of(past, new, row, S, WINDOW: gl.constexpr):
    """Slot of a query row, its window's oldest position and length, 0 for a padding row."""
    slot = row // S
    step = row % S
    newest = gl.load(past + slot) + step
    count = gl.minimum(newest + 1, WINDOW)
    count = gl.where(step < gl.load(new + slot), count, 0)
    return slot, newest + 1 - count, count


@gluon.jit
def window_whole(
    q_latent, q_rope, cache, past, new, base, gate,
    S, R,
    out,
    SCALE: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Whole windows, gated and final. Grid (2 H / 64, rows), 4 warps.

    Tensors as in `window.window_scores`; out [B, S, H, L].
    """
    row = gl.program_id(1)
    half = gl.program_id(0) % 2
    first_head = gl.program_id(0) // 2 * BLOCK_H
    slot, oldest, count = _window_of(past, new, row, S, WINDOW)
    at = row.to(gl.int64) * HEADS + first_head
    head = gl.arange(0, BLOCK_H, layout=_HEADS_IN_SCORES)
    opened = gl.load(gate + at + head).to(gl.float32)
    opened = 1.0 / (1.0 + gl.exp2(-opened * LOG2_E))
    _program(
        q_latent, q_rope, cache, gl.load(base + slot), slot, row, first_head, half, oldest, count,
        opened, out + at * LATENT + half * HALF, R, HEADS, SCALE,
    )  # fmt: skip


@gluon.jit
def window_split(
    q_latent, q_rope, cache, past, new, base,
    S, R, splits,
    partial, partial_lse,
    SCALE: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Runs of windows. Grid (2 H / 64, splits, rows), 4 warps.

    partial float32 [B, S, splits, H, L]; partial_lse float32 [B, S, splits, H], base 2.
    """
    row = gl.program_id(2)
    split = gl.program_id(1)
    half = gl.program_id(0) % 2
    first_head = gl.program_id(0) // 2 * BLOCK_H
    slot, oldest, count = _window_of(past, new, row, S, WINDOW)
    run = gl.cdiv(gl.cdiv(count, BLOCK_N), splits) * BLOCK_N
    first = gl.minimum(split * run, count)
    count = gl.minimum(run, count - first)
    at = (row.to(gl.int64) * splits + split) * HEADS + first_head
    opened = gl.full((BLOCK_H,), 1.0, gl.float32, layout=_HEADS_IN_SCORES)
    lse = _program(
        q_latent, q_rope, cache, gl.load(base + slot), slot, row, first_head, half, oldest + first,
        count, opened, partial + at * LATENT + half * HALF, R, HEADS, SCALE,
    )  # fmt: skip
    head = gl.arange(0, BLOCK_H, layout=_HEADS_IN_SCORES)
    gl.store(partial_lse + at + head, lse, mask=head < BLOCK_H * (1 - half))
