"""Windowed latent attention scheduled for Hopper's matrix units (compute capability 9.0).

The same operation as `window.window_scores` and `window_values`, in one pass over the latents. A
program takes one query, 64 heads and one half of the output channels; the two programs of a query
run side by side and share the latents through the L2 cache. The queries alone fill more than half
of the shared memory, so tiles of 32 tokens stream through a ring of pieces of 128 channels: first
those that only the scores need, which are given back at once, then the program's own half, which
stays until the output has used it.

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
    _OUTPUT,
    _TILE,
    _VECTOR,
    BLOCK_H,
    _gather,
    hand_over,
    store,
)

BLOCK_N = gl.constexpr(32)
LATENT = gl.constexpr(1024)
ROPE = gl.constexpr(64)
WIDTH = gl.constexpr(1088)
HALF = gl.constexpr(512)
# Channels per piece; a tile is the other half's pieces, the rotary part, then the own half's.
PIECE = gl.constexpr(128)
OTHERS = gl.constexpr(4)
PASSING = gl.constexpr(5)
PIECES = gl.constexpr(9)
SLOTS = gl.constexpr(10)
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_HEADS_IN_SCORES = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_HEADS_IN_OUTPUT = gl.constexpr(gl.SliceLayout(1, _OUTPUT.value))
_WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))


@gluon.jit
def _loader(
    q_latent, q_rope, rows, oldest, count, base, R, half, tiles, ql, qr, ring, full, empty,
):  # fmt: skip
    """The pieces of every tile, in the order of use; with the first tile also the queries."""
    head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, _COPY))
    line = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _COPY))
    lane = gl.arange(0, PIECE, layout=gl.SliceLayout(0, _COPY))
    rope_lane = gl.arange(0, ROPE, layout=gl.SliceLayout(0, _COPY))
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
            mbarrier.wait(empty.index(slot), phase)
            if piece == OTHERS:
                if tile == 0:
                    _gather(qr, q_rope + head[:, None] * ROPE + rope_lane[None, :])
                target = ring.index(slot).slice(0, ROPE, dim=1)
                _gather(target, at + (LATENT + rope_lane)[None, :], mask=used)
            else:
                # Which piece of all, without the rotary part; the other half's come first.
                first = (1 - half) * HALF + piece * PIECE
                if piece > OTHERS:
                    first = half * HALF + (piece - PASSING) * PIECE
                if tile == 0:
                    query = q_latent + head[:, None] * LATENT + (first + lane)[None, :]
                    _gather(ql.index(piece if piece < OTHERS else piece - 1), query)
                _gather(ring.index(slot), at + (first + lane)[None, :], mask=used)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            slot += 1
            phase = gl.where(slot == SLOTS, phase ^ 1, phase)
            slot = gl.where(slot == SLOTS, 0, slot)


@gluon.jit
def _scores(ql, qr, ring, full, empty, position):
    """The scores of the tile whose first piece is `position`; gives passing pieces back."""
    dots = gl.zeros((BLOCK_H, BLOCK_N), gl.float32, layout=_SCORES)
    bystander = gl.zeros((BLOCK_H,), gl.float32, layout=_HEADS_IN_SCORES)
    for piece in gl.static_range(PIECES):
        slot = (position + piece) % SLOTS
        mbarrier.wait(full.index(slot), ((position + piece) // SLOTS) & 1)
        fence_async_shared()
        if piece == OTHERS:
            keys = ring.index(slot).slice(0, ROPE, dim=1).permute((1, 0))
            dots = warpgroup_mma(qr, keys, dots, is_async=True)
        else:
            query = ql.index(piece if piece < OTHERS else piece - 1)
            keys = ring.index(slot).permute((1, 0))
            dots = warpgroup_mma(query, keys, dots, use_acc=piece > 0, is_async=True)
        if piece > 0 and piece <= PASSING:
            # Only the newest product is in flight now: the piece before is read. The wait must not
            # name the sum, or the assembler makes every product wait.
            bystander = warpgroup_mma_wait(1, deps=[bystander])
            mbarrier.arrive(empty.index((position + piece - 1) % SLOTS), count=1)
    return warpgroup_mma_wait(0, deps=[dots])


@gluon.jit
def _add_pieces(weights, ring, empty, position, decay, first, second):
    """Two pieces of the output: faded sums plus probabilities times latents."""
    factor = decay[:, None]
    first = first * factor
    second = second * factor
    slot = position % SLOTS
    next_slot = (position + 1) % SLOTS
    one = warpgroup_mma(weights, ring.index(slot), first, is_async=True)
    two = warpgroup_mma(weights, ring.index(next_slot), second, is_async=True)
    first, second = warpgroup_mma_wait(0, deps=[one, two])
    mbarrier.arrive(empty.index(slot), count=1)
    mbarrier.arrive(empty.index(next_slot), count=1)
    return first, second


@gluon.jit
def _first_consumer(
    tiles, count, opened, ql, qr, ring, weights, factors, full, empty, made, taken,
    FACTOR: gl.constexpr,
):  # fmt: skip
    """Scores, probabilities and the first quarter of the output, as two pieces."""
    maximum = gl.full((BLOCK_H,), LOWEST, gl.float32, layout=_HEADS_IN_SCORES)
    normalizer = gl.zeros((BLOCK_H,), gl.float32, layout=_HEADS_IN_SCORES)
    first = gl.zeros((BLOCK_H, PIECE), gl.float32, layout=_OUTPUT)
    second = first
    for tile in range(tiles):
        score = _scores(ql, qr, ring, full, empty, tile * PIECES)
        decay, maximum, weight = hand_over(
            score, tile * BLOCK_N, count, maximum, weights, factors, made, taken, tile,
            FACTOR, True, _SCORES, BLOCK_N,
        )  # fmt: skip
        own = tile * PIECES + PASSING
        faded = gl.convert_layout(decay, _HEADS_IN_OUTPUT)
        first, second = _add_pieces(weights, ring, empty, own, faded, first, second)
        normalizer = normalizer * decay + gl.sum(weight, axis=1)
    mbarrier.wait(taken, (tiles & 1) ^ 1)
    some = normalizer > 0
    last = gl.where(some, opened / normalizer, 0.0)
    factors.store(last)
    mbarrier.arrive(made, count=1)
    lse = gl.where(some, maximum + gl.log2(normalizer), LOWEST)
    factor = gl.convert_layout(last, _HEADS_IN_OUTPUT)[:, None]
    return first * factor, second * factor, lse


@gluon.jit
def _second_consumer(tiles, out, ring, weights, factors, full, empty, made, taken):
    """The second quarter of the output, stored."""
    first = gl.zeros((BLOCK_H, PIECE), gl.float32, layout=_OUTPUT)
    second = first
    for tile in range(tiles):
        own = tile * PIECES + PASSING + 2
        mbarrier.wait(made, tile & 1)
        mbarrier.wait(full.index(own % SLOTS), (own // SLOTS) & 1)
        mbarrier.wait(full.index((own + 1) % SLOTS), ((own + 1) // SLOTS) & 1)
        decay = factors.load(_HEADS_IN_OUTPUT)
        fence_async_shared()
        first, second = _add_pieces(weights, ring, empty, own, decay, first, second)
        mbarrier.arrive(taken, count=1)
    mbarrier.wait(made, tiles & 1)
    factor = factors.load(_HEADS_IN_OUTPUT)[:, None]
    store(out, first * factor, 2 * PIECE, LATENT, _OUTPUT)
    store(out, second * factor, 3 * PIECE, LATENT, _OUTPUT)


@gluon.jit
def _program(
    q_latent, q_rope, cache, base, slot, row, first_head, half, oldest, count, opened, out, R,
    HEADS: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """One query, 64 heads, one half of the channels, `count` tokens from position `oldest` on."""
    ql = gl.allocate_shared_memory(gl.bfloat16, [2 * OTHERS, BLOCK_H, PIECE], _TILE)
    qr = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, ROPE], _TILE)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK_N, PIECE], _TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], _WEIGHTS)
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
    first, second, lse = gl.warp_specialize(
        [
            (
                _first_consumer,
                (
                    tiles, count, opened, ql, qr, ring, weights, factors, full, empty, made,
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
                    ql, qr, ring, full, empty,
                ),
            ),
        ],
        [4, 4],
        [184, 88],
    )  # fmt: skip
    store(out, first, 0, LATENT, _OUTPUT)
    store(out, second, PIECE, LATENT, _OUTPUT)
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
