"""Windowed latent attention scheduled for Hopper's matrix units (compute capability 9.0).

The same operation as `window.window_scores` and `window_values`. The sum of 64 heads times 1024
channels would fill the register file of a multiprocessor, and the queries most of its shared
memory. So two programs, a cluster, share a query: each has all 64 heads and one half of the
channels, keeps its half of the queries, and reads its half of the latents, once. The scores need
both halves: each program sends its part of a tile's scores to the other one.

Four groups of four warps work side by side, as in `hopper.py`. Sizes are Dots3's: a latent of 1024
and a rotary part of 64, heads a multiple of 64, bfloat16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_wait,
)

from plugins.dsa.kernels import pair
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
    consumer,
    finish,
    hand_over,
    scores,
)

LATENT = gl.constexpr(1024)
ROPE = gl.constexpr(64)
WIDTH = gl.constexpr(1088)
# A program's half.
HALF = gl.constexpr(512)
HALF_ROPE = gl.constexpr(32)
_NARROW_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
_NARROW_TILE = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))


@gluon.jit
def _rows(rows, first_row, entry, count, R):
    """Addresses of the cache rows of a window's entries, and which of them there are."""
    used = entry < count
    row = first_row + gl.where(used, entry, 0)
    row = gl.where(row >= R, row - R, row)
    return rows + row.to(gl.int64)[:, None] * WIDTH, used[:, None]


