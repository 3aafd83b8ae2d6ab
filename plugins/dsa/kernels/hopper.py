"""Sparse latent attention scheduled for Hopper's matrix units (compute capability 9.0).

The same operation as `attention.attend_whole` and `attend_split`, written in Gluon, Triton's
explicit level, because the plain compiler gives both warp groups the same score product and waits
for each tile it loads. Here three groups of four warps work side by side on 64 heads:

- the loader gathers latent tiles into two buffers with asynchronous copies;
- the first consumer makes the scores and the probabilities, and a quarter of the output;
- the second consumer makes the rest, from the probabilities that it finds in shared memory.

While the first consumer is busy with exponentials, the second one keeps the matrix units busy.
Sizes are Dots3's: a latent of 512 and a rotary part of 64, heads a multiple of 64, bfloat16.
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
# Output channels: the first consumer's, then the second one's two parts.
PART_A = gl.constexpr(128)
PART_B = gl.constexpr(128)
PART_C = gl.constexpr(256)
# One 128-byte line of each of four rows per warp and copy.
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_WIDE_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_HEADS_IN_SCORES = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_HEADS_IN_OUTPUT = gl.constexpr(gl.SliceLayout(1, _OUTPUT.value))
_HEADS_IN_WIDE = gl.constexpr(gl.SliceLayout(1, _WIDE_OUTPUT.value))


@gluon.jit
def _loader(
    q_latent, q_rope, rows, tokens, first, last, tiles,
    ql, qr, latents, ropes, full, empty,
):  # fmt: skip
    """Queries once, then the tiles of entries [first, last) of the token list."""
    line = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _COPY))
    lane = gl.arange(0, LATENT, layout=gl.SliceLayout(0, _COPY))
    rope_lane = gl.arange(0, ROPE, layout=gl.SliceLayout(0, _COPY))
    _gather(ql.index(0), q_latent + line[:, None] * LATENT + lane[None, :])
    _gather(qr.index(0), q_rope + line[:, None] * ROPE + rope_lane[None, :])
    for step in range(tiles):
        stage = step % 2
        entry = first + step * BLOCK_N + line
        used = entry < last
        token = gl.load(tokens + entry, mask=used, other=0)
        at = rows + token.to(gl.int64)[:, None] * WIDTH
        mbarrier.wait(empty.index(stage), ((step // 2) & 1) ^ 1)
        _gather(latents.index(stage), at + lane[None, :], mask=used[:, None])
        _gather(ropes.index(stage), at + (LATENT + rope_lane)[None, :], mask=used[:, None])
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def zero(step):
    """0, but not for the compiler, which would compute all addresses ahead and spill them."""
    return step >> 30


@gluon.jit
def _scores(ql, qr, latents, ropes, full, step):
    """The scores of tile `step`, in flight."""
    stage = step % 2
    mbarrier.wait(full.index(stage), (step // 2) & 1)
    fence_async_shared()
    none = gl.zeros((BLOCK_H, BLOCK_N), gl.float32, layout=_SCORES)
    keys = latents.index(stage).permute((1, 0))
    dots = warpgroup_mma(ql.index(zero(step)), keys, none, use_acc=False, is_async=True)
    keys = ropes.index(stage).permute((1, 0))
    return warpgroup_mma(qr.index(zero(step)), keys, dots, is_async=True)


@gluon.jit
def hand_over(
    score, first, count, maximum, weights, factors, made, taken, step,
    FACTOR: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Scores of entries from `first` on to probabilities, for both consumers.

    `made` says that a tile's probabilities and the factor on earlier sums are in shared memory,
    `taken` that the second consumer has used them. Returns that factor, the new maximum (both in
    powers of two) and the probabilities, whose sum is better taken once products are in flight.
    """
    if MASKED:
        entry = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LAYOUT))
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
    return decay, highest, weight


