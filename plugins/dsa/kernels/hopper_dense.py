"""Attention over expanded keys and values, scheduled for Hopper (compute capability 9.0).

The same operation as `dense.attend_dense`. A program takes blocks of 128 queries of one head, one
after another: two consumers of four warps with 64 queries each, and a loader that keeps a few tiles
of 64 tokens ahead, also of the next block. The consumers take turns at the matrix units, or both
would wait for them and then both compute exponentials: one has its output and the next tile's
scores computed while the other turns scores into probabilities.

Blocks are dealt in pairs of the longest and the shortest, the second longest and the second
shortest, and so on, which all take the same time; the pairs of a head stay together, because they
share its keys in the L2 cache. Widths are multiples of 64 up to 128 + 128 per part, bfloat16.
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
def _block(
    turn, past, new, S, B, HEADS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """What a program does in its turn-th turn; turns 2n and 2n + 1 are a pair.

    Returns: slot, head, first query, valid queries (0: none, all padding; -1: no block), the row of
    the first query's own token minus the first query, the oldest row that exists, the first row of
    the first tile, the row behind the last, and the number of tiles.
    """
    blocks = gl.cdiv(S, 2 * BLOCK_M)
    pairs = gl.cdiv(blocks, 2)
    item = gl.program_id(0) + turn // 2 * gl.num_programs(0)
    pair = item % pairs
    head = item // pairs % HEADS
    slot = item // (pairs * HEADS)
    there = slot < B
    slot = gl.where(there, slot, 0)
    other = blocks - 1 - pair
    there = there & ((turn % 2 == 0) | (pair != other))
    first_query = gl.where(turn % 2 == 0, other, pair) * (2 * BLOCK_M)
    past_tokens = gl.load(past + slot)
    queries = gl.minimum(gl.load(new + slot), S) - first_query
    queries = gl.where(there, gl.minimum(gl.maximum(queries, 0), 2 * BLOCK_M), -1)
    shift = past_tokens
    oldest = 0
    first = 0
    if WINDOW > 0:
        shift = WINDOW - 1
        oldest = gl.maximum(WINDOW - 1 - past_tokens, 0)
        first = gl.maximum(first_query, oldest) // BLOCK_N * BLOCK_N
    last = first_query + queries + shift
    tiles = gl.where(queries > 0, gl.cdiv(last - first, BLOCK_N), 0)
    return slot, head, first_query, queries, shift, oldest, first, last, tiles


@gluon.jit
def _turns(S, B, HEADS: gl.constexpr):
    """Turns of a program; in the last two there may be no block."""
    items = gl.cdiv(gl.cdiv(S, 2 * BLOCK_M), 2) * HEADS * B
    return 2 * gl.cdiv(items, gl.num_programs(0))


@gluon.jit
def _loader(
    q_nope, q_rope, expanded, cache, past, new, S, N, C, B,
    qf, qs, qr, kf, ks, kr, vs, full, empty, q_full, q_empty,
    HEADS: gl.constexpr, NOPE: gl.constexpr, ROPE: gl.constexpr, VALUE: gl.constexpr,
    LATENT: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    line = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _COPY))
    lane = gl.arange(0, FIRST, layout=gl.SliceLayout(0, _COPY))
    more = gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY))
    value_lane = gl.arange(0, VALUE, layout=gl.SliceLayout(0, _COPY))
    position = 0
    done = 0
    for turn in range(_turns(S, B, HEADS)):
        slot, head, first_query, queries, _, oldest, first, last, tiles = _block(
            turn, past, new, S, B, HEADS, WINDOW
        )
        if tiles > 0:
            row = (slot.to(gl.int64) * S + first_query) * HEADS + head
            mbarrier.wait(q_empty, (done & 1) ^ 1)
            for part in gl.static_range(2):
                query = part * BLOCK_M + line
                live = (query < queries)[:, None]
                at = q_nope + row * NOPE + query[:, None] * (HEADS * NOPE)
                _gather(qf.index(part), at + lane[None, :], mask=live)
                if SECOND > 0:
                    _gather(qs.index(part), at + (FIRST + more)[None, :], mask=live)
                turned = q_rope + row * ROPE + query[:, None] * (HEADS * ROPE) + more[None, :]
                _gather(qr.index(part), turned, mask=live)
            async_copy.mbarrier_arrive(q_full, increment_count=False)
            done += 1
            kv = expanded + (slot.to(gl.int64) * N * HEADS + head) * (NOPE + VALUE)
            rope_keys = cache + slot.to(gl.int64) * C * (LATENT + ROPE) + LATENT
            for step in range(tiles):
                stage = position % STAGES
                entry = first + step * BLOCK_N + line
                there = ((entry < last) & (entry >= oldest))[:, None]
                at = kv + entry.to(gl.int64)[:, None] * (HEADS * (NOPE + VALUE))
                rope_at = rope_keys + entry.to(gl.int64)[:, None] * (LATENT + ROPE)
                mbarrier.wait(empty.index(stage), ((position // STAGES) & 1) ^ 1)
                _gather(kf.index(stage), at + lane[None, :], mask=there)
                if SECOND > 0:
                    _gather(ks.index(stage), at + (FIRST + more)[None, :], mask=there)
                _gather(kr.index(stage), rope_at + more[None, :], mask=there)
                _gather(vs.index(stage), at + (NOPE + value_lane)[None, :], mask=there)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                position += 1


@gluon.jit
def _scores(
    q_first, q_second, q_turned, position, kf, ks, kr, full,
    SECOND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The scores of the tile at `position`, in flight."""
    stage = position % STAGES
    mbarrier.wait(full.index(stage), (position // STAGES) & 1)
    fence_async_shared()
    none = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout=_SCORES)
    keys = kf.index(stage).permute((1, 0))
    dots = warpgroup_mma(q_first, keys, none, use_acc=False, is_async=True)
    if SECOND > 0:
        dots = warpgroup_mma(q_second, ks.index(stage).permute((1, 0)), dots, is_async=True)
    return warpgroup_mma(q_turned, kr.index(stage).permute((1, 0)), dots, is_async=True)


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
def _attend(
    part, position, done, tiles, queries, first_query, first, shift, oldest, gate,
    qf, qs, qr, kf, ks, kr, vs, full, empty, q_full, q_empty, order,
    HEADS: gl.constexpr, VALUE: gl.constexpr, SECOND: gl.constexpr, WINDOW: gl.constexpr,
    FACTOR: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """64 queries of a block; returns their outputs, zeros for padding.

    `order` says whose turn at the matrix units it is. HELD: the queries stay in registers. No
    product is in flight at the end of a turn.
    """
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
    mbarrier.wait(q_full, done & 1)
    if HELD:
        held: gl.constexpr = gl.DotOperandLayout(0, _SCORES, 2)
        q_first = qf.index(part).load(held)
        q_turned = qr.index(part).load(held)
        q_second = q_turned
        mbarrier.arrive(q_empty, count=1)
    else:
        q_first = qf.index(part)
        q_second = qs.index(part)
        q_turned = qr.index(part)
    score = warpgroup_mma_wait(
        0, deps=[_scores(q_first, q_second, q_turned, position, kf, ks, kr, full, SECOND, STAGES)]
    )
    for step in range(tiles - 1):
        begin = first + step * BLOCK_N
        plain = (begin >= all_from) & (begin + BLOCK_N - 1 <= all_until)
        weight, decay, maximum = _softmax(
            score, begin, newest, oldest, plain, maximum, WINDOW, FACTOR
        )
        stage = (position + step) % STAGES
        low = gl.convert_layout(weight.to(gl.bfloat16), operand)
        faded = total * gl.convert_layout(decay, rows)[:, None]
        # A block has one turn less than tiles. The first consumer begins.
        turn = position - done + step
        mbarrier.wait(order.index(part), (turn & 1) ^ (1 - part))
        output = warpgroup_mma(low, vs.index(stage), faded, is_async=True)
        dots = _scores(
            q_first, q_second, q_turned, position + step + 1, kf, ks, kr, full, SECOND, STAGES
        )
        mbarrier.arrive(order.index(1 - part), count=1)
        normalizer = normalizer * decay + gl.sum(weight, axis=1)
        # The output is done when only the products of the scores are left.
        scores: gl.constexpr = 3 if SECOND > 0 else 2
        total, low = warpgroup_mma_wait(scores, deps=[output, low])
        mbarrier.arrive(empty.index(stage), count=1)
        score = warpgroup_mma_wait(0, deps=[dots])
    if not HELD:
        mbarrier.arrive(q_empty, count=1)
    last = tiles - 1
    weight, decay, maximum = _softmax(
        score, first + last * BLOCK_N, newest, oldest, 0, maximum, WINDOW, FACTOR
    )
    stage = (position + last) % STAGES
    low = gl.convert_layout(weight.to(gl.bfloat16), operand)
    faded = total * gl.convert_layout(decay, rows)[:, None]
    output = warpgroup_mma(low, vs.index(stage), faded, is_async=True)
    normalizer = normalizer * decay + gl.sum(weight, axis=1)
    total, low = warpgroup_mma_wait(0, deps=[output, low])
    mbarrier.arrive(empty.index(stage), count=1)
    live = line < queries
    opened = gl.load(gate + line * HEADS, mask=live, other=0.0).to(gl.float32)
    factor = gl.where(live, 1.0 / (normalizer * (1.0 + gl.exp2(-opened * LOG2_E))), 0.0)
    return total * gl.convert_layout(factor, rows)[:, None]


@gluon.jit
def _consumer(
    part, past, new, gate, out, S, B,
    qf, qs, qr, kf, ks, kr, vs, full, empty, q_full, q_empty, order,
    HEADS: gl.constexpr, VALUE: gl.constexpr, SECOND: gl.constexpr, WINDOW: gl.constexpr,
    FACTOR: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """64 queries of every block, stored."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE, 16])
    line = part * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    lane = gl.arange(0, VALUE, layout=gl.SliceLayout(0, layout))
    position = 0
    done = 0
    for turn in range(_turns(S, B, HEADS)):
        slot, head, first_query, queries, shift, oldest, first, _, tiles = _block(
            turn, past, new, S, B, HEADS, WINDOW
        )
        row = (slot.to(gl.int64) * S + first_query) * HEADS + head
        at = out + row * VALUE + line[:, None] * (HEADS * VALUE) + lane[None, :]
        there = (line < S - first_query)[:, None]
        if tiles > 0:
            result = _attend(
                part, position, done, tiles, queries, first_query, first, shift, oldest, gate + row,
                qf, qs, qr, kf, ks, kr, vs, full, empty, q_full, q_empty, order,
                HEADS, VALUE, SECOND, WINDOW, FACTOR, STAGES, layout, HELD,
            )  # fmt: skip
            gl.store(at, result.to(out.dtype.element_ty), mask=there)
            position += tiles
            done += 1
        elif queries == 0:
            gl.store(at, gl.zeros((BLOCK_M, VALUE), gl.bfloat16, layout=layout), mask=there)


@gluon.jit
def attend_dense(
    q_nope, q_rope, expanded, cache, past, new, gate,
    S, N, C, B,
    out,
    SCALE: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr, NOPE: gl.constexpr,
    ROPE: gl.constexpr, VALUE: gl.constexpr, LATENT: gl.constexpr, FIRST: gl.constexpr,
    SECOND: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Tensors as in `dense.attend_dense`. Grid (any,), best the multiprocessors; 4 warps."""
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
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Each thread of the loader reports its own copies; each consumer reports once.
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(q_full, count=128)
    mbarrier.init(q_empty, count=2)
    for part in gl.static_range(2):
        mbarrier.init(order.index(part), count=1)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, past, new, gate, out, S, B, qf, qs, qr, kf, ks, kr, vs, full, empty,
                    q_full, q_empty, order,
                    HEADS, VALUE, SECOND, WINDOW, SCALE * LOG2_E, STAGES, HELD,
                ),
            ),
            (
                _consumer,
                (
                    1, past, new, gate, out, S, B, qf, qs, qr, kf, ks, kr, vs, full, empty,
                    q_full, q_empty, order,
                    HEADS, VALUE, SECOND, WINDOW, SCALE * LOG2_E, STAGES, HELD,
                ),
            ),
            (
                _loader,
                (
                    q_nope, q_rope, expanded, cache, past, new, S, N, C, B,
                    qf, qs, qr, kf, ks, kr, vs, full, empty, q_full, q_empty,
                    HEADS, NOPE, ROPE, VALUE, LATENT, FIRST, SECOND, WINDOW, STAGES,
                ),
            ),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