@gluon.jit
def _loader(
    exchange, q_latent, q_rope, rows, rank, first_row, count, R, tiles,
    ql, qr, latents, ropes, full, empty, rope_empty,
):  # fmt: skip
    """This program's half of the queries once, then of the tiles."""
    pair.come(exchange)
    line = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _COPY))
    lane = rank * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, _COPY))
    narrow = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _NARROW_COPY))
    rope_lane = rank * HALF_ROPE + gl.arange(0, HALF_ROPE, layout=gl.SliceLayout(0, _NARROW_COPY))
    _gather(ql.index(0), q_latent + line[:, None] * LATENT + lane[None, :])
    _gather(qr.index(0), q_rope + narrow[:, None] * ROPE + rope_lane[None, :])
    for step in range(tiles):
        stage = step % 2
        at, used = _rows(rows, first_row, step * BLOCK_N + line, count, R)
        mbarrier.wait(empty.index(stage), ((step // 2) & 1) ^ 1)
        _gather(latents.index(stage), at + lane[None, :], mask=used)
        at, used = _rows(rows + LATENT, first_row, step * BLOCK_N + narrow, count, R)
        mbarrier.wait(rope_empty, (step & 1) ^ 1)
        _gather(ropes, at + rope_lane[None, :], mask=used)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
    pair.meet(exchange)


@gluon.jit
def _exchanged(exchange, peer, at, ql, qr, latents, ropes, full, rope_empty, step):
    """The scores of a tile: this program's part and the other one's."""
    dots = scores(ql, qr, latents, ropes, full, step)
    score = warpgroup_mma_wait(0, deps=[dots])
    mbarrier.arrive(rope_empty, count=1)
    if step > 0:
        pair.wait_taken(exchange, step - 1)
    pair.send(score, peer, at)
    return score + pair.receive(exchange, at, step)


@gluon.jit
def _scorer(
    exchange, tiles, count, opened, rank, lse,
    ql, qr, latents, ropes, weights, factors, full, rope_empty, made, taken,
    FACTOR: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities. All tiles but the last are full."""
    pair.come(exchange)
    pair.meet(exchange)
    peer = pair.peer_of(exchange)
    at = pair.places(_SCORES)
    maximum = gl.full((BLOCK_H,), LOWEST, gl.float32, layout=_HEADS_IN_SCORES)
    normalizer = gl.zeros((BLOCK_H,), gl.float32, layout=_HEADS_IN_SCORES)
    last = tiles - 1
    for step in range(last):
        score = _exchanged(exchange, peer, at, ql, qr, latents, ropes, full, rope_empty, step)
        maximum, normalizer = hand_over(
            score, step, count, maximum, normalizer, weights, factors, made, taken, FACTOR, False
        )
        pair.acknowledge(peer)
    score = _exchanged(exchange, peer, at, ql, qr, latents, ropes, full, rope_empty, last)
    maximum, normalizer = hand_over(
        score, last, count, maximum, normalizer, weights, factors, made, taken, FACTOR, True
    )
    # The last tile is not acknowledged: the other program may be gone.
    finish(tiles, opened, lse, rank == 0, maximum, normalizer, factors, made, taken, SPLIT)


@gluon.jit
def _consumer(
    me: gl.constexpr, exchange, tiles, out, latents, weights, factors, full, empty, made, taken,
):  # fmt: skip
    """A half of the program's output, stored."""
    pair.come(exchange)
    consumer(me, tiles, out, latents, weights, factors, full, empty, made, taken, LATENT)
    pair.meet(exchange)


@gluon.jit
def _program(
    q_latent, q_rope, cache, base, slot, row, rank, first_head, oldest, count, opened, out, lse, R,
    HEADS: gl.constexpr, SCALE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """One query, 64 heads, half of the channels, `count` tokens from position `oldest` on."""
    exchange = pair.open_exchange(row)
    ql = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, HALF], _TILE)
    qr = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, HALF_ROPE], _NARROW_TILE)
    latents = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, HALF], _TILE)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, HALF_ROPE], _NARROW_TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], _TILE)
    factors = gl.allocate_shared_memory(gl.float32, [BLOCK_H], _VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    rope_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        # Each thread of the loader reports its own copies; each consumer reports once.
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(rope_empty, count=1)
    mbarrier.init(made, count=1)
    mbarrier.init(taken, count=2)
    at = row.to(gl.int64) * HEADS + first_head
    first_row = (oldest - base) % R
    # The remainder takes the sign of the dividend; a base may lie ahead of an unused position.
    first_row = gl.where(first_row < 0, first_row + R, first_row)
    # An empty window still is one tile, of which nothing is loaded: zeros, and so is the output.
    tiles = gl.maximum(gl.cdiv(count, BLOCK_N), 1)
    gl.warp_specialize(
        [
            (
                _scorer,
                (
                    exchange, tiles, count, opened, rank, lse, ql, qr, latents, ropes, weights,
                    factors, full, rope_empty, made, taken, SCALE * LOG2_E, SPLIT,
                ),
            ),
            (
                _consumer,
                (0, exchange, tiles, out, latents, weights, factors, full, empty, made, taken),
            ),
            (
                _consumer,
                (1, exchange, tiles, out, latents, weights, factors, full, empty, made, taken),
            ),
            (
                _loader,
                (
                    exchange, q_latent + at * LATENT, q_rope + at * ROPE,
                    cache + slot.to(gl.int64) * R * WIDTH, rank, first_row, count, R, tiles,
                    ql, qr, latents, ropes, full, empty, rope_empty,
                ),
            ),
        ],
        [4, 4, 4],
        [176, 176, 56],
    )  # fmt: skip


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
    """Whole windows, gated and final. Grid (2 H / 64, rows), clusters of 2, 4 warps.

    Tensors as in `window.window_scores`; out [B, S, H, L].
    """
    row = gl.program_id(1)
    rank = gl.program_id(0) % 2
    first_head = gl.program_id(0) // 2 * BLOCK_H
    slot, oldest, count = _window_of(past, new, row, S, WINDOW)
    at = row.to(gl.int64) * HEADS + first_head
    head = gl.arange(0, BLOCK_H, layout=_HEADS_IN_SCORES)
    opened = gl.load(gate + at + head).to(gl.float32)
    opened = 1.0 / (1.0 + gl.exp2(-opened * LOG2_E))
    _program(
        q_latent, q_rope, cache, gl.load(base + slot), slot, row, rank, first_head, oldest, count,
        opened, out + at * LATENT + rank * HALF, out, R, HEADS, SCALE, False,
    )  # fmt: skip


@gluon.jit
def window_split(
    q_latent, q_rope, cache, past, new, base,
    S, R, splits,
    partial, partial_lse,
    SCALE: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Runs of windows. Grid (2 H / 64, splits, rows), clusters of 2, 4 warps.

    partial float32 [B, S, splits, H, L]; partial_lse float32 [B, S, splits, H], base 2.
    """
    row = gl.program_id(2)
    split = gl.program_id(1)
    rank = gl.program_id(0) % 2
    first_head = gl.program_id(0) // 2 * BLOCK_H
    slot, oldest, count = _window_of(past, new, row, S, WINDOW)
    # Whole tiles each; the last run takes the short one besides.
    run = gl.cdiv(count // BLOCK_N, splits) * BLOCK_N
    first = gl.minimum(split * run, count)
    count = gl.where(split == splits - 1, count - first, gl.minimum(run, count - first))
    at = (row.to(gl.int64) * splits + split) * HEADS + first_head
    opened = gl.full((BLOCK_H,), 1.0, gl.float32, layout=_HEADS_IN_SCORES)
    _program(
        q_latent, q_rope, cache, gl.load(base + slot), slot, row, rank, first_head, oldest + first,
        count, opened, partial + at * LATENT + rank * HALF, partial_lse + at, R, HEADS, SCALE,
        True,
    )  # fmt: skip
