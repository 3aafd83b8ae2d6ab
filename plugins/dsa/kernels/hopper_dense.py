"""Attention over expanded keys and values, scheduled for Hopper (compute capability 9.0).

The same operation as `dense.attend_dense`. A program takes blocks of 128 queries of one head, one
after another: two consumers of four warps with 64 queries each, and a loader that keeps a few tiles
of tokens ahead, also of the next block. The consumers take turns at the matrix units, or both
would wait for them and then both compute exponentials: one has its output and the next tile's
scores computed while the other turns scores into probabilities.

That turning is the longest part of a consumer's way, so nothing waits in it: from the scores to the
products there is one stretch without a branch, in which the compiler hides everything else behind
the exponentials, and the turns are hardware barriers, which need no loop.

Blocks are dealt in pairs of the longest and the shortest, the second longest and the second
shortest, and so on, which all take the same time; the pairs of a head stay together, because they
share its keys in the L2 cache. Keys are 128 + SECOND + ROPE wide, multiples of 64, values 128,
bfloat16.
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
from plugins.dsa.kernels.hopper import _COPY, _TILE, _gather, zero

# Queries per consumer.
BLOCK_M = gl.constexpr(64)
# Where a thread of the products' layout keeps the same rows, but eight channels of each side by
# side: 16-byte stores, without a way through shared memory.
_STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
# Hardware barriers, far from those that the compiler takes: one for each consumer's turn.
_AWAIT = gl.constexpr(("bar.sync 14, 256; mov.u32 $0, 0;", "bar.sync 15, 256; mov.u32 $0, 0;"))
_PASS = gl.constexpr(("bar.arrive 15, 256; mov.u32 $0, 0;", "bar.arrive 14, 256; mov.u32 $0, 0;"))
_NOTHING = gl.constexpr("=r,r,~{memory}")


@gluon.jit
def _await_turn(part: gl.constexpr, step):
    """Waits until the other consumer has asked for its products."""
    gl.inline_asm_elementwise(_AWAIT[part], _NOTHING, [step], gl.int32, False, 1)


@gluon.jit
def _pass_turn(part: gl.constexpr, step):
    gl.inline_asm_elementwise(_PASS[part], _NOTHING, [step], gl.int32, False, 1)


@gluon.jit
def _deal(S):
    """Pairs of blocks per head, and how far a program's next pair is: pairs, and heads besides."""
    pairs = gl.cdiv(gl.cdiv(S, 2 * BLOCK_M), 2)
    return pairs, gl.num_programs(0) % pairs, gl.num_programs(0) // pairs


@gluon.jit
def _turns(S, B, HEADS: gl.constexpr):
    """Turns of a program, two per pair; in the last two there may be no block."""
    items = gl.cdiv(gl.cdiv(S, 2 * BLOCK_M), 2) * HEADS * B
    return 2 * gl.cdiv(items, gl.num_programs(0))


