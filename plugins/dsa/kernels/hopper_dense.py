"""Attention over expanded keys and values, scheduled for Hopper (compute capability 9.0).

The same operation as `dense.attend_dense`. A program takes 128 queries of one head: two consumers
of four warps with 64 queries each, and a loader that keeps a few tiles of 64 tokens ahead. A
consumer has the next tile's scores computed while it turns the present ones into probabilities,
and one consumer's exponentials run beside the other one's products.
Widths are multiples of 64 up to 128 + 128 per part, bfloat16.
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
from plugins.dsa.kernels.hopper import _COPY, _HEADS_IN_SCORES, _SCORES, _TILE, BLOCK_N, _gather

# Queries per consumer.
BLOCK_M = gl.constexpr(64)


@gluon.jit
def _loader(
    q_nope, q_rope, kv, rope_keys, queries, first, last, oldest, tiles,
    qf, qs, qr, kf, ks, kr, vs, full, empty,
    HEADS: gl.constexpr, NOPE: gl.constexpr, ROPE: gl.constexpr, VALUE: gl.constexpr,
    LATENT: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    line = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _COPY))
    lane = gl.arange(0, FIRST, layout=gl.SliceLayout(0, _COPY))
    more = gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY))
    value_lane = gl.arange(0, VALUE, layout=gl.SliceLayout(0, _COPY))
    for part in gl.static_range(2):
        query = part * BLOCK_M + line
        live = (query < queries)[:, None]
        at = q_nope + query[:, None] * (HEADS * NOPE)
        _gather(qf.index(part), at + lane[None, :], mask=live)
        if SECOND > 0:
            _gather(qs.index(part), at + (FIRST + more)[None, :], mask=live)
        turned = q_rope + query[:, None] * (HEADS * ROPE) + more[None, :]
        _gather(qr.index(part), turned, mask=live)
    for step in range(tiles):
        stage = step % STAGES
        entry = first + step * BLOCK_N + line
        there = ((entry < last) & (entry >= oldest))[:, None]
        at = kv + entry.to(gl.int64)[:, None] * (HEADS * (NOPE + VALUE))
        rope_at = rope_keys + entry.to(gl.int64)[:, None] * (LATENT + ROPE)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        _gather(kf.index(stage), at + lane[None, :], mask=there)
        if SECOND > 0:
            _gather(ks.index(stage), at + (FIRST + more)[None, :], mask=there)
        _gather(kr.index(stage), rope_at + more[None, :], mask=there)
        _gather(vs.index(stage), at + (NOPE + value_lane)[None, :], mask=there)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _scores(
    part, step, qf, qs, qr, kf, ks, kr, full, SECOND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The scores of tile `step`, in flight."""
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    fence_async_shared()
    none = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout=_SCORES)
    keys = kf.index(stage).permute((1, 0))
    dots = warpgroup_mma(qf.index(part), keys, none, use_acc=False, is_async=True)
    if SECOND > 0:
        dots = warpgroup_mma(qs.index(part), ks.index(stage).permute((1, 0)), dots, is_async=True)
    return warpgroup_mma(qr.index(part), kr.index(stage).permute((1, 0)), dots, is_async=True)


@gluon.jit
def _softmax(
    score, begin, newest, oldest, plain, maximum,
    WINDOW: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """Probabilities, the factor on earlier sums and the new maximum, in powers of two.

    plain: every query of the consumer sees every token of the tile.
    """
    if plain == 0:
        entry = begin + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, _SCORES))
        used = (entry[None, :] <= newest[:, None]) & (entry >= oldest)[None, :]
        if WINDOW > 0:
            used = used & (entry[None, :] > newest[:, None] - WINDOW)
        # Minus infinity, not LOWEST: the scaling below is fused, and its rounding error at 1e30
        # would be anything.
        score = gl.where(used, score, float("-inf"))
    highest = gl.maximum(maximum, gl.max(score, axis=1) * FACTOR)
    return gl.exp2(score * FACTOR - highest[:, None]), gl.exp2(maximum - highest), highest


