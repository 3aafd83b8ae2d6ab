"""Windowed latent attention scheduled for Hopper's matrix units (compute capability 9.0).

The same operation as `window.window_scores` and `window_values`, in one program per query and 64
heads. The sum of 64 heads times 1024 channels would fill the register file, so the latents pass
twice: first for the scores of the whole window, which stay in registers, then, newest tokens first
(they are still in the L2 cache), for one half of the output channels after the other. No tile has
to stay in shared memory, so that the loads run far ahead; the probabilities overwrite the queries.

Three groups of four warps work side by side: a loader and two consumers, which take every other
tile of 64 tokens of the scores, then each a quarter of the output channels at a time. Sizes are
Dots3's: a latent of 1024 and a rotary part of 64, heads a multiple of 64, bfloat16.
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
    _barrier,
    _gather,
    store,
)

LATENT = gl.constexpr(1024)
ROPE = gl.constexpr(64)
WIDTH = gl.constexpr(1088)
# Channels per piece of a tile; pieces, the last one being the rotary part; buffers.
PIECE = gl.constexpr(64)
PIECES = gl.constexpr(17)
SLOTS = gl.constexpr(11)


@gluon.jit
def _rows(rows, first_row, tile, count, R):
    """Addresses of a tile's cache rows, and which of its tokens there are."""
    entry = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _COPY))
    used = entry < count
    row = first_row + gl.where(used, entry, 0)
    row = gl.where(row >= R, row - R, row)
    return rows + row.to(gl.int64)[:, None] * WIDTH, used[:, None]