@gluon.jit
def _first_pair(past, new, pairs, B, HEADS: gl.constexpr):
    """A program's first pair, its head (counted through all slots), slot, and the slot's lengths.

    There may be no such slot; then it is the last one.
    """
    unit = gl.program_id(0) // pairs
    slot = gl.minimum(unit // HEADS, B - 1)
    return gl.program_id(0) % pairs, unit, slot, gl.load(past + slot), gl.load(new + slot)


@gluon.jit
def _next_pair(
    turn, pair, unit, slot, past_tokens, new_tokens, past, new, pairs, more, heads, B,
    HEADS: gl.constexpr,
):  # fmt: skip
    """The same for the turn after this one. Divides by no variable, and seldom loads."""
    odd = turn % 2
    pair += odd * more
    over = (pair >= pairs).to(gl.int32)
    unit += odd * heads + over
    before = slot
    slot = gl.minimum(unit // HEADS, B - 1)
    if slot != before:
        past_tokens = gl.load(past + slot)
        new_tokens = gl.load(new + slot)
    return pair - over * pairs, unit, slot, past_tokens, new_tokens


@gluon.jit
def _block(
    turn, pair, unit, past_tokens, new_tokens, S, B,
    HEADS: gl.constexpr, WINDOW: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """The block of a turn.

    Returns: head, first query, valid queries (0: none, all padding; -1: no block), the row of the
    first query's own token minus the first query, the oldest row that exists, the first row of the
    first tile, the row behind the last, and the number of tiles.
    """
    other = gl.cdiv(S, 2 * BLOCK_M) - 1 - pair
    there = (unit < B * HEADS) & ((turn % 2 == 0) | (pair != other))
    first_query = gl.where(turn % 2 == 0, other, pair) * (2 * BLOCK_M)
    queries = gl.minimum(new_tokens, S) - first_query
    queries = gl.where(there, gl.minimum(gl.maximum(queries, 0), 2 * BLOCK_M), -1)
    shift = past_tokens
    oldest = 0
    first = 0
    if WINDOW > 0:
        shift = WINDOW - 1
        oldest = gl.maximum(WINDOW - 1 - past_tokens, 0)
        first = gl.maximum(first_query, oldest) // TOKENS * TOKENS
    last = first_query + queries + shift
    tiles = gl.where(queries > 0, gl.cdiv(last - first, TOKENS), 0)
    return unit % HEADS, first_query, queries, shift, oldest, first, last, tiles


@gluon.jit
def _loader(
    q_nope, q_rope, expanded, cache, past, new, S, N, C, B,
    qf, qs, qr, kf, ks, kr, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    HEADS: gl.constexpr, NOPE: gl.constexpr, ROPE: gl.constexpr, VALUE: gl.constexpr,
    LATENT: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, WINDOW: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Keys and values of every tile; queries behind the keys of a block's first tile."""
    line = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, _COPY))
    query_line = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, _COPY))
    lane = gl.arange(0, FIRST, layout=gl.SliceLayout(0, _COPY))
    more_lane = gl.arange(0, 64, layout=gl.SliceLayout(0, _COPY))
    value_lane = gl.arange(0, VALUE, layout=gl.SliceLayout(0, _COPY))
    position = 0
    done = 0
    pairs, more, heads = _deal(S)
    pair, unit, slot, past_tokens, new_tokens = _first_pair(past, new, pairs, B, HEADS)
    for turn in range(_turns(S, B, HEADS)):
        head, first_query, queries, _, oldest, first, last, tiles = _block(
            turn, pair, unit, past_tokens, new_tokens, S, B, HEADS, WINDOW, TOKENS
        )
        row = (slot.to(gl.int64) * S + first_query) * HEADS + head
        kv = expanded + (slot.to(gl.int64) * N * HEADS + head) * (NOPE + VALUE)
        rope_keys = cache + slot.to(gl.int64) * C * (LATENT + ROPE) + LATENT
        for step in range(tiles):
            stage = position % STAGES
            free = ((position // STAGES) & 1) ^ 1
            entry = first + step * TOKENS + line
            there = ((entry < last) & (entry >= oldest))[:, None]
            at = kv + entry.to(gl.int64)[:, None] * (HEADS * (NOPE + VALUE))
            rope_at = rope_keys + entry.to(gl.int64)[:, None] * (LATENT + ROPE)
            mbarrier.wait(k_empty.index(stage), free)
            _gather(kf.index(stage), at + lane[None, :], mask=there)
            if SECOND > 0:
                _gather(ks.index(stage), at + (FIRST + more_lane)[None, :], mask=there)
            _gather(kr.index(stage), rope_at + more_lane[None, :], mask=there)
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            if step == 0:
                for part in gl.static_range(2):
                    query = part * BLOCK_M + query_line
                    live = (query < queries)[:, None]
                    q_at = q_nope + row * NOPE + query[:, None] * (HEADS * NOPE)
                    turned = q_rope + row * ROPE + query[:, None] * (HEADS * ROPE)
                    mbarrier.wait(q_empty.index(part), (done & 1) ^ 1)
                    _gather(qf.index(part), q_at + lane[None, :], mask=live)
                    if SECOND > 0:
                        _gather(qs.index(part), q_at + (FIRST + more_lane)[None, :], mask=live)
                    _gather(qr.index(part), turned + more_lane[None, :], mask=live)
                    async_copy.mbarrier_arrive(q_full.index(part), increment_count=False)
                done += 1
            mbarrier.wait(v_empty.index(stage), free)
            _gather(vs.index(stage), at + (NOPE + value_lane)[None, :], mask=there)
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            position += 1
        pair, unit, slot, past_tokens, new_tokens = _next_pair(
            turn, pair, unit, slot, past_tokens, new_tokens, past, new, pairs, more, heads, B, HEADS
        )


@gluon.jit
def _ready(full, position, STAGES: gl.constexpr):
    """Waits for a tile's keys or values."""
    mbarrier.wait(full.index(position % STAGES), (position // STAGES) & 1)
    fence_async_shared()


@gluon.jit
def _scores(
    part, qf, qs, qr, kf, ks, kr, position,
    SECOND: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """The scores of the tile at `position`, in flight."""
    stage = position % STAGES
    part += zero(position)
    none = gl.zeros((BLOCK_M, TOKENS), gl.float32, layout=SCORES)
    keys = kf.index(stage).permute((1, 0))
    dots = warpgroup_mma(qf.index(part), keys, none, use_acc=False, is_async=True)
    if SECOND > 0:
        dots = warpgroup_mma(qs.index(part), ks.index(stage).permute((1, 0)), dots, is_async=True)
    return warpgroup_mma(qr.index(part), kr.index(stage).permute((1, 0)), dots, is_async=True)


@gluon.jit
def _masked(
    score, begin, newest, oldest, plain, maximum,
    WINDOW: gl.constexpr, FACTOR: gl.constexpr, TOKENS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """The scores that are used, minus infinity elsewhere, and the new maximum in powers of two.

    plain: every query of the consumer sees every token of the tile.
    """
    if plain == 0:
        entry = begin + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, SCORES))
        used = entry[None, :] <= newest[:, None]
        if WINDOW > 0:
            used = used & (entry >= oldest)[None, :] & (entry[None, :] > newest[:, None] - WINDOW)
        # Minus infinity, not LOWEST: the scaling below is fused, and its rounding error at 1e30
        # would be anything.
        score = gl.where(used, score, float("-inf"))
    return score, gl.maximum(maximum, gl.max(score, axis=1) * FACTOR)


@gluon.jit
def _probabilities(score, highest, FACTOR: gl.constexpr):
    """bfloat16; two of a register, so that `_total` takes them as they are."""
    weight = gl.exp2(score * FACTOR - highest[:, None]).to(gl.bfloat16)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weight], gl.bfloat16, True, 2)


@gluon.jit
def _total(weight):
    """Sums of the rounded probabilities: no register holds the others any longer."""
    wide = gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [weight], gl.float32, True, 2
    )
    return gl.sum(wide, axis=1)


@gluon.jit
def _attend(
    part: gl.constexpr, position, done, tiles, queries, first_query, first, shift, oldest, gate,
    qf, qs, qr, kf, ks, kr, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    HEADS: gl.constexpr, VALUE: gl.constexpr, SECOND: gl.constexpr, WINDOW: gl.constexpr,
    FACTOR: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """64 queries of a block; returns their outputs, zeros for padding.

    No product is in flight at the end of a turn.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    lines: gl.constexpr = gl.SliceLayout(1, SCORES)
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    operand: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    line = part * BLOCK_M + gl.arange(0, BLOCK_M, layout=lines)
    newest = first_query + line + shift
    # Rows seen by all of the consumer's queries: up to its first one's newest, from its last one's
    # oldest on.
    all_until = first_query + part * BLOCK_M + shift
    all_from = oldest
    if WINDOW > 0:
        all_from = gl.maximum(oldest, all_until + BLOCK_M - WINDOW)
    maximum = gl.full((BLOCK_M,), LOWEST, gl.float32, layout=lines)
    normalizer = gl.zeros((BLOCK_M,), gl.float32, layout=lines)
    total = gl.zeros((BLOCK_M, VALUE), gl.float32, layout=LAYOUT)
    mbarrier.wait(q_full.index(part), done & 1)
    _ready(k_full, position, STAGES)
    dots = _scores(part, qf, qs, qr, kf, ks, kr, position, SECOND, TOKENS, STAGES, SCORES)
    _ready(v_full, position, STAGES)
    # Behind the fence, which would wait for it.
    live = line < queries
    opened = gl.load(gate + line * HEADS, mask=live, other=0.0)
    score = warpgroup_mma_wait(0, deps=[dots])
    mbarrier.arrive(k_empty.index(position % STAGES), count=1)
    for step in range(tiles - 1):
        here = position + step
        begin = first + step * TOKENS
        plain = (begin >= all_from) & (begin + TOKENS - 1 <= all_until)
        score, highest = _masked(
            score, begin, newest, oldest, plain, maximum, WINDOW, FACTOR, TOKENS, SCORES
        )
        _ready(k_full, here + 1, STAGES)
        # No branch from here to the products.
        decay = gl.exp2(maximum - highest)
        maximum = highest
        faded = total * gl.convert_layout(decay, rows)[:, None]
        weight = _probabilities(score, highest, FACTOR)
        low = gl.convert_layout(weight, operand)
        # A block has one turn less than tiles. The first consumer begins.
        _await_turn(part, step)
        output = warpgroup_mma(low, vs.index(here % STAGES), faded, is_async=True)
        dots = _scores(part, qf, qs, qr, kf, ks, kr, here + 1, SECOND, TOKENS, STAGES, SCORES)
        _pass_turn(part, step)
        normalizer = normalizer * decay + _total(weight)
        _ready(v_full, here + 1, STAGES)
        # The output is done when only the products of the scores are left.
        in_flight: gl.constexpr = 3 if SECOND > 0 else 2
        total, low = warpgroup_mma_wait(in_flight, deps=[output, low])
        mbarrier.arrive(v_empty.index(here % STAGES), count=1)
        score = warpgroup_mma_wait(0, deps=[dots])
        mbarrier.arrive(k_empty.index((here + 1) % STAGES), count=1)
    mbarrier.arrive(q_empty.index(part), count=1)
    last = position + tiles - 1
    begin = first + (tiles - 1) * TOKENS
    score, highest = _masked(
        score, begin, newest, oldest, 0, maximum, WINDOW, FACTOR, TOKENS, SCORES
    )
    decay = gl.exp2(maximum - highest)
    weight = _probabilities(score, highest, FACTOR)
    low = gl.convert_layout(weight, operand)
    faded = total * gl.convert_layout(decay, rows)[:, None]
    output = warpgroup_mma(low, vs.index(last % STAGES), faded, is_async=True)
    normalizer = normalizer * decay + _total(weight)
    opened = 1.0 + gl.exp2(-opened.to(gl.float32) * LOG2_E)
    factor = gl.where(live, 1.0 / (normalizer * opened), 0.0)
    total, low = warpgroup_mma_wait(0, deps=[output, low])
    mbarrier.arrive(v_empty.index(last % STAGES), count=1)
    return total * gl.convert_layout(factor, rows)[:, None]


@gluon.jit
def _consumer(
    part: gl.constexpr, past, new, gate, out, S, B,
    qf, qs, qr, kf, ks, kr, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    HEADS: gl.constexpr, VALUE: gl.constexpr, SECOND: gl.constexpr, WINDOW: gl.constexpr,
    FACTOR: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 queries of every block, stored."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE, 16])
    line = part * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, _STORE))
    lane = gl.arange(0, VALUE, layout=gl.SliceLayout(0, _STORE))
    position = 0
    done = 0
    if part == 1:
        _pass_turn(part, position)
    pairs, more, heads = _deal(S)
    pair, unit, slot, past_tokens, new_tokens = _first_pair(past, new, pairs, B, HEADS)
    for turn in range(_turns(S, B, HEADS)):
        head, first_query, queries, shift, oldest, first, _, tiles = _block(
            turn, pair, unit, past_tokens, new_tokens, S, B, HEADS, WINDOW, TOKENS
        )
        row = (slot.to(gl.int64) * S + first_query) * HEADS + head
        at = out + row * VALUE + line[:, None] * (HEADS * VALUE) + lane[None, :]
        there = (line < S - first_query)[:, None]
        if tiles > 0:
            result = _attend(
                part, position, done, tiles, queries, first_query, first, shift, oldest, gate + row,
                qf, qs, qr, kf, ks, kr, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                HEADS, VALUE, SECOND, WINDOW, FACTOR, TOKENS, STAGES, layout,
            )  # fmt: skip
            gl.store(at, gl.convert_layout(result.to(gl.bfloat16), _STORE), mask=there)
            position += tiles
            done += 1
        elif queries == 0:
            gl.store(at, gl.zeros((BLOCK_M, VALUE), gl.bfloat16, layout=_STORE), mask=there)
        pair, unit, slot, past_tokens, new_tokens = _next_pair(
            turn, pair, unit, slot, past_tokens, new_tokens, past, new, pairs, more, heads, B, HEADS
        )


@gluon.jit
def attend_dense(
    q_nope, q_rope, expanded, cache, past, new, gate,
    S, N, C, B,
    out,
    SCALE: gl.constexpr, WINDOW: gl.constexpr, HEADS: gl.constexpr, NOPE: gl.constexpr,
    ROPE: gl.constexpr, VALUE: gl.constexpr, LATENT: gl.constexpr, FIRST: gl.constexpr,
    SECOND: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tensors as in `dense.attend_dense`. Grid (any,), best the multiprocessors; 4 warps.

    TOKENS: per tile. STAGES: tiles in shared memory.
    """
    qf = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_M, FIRST], _TILE)
    qr = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_M, ROPE], _TILE)
    kf = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, FIRST], _TILE)
    kr = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, ROPE], _TILE)
    vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, VALUE], _TILE)
    qs = qr
    ks = kr
    if SECOND > 0:
        qs = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_M, SECOND], _TILE)
        ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, SECOND], _TILE)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Each thread of the loader reports its own copies; each consumer reports once.
    for part in gl.static_range(2):
        mbarrier.init(q_full.index(part), count=128)
        mbarrier.init(q_empty.index(part), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=128)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=128)
        mbarrier.init(v_empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, past, new, gate, out, S, B,
                    qf, qs, qr, kf, ks, kr, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    HEADS, VALUE, SECOND, WINDOW, SCALE * LOG2_E, TOKENS, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    1, past, new, gate, out, S, B,
                    qf, qs, qr, kf, ks, kr, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    HEADS, VALUE, SECOND, WINDOW, SCALE * LOG2_E, TOKENS, STAGES,
                ),
            ),
            (
                _loader,
                (
                    q_nope, q_rope, expanded, cache, past, new, S, N, C, B,
                    qf, qs, qr, kf, ks, kr, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    HEADS, NOPE, ROPE, VALUE, LATENT, FIRST, SECOND, WINDOW, TOKENS, STAGES,
                ),
            ),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip
