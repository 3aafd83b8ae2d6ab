"""Prefill attention scheduled for Hopper's matrix units (compute capability 9.0).

The same operations as `prefill.attend_tile` and `dense.attend_dense` in one launch, written in
Gluon, Triton's explicit level, because the plain compiler lets loads and products of one program
take turns. Here three groups of four warps work side by side: a loader that keeps a ring of five
tiles of 64 keys or 64 values full, and two consumers with 64 lines each, a line being one query of
one head. While one consumer turns scores into probabilities the other one keeps the matrix units
busy.

In the sparse kernel a consumer has the queries of half a tile of neighbours. Tiles of blocks that
only one half keeps are loaded for that half alone, those of the two halves taking turns; blocks
that both halves keep come last and are loaded once for both.

Sizes are Qwen3.8's: heads of 256, bfloat16, at most 64 lines per consumer.
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

from plugins.qsa.kernels.attention import LOG2_E, LOWEST
from plugins.qsa.kernels.dense import first_sparse

# Triton 3.9 renamed it.
_gather = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)

# Lines per consumer, tokens per tile, channels, tiles in the ring.
LINES = gl.constexpr(64)
TOKENS = gl.constexpr(64)
D = gl.constexpr(256)
SLOTS = gl.constexpr(5)
# One 128-byte line of each of four rows per warp and copy.
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _OUTPUT.value, 2))
_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_LINES_OF_SCORES = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_LINES_OF_OUTPUT = gl.constexpr(gl.SliceLayout(1, _OUTPUT.value))
_COLUMNS = gl.constexpr(gl.SliceLayout(0, _SCORES.value))
# Two neighbouring channels behind their gates, as two bfloat16: a * logistic(gate). A reciprocal
# costs as much as an exponential, so that both share one, of the product of 1 + exp(-gate). The
# exponentials are at most 2^62, or their product would be infinite: no gate is below 2^-62.
_GATED = gl.constexpr("""
{
.reg .f32 first, second, shared;
shl.b32 first, $1, 16;
and.b32 second, $1, 0xffff0000;
mul.f32 first, first, 0fBFB8AA3B;
mul.f32 second, second, 0fBFB8AA3B;
min.NaN.f32 first, first, 0f42780000;
min.NaN.f32 second, second, 0f42780000;
ex2.approx.ftz.f32 first, first;
ex2.approx.ftz.f32 second, second;
add.f32 first, first, 0f3F800000;
add.f32 second, second, 0f3F800000;
mul.f32 shared, first, second;
rcp.approx.ftz.f32 shared, shared;
mul.f32 second, second, shared;
mul.f32 first, first, shared;
mul.f32 second, second, $2;
mul.f32 first, first, $3;
cvt.rn.bf16x2.f32 $0, first, second;
}
""")


@gluon.jit
def _load_queries(
    q, queries, slot, kv_head, first_line, first_step, last_step, S,
    HQ: gl.constexpr, GROUP: gl.constexpr, PER_PART: gl.constexpr,
):  # fmt: skip
    """Queries of both consumers: PER_PART lines each, from `first_line` of `first_step` on."""
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, _COPY))
    lane = gl.arange(0, D, layout=gl.SliceLayout(0, _COPY))
    for part in gl.static_range(2):
        mine = first_line + part * PER_PART + line
        step = first_step + mine // GROUP
        head = kv_head * GROUP + mine % GROUP
        at = ((slot * HQ + head).to(gl.int64) * S + step) * D
        live = (line < PER_PART) & (step < last_step)
        pointer = q + at[:, None] + lane[None, :]
        _gather(queries.index(part), pointer, mask=live[:, None])


@gluon.jit
def _load_tile(step, keys, values, token, there, ring, full, empty):
    """Keys, then values of 64 tokens, into the ring's slots of this step."""
    lane = gl.arange(0, D, layout=gl.SliceLayout(0, _COPY))
    at = token.to(gl.int64)[:, None] * D + lane[None, :]
    for half in gl.static_range(2):
        turn = 2 * step + half
        slot = turn % SLOTS
        mbarrier.wait(empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
        source = keys if half == 0 else values
        _gather(ring.index(slot), source + at, mask=there[:, None])
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def _scores(queries, ring, full, step):
    """The scores of a step's tile, in flight."""
    turn = 2 * step
    slot = turn % SLOTS
    mbarrier.wait(full.index(slot), (turn // SLOTS) & 1)
    fence_async_shared()
    none = gl.zeros((LINES, TOKENS), gl.float32, layout=_SCORES)
    keys = ring.index(slot).permute((1, 0))
    return warpgroup_mma(queries, keys, none, use_acc=False, is_async=True)


@gluon.jit
def _release(empty, turn):
    mbarrier.arrive(empty.index(turn % SLOTS), count=1)


@gluon.jit
def _pass_over(first, last, full, empty):
    """Let go of the tiles of other consumers.

    Their arrival is waited for: a slot's barrier tells only one fill from the next one.
    """
    for step in range(first, last):
        for half in gl.static_range(2):
            turn = 2 * step + half
            mbarrier.wait(full.index(turn % SLOTS), (turn // SLOTS) & 1)
            _release(empty, turn)


@gluon.jit
def _weigh(score, maximum, FACTOR: gl.constexpr):
    """Probabilities, the factor on earlier sums and the new maximum, in powers of two."""
    highest = gl.maximum(maximum, gl.max(score, axis=1) * FACTOR)
    return gl.exp2(score * FACTOR - highest[:, None]), gl.exp2(maximum - highest), highest


@gluon.jit
def _mix(weight, total, step, ring, full):
    """`total` and the weighted values of a step's tile, in flight."""
    turn = 2 * step + 1
    slot = turn % SLOTS
    mbarrier.wait(full.index(slot), (turn // SLOTS) & 1)
    fence_async_shared()
    return warpgroup_mma(weight, ring.index(slot), total, is_async=True)


@gluon.jit
def _store(
    total, normalizer, out, gate, slot, kv_head, first_line, first_step, begin, end, S,
    HQ: gl.constexpr, GROUP: gl.constexpr, PER_PART: gl.constexpr, V_SCALE: gl.constexpr,
    GATE_STRIDE: gl.constexpr, GATE_OFFSET: gl.constexpr,
):  # fmt: skip
    """The gated output of the queries at steps [begin, end)."""
    line = gl.arange(0, LINES, layout=_LINES_OF_OUTPUT)
    lane = gl.arange(0, D, layout=gl.SliceLayout(0, _OUTPUT))
    step = first_step + (first_line + line) // GROUP
    head = kv_head * GROUP + (first_line + line) % GROUP
    live = ((line < PER_PART) & (step >= begin) & (step < end))[:, None]
    safe = gl.convert_layout(gl.where(normalizer > 0, normalizer, 1.0), _LINES_OF_OUTPUT)
    at = (slot.to(gl.int64) * S + step) * HQ + head
    gate_at = at[:, None] * GATE_STRIDE + GATE_OFFSET + lane[None, :]
    gates = gl.load(gate + gate_at, mask=live, other=0.0)
    result = total * (V_SCALE / safe)[:, None]
    gated = gl.inline_asm_elementwise(_GATED, "=r,r,f,f", [gates, result], gl.bfloat16, True, 2)
    gl.store(out + at[:, None] * D + lane[None, :], gated, mask=live)


# -- union of blocks -------------------------------------------------------------------------------


@gluon.jit
def _tile_of(index, lone, part, list_, count_lone, count_both, HALF: gl.constexpr):
    """List address, first entry and number of entries of a consumer's tile `index`."""
    alone = index < lone
    run = list_ + gl.where(alone, part, 2) * HALF
    entry = gl.where(alone, index, index - lone) * (TOKENS // 4)
    return run, entry, gl.where(alone, count_lone, count_both)


@gluon.jit
def _step_of(index, lone, other, part):
    """The loader's step at which a consumer's tile `index` comes.

    The halves take turns while both have tiles of their own; then the longer one goes on; then
    come those of both.
    """
    pairs = gl.minimum(lone, other)
    alone = gl.where(index < pairs, 2 * index + part, index + pairs)
    return gl.where(index < lone, alone, index + other)


@gluon.jit
def _union_loader(
    q, keys, values, list_, count_a, count_b, count_both, past_length, count, slot, kv_head,
    first_step, S, queries, ring, full, empty,
    RATIO: gl.constexpr, HQ: gl.constexpr, GROUP: gl.constexpr, HALF_ROWS: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = TOKENS // RATIO
    ROWS: gl.constexpr = 2 * HALF_ROWS
    line = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, _COPY))
    _load_queries(q, queries, slot, kv_head, 0, first_step, count, S, HQ, GROUP, HALF_ROWS * GROUP)
    tiles_a = gl.cdiv(count_a, BLOCKS)
    tiles_b = gl.cdiv(count_b, BLOCKS)
    tiles = tiles_a + tiles_b + gl.cdiv(count_both, BLOCKS)
    pairs = gl.minimum(tiles_a, tiles_b)
    longer = gl.where(tiles_a > tiles_b, 0, 1)
    for step in range(tiles):
        alone = gl.where(step < 2 * pairs, step & 1, longer)
        run = gl.where(step < tiles_a + tiles_b, alone, 2)
        index = gl.where(step < 2 * pairs, step // 2, step - pairs)
        index = gl.where(run == 2, step - tiles_a - tiles_b, index)
        listed = gl.where(run == 0, count_a, gl.where(run == 1, count_b, count_both))
        entry = index * BLOCKS + line // RATIO
        there = entry < listed
        word = gl.load(list_ + run * HALF + entry, mask=there, other=0)
        token = (word >> ROWS) * RATIO + line % RATIO
        _load_tile(step, keys, values, token, there, ring, full, empty)
    first_tail = (past_length + first_step + 1) // RATIO * RATIO
    newest = past_length + gl.minimum(first_step + ROWS, count) - 1
    token = first_tail + line
    _load_tile(tiles, keys, values, token, token <= newest, ring, full, empty)


@gluon.jit
def _tail_bits(past_length, first_step, count, RATIO: gl.constexpr, ROWS: gl.constexpr):
    """For each token of the last tile, the bits of the queries in whose tail it is."""
    first_tail = (past_length + first_step + 1) // RATIO * RATIO
    token = first_tail + gl.arange(0, TOKENS, layout=_COLUMNS)
    bits = gl.zeros((TOKENS,), gl.int32, layout=_COLUMNS)
    for row in gl.static_range(ROWS):
        position = past_length + first_step + row
        start = (position + 1) // RATIO * RATIO
        inside = (token >= start) & (token <= position) & (first_step + row < count)
        bits = bits | gl.where(inside, 1 << row, 0)
    return bits


@gluon.jit
def _union_consumer(
    part, list_, count_lone, count_other, count_both, past_length, count, sparse, slot, kv_head,
    first_step, S, gate, out, queries, ring, full, empty,
    RATIO: gl.constexpr, HQ: gl.constexpr, GROUP: gl.constexpr, HALF_ROWS: gl.constexpr,
    HALF: gl.constexpr, SCALE: gl.constexpr, V_SCALE: gl.constexpr, GATE_STRIDE: gl.constexpr,
    GATE_OFFSET: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = TOKENS // RATIO
    PER_PART: gl.constexpr = HALF_ROWS * GROUP
    column = gl.arange(0, TOKENS, layout=_COLUMNS)
    line = gl.arange(0, LINES, layout=_LINES_OF_SCORES)
    bit = 1 << (part * HALF_ROWS + line // GROUP)
    lone = gl.cdiv(count_lone, BLOCKS)
    other = gl.cdiv(count_other, BLOCKS)
    tiles = lone + gl.cdiv(count_both, BLOCKS)
    maximum = gl.full((LINES,), LOWEST, gl.float32, layout=_LINES_OF_SCORES)
    normalizer = gl.zeros((LINES,), gl.float32, layout=_LINES_OF_SCORES)
    total = gl.zeros((LINES, D), gl.float32, layout=_OUTPUT)
    passed = 0
    for index in range(tiles + 1):
        step = _step_of(index, lone, other, part)
        # Asked for before anything is waited for, used when the scores are there.
        run, entry, listed = _tile_of(index, lone, part, list_, count_lone, count_both, HALF)
        entry = entry + column // RATIO
        bits = gl.load(run + entry, mask=entry < listed, other=0)
        _pass_over(passed, step, full, empty)
        passed = step + 1
        dots = _scores(queries.index(part), ring, full, step)
        if index == tiles:
            bits = _tail_bits(past_length, first_step, count, RATIO, 2 * HALF_ROWS)
        score = warpgroup_mma_wait(0, deps=[dots])
        _release(empty, 2 * step)
        # Minus infinity, not LOWEST: the scaling is fused, and its rounding error at 1e30 would
        # be anything.
        score = gl.where((bits[None, :] & bit[:, None]) != 0, score, float("-inf"))
        weight, decay, maximum = _weigh(score, maximum, SCALE * LOG2_E)
        low = gl.convert_layout(weight.to(gl.bfloat16), _WEIGHTS)
        faded = total * gl.convert_layout(decay, _LINES_OF_OUTPUT)[:, None]
        output = _mix(low, faded, step, ring, full)
        normalizer = normalizer * decay + gl.sum(weight, axis=1)
        total, low = warpgroup_mma_wait(0, deps=[output, low])
        _release(empty, 2 * step + 1)
    # Padding rows are stored too, as zeros: nothing was added to them.
    _store(
        total, normalizer, out, gate, slot, kv_head, part * PER_PART, first_step, sparse, S, S,
        HQ, GROUP, PER_PART, V_SCALE, GATE_STRIDE, GATE_OFFSET,
    )  # fmt: skip


# -- whole contexts --------------------------------------------------------------------------------


@gluon.jit
def _dense_loader(
    q, keys, values, tiles, newest, slot, kv_head, first_line, end, S, queries, ring, full, empty,
    HQ: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    line = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, _COPY))
    _load_queries(q, queries, slot, kv_head, first_line, 0, end, S, HQ, GROUP, LINES)
    for step in range(tiles):
        token = step * TOKENS + line
        _load_tile(step, keys, values, token, token <= newest, ring, full, empty)


@gluon.jit
def _causal(score, begin, positions, all_until):
    """Scores of the tokens that a line sees; `all_until` is the first line's position."""
    if begin + TOKENS - 1 > all_until:
        token = begin + gl.arange(0, TOKENS, layout=_COLUMNS)
        score = gl.where(token[None, :] <= positions[:, None], score, float("-inf"))
    return score


@gluon.jit
def _dense_consumer(
    part, tiles, past_length, end, slot, kv_head, first_line, S, gate, out,
    queries, ring, full, empty, order,
    HQ: gl.constexpr, GROUP: gl.constexpr, SCALE: gl.constexpr, V_SCALE: gl.constexpr,
    GATE_STRIDE: gl.constexpr, GATE_OFFSET: gl.constexpr,
):  # fmt: skip
    """The present values are summed while the next tile's scores become probabilities.

    The consumers take turns at starting products, so that one's exponentials run beside the other
    one's products. No product is in flight at the end of a step: the assembler would make all of
    them wait.
    """
    first = first_line + part * LINES
    line = gl.arange(0, LINES, layout=_LINES_OF_SCORES)
    positions = past_length + (first + line) // GROUP
    all_until = past_length + first // GROUP
    mine = queries.index(part)
    lowest = gl.full((LINES,), LOWEST, gl.float32, layout=_LINES_OF_SCORES)
    total = gl.zeros((LINES, D), gl.float32, layout=_OUTPUT)
    score = warpgroup_mma_wait(0, deps=[_scores(mine, ring, full, 0)])
    _release(empty, 0)
    score = _causal(score, 0, positions, all_until)
    weight, decay, maximum = _weigh(score, lowest, SCALE * LOG2_E)
    normalizer = gl.sum(weight, axis=1)
    low = gl.convert_layout(weight.to(gl.bfloat16), _WEIGHTS)
    for step in range(tiles - 1):
        mbarrier.wait(order.index(part), (step & 1) ^ (1 - part))
        dots = _scores(mine, ring, full, step + 1)
        output = _mix(low, total, step, ring, full)
        mbarrier.arrive(order.index(1 - part), count=1)
        score = warpgroup_mma_wait(1, deps=[dots])
        _release(empty, 2 * step + 2)
        score = _causal(score, (step + 1) * TOKENS, positions, all_until)
        weight, decay, maximum = _weigh(score, maximum, SCALE * LOG2_E)
        normalizer = normalizer * decay + gl.sum(weight, axis=1)
        total, low = warpgroup_mma_wait(0, deps=[output, low])
        _release(empty, 2 * step + 1)
        total = total * gl.convert_layout(decay, _LINES_OF_OUTPUT)[:, None]
        low = gl.convert_layout(weight.to(gl.bfloat16), _WEIGHTS)
    output = _mix(low, total, tiles - 1, ring, full)
    total, low = warpgroup_mma_wait(0, deps=[output, low])
    _store(
        total, normalizer, out, gate, slot, kv_head, first, 0, 0, end, S,
        HQ, GROUP, LINES, V_SCALE, GATE_STRIDE, GATE_OFFSET,
    )  # fmt: skip


@gluon.jit
def _union_program(
    q, k_cache, v_cache, counts, entries, past, new, gate, S, C, out, slot, kv_head, tile, tiles,
    queries, ring, full, empty,
    K: gl.constexpr, RATIO: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr,
    ROWS: gl.constexpr, SCALE: gl.constexpr, V_SCALE: gl.constexpr, GATE_STRIDE: gl.constexpr,
    GATE_OFFSET: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    GROUP: gl.constexpr = HQ // HK
    HALF_ROWS: gl.constexpr = ROWS // 2
    HALF: gl.constexpr = HALF_ROWS * K
    first_step = tile * ROWS
    past_length = gl.load(past + slot)
    count = gl.minimum(gl.load(new + slot), S)
    sparse = first_sparse(past_length, count, K, RATIO)
    if gl.minimum(first_step + ROWS, S) > sparse:
        place = slot * tiles + tile
        list_ = entries + place.to(gl.int64) * (3 * HALF)
        count_a = gl.to_tensor(0)
        count_b = gl.to_tensor(0)
        count_both = gl.to_tensor(0)
        if not WHOLE:
            count_a = gl.load(counts + place * 3)
            count_b = gl.load(counts + place * 3 + 1)
            count_both = gl.load(counts + place * 3 + 2)
        cache_at = (slot * HK + kv_head).to(gl.int64) * C * D
        gl.warp_specialize(
            [
                (
                    _union_consumer,
                    (
                        0, list_, count_a, count_b, count_both, past_length, count, sparse, slot,
                        kv_head, first_step, S, gate, out, queries, ring, full, empty,
                        RATIO, HQ, GROUP, HALF_ROWS, HALF, SCALE, V_SCALE, GATE_STRIDE,
                        GATE_OFFSET,
                    ),
                ),
                (
                    _union_consumer,
                    (
                        1, list_, count_b, count_a, count_both, past_length, count, sparse, slot,
                        kv_head, first_step, S, gate, out, queries, ring, full, empty,
                        RATIO, HQ, GROUP, HALF_ROWS, HALF, SCALE, V_SCALE, GATE_STRIDE,
                        GATE_OFFSET,
                    ),
                ),
                (
                    _union_loader,
                    (
                        q, k_cache + cache_at, v_cache + cache_at, list_, count_a, count_b,
                        count_both, past_length, count, slot, kv_head, first_step, S, queries,
                        ring, full, empty, RATIO, HQ, GROUP, HALF_ROWS, HALF,
                    ),
                ),
            ],
            [4, 4],
            [232, 40],
        )  # fmt: skip


@gluon.jit
def _dense_program(
    q, k_cache, v_cache, past, new, gate, S, C, out, slot, kv_head, first_line,
    queries, ring, full, empty, order,
    K: gl.constexpr, RATIO: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr,
    SCALE: gl.constexpr, V_SCALE: gl.constexpr, GATE_STRIDE: gl.constexpr,
    GATE_OFFSET: gl.constexpr,
):  # fmt: skip
    GROUP: gl.constexpr = HQ // HK
    past_length = gl.load(past + slot)
    end = first_sparse(past_length, gl.minimum(gl.load(new + slot), S), K, RATIO)
    if first_line < end * GROUP:
        newest = past_length + gl.minimum((first_line + 2 * LINES - 1) // GROUP, end - 1)
        tiles = newest // TOKENS + 1
        cache_at = (slot * HK + kv_head).to(gl.int64) * C * D
        gl.warp_specialize(
            [
                (
                    _dense_consumer,
                    (
                        0, tiles, past_length, end, slot, kv_head, first_line, S, gate, out,
                        queries, ring, full, empty, order, HQ, GROUP, SCALE, V_SCALE, GATE_STRIDE,
                        GATE_OFFSET,
                    ),
                ),
                (
                    _dense_consumer,
                    (
                        1, tiles, past_length, end, slot, kv_head, first_line, S, gate, out,
                        queries, ring, full, empty, order, HQ, GROUP, SCALE, V_SCALE, GATE_STRIDE,
                        GATE_OFFSET,
                    ),
                ),
                (
                    _dense_loader,
                    (
                        q, k_cache + cache_at, v_cache + cache_at, tiles, newest, slot, kv_head,
                        first_line, end, S, queries, ring, full, empty, HQ, GROUP,
                    ),
                ),
            ],
            [4, 4],
            [232, 40],
        )  # fmt: skip


@gluon.jit
def _turn(program, programs, PROCESSORS: gl.constexpr):
    """Rank by size, longest first, of the tile that a program takes.

    The second wave runs backwards and starts in its middle: the processors then become free one by
    one, so that the short tiles of the third wave even them out instead of adding to their sum.
    """
    second = gl.minimum(programs - PROCESSORS, PROCESSORS)
    place = program - PROCESSORS
    turned = PROCESSORS + second - 1 - (place + second // 2) % gl.maximum(second, 1)
    return gl.where((place >= 0) & (place < second), turned, program)


@gluon.jit
def attend(
    q, k_cache, v_cache, counts, entries, past, new, gate,
    S, C, batch,
    out,
    K: gl.constexpr, RATIO: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr,
    ROWS: gl.constexpr, SCALE: gl.constexpr, V_SCALE: gl.constexpr, GATE_STRIDE: gl.constexpr,
    GATE_OFFSET: gl.constexpr, PROCESSORS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """`prefill.attend_tile` without a limit, and `dense.attend_dense`. 4 warps.

    Grid ((cdiv(S * HQ / HK, 128) + cdiv(S, ROWS)) * HK * B,): first the tiles of whole contexts.
    PROCESSORS: multiprocessors of the GPU, which the order of these tiles is made for. WHOLE: no
    context exceeds the budget; counts and entries are not read.
    """
    program = gl.program_id(0)
    queries = gl.allocate_shared_memory(gl.bfloat16, [2, LINES, D], _TILE)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TOKENS, D], _TILE)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        # Each thread of the loader reports its own copies; each consumer reports once.
        mbarrier.init(full.index(slot), count=128)
        mbarrier.init(empty.index(slot), count=2)
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(2):
        mbarrier.init(order.index(part), count=1)
    line_tiles = gl.cdiv(S * (HQ // HK), 2 * LINES)
    lists = HK * batch
    dense = line_tiles * lists
    if program < dense:
        rank = _turn(program, dense, PROCESSORS)
        _dense_program(
            q, k_cache, v_cache, past, new, gate, S, C, out, rank % lists // HK, rank % HK,
            (line_tiles - 1 - rank // lists) * (2 * LINES), queries, ring, full, empty, order,
            K, RATIO, HQ, HK, SCALE, V_SCALE, GATE_STRIDE, GATE_OFFSET,
        )  # fmt: skip
    else:
        tiles = gl.cdiv(S, ROWS)
        rank = program - dense
        _union_program(
            q, k_cache, v_cache, counts, entries, past, new, gate, S, C, out,
            rank // tiles // HK, rank // tiles % HK, rank % tiles, tiles,
            queries, ring, full, empty,
            K, RATIO, HQ, HK, ROWS, SCALE, V_SCALE, GATE_STRIDE, GATE_OFFSET, WHOLE,
        )  # fmt: skip