@gluon.jit
def _load(ring, full, empty, position, at, used, first):
    """The channels from `first` on of a tile into the next buffer."""
    lane = first + gl.arange(0, PIECE, layout=gl.SliceLayout(0, _COPY))
    slot = position % SLOTS
    mbarrier.wait(empty.index(slot), ((position // SLOTS) & 1) ^ 1)
    _gather(ring.index(slot), at + lane[None, :], mask=used)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
    return position + 1


@gluon.jit
def _loader(
    q_latent, q_rope, rows, first_row, count, R, q, ring, full, empty,
    TILES: gl.constexpr,
):  # fmt: skip
    """The pieces of all tiles in the order of use; with the first ones the queries."""
    head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, _COPY))[:, None]
    lane = gl.arange(0, PIECE, layout=gl.SliceLayout(0, _COPY))[None, :]
    position = 0
    for pair in range(TILES // 2):
        even, even_used = _rows(rows, first_row, 2 * pair, count, R)
        odd, odd_used = _rows(rows, first_row, 2 * pair + 1, count, R)
        for piece in range(PIECES):
            if pair == 0:
                if piece < PIECES - 1:
                    _gather(q.index(piece), q_latent + head * LATENT + lane + piece * PIECE)
                else:
                    _gather(q.index(piece), q_rope + head * ROPE + lane)
            position = _load(ring, full, empty, position, even, even_used, piece * PIECE)
            position = _load(ring, full, empty, position, odd, odd_used, piece * PIECE)
    tiles = TILES
    if count > TILES * BLOCK_N:
        tiles += 1
        at, used = _rows(rows, first_row, TILES, count, R)
        for piece in range(PIECES):
            position = _load(ring, full, empty, position, at, used, piece * PIECE)
    for half in range(2):
        for turn in range(tiles):
            at, used = _rows(rows, first_row, tiles - 1 - turn, count, R)
            for piece in range(4):
                first = half * (LATENT // 2) + piece * PIECE
                position = _load(ring, full, empty, position, at, used, first)
                position = _load(ring, full, empty, position, at, used, first + LATENT // 4)


@gluon.jit
def _scores(q, ring, full, empty, first, step):
    """The scores of the tile whose pieces are at `first`, `first + step`, ..."""
    score = gl.zeros((BLOCK_H, BLOCK_N), gl.float32, layout=_SCORES)
    position = first
    for piece in range(PIECES):
        slot = position % SLOTS
        mbarrier.wait(full.index(slot), (position // SLOTS) & 1)
        fence_async_shared()
        keys = ring.index(slot).permute((1, 0))
        dots = warpgroup_mma(q.index(piece), keys, score, is_async=True)
        # The other consumer's products fill the gap that this wait leaves.
        score = warpgroup_mma_wait(0, deps=[dots])
        mbarrier.arrive(empty.index(slot), count=1)
        position += step
    return score


@gluon.jit
def _seen(score, tile, count):
    """Minus infinity for tokens that are not there."""
    entry = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, _SCORES))
    return gl.where((entry < count)[None, :], score, float("-inf"))


@gluon.jit
def _meet(met, turn: gl.constexpr):
    """Both consumers have come here."""
    _barrier()
    mbarrier.arrive(met, count=1)
    mbarrier.wait(met, turn)


@gluon.jit
def _probabilities(score, tile, highest, q, FACTOR: gl.constexpr):
    """Stores a tile's probabilities where the queries were; returns their sums."""
    weight = gl.exp2(score * FACTOR - highest[:, None])
    q.index(tile).store(weight.to(gl.bfloat16))
    return gl.sum(weight, axis=1)


@gluon.jit
def _add(weights, total, ring, full, position):
    """A piece of the output with one more tile, in flight."""
    slot = position % SLOTS
    mbarrier.wait(full.index(slot), (position // SLOTS) & 1)
    fence_async_shared()
    return warpgroup_mma(weights, ring.index(slot), total, is_async=True)


@gluon.jit
def _give_back(bystander, empty, position):
    """Waits for all products but the newest one; the one before has read its buffer.

    The wait must not name the sums, or the assembler makes every product wait.
    """
    bystander = warpgroup_mma_wait(1, deps=[bystander])
    mbarrier.arrive(empty.index(position % SLOTS), count=1)
    return bystander


@gluon.jit
def _consumer(
    me: gl.constexpr, count, gate, out, q, ring, mine, other, my_sum, other_sum,
    full, empty, met,
    TILES: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """Every other tile of the scores and half of the output; consumer 1 takes the short tile."""
    short = count > TILES * BLOCK_N
    scores = ()
    maximum = gl.full((BLOCK_H,), LOWEST, gl.float32, layout=_HEADS_IN_SCORES)
    for pair in gl.static_range(TILES // 2):
        score = _scores(q, ring, full, empty, 2 * PIECES * pair + me, 2)
        score = _seen(score, 2 * pair + me, count)
        maximum = gl.maximum(maximum, gl.max(score, axis=1) * FACTOR)
        scores = scores + (score,)  # type: ignore[assignment]  # noqa: RUF005
    last = gl.full((BLOCK_H, BLOCK_N), float("-inf"), gl.float32, layout=_SCORES)
    position = TILES * PIECES
    if short:
        if me == 1:
            last = _scores(q, ring, full, empty, position, 1)
            last = _seen(last, TILES, count)
            maximum = gl.maximum(maximum, gl.max(last, axis=1) * FACTOR)
        position += PIECES
    mine.store(maximum)
    # The queries are read, too: their place is free.
    _meet(met, 0)
    highest = gl.maximum(maximum, other.load(_HEADS_IN_SCORES))
    total = gl.zeros((BLOCK_H,), gl.float32, layout=_HEADS_IN_SCORES)
    for pair in gl.static_range(TILES // 2):
        total += _probabilities(scores[pair], 2 * pair + me, highest, q, FACTOR)
    if me == 1:  # noqa: SIM102, known when compiling
        if short:
            total += _probabilities(last, TILES, highest, q, FACTOR)
    my_sum.store(total)
    fence_async_shared()
    _meet(met, 1)
    normalizer = total + other_sum.load(_HEADS_IN_SCORES)
    some = normalizer > 0
    head = gl.arange(0, BLOCK_H, layout=_HEADS_IN_SCORES)
    factor = gl.where(some, 1.0 / normalizer, 0.0)
    factor /= 1.0 + gl.exp2(-gl.load(gate + head).to(gl.float32) * LOG2_E)
    tiles = gl.where(short, TILES + 1, TILES)
    for half in range(2):
        a = gl.zeros((BLOCK_H, PIECE), gl.float32, layout=_SCORES)
        b = a
        c = a
        d = a
        for turn in range(tiles):
            weights = q.index(tiles - 1 - turn)
            a_sum = _add(weights, a, ring, full, position + me)
            b_sum = _add(weights, b, ring, full, position + me + 2)
            factor = _give_back(factor, empty, position + me)
            c_sum = _add(weights, c, ring, full, position + me + 4)
            factor = _give_back(factor, empty, position + me + 2)
            d_sum = _add(weights, d, ring, full, position + me + 6)
            factor = _give_back(factor, empty, position + me + 4)
            a, b, c, d = warpgroup_mma_wait(0, deps=[a_sum, b_sum, c_sum, d_sum])
            mbarrier.arrive(empty.index((position + me + 6) % SLOTS), count=1)
            position += 8
        channel = half * (LATENT // 2) + me * (LATENT // 4)
        store(out + channel, a * factor[:, None], 0, LATENT, _SCORES)
        store(out + channel, b * factor[:, None], PIECE, LATENT, _SCORES)
        store(out + channel, c * factor[:, None], 2 * PIECE, LATENT, _SCORES)
        store(out + channel, d * factor[:, None], 3 * PIECE, LATENT, _SCORES)


@gluon.jit
def _program(
    q_latent, q_rope, cache, base, slot, row, first_head, oldest, count, gate, out, R,
    HEADS: gl.constexpr, SCALE: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """One query, 64 heads, `count` <= 64 (TILES + 1) tokens from position `oldest` on."""
    q = gl.allocate_shared_memory(gl.bfloat16, [PIECES, BLOCK_H, PIECE], _TILE)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK_N, PIECE], _TILE)
    max_a = gl.allocate_shared_memory(gl.float32, [BLOCK_H], _VECTOR)
    max_b = gl.allocate_shared_memory(gl.float32, [BLOCK_H], _VECTOR)
    sum_a = gl.allocate_shared_memory(gl.float32, [BLOCK_H], _VECTOR)
    sum_b = gl.allocate_shared_memory(gl.float32, [BLOCK_H], _VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for index in gl.static_range(SLOTS):
        # Each thread of the loader reports its own copies; one consumer gives a piece back.
        mbarrier.init(full.index(index), count=128)
        mbarrier.init(empty.index(index), count=1)
    mbarrier.init(met, count=2)
    at = row.to(gl.int64) * HEADS + first_head
    first_row = (oldest - base) % R
    # The remainder takes the sign of the dividend; a base may lie ahead of an unused position.
    first_row = gl.where(first_row < 0, first_row + R, first_row)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, count, gate, out, q, ring, max_a, max_b, sum_a, sum_b,
                    full, empty, met, TILES, SCALE * LOG2_E,
                ),
            ),
            (
                _consumer,
                (
                    1, count, gate, out, q, ring, max_b, max_a, sum_b, sum_a,
                    full, empty, met, TILES, SCALE * LOG2_E,
                ),
            ),
            (
                _loader,
                (
                    q_latent + at * LATENT, q_rope + at * ROPE,
                    cache + slot.to(gl.int64) * R * WIDTH, first_row, count, R,
                    q, ring, full, empty, TILES,
                ),
            ),
        ],
        [4, 4],
        [216, 72],
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
    SCALE: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Whole windows, gated and final. Grid (H / 64, rows), 4 warps.

    Tensors as in `window.window_scores`; out [B, S, H, L]. TILES: the window's full tiles.
    """
    row = gl.program_id(1)
    first_head = gl.program_id(0) * BLOCK_H
    slot, oldest, count = _window_of(past, new, row, S, WINDOW)
    at = row.to(gl.int64) * HEADS + first_head
    _program(
        q_latent, q_rope, cache, gl.load(base + slot), slot, row, first_head, oldest, count,
        gate + at, out + at * LATENT, R, HEADS, SCALE, TILES,
    )  # fmt: skip
