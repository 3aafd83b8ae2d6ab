"""Sparse latent attention scheduled for Hopper's matrix units (compute capability 9.0).

The same operation as `attention.attend_whole` and `attend_split`, written in Gluon, Triton's
explicit level, because the plain compiler gives both warp groups the same score product and waits
for each tile it loads. Here four groups of four warps work side by side on 64 heads:

- the loader gathers latent tiles into two buffers with asynchronous copies;
- the scorer makes the scores and the probabilities;
- two consumers make half of the output each, from the probabilities in shared memory, while the
  scorer is at the next tile.

Where two runs per list fill the GPU, the two programs of a list form a cluster: each gives one half
of its output to the other one, through the L2 cache, and finishes the other half.

Sizes are Dots3's: a latent of 512 and a rotary part of 64, heads a multiple of 64, bfloat16.
`hopper_window` shares the second half of the work.
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

from plugins.dsa.kernels import pair
from plugins.dsa.kernels.attention import LOG2_E, LOWEST, tokens_of

# Triton 3.9 renamed these two.
_gather = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# Heads per program, tokens per tile, warps of every group.
BLOCK_H = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
WIDTH = gl.constexpr(576)
# Output channels per consumer.
PART = gl.constexpr(256)
# One 128-byte line of each of four rows per warp and copy.
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
# Products of 128 channels: one of 256 needs more registers than 512 threads have each.
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
# Whole lines of the output per warp.
_LINES = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_HEADS_IN_SCORES = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_HEADS_IN_OUTPUT = gl.constexpr(gl.SliceLayout(1, _OUTPUT.value))


@gluon.jit
def _loader(
    q_latent, q_rope, rows, tokens, first, last, tiles,
    ql, qr, latents, ropes, full, empty,
    PAIR: gl.constexpr,
):  # fmt: skip
    """Queries once, then the tiles of entries [first, last) of the token list."""
    line = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _COPY))
    lane = gl.arange(0, LATENT, layout=gl.SliceLayout(0, _COPY))
    rope_lane = gl.arange(0, ROPE, layout=gl.SliceLayout(0, _COPY))
    _gather(ql.index(0), q_latent + line[:, None] * LATENT + lane[None, :])
    _gather(qr.index(0), q_rope + line[:, None] * ROPE + rope_lane[None, :])
    entry = first + line
    token = gl.load(tokens + entry, mask=entry < last, other=0)
    for step in range(tiles):
        stage = step % 2
        used = entry < last
        at = rows + token.to(gl.int64)[:, None] * WIDTH
        entry += BLOCK_N
        # Of the next tile, while this one waits for its place.
        token = gl.load(tokens + entry, mask=entry < last, other=0)
        mbarrier.wait(empty.index(stage), ((step // 2) & 1) ^ 1)
        _gather(latents.index(stage), at + lane[None, :], mask=used[:, None])
        _gather(ropes.index(stage), at + (LATENT + rope_lane)[None, :], mask=used[:, None])
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
    if PAIR:
        pair.publish(tiles)
        pair.meet(tiles)


@gluon.jit
def zero(step):
    """0, but not for the compiler, which would compute all addresses ahead and spill them."""
    return step >> 30


@gluon.jit
def scores(ql, qr, latents, turned, full, step):
    """The scores of tile `step`, in flight; `turned` are its rotary parts."""
    stage = step % 2
    mbarrier.wait(full.index(stage), (step // 2) & 1)
    fence_async_shared()
    none = gl.zeros((BLOCK_H, BLOCK_N), gl.float32, layout=_SCORES)
    keys = latents.index(stage).permute((1, 0))
    dots = warpgroup_mma(ql.index(zero(step)), keys, none, use_acc=False, is_async=True)
    return warpgroup_mma(qr.index(zero(step)), turned.permute((1, 0)), dots, is_async=True)


@gluon.jit
def hand_over(
    score, step, count, maximum, normalizer, weights, factors, made, taken,
    FACTOR: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of tile `step` to probabilities, for the consumers.

    `made` says that a tile's probabilities and the factor on earlier sums are in shared memory,
    `taken` that the consumers have used them. Returns the new maximum (in powers of two) and
    normalizer.
    """
    if MASKED:
        entry = step * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, _SCORES))
        # Minus infinity, not LOWEST: the scaling below is fused, and its rounding error at 1e30
        # would be anything.
        score = gl.where((entry < count)[None, :], score, float("-inf"))
    highest = gl.maximum(maximum, gl.max(score, axis=1) * FACTOR)
    decay = gl.exp2(maximum - highest)
    weight = gl.exp2(score * FACTOR - highest[:, None])
    mbarrier.wait(taken, (step & 1) ^ 1)
    weights.store(weight.to(gl.bfloat16))
    factors.store(decay)
    fence_async_shared()
    _barrier()
    mbarrier.arrive(made, count=1)
    return highest, normalizer * decay + gl.sum(weight, axis=1)