@gluon.jit
def _first_consumer(
    tiles, count, opened,
    ql, qr, latents, ropes, weights, factors, full, empty, made, taken,
    FACTOR: gl.constexpr,
):  # fmt: skip
    """Scores, probabilities and the first part of the output.

    Returns that part and the base-2 log-sum-exp. No product is in flight at the end of a turn: the
    assembler would make all of them wait. All tiles but the last are full.
    """
    maximum = gl.full((BLOCK_H,), LOWEST, gl.float32, layout=_HEADS_IN_SCORES)
    normalizer = gl.zeros((BLOCK_H,), gl.float32, layout=_HEADS_IN_SCORES)
    total = gl.zeros((BLOCK_H, PART_A), gl.float32, layout=_OUTPUT)
    score = warpgroup_mma_wait(0, deps=[_scores(ql, qr, latents, ropes, full, 0)])
    for step in range(tiles - 1):
        stage = step % 2
        decay, maximum, weight = hand_over(
            score, step * BLOCK_N, count, maximum, weights, factors, made, taken, step,
            FACTOR, False, _SCORES, BLOCK_N,
        )  # fmt: skip
        faded = total * gl.convert_layout(decay, _HEADS_IN_OUTPUT)[:, None]
        part = latents.index(stage).slice(0, PART_A, dim=1)
        output = warpgroup_mma(weights, part, faded, is_async=True)
        dots = _scores(ql, qr, latents, ropes, full, step + 1)
        normalizer = normalizer * decay + gl.sum(weight, axis=1)
        # Two products make the scores: the output is done when only they are left.
        total = warpgroup_mma_wait(2, deps=[output])
        mbarrier.arrive(empty.index(stage), count=1)
        score = warpgroup_mma_wait(0, deps=[dots])
    last = tiles - 1
    decay, maximum, weight = hand_over(
        score, last * BLOCK_N, count, maximum, weights, factors, made, taken, last,
        FACTOR, True, _SCORES, BLOCK_N,
    )  # fmt: skip
    faded = total * gl.convert_layout(decay, _HEADS_IN_OUTPUT)[:, None]
    part = latents.index(last % 2).slice(0, PART_A, dim=1)
    output = warpgroup_mma(weights, part, faded, is_async=True)
    normalizer = normalizer * decay + gl.sum(weight, axis=1)
    total = warpgroup_mma_wait(0, deps=[output])
    mbarrier.wait(taken, (tiles & 1) ^ 1)
    some = normalizer > 0
    factor = gl.where(some, opened / normalizer, 0.0)
    factors.store(factor)
    mbarrier.arrive(made, count=1)
    lse = gl.where(some, maximum + gl.log2(normalizer), LOWEST)
    return total * gl.convert_layout(factor, _HEADS_IN_OUTPUT)[:, None], lse


@gluon.jit
def _second_consumer(
    tiles, out, latents, weights, factors, full, empty, made, taken,
):  # fmt: skip
    """The rest of the output, stored."""
    narrow = gl.zeros((BLOCK_H, PART_B), gl.float32, layout=_OUTPUT)
    wide = gl.zeros((BLOCK_H, PART_C), gl.float32, layout=_WIDE_OUTPUT)
    for step in range(tiles):
        stage = step % 2
        mbarrier.wait(full.index(stage), (step // 2) & 1)
        mbarrier.wait(made, step & 1)
        narrow = narrow * factors.load(_HEADS_IN_OUTPUT)[:, None]
        wide = wide * factors.load(_HEADS_IN_WIDE)[:, None]
        fence_async_shared()
        tile = latents.index(stage)
        more = warpgroup_mma(weights, tile.slice(PART_C, PART_C, dim=1), wide, is_async=True)
        less = warpgroup_mma(weights, tile.slice(PART_A, PART_B, dim=1), narrow, is_async=True)
        wide, narrow = warpgroup_mma_wait(0, deps=[more, less])
        mbarrier.arrive(taken, count=1)
        mbarrier.arrive(empty.index(stage), count=1)
    mbarrier.wait(made, tiles & 1)
    store(out, narrow * factors.load(_HEADS_IN_OUTPUT)[:, None], PART_A, LATENT, _OUTPUT)
    store(out, wide * factors.load(_HEADS_IN_WIDE)[:, None], PART_C, LATENT, _WIDE_OUTPUT)


@gluon.jit
def store(out, part, first: gl.constexpr, width: gl.constexpr, LAYOUT: gl.constexpr):
    """Channels from `first` on of BLOCK_H rows of `width` channels."""
    line = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, LAYOUT))
    lane = first + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    gl.store(out + line[:, None] * width + lane[None, :], part.to(out.dtype.element_ty))


@gluon.jit
def _program(
    q_latent, q_rope, cache, tokens, slot, row, first_head, first, last, opened, out, C, K,
    HEADS: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """Everything of one program; returns its heads' base-2 log-sum-exp."""
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
    mbarrier.init(taken, count=1)
    at = row.to(gl.int64) * HEADS + first_head
    # An empty list still is one tile, of which nothing is loaded: zeros, and so is the output.
    tiles = gl.maximum(gl.cdiv(last - first, BLOCK_N), 1)
    part, lse = gl.warp_specialize(
        [
            (
                _first_consumer,
                (
                    tiles, last - first, opened, ql, qr, latents, ropes, weights, factors, full,
                    empty, made, taken, SCALE * LOG2_E,
                ),
            ),
            (
                _second_consumer,
                (tiles, out, latents, weights, factors, full, empty, made, taken),
            ),
            (
                _loader,
                (
                    q_latent + at * LATENT, q_rope + at * ROPE,
                    cache + slot.to(gl.int64) * C * WIDTH, tokens + row.to(gl.int64) * K,
                    first, last, tiles, ql, qr, latents, ropes, full, empty,
                ),
            ),
        ],
        [4, 4],
        [240, 72],
    )  # fmt: skip
    store(out, part, 0, LATENT, _OUTPUT)
    return lse


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
        out + at * LATENT, C, K, HEADS, SCALE,
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
    lse = _program(
        q_latent, q_rope, cache, tokens, slot, row, first_head, first, last, opened,
        partial + at * LATENT, C, K, HEADS, SCALE,
    )  # fmt: skip
    head = gl.arange(0, BLOCK_H, layout=_HEADS_IN_SCORES)
    gl.store(partial_lse + at + head, lse)