@gluon.jit
def _consumer(
    part, tiles, queries, first_query, first, shift, oldest, out, gate,
    qf, qs, qr, kf, ks, kr, vs, full, empty,
    HEADS: gl.constexpr, VALUE: gl.constexpr, SECOND: gl.constexpr, WINDOW: gl.constexpr,
    FACTOR: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """64 queries, stored. No product is in flight at the end of a turn."""
    line = part * BLOCK_M + gl.arange(0, BLOCK_M, layout=_HEADS_IN_SCORES)
    newest = first_query + line + shift
    # Rows seen by all of the consumer's queries: up to its first one's newest, from its last one's
    # oldest on.
    all_until = first_query + part * BLOCK_M + shift
    all_from = oldest
    if WINDOW > 0:
        all_from = gl.maximum(oldest, all_until + BLOCK_M - WINDOW)
    maximum = gl.full((BLOCK_M,), LOWEST, gl.float32, layout=_HEADS_IN_SCORES)
    normalizer = gl.zeros((BLOCK_M,), gl.float32, layout=_HEADS_IN_SCORES)
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    operand: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    total = gl.zeros((BLOCK_M, VALUE), gl.float32, layout=LAYOUT)
    score = warpgroup_mma_wait(
        0, deps=[_scores(part, 0, qf, qs, qr, kf, ks, kr, full, SECOND, STAGES)]
    )
    for step in range(tiles - 1):
        begin = first + step * BLOCK_N
        dots = _scores(part, step + 1, qf, qs, qr, kf, ks, kr, full, SECOND, STAGES)
        plain = (begin >= all_from) & (begin + BLOCK_N - 1 <= all_until)
        weight, decay, maximum = _softmax(
            score, begin, newest, oldest, plain, maximum, WINDOW, FACTOR
        )
        stage = step % STAGES
        low = gl.convert_layout(weight.to(gl.bfloat16), operand)
        faded = total * gl.convert_layout(decay, rows)[:, None]
        output = warpgroup_mma(low, vs.index(stage), faded, is_async=True)
        normalizer = normalizer * decay + gl.sum(weight, axis=1)
        total, score, low = warpgroup_mma_wait(0, deps=[output, dots, low])
        mbarrier.arrive(empty.index(stage), count=1)
    last = tiles - 1
    weight, decay, maximum = _softmax(
        score, first + last * BLOCK_N, newest, oldest, 0, maximum, WINDOW, FACTOR
    )
    low = gl.convert_layout(weight.to(gl.bfloat16), operand)
    faded = total * gl.convert_layout(decay, rows)[:, None]
    output = warpgroup_mma(low, vs.index(last % STAGES), faded, is_async=True)
    normalizer = normalizer * decay + gl.sum(weight, axis=1)
    total, low = warpgroup_mma_wait(0, deps=[output, low])
    live = line < queries
    opened = gl.load(gate + line * HEADS, mask=live, other=0.0).to(gl.float32)
    factor = gl.where(live, 1.0 / (normalizer * (1.0 + gl.exp2(-opened * LOG2_E))), 0.0)
    result = total * gl.convert_layout(factor, rows)[:, None]
    out_line = part * BLOCK_M + gl.arange(0, BLOCK_M, layout=rows)
    lane = gl.arange(0, VALUE, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(
        out + out_line[:, None] * (HEADS * VALUE) + lane[None, :],
        result.to(out.dtype.element_ty),
        mask=(out_line < queries)[:, None],
    )


@gluon.jit
def _clear(out, rows, HEADS: gl.constexpr, VALUE: gl.constexpr, first):
    """Zero the padding rows [first, rows) of a block."""
    line = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _COPY))
    lane = gl.arange(0, VALUE, layout=gl.SliceLayout(0, _COPY))
    zero = gl.zeros((BLOCK_N, VALUE), gl.bfloat16, layout=_COPY)
    for part in gl.static_range(2):
        row = part * BLOCK_N + line
        gl.store(
            out + row[:, None] * (HEADS * VALUE) + lane[None, :],
            zero,
            mask=((row >= first) & (row < rows))[:, None],
        )


@gluon.jit
def attend_dense(
    q_nope, q_rope, expanded, cache, past, new, gate,
    S, N, C,
    out,
    SCALE: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr, NOPE: gl.constexpr,
    ROPE: gl.constexpr, VALUE: gl.constexpr, LATENT: gl.constexpr, FIRST: gl.constexpr,
    SECOND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tensors as in `dense.attend_dense`. Grid (query blocks of 128, H, B), 4 warps."""
    slot = gl.program_id(2)
    head = gl.program_id(1)
    # The last query blocks have the most keys: they go first.
    first_query = (gl.num_programs(0) - 1 - gl.program_id(0)) * (2 * BLOCK_M)
    past_tokens = gl.load(past + slot)
    queries = gl.minimum(gl.load(new + slot), S) - first_query
    shift = past_tokens
    oldest = 0
    first = 0
    if WINDOW > 0:
        shift = WINDOW - 1
        oldest = gl.maximum(WINDOW - 1 - past_tokens, 0)
        first = gl.maximum(first_query, oldest) // BLOCK_N * BLOCK_N
    row = slot.to(gl.int64) * S + first_query
    block_out = out + (row * HEADS + head) * VALUE
    _clear(block_out, S - first_query, HEADS, VALUE, gl.maximum(queries, 0))
    if queries > 0:
        last = first_query + gl.minimum(queries, 2 * BLOCK_M) + shift
        tiles = gl.cdiv(last - first, BLOCK_N)
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE, 16])
        qf = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_M, FIRST], _TILE)
        qr = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_M, ROPE], _TILE)
        kf = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, FIRST], _TILE)
        kr = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, ROPE], _TILE)
        vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, VALUE], _TILE)
        qs = qr
        ks = kr
        if SECOND > 0:
            qs = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_M, SECOND], _TILE)
            ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, SECOND], _TILE)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            # Each thread of the loader reports its own copies; each consumer reports once.
            mbarrier.init(full.index(stage), count=128)
            mbarrier.init(empty.index(stage), count=2)
        block_gate = gate + row * HEADS + head
        kv = expanded + (slot.to(gl.int64) * N * HEADS + head) * (NOPE + VALUE)
        rope_keys = cache + slot.to(gl.int64) * C * (LATENT + ROPE) + LATENT
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        0, tiles, queries, first_query, first, shift, oldest, block_out,
                        block_gate, qf, qs, qr, kf, ks, kr, vs, full, empty, HEADS, VALUE, SECOND,
                        WINDOW, SCALE * LOG2_E, STAGES, layout,
                    ),
                ),
                (
                    _consumer,
                    (
                        1, tiles, queries, first_query, first, shift, oldest, block_out,
                        block_gate, qf, qs, qr, kf, ks, kr, vs, full, empty, HEADS, VALUE, SECOND,
                        WINDOW, SCALE * LOG2_E, STAGES, layout,
                    ),
                ),
                (
                    _loader,
                    (
                        q_nope + (row * HEADS + head) * NOPE, q_rope + (row * HEADS + head) * ROPE,
                        kv, rope_keys, queries, first, last, oldest, tiles,
                        qf, qs, qr, kf, ks, kr, vs, full, empty, HEADS, NOPE, ROPE, VALUE, LATENT,
                        FIRST, SECOND, STAGES,
                    ),
                ),
            ],
            [4, 4],
            [216, 72],
        )  # fmt: skip