@gluon.jit
def finish(
    tiles, opened, lse, there, maximum, normalizer, factors, made, taken, SPLIT: gl.constexpr,
):  # fmt: skip
    """The factor on the whole sum, for the consumers; of runs also the base-2 log-sum-exp."""
    mbarrier.wait(taken, (tiles & 1) ^ 1)
    some = normalizer > 0
    factors.store(gl.where(some, opened / normalizer, 0.0))
    mbarrier.arrive(made, count=1)
    if SPLIT:
        head = gl.arange(0, BLOCK_H, layout=_HEADS_IN_SCORES)
        result = gl.where(some, maximum + gl.log2(normalizer), LOWEST)
        gl.store(lse + head, result, mask=(head >= 0) & there)


@gluon.jit
def _scorer(
    tiles, count, opened, lse,
    ql, qr, latents, ropes, weights, factors, full, made, taken,
    FACTOR: gl.constexpr, SPLIT: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities. All tiles but the last are full."""
    maximum = gl.full((BLOCK_H,), LOWEST, gl.float32, layout=_HEADS_IN_SCORES)
    normalizer = gl.zeros((BLOCK_H,), gl.float32, layout=_HEADS_IN_SCORES)
    last = tiles - 1
    for step in range(last):
        dots = scores(ql, qr, latents, ropes.index(step % 2), full, step)
        score = warpgroup_mma_wait(0, deps=[dots])
        maximum, normalizer = hand_over(
            score, step, count, maximum, normalizer, weights, factors, made, taken, FACTOR, False
        )
    dots = scores(ql, qr, latents, ropes.index(last % 2), full, last)
    score = warpgroup_mma_wait(0, deps=[dots])
    maximum, normalizer = hand_over(
        score, last, count, maximum, normalizer, weights, factors, made, taken, FACTOR, True
    )
    finish(tiles, opened, lse, True, maximum, normalizer, factors, made, taken, SPLIT)
    if PAIR:
        pair.publish(tiles)
        pair.meet(tiles)


@gluon.jit
def _products(me: gl.constexpr, tiles, latents, weights, factors, full, empty, made, taken):
    """Channels me * PART .. of the output. Afterwards all buffers are free."""
    total = gl.zeros((BLOCK_H, PART), gl.float32, layout=_OUTPUT)
    for step in range(tiles):
        stage = step % 2
        mbarrier.wait(full.index(stage), (step // 2) & 1)
        mbarrier.wait(made, step & 1)
        total = total * factors.load(_HEADS_IN_OUTPUT)[:, None]
        fence_async_shared()
        values = latents.index(stage).slice(me * PART, PART, dim=1)
        total = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, values, total, is_async=True)])
        mbarrier.arrive(taken, count=1)
        mbarrier.arrive(empty.index(stage), count=1)
    mbarrier.wait(made, tiles & 1)
    return total * factors.load(_HEADS_IN_OUTPUT)[:, None]


@gluon.jit
def consumer(
    me: gl.constexpr, tiles, out, latents, weights, factors, full, empty, made, taken,
    STRIDE: gl.constexpr,
):  # fmt: skip
    """Channels me * PART .. of the output, stored; STRIDE channels from head to head."""
    total = _products(me, tiles, latents, weights, factors, full, empty, made, taken)
    if out.dtype.element_ty == gl.float32:
        store(out, total, me * PART, STRIDE, _OUTPUT)
    else:
        _store_lines(me, out, total, latents, STRIDE)


@gluon.jit
def _store_lines(me: gl.constexpr, out, total, latents, STRIDE: gl.constexpr):
    """A buffer of tiles turns channels me * PART .. of the output into whole lines."""
    place = latents.index(0).slice(me * PART, PART, dim=1)
    place.store(total.to(gl.bfloat16))
    store(out, place.load(_LINES), me * PART, STRIDE, _LINES)


@gluon.jit
def _consumer(
    me: gl.constexpr, rank, tiles, gate, out, partial, lse,
    latents, weights, factors, full, empty, made, taken,
    HEADS: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """`consumer`; of a pair's run, half of the output is given to the other program.

    `partial` and `lse` are those of the first run.
    """
    if PAIR:
        total = _products(me, tiles, latents, weights, factors, full, empty, made, taken)
        _exchange(me, rank, tiles, gate, out, partial, lse, total, latents, HEADS)
    else:
        consumer(me, tiles, out, latents, weights, factors, full, empty, made, taken, LATENT)


@gluon.jit
def _exchange(
    me: gl.constexpr, rank, tiles, gate, out, partial, lse, total, latents, HEADS: gl.constexpr,
):  # fmt: skip
    """Channels me * PART .. of a run: given to the other program, or finished with its own."""
    run: gl.constexpr = HEADS * PART
    if rank != me:
        store(partial + rank * run, total, 0, PART, _OUTPUT)
        pair.publish(tiles)
        pair.meet(tiles)
    else:
        pair.publish(tiles)
        head = gl.arange(0, BLOCK_H, layout=_HEADS_IN_OUTPUT)
        opened = gl.load(gate + head).to(gl.float32)
        pair.meet(tiles)
        mine = gl.load(lse + me * HEADS + head)
        theirs = gl.load(lse + (1 - me) * HEADS + head)
        # Two empty runs have LOWEST both: equal weights on zeros give zeros.
        most = gl.maximum(mine, theirs)
        mine = gl.exp2(mine - most)
        theirs = gl.exp2(theirs - most)
        factor = 1.0 / ((1.0 + gl.exp2(-opened * LOG2_E)) * (mine + theirs))
        lane = gl.arange(0, PART, layout=gl.SliceLayout(0, _OUTPUT))
        other = gl.load(partial + (1 - me) * run + head[:, None] * PART + lane[None, :])
        total = total * (mine * factor)[:, None] + other * (theirs * factor)[:, None]
        _store_lines(me, out, total, latents, LATENT)


@gluon.jit
def store(out, part, first: gl.constexpr, width: gl.constexpr, LAYOUT: gl.constexpr):
    """Channels from `first` on of BLOCK_H rows of `width` channels."""
    line = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, LAYOUT))
    lane = first + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    gl.store(out + line[:, None] * width + lane[None, :], part.to(out.dtype.element_ty))


@gluon.jit
def _program(
    q_latent, q_rope, cache, tokens, slot, row, first_head, first, last, opened, out, lse, C, K,
    rank, gate, partial, pair_lse,
    HEADS: gl.constexpr, SCALE: gl.constexpr, SPLIT: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Everything of one program; `lse` gets the base-2 log-sum-exp of runs.

    The arguments behind K are those of a PAIR of runs.
    """
    ql = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, LATENT], _TILE)
    qr = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_H, ROPE], _TILE)
    latents = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, LATENT], _TILE)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, ROPE], _TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], _TILE)
    factors = gl.allocate_shared_memory(gl.float32, [BLOCK_H], _VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        # Each thread of the loader reports its own copies; each consumer reports once.
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(made, count=1)
    mbarrier.init(taken, count=2)
    at = row.to(gl.int64) * HEADS + first_head
    # An empty list still is one tile, of which nothing is loaded: zeros, and so is the output.
    tiles = gl.maximum(gl.cdiv(last - first, BLOCK_N), 1)
    gl.warp_specialize(
        [
            (
                _scorer,
                (
                    tiles, last - first, opened, lse, ql, qr, latents, ropes, weights, factors,
                    full, made, taken, SCALE * LOG2_E, SPLIT, PAIR,
                ),
            ),
            (
                _consumer,
                (
                    0, rank, tiles, gate, out, partial, pair_lse,
                    latents, weights, factors, full, empty, made, taken, HEADS, PAIR,
                ),
            ),
            (
                _consumer,
                (
                    1, rank, tiles, gate, out, partial, pair_lse,
                    latents, weights, factors, full, empty, made, taken, HEADS, PAIR,
                ),
            ),
            (
                _loader,
                (
                    q_latent + at * LATENT, q_rope + at * ROPE,
                    cache + slot.to(gl.int64) * C * WIDTH, tokens + row.to(gl.int64) * K,
                    first, last, tiles, ql, qr, latents, ropes, full, empty, PAIR,
                ),
            ),
        ],
        [4, 4, 4],
        [176, 176, 56],
    )  # fmt: skip


@gluon.jit
def attend_whole(
    q_latent, q_rope, cache, tokens, past, new, gate,
    S, C, K,
    out,
    SCALE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Like `attention.attend_whole`. Grid (H / 64, rows), 4 warps."""
    row = gl.program_id(1)
    first_head = gl.program_id(0) * BLOCK_H
    slot, count = tokens_of(past, new, row, S, K)
    at = row.to(gl.int64) * HEADS + first_head
    head = gl.arange(0, BLOCK_H, layout=_HEADS_IN_SCORES)
    opened = gl.load(gate + at + head).to(gl.float32)
    opened = 1.0 / (1.0 + gl.exp2(-opened * LOG2_E))
    _program(
        q_latent, q_rope, cache, tokens, slot, row, first_head, 0, count, opened,
        out + at * LATENT, out, C, K, 0, gate, out, out, HEADS, SCALE, False, False,
    )  # fmt: skip


@gluon.jit
def attend_split(
    q_latent, q_rope, cache, tokens, past, new,
    S, C, K, splits,
    partial, partial_lse,
    SCALE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Like `attention.attend_split`. Grid (H / 64, splits, rows), 4 warps."""
    row = gl.program_id(2)
    split = gl.program_id(1)
    first_head = gl.program_id(0) * BLOCK_H
    slot, count = tokens_of(past, new, row, S, K)
    run = gl.cdiv(gl.cdiv(count, BLOCK_N), splits) * BLOCK_N
    first = gl.minimum(split * run, count)
    last = gl.minimum(first + run, count)
    at = (row.to(gl.int64) * splits + split) * HEADS + first_head
    opened = gl.full((BLOCK_H,), 1.0, gl.float32, layout=_HEADS_IN_SCORES)
    _program(
        q_latent, q_rope, cache, tokens, slot, row, first_head, first, last, opened,
        partial + at * LATENT, partial_lse + at, C, K, 0, partial, partial, partial,
        HEADS, SCALE, True, False,
    )  # fmt: skip


@gluon.jit
def attend_pair(
    q_latent, q_rope, cache, tokens, past, new, gate,
    S, C, K,
    out, partial, partial_lse,
    SCALE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Like `attention.attend_whole`, in two runs. Grid (2 H / 64, rows), clusters of 2, 4 warps.

    What the programs give to each other: partial float32 [B, S, 2, H, L / 2], of the first run the
    second half of the channels, of the second run the first; partial_lse float32 [B, S, 2, H],
    base 2.
    """
    row = gl.program_id(1)
    rank = gl.program_id(0) % 2
    first_head = gl.program_id(0) // 2 * BLOCK_H
    slot, count = tokens_of(past, new, row, S, K)
    run = gl.cdiv(gl.cdiv(count, BLOCK_N), 2) * BLOCK_N
    first = gl.minimum(rank * run, count)
    last = gl.minimum(first + run, count)
    at = row.to(gl.int64) * HEADS + first_head
    runs = row.to(gl.int64) * 2 * HEADS + first_head
    opened = gl.full((BLOCK_H,), 1.0, gl.float32, layout=_HEADS_IN_SCORES)
    _program(
        q_latent, q_rope, cache, tokens, slot, row, first_head, first, last, opened,
        out + at * LATENT, partial_lse + runs + rank * HEADS, C, K,
        rank, gate + at, partial + runs * PART, partial_lse + runs, HEADS, SCALE, True, True,
    )  # fmt: skip
