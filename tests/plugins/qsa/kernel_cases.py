"""The QSA kernels in Triton's interpreter, against the definition.

Run by test_kernels.py in a process of its own: the interpreter must be chosen before a kernel is
imported, and other tests compile the same kernels.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugins.qsa import kernel, plan, reference
from plugins.qsa.kernel import DecodePlan, PrefillPlan
from plugins.qsa.plan import Geometry, Rotary, Tiles
from plugins.support.errors import UsageError

G = Geometry(
    heads=6, kv_heads=2, width=32, index_heads=4, index_width=32, ratio=4, blocks=8,
    dtype="float32", cache_dtype="float32",
)  # fmt: skip
NAN = float("nan")
TILES = Tiles(16, 4, 1)
PLANS = {
    "whole": DecodePlan(TILES, 1),
    "split": DecodePlan(TILES, 2),
    # More splits than tiles: most are empty, and a program of the sum takes half of the channels.
    "many": DecodePlan(TILES, 8),
    "once": DecodePlan(TILES, plan.once_splits(G, 16), once=True),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def near(got: Tensor, want: Tensor, bound: float = 2e-5) -> None:
    assert torch.isfinite(got).all()
    assert (got.float() - want.float()).abs().max() <= bound


def positions(past: Tensor, new: Tensor, steps: int) -> Tensor:
    step = torch.arange(steps)
    return torch.where(step < new[:, None], past[:, None] + step, -1)


def chosen(position: Tensor, g: Geometry = G) -> Tensor:
    """Random selections: ids ascending, -1 behind the last."""
    visible = reference.visible_blocks(position, g.ratio)
    count = max(int(visible.max()), 1)
    return reference.select_blocks(torch.rand(*position.shape, count), visible, g.blocks)


def sparse(path: Path, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Zeros in a sparse file: only what is touched takes memory."""
    size = math.prod(shape)
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)


def call(past: Tensor, new: Tensor, steps: int, context: int, g: Geometry = G) -> tuple:
    """Queries, caches whose unwritten rows are NaN, selections, gate and the expected output."""
    batch = len(past)
    query = torch.randn(batch, g.heads, steps, g.width)
    keys, values = torch.randn(2, batch, g.kv_heads, context, g.width)
    for slot in range(batch):
        written = int(past[slot] + new[slot])
        keys[slot, :, written:] = NAN
        values[slot, :, written:] = NAN
    gate = torch.randn(batch, steps, g.heads * g.width)
    position = positions(past, new, steps)
    blocks = chosen(position, g)
    # A padding query's ids must not matter.
    noisy = torch.where(position[..., None] < 0, 3, blocks)
    tokens = reference.expand_tokens(blocks, position, g.ratio)
    finite = (keys.nan_to_num(), values.nan_to_num())
    want = reference.attend(query, *finite, tokens, scale=g.width**-0.5, gate=gate)
    return query, keys, values, noisy, gate, want


# -- scores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("long", [False, True])
def test_scores_of_visible_blocks(steps: int, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if long:
        monkeypatch.setattr(kernel, "SELECT_WHOLE", 32)
    past, new = ints(0, 39, 150), ints(steps, 0, max(1, steps - 1))
    query, keys = torch.randn(3, 4, steps, 32), torch.randn(3, 50, 32)
    got, maxima = kernel.score(G, query, keys, past, new)
    assert got.shape[-1] == 52
    got = got[..., :50]
    want = reference.block_scores(query, keys)
    visible = reference.visible_blocks(positions(past, new, steps), G.ratio)
    seen = torch.arange(50) < visible[..., None]
    near(got[seen], want[seen])
    assert (got[seen] - want.roll(1, dims=-1)[seen]).abs().max() > 0.1
    assert (maxima is not None) == long
    if maxima is not None:
        # 50 blocks: the last group is not whole.
        wanted = maxima_of(want, visible, 4)
        shown = wanted < 99
        near(maxima[shown], wanted[shown])


# -- selection -------------------------------------------------------------------------------------


def scored(kind: str, shape: tuple[int, ...]) -> Tensor:
    scores = torch.randn(shape).relu()
    if kind == "ties":
        return (scores * 2).round() / 2
    if kind == "zeros":
        return torch.where(torch.rand(shape) < 0.5, 0.0, -0.0)
    if kind == "close":
        # Neighbouring floats: their patterns differ in the last bits only.
        return (torch.randint(0, 40, shape, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    if kind == "runs":
        # The best blocks are neighbours, as in text; one outlier widens the range of the patterns.
        scores[..., 40:60] += 2
        scores[..., 3] = 3e38
        return scores
    return scores


def widened(rows: Tensor) -> Tensor:
    """Rows of scores of a length that is a multiple of 4; what is behind must not be chosen."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 4), value=99.0)


def maxima_of(scores: Tensor, visible: Tensor, group: int) -> Tensor:
    """Largest visible score of each group; of the others something that must not be chosen."""
    count = scores.shape[-1]
    seen = torch.arange(count) < visible[..., None]
    scores = torch.nn.functional.pad(scores.masked_fill(~seen, 0.0), (0, -count % group))
    grouped = scores.unflatten(-1, (-1, group))
    hidden = torch.arange(grouped.shape[-2]) * group >= visible[..., None]
    return widened(grouped.amax(-1).masked_fill(hidden, 99.0))


@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "close", "runs"])
@pytest.mark.parametrize("group", [0, 4, 16])
def test_selection_is_exact_and_lowest_id_wins(
    kind: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if group:
        monkeypatch.setattr(kernel, "SELECT_WHOLE", 32)
        monkeypatch.setattr(kernel, "SELECT_GROUPS", 128 // group)
    # No block, fewer than the budget, exactly it, one more, many; a padding row.
    past, new = ints(2, 4 * 7, 4 * 8 - 1, 4 * 8 + 3, 290, 50, 399), ints(1, 1, 1, 1, 1, 0, 1)
    scores = scored(kind, (7, 1, 101))
    visible = reference.visible_blocks(positions(past, new, 1), G.ratio)
    assert kernel.group_size(101) == group
    maxima = maxima_of(scores, visible, group) if group else None
    got = kernel.select(G, widened(scores), maxima, past, new)
    assert torch.equal(got, reference.select_blocks(scores.abs(), visible, G.blocks))
    if kind in ("ties", "zeros"):
        flipped = reference.select_blocks(scores.abs().flip(-1), visible * 0 + 101, G.blocks)
        assert not torch.equal(got[6], 100 - flipped[6].flip(-1))


@pytest.mark.parametrize("group", [0, 4])
def test_scores_that_are_no_numbers_spoil_their_own_row_only(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if group:
        monkeypatch.setattr(kernel, "SELECT_WHOLE", 32)
        monkeypatch.setattr(kernel, "SELECT_GROUPS", 128 // group)
    past, new = ints(399, 399, 399, 399), ints(1, 1, 1, 1)
    scores = torch.rand(4, 1, 101)
    scores[1][torch.rand(1, 101) < 0.5] = float("nan")
    scores[2] = float("inf")
    visible = reference.visible_blocks(positions(past, new, 1), G.ratio)
    # Maxima that leave NaN out, as the largest of numbers does on a GPU.
    maxima = maxima_of(scores.nan_to_num(0.0), visible, group) if group else None
    tensors = {"scores": widened(scores), "past": past, "new": new}
    if maxima is not None:
        tensors["maxima"] = maxima
    room = torch.full((6, 1, G.blocks), -7, dtype=torch.int32)
    spec = kernel.select_spec(G, 104)
    spec.launch(tensors | {"ids": room[1:5]}, {"S": 1, "NB": 104, "rows": 4})
    assert (room[0] == -7).all() and (room[5] == -7).all()
    for row in room[1:5, 0]:
        assert len(row.unique()) == G.blocks and row.min() >= 0 and row.max() < 100
    wanted = reference.select_blocks(scores, visible, G.blocks)
    assert torch.equal(room[1:5][[0, 2, 3]], wanted[[0, 2, 3]])


def test_selection_with_few_blocks_and_many_steps() -> None:
    past, new, steps = ints(0, 9), ints(6, 6), 6
    scores = torch.rand(2, steps, 5)
    visible = reference.visible_blocks(positions(past, new, steps), G.ratio)
    got = kernel.select(G, widened(scores), None, past, new)
    assert torch.equal(got, reference.select_blocks(scores, visible, G.blocks))


def test_scores_and_selection_of_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SELECT_WHOLE", 32)
    monkeypatch.setattr(kernel, "SELECT_GROUPS", 16)
    past, new, steps, count = ints(590, 77, 3), ints(5, 2, 5), 5, 152
    assert kernel.group_size(count) == 16
    query, keys = torch.randn(3, 4, steps, 32), torch.randn(3, count, 32)
    scores, maxima = kernel.score(G, query, keys, past, new)
    visible = reference.visible_blocks(positions(past, new, steps), G.ratio)
    got = kernel.select(G, scores, maxima, past, new)
    seen = torch.arange(count) < visible[..., None]
    want = reference.select_blocks(scores.masked_fill(~seen, 0.0), visible, G.blocks)
    assert torch.equal(got, want)


def far_slots(count: int, valid: int) -> tuple[Tensor, Tensor]:
    """Lengths of slots of which only the first and the last one are in use."""
    past, new = torch.zeros(2, count, dtype=torch.int32)
    past[0], past[-1] = 60, 180
    new[0], new[-1] = valid, valid
    return past, new


def test_scores_beyond_32_bit_offsets(tmp_path: Path) -> None:
    g = replace(G, dtype="float16", cache_dtype="float16")
    slots, steps, count = 65, 32, 2**20
    assert min(slots * count * g.index_width, slots * steps * count) > 2**31
    past, new = far_slots(slots, 3)
    keys = sparse(tmp_path / "keys", slots, count, g.index_width)
    query = torch.zeros(slots, 4, steps, g.index_width, dtype=torch.float16)
    for slot in (0, -1):
        keys[slot, :50] = torch.randn(50, g.index_width).half()
        query[slot, :, :3] = torch.randn(4, 3, g.index_width).half()
    tensors = {"index_query": query, "index_keys": keys, "past": past, "new": new}
    for name in ("scores", "maxima"):
        tensors[name] = sparse(tmp_path / name, slots, steps, count, dtype=torch.float32)
    # Groups of one block: as many maxima as scores.
    spec = plan.score_blocks(g, steps, Tiles(64, 4, 1), group=1)
    spec.launch(tensors, {"S": steps, "NB": count, "tiles": count // 64, "batch": slots})
    ends = torch.tensor([0, slots - 1])
    want = reference.block_scores(query[ends].float(), keys[ends, :50].float())[:, :3]
    seen = torch.arange(50) < reference.visible_blocks(
        positions(past[ends], new[ends], 3), G.ratio
    ).unsqueeze(-1)
    for name in ("scores", "maxima"):
        near(tensors[name][ends, :3, :50][seen], want[seen], 1e-3)
    assert (tensors["scores"][ends, :3, :50] - want.flip(0))[seen].abs().max() > 0.1


@pytest.mark.parametrize("group", [0, 4])
def test_selection_beyond_32_bit_offsets(group: int, tmp_path: Path) -> None:
    slots, count = 33, 2**26 * max(1, group)
    assert slots * count // max(1, group) > 2**31
    past, new = far_slots(slots, 1)
    scores = sparse(tmp_path / "scores", slots, 1, count, dtype=torch.float32)
    tensors = {"scores": scores, "past": past, "new": new}
    visible = reference.visible_blocks(positions(past, new, 1), G.ratio)
    ends = torch.tensor([0, slots - 1])
    scores[ends, :, :48] = scored("random", (2, 1, 48))
    want = reference.select_blocks(scores[ends, :, :48], visible[ends], G.blocks)
    if group:
        maxima = sparse(tmp_path / "maxima", slots, 1, count // group, dtype=torch.float32)
        maxima[ends, :, :12] = maxima_of(scores[ends, :, :48], visible[ends], group)
        tensors["maxima"] = maxima
        spec = plan.select_grouped(G, 16, group, 1)
    else:
        spec = plan.select_row(G, 64, 1)
    tensors["ids"] = torch.full((slots, 1, G.blocks), 7, dtype=torch.int32)
    spec.launch(tensors, {"S": 1, "NB": count, "rows": slots})
    assert torch.equal(tensors["ids"][ends], want)
    assert (tensors["ids"][1:-1] == -1).all()
    assert not torch.equal(want[0], want[1])


# -- decode ----------------------------------------------------------------------------------------

# Only tails; the first blocks; the last position where all blocks are kept; the first real choice.
BORDERS = (0, 1, 2, 3, 4, 7, 30, 31, 34, 35, 36, 93)


@pytest.mark.parametrize("how", PLANS)
def test_decode_at_every_border(how: str) -> None:
    past, new = ints(*BORDERS), torch.ones(len(BORDERS), dtype=torch.int32)
    new[5] = 0
    query, keys, values, blocks, gate, want = call(past, new, 1, 96)
    got = kernel.attend_decode(G, query, keys, values, blocks, past, new, gate, PLANS[how])
    near(got, want)
    assert (got[5] == 0).all()
    wrong = kernel.attend_decode(
        G, query, keys, values, (blocks + 1).clamp_max(7), past, new, gate, PLANS[how]
    )
    assert (wrong[-1] - want[-1]).abs().max() > 1e-2


def test_decode_of_several_tokens_with_an_interleaved_gate() -> None:
    past, new, steps = ints(33, 61, 12), ints(3, 4, 0), 4
    query, keys, values, blocks, gate, want = call(past, new, steps, 68)
    wide = torch.randn(3, steps, G.heads, 2, G.width)
    wide[:, :, :, 1] = gate.view(3, steps, G.heads, G.width)
    got = kernel.attend_decode(
        G, query, keys, values, blocks, past, new, wide.flatten(2), PLANS["whole"]
    )
    near(got, want)
    assert (got[2] == 0).all()


@pytest.mark.parametrize("how", ["whole", "split"])
def test_decode_over_float8_caches(how: str) -> None:
    g = replace(G, k_scale=0.5, v_scale=0.25)
    past, new = ints(2, 35, 60), ints(1, 1, 1)
    query, keys, values, blocks, gate, _ = call(past, new, 1, 64)
    keys8 = (keys / g.k_scale).to(torch.float8_e4m3fn)
    values8 = (values / g.v_scale).to(torch.float8_e4m3fn)
    wide = (keys8.float() * g.k_scale).nan_to_num(), (values8.float() * g.v_scale).nan_to_num()
    tokens = reference.expand_tokens(blocks, positions(past, new, 1), g.ratio)
    want = reference.attend(query, *wide, tokens, scale=g.width**-0.5, gate=gate)
    got = kernel.attend_decode(g, query, keys8, values8, blocks, past, new, gate, PLANS[how])
    near(got, want)
    unscaled = kernel.attend_decode(G, query, keys8, values8, blocks, past, new, gate, PLANS[how])
    assert (unscaled - want).abs().max() > 1e-2


@pytest.mark.parametrize("how", PLANS)
def test_decode_beyond_32_bit_offsets(how: str, tmp_path: Path) -> None:
    g = replace(G, heads=2, kv_heads=1, dtype="float16", cache_dtype="float16")
    rows = 2**31 // g.width + 100
    keys, values = (sparse(tmp_path / name, 2, 1, rows, g.width) for name in ("keys", "values"))
    past, new = ints(3, rows - 2), ints(1, 1)
    last = (rows - 1) // g.ratio
    blocks = torch.full((2, 1, g.blocks), -1, dtype=torch.int32)
    blocks[0, 0, 0] = 0
    blocks[1, 0] = torch.arange(last - g.blocks, last)
    tokens = reference.expand_tokens(blocks, positions(past, new, 1), g.ratio)
    for slot in range(2):
        used = tokens[slot, 0][tokens[slot, 0] >= 0].long()
        keys[slot, 0, used] = torch.randn(len(used), g.width).half()
        values[slot, 0, used] = torch.randn(len(used), g.width).half()
    query, gate = torch.randn(2, 2, 1, g.width).half(), torch.randn(2, 1, 2 * g.width).half()
    got = kernel.attend_decode(g, query, keys, values, blocks, past, new, gate, PLANS[how])
    want = reference.attend(query, keys, values, tokens, scale=g.width**-0.5, gate=gate)
    near(got, want, 2e-3)
    assert (got - want.flip(0)).abs().max() > 1e-2


def test_a_cache_of_another_type_is_refused() -> None:
    past, new = ints(5), ints(1)
    query, keys, values, blocks, gate, _ = call(past, new, 1, 8)
    with pytest.raises(UsageError, match="element type"):
        kernel.attend_decode(G, query, keys.half(), values.half(), blocks, past, new, gate)


# -- prefill ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("alike", [True, False])
def test_prefill_with_shared_and_with_different_selections(rows: int, alike: bool) -> None:
    g = replace(G, blocks=16)
    past, new, steps = ints(50, 403), ints(9, 11), 11
    query, keys, values, blocks, gate, want = call(past, new, steps, 416, g)
    position = positions(past, new, steps)
    if alike:
        scores = torch.rand(2, 1, 104).expand(2, steps, 104)
        blocks = reference.select_blocks(scores, position.add(1) // g.ratio, g.blocks)
        finite = (keys.nan_to_num(), values.nan_to_num())
        tokens = reference.expand_tokens(blocks, position, g.ratio)
        want = reference.attend(query, *finite, tokens, scale=g.width**-0.5, gate=gate)
    # Queries within the budget do not read their ids.
    blocks[0, : 4 * 16 + 3 - 50] = 7
    counts, _ = kernel.unite(g, blocks, past, new, rows, 104)
    apart = bool((counts.sum(-1) > plan.union_limit(g, rows)).any())
    assert apart != alike
    how = PrefillPlan(rows, TILES, TILES, TILES, lines=16)
    got = kernel.attend_prefill(g, query, keys, values, blocks, past, new, gate, how)
    near(got, want)
    assert (got[0, 9:] == 0).all()
    other = kernel.attend_prefill(
        g, query, keys, values, (blocks - 1).clamp_min(0), past, new, gate, how
    )
    assert (other - want).abs().amax((0, 2))[-1] > 1e-2


@pytest.mark.parametrize("past", [0, 5, 26, 34, 35])
def test_prefill_within_the_budget_is_causal_attention(past: int) -> None:
    # The budget of 8 blocks and 3 tokens is used up within the chunk, at its border or before it.
    steps, start = 10, ints(past, 0)
    new = ints(10, 3)
    query, keys, values, blocks, gate, _ = call(start, new, steps, 48)
    position = positions(start, new, steps)
    visible = reference.visible_blocks(position, G.ratio)
    finite = (keys.nan_to_num(), values.nan_to_num())
    tokens = reference.expand_tokens(blocks, position, G.ratio)
    want = reference.attend(query, *finite, tokens, scale=G.width**-0.5, gate=gate)
    causal = torch.arange(48).expand(2, steps, 48)
    causal = torch.where(causal <= position[..., None], causal, -1)
    dense = reference.attend(query, *finite, causal, scale=G.width**-0.5, gate=gate)
    within = visible <= G.blocks
    near(want[within], dense[within])
    how = PrefillPlan(4, TILES, TILES, TILES, lines=16)
    got = kernel.attend_prefill(G, query, keys, values, blocks, start, new, gate, how)
    near(got, want)
    assert (got[1, 3:] == 0).all()


def test_union_names_each_block_once_with_its_queries() -> None:
    past, new, steps, rows = ints(100), ints(7), 9, 4
    blocks = chosen(positions(past, new, steps))
    counts, entries = kernel.unite(G, blocks, past, new, rows, 32)
    for tile in range(3):
        wanted: dict[int, int] = {}
        for row in range(rows):
            if tile * rows + row < 7:
                for block in blocks[0, tile * rows + row].tolist():
                    wanted[block] = wanted.get(block, 0) | 1 << row
        runs: list[list[int]] = [[], [], []]
        for block, bits in sorted(wanted.items()):
            run = 0 if bits < 4 else 1 if bits % 4 == 0 else 2
            runs[run].append(block << rows | bits)
        for run in range(3):
            assert entries[0, tile, run, : counts[0, tile, run]].tolist() == runs[run]
    assert counts[0, 2].tolist() == [0, 0, 0]


def test_prefill_beyond_32_bit_offsets(tmp_path: Path) -> None:
    g = replace(G, heads=2, kv_heads=1, dtype="float16", cache_dtype="float16")
    rows = 2**31 // g.width + 100
    keys, values = (sparse(tmp_path / name, 2, 1, rows, g.width) for name in ("keys", "values"))
    # The second slot lies behind the border; it crosses the budget, the first one is past it.
    past, new, steps = ints(60, 30), ints(8, 8), 8
    keys[:, :, :68] = torch.randn(2, 1, 68, g.width).half()
    values[:, :, :68] = torch.randn(2, 1, 68, g.width).half()
    query = torch.randn(2, 2, steps, g.width).half()
    gate = torch.randn(2, steps, 2 * g.width).half()
    position = positions(past, new, steps)
    blocks = chosen(position, g)
    tokens = reference.expand_tokens(blocks, position, g.ratio)
    want = reference.attend(query, keys, values, tokens, scale=g.width**-0.5, gate=gate)
    how = PrefillPlan(4, TILES, TILES, TILES, lines=16)
    got = kernel.attend_prefill(g, query, keys, values, blocks, past, new, gate, how)
    near(got, want, 2e-3)
    first = reference.attend(
        query, keys[:1].expand(2, -1, -1, -1), values[:1].expand(2, -1, -1, -1), tokens,
        scale=g.width**-0.5, gate=gate,
    )  # fmt: skip
    assert (got[1] - first[1]).abs().max() > 1e-2


@pytest.mark.parametrize("together", [True, False])
def test_prefill_of_tokens_beyond_32_bit_offsets(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = replace(G, heads=2, kv_heads=1, dtype="float16", cache_dtype="float16")
    rows, steps, tile = 2**31 // g.width + 100, 4, 4
    keys, values = (sparse(tmp_path / name, 1, 1, rows, g.width) for name in ("keys", "values"))
    past, new = ints(rows - 8), ints(steps)
    # The same blocks for all queries, on both sides of the border.
    chosen_blocks = torch.cat([torch.arange(3, 7), torch.arange(rows // 4 - 9, rows // 4 - 5)])
    blocks = chosen_blocks.to(torch.int32).expand(1, steps, g.blocks).contiguous()
    tokens = reference.expand_tokens(blocks, positions(past, new, steps), g.ratio)
    used = tokens[tokens >= 0].unique().long()
    keys[0, 0, used] = torch.randn(len(used), g.width).half()
    values[0, 0, used] = torch.randn(len(used), g.width).half()
    # The union, whose working space would be 67 MB here. What is taken row by row needs its length.
    counts = ints(0, 0, g.blocks if together else 99).view(1, 1, 3)
    entries = torch.zeros(1, 1, 3, tile // 2 * g.blocks, dtype=torch.int32)
    entries[0, 0, 2, : g.blocks] = (chosen_blocks << tile) | 2**tile - 1
    monkeypatch.setattr(kernel, "unite", lambda *_: (counts, entries))
    query, gate = (
        torch.randn(1, 2, steps, g.width).half(),
        torch.randn(1, steps, 2 * g.width).half(),
    )
    how = PrefillPlan(tile, TILES, TILES, TILES, lines=16)
    got = kernel.attend_prefill(g, query, keys, values, blocks, past, new, gate, how)
    want = reference.attend(query, keys, values, tokens, scale=g.width**-0.5, gate=gate)
    near(got, want, 2e-3)
    near_ones = torch.where(tokens < 2**31 // g.width, tokens, -1)
    wrapped = reference.attend(query, keys, values, near_ones, scale=g.width**-0.5, gate=gate)
    assert (got - wrapped).abs().max() > 1e-2


# -- prepare ---------------------------------------------------------------------------------------

EPS, THETA = 1e-6, 1e4


def layer(batch: int, tokens: int) -> tuple[Any, Any, Any]:
    draws = (
        torch.randn(batch, tokens, G.heads * 2 * G.width),
        torch.randn(batch, tokens, G.kv_heads * G.width),
        torch.randn(batch, tokens, G.kv_heads * G.width),
        torch.randn(batch, tokens, (G.index_heads + 1) * G.index_width),
    )
    weights = tuple(torch.randn(n) * 0.2 for n in (32, 32, 32, 32))
    frequencies = 1.0 / THETA ** (torch.arange(0, 16, 2).float() / 16)
    return draws, weights, (frequencies, frequencies)


def empty_caches(batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple:
    shape = (batch, G.kv_heads, tokens, G.width)
    blocks = torch.full((batch, tokens // G.ratio, G.index_width), NAN)
    return torch.zeros(shape).to(dtype), torch.zeros(shape).to(dtype), blocks


def test_prepare_in_chunks_is_prepare_at_once() -> None:
    tokens, rotary = 14, Rotary(16, 16)
    draws, weights, frequencies = layer(1, tokens)
    caches, state = empty_caches(1, 16), torch.zeros(1, 3, G.index_width)
    queries, index_queries, done = [], [], 0
    for valid, padded in ((3, 3), (1, 2), (5, 8), (1, 1), (4, 4)):
        part: Any = tuple(
            torch.nn.functional.pad(d[:, done : done + valid], (0, 0, 0, padded - valid), value=9.0)
            for d in draws
        )
        past, new = ints(done), ints(valid)
        got = kernel.prepare(G, rotary, EPS, part, weights, frequencies, caches, state, past, new)
        state = got.index_state
        queries.append(got.query[:, :, :valid])
        index_queries.append(got.index_query[:, :, :valid])
        done += valid
    want = reference.prepare(
        *draws, q_norm=weights[0], k_norm=weights[1], index_q_norm=weights[2],
        positions=torch.arange(tokens)[None], rotary_dim=16, index_rotary_dim=16,
        theta=THETA, eps=EPS,
    )  # fmt: skip
    near(torch.cat(queries, 2), want.query)
    near(torch.cat(index_queries, 2), want.index_query)
    near(caches[0][:, :, :tokens], want.key)
    near(caches[1][:, :, :tokens], want.value, 0.0)
    assert (caches[0][:, :, tokens:] == 0).all()
    pooled = reference.pool_index_keys(
        want.index_key, weights[3], ratio=4, rotary_dim=16, theta=THETA, eps=EPS
    )
    near(caches[2][:, :3], pooled)
    assert caches[2][:, 3:].isnan().all()
    near(state, want.index_key[:, -3:], 0.0)
    wrong = reference.pool_index_keys(
        want.index_key.roll(1, 1), weights[3], ratio=4, rotary_dim=16, theta=THETA, eps=EPS
    )
    assert (caches[2][:, :3] - wrong).abs().max() > 1e-2


def test_prepare_leaves_a_padding_slot_alone() -> None:
    draws, weights, frequencies = layer(2, 2)
    caches, state = empty_caches(2, 8), torch.randn(2, 3, G.index_width)
    got = kernel.prepare(
        G, Rotary(16, 16), EPS, draws, weights, frequencies, caches, state, ints(3, 3), ints(2, 0)
    )
    assert torch.equal(got.index_state[1], state[1])
    assert not torch.equal(got.index_state[0], state[0])
    assert (caches[0][1] == 0).all() and caches[2][1].isnan().all()
    assert (got.query[1] == 0).all()


@pytest.mark.parametrize("reset", [True, False])
def test_prepare_in_a_used_slot_is_prepare_in_a_fresh_one(reset: bool) -> None:
    """Caches and state still hold another sequence, of which no value may come through."""
    weights, frequencies = layer(1, 1)[1:]
    old, own = layer(1, 9)[0], layer(1, 9)[0]
    made = []
    for used in (True, False):
        caches, state = empty_caches(1, 20), torch.zeros(1, 3, G.index_width)
        begin = 0
        for draws in (old, own) if used else (own,):
            queries = []
            for start, stop in ((0, 2), (2, 9)):
                part = tuple(d[:, start:stop].contiguous() for d in draws)
                got = kernel.prepare(
                    G, Rotary(16, 16), EPS, part, weights, frequencies, caches, state,
                    ints(begin + start), ints(stop - start),
                )  # fmt: skip
                state = got.index_state
                queries.append((got.query, got.index_query))
            # Negative control: one that goes on where the other sequence ended.
            begin = 0 if reset else 9
        parts = [torch.cat(both, 2) for both in zip(*queries, strict=True)]
        made.append([*parts, state, *(c[..., :9, :] for c in caches[:2]), caches[2][:, :2]])
    same = [torch.equal(a, b) for a, b in zip(*made, strict=True)]
    # Raw keys of the state are neither normed nor rotated.
    assert same == ([True] * 6 if reset else [False, False, True, False, False, False])


def test_prepare_beyond_32_bit_offsets(tmp_path: Path) -> None:
    """The first slot is that long itself, the second one lies behind it."""
    g = replace(G, kv_heads=1, index_width=128, dtype="float16", cache_dtype="float16")
    rows = 2**31 // g.width + 128
    blocks = rows // g.ratio
    # Sparse files: only the rows that are touched take memory.
    keys, values, index_keys = (
        torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=torch.float16)
        for name, size in (
            ("keys", 2 * rows * g.width),
            ("values", 2 * rows * g.width),
            ("index_keys", 2 * blocks * g.index_width),
        )
    )
    caches = (
        keys.view(2, 1, rows, g.width),
        values.view(2, 1, rows, g.width),
        index_keys.view(2, blocks, g.index_width),
    )
    past = ints(rows - 8, 4)
    draws = tuple(
        torch.randn(2, 4, n).half()
        for n in (g.heads * 2 * g.width, g.width, g.width, (g.index_heads + 1) * g.index_width)
    )
    weights: Any = tuple((torch.randn(n) * 0.2).half() for n in (32, 32, 128, 128))
    frequencies = layer(1, 1)[2]
    kernel.prepare(
        g, Rotary(16, 16), EPS, draws, weights, frequencies, caches,
        torch.zeros(2, 3, g.index_width).half(), past, ints(4, 4),
    )  # fmt: skip
    rank = positions(past, ints(4, 4), 4)
    want = reference.prepare(
        *draws, q_norm=weights[0], k_norm=weights[1], index_q_norm=weights[2], positions=rank,
        rotary_dim=16, index_rotary_dim=16, theta=THETA, eps=EPS,
    )  # fmt: skip
    for slot in range(2):
        pooled = reference.pool_index_keys(
            want.index_key[slot : slot + 1], weights[3], ratio=4, rotary_dim=16, theta=THETA,
            eps=EPS, first_block=int(past[slot]) // 4,
        )  # fmt: skip
        near(caches[0][slot, :, rank[slot]], want.key[slot], 2e-2)
        near(caches[1][slot, :, rank[slot]], want.value[slot], 0.0)
        near(caches[2][slot, rank[slot, :1] // 4], pooled[0], 2e-2)
    assert (caches[1][0, :, rank[0]] - want.value[1]).abs().max() > 1e-1
    # What a wrapped offset would have hit.
    assert (keys[: 4 * g.width] == 0).all() and (index_keys[: 4 * g.index_width] == 0).all()


def test_prepare_with_three_axes_and_positions_across_calls() -> None:
    tokens, rotary = 8, Rotary(16, 16, axes=3, sections=(3, 3, 2))
    draws, weights, frequencies = layer(1, tokens)
    axes = torch.randint(0, 90, (3, 1, tokens), dtype=torch.int32)
    caches, state = empty_caches(1, 8), torch.zeros(1, 3, G.index_width)
    seen = torch.zeros(1, 3, 3, dtype=torch.int32)
    queries = []
    for start, stop in ((0, 3), (3, 8)):
        part = tuple(d[:, start:stop].contiguous() for d in draws)
        got = kernel.prepare(
            G, rotary, EPS, part, weights, frequencies, caches, state, ints(start),
            ints(stop - start), axes[:, :, start:stop].contiguous(), seen,
        )  # fmt: skip
        state, seen = got.index_state, got.position_state
        queries.append(got.query)
    # Frequencies 0..7 turn by T H W T H W T H.
    axis = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    angles = axes[axis].permute(1, 2, 0).float() * frequencies[0]
    cos, sin = angles.cos(), angles.sin()
    heads = draws[0].view(1, tokens, G.heads, 2, G.width)[:, :, :, 0]
    normed = reference.centered_rms_norm(heads, weights[0], EPS)
    want = reference.rotate(normed, cos[:, :, None], sin[:, :, None]).transpose(1, 2)
    near(torch.cat(queries, 2), want)
    raw = draws[3][..., -G.index_width :]
    mean = raw.view(1, 2, 4, G.index_width).mean(2)
    pooled = reference.rotate(
        reference.centered_rms_norm(mean, weights[3], EPS), cos[:, ::4], sin[:, ::4]
    )
    near(caches[2], pooled)
    assert torch.equal(seen, axes[:, :, -3:].permute(1, 2, 0))


def test_prepare_saturates_float8_caches() -> None:
    g = replace(G, cache_dtype="float8_e4m3fn", k_scale=0.001, v_scale=0.5)
    draws, weights, frequencies = layer(1, 4)
    # Values that e4m3 holds: the interpreter does not round like a GPU (1.97 becomes 1, not 2).
    drawn = torch.randn(1, 4, G.kv_heads * G.width)
    stored = torch.where(drawn.abs() < 2**-6, 1.0, drawn).to(torch.float8_e4m3fn)
    draws = (*draws[:2], stored.float() * g.v_scale, draws[3])
    caches = empty_caches(1, 4, torch.float8_e4m3fn)
    kernel.prepare(
        g, Rotary(16, 16), EPS, draws, weights, frequencies, caches,
        torch.zeros(1, 3, G.index_width), ints(0), ints(4),
    )  # fmt: skip
    wanted = stored.view(1, 4, G.kv_heads, G.width).transpose(1, 2).float()
    assert torch.equal(caches[1].float(), wanted)
    # The keys' scale is far too small on purpose.
    assert caches[0].float().abs().max() == 448 and caches[0].float().isfinite().all()


def test_prepare_in_bfloat16() -> None:
    g = replace(G, dtype="bfloat16", cache_dtype="bfloat16")
    draws, weights, frequencies = layer(1, 4)
    draws = tuple(d.bfloat16() for d in draws)
    weights = tuple(w.bfloat16() for w in weights)
    caches = tuple(c.bfloat16() for c in empty_caches(1, 4))
    got = kernel.prepare(
        g, Rotary(16, 16), EPS, draws, weights, frequencies, caches,
        torch.zeros(1, 3, G.index_width, dtype=torch.bfloat16), ints(0), ints(4),
    )  # fmt: skip
    want = reference.prepare(
        *draws, q_norm=weights[0], k_norm=weights[1], index_q_norm=weights[2],
        positions=torch.arange(4)[None], rotary_dim=16, index_rotary_dim=16, theta=THETA, eps=EPS,
    )  # fmt: skip
    # The interpreter truncates where a GPU rounds: three times one unit in the last place.
    for out, right in ((got.query, want.query), (caches[0], want.key)):
        assert ((out - right).abs() <= 3 * 2**-7 * right.abs() + 2**-6).all()
    assert not torch.equal(caches[0], want.key.roll(1, -1))


def test_positions_belong_to_three_axes() -> None:
    draws, weights, frequencies = layer(1, 1)
    with pytest.raises(UsageError, match="three axes"):
        kernel.prepare(
            G, Rotary(16, 16, axes=3), EPS, draws, weights, frequencies, empty_caches(1, 4),
            torch.zeros(1, 3, G.index_width), ints(0), ints(1),
        )  # fmt: skip


# -- the whole layer -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_random_layers_with_reused_slots(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    g = Geometry(
        heads=draw.choice([2, 6]), kv_heads=draw.choice([1, 2]), width=32,
        index_heads=draw.choice([2, 4]), index_width=draw.choice([16, 32]),
        ratio=draw.choice([2, 4]), blocks=draw.choice([4, 8]), dtype="float32",
        cache_dtype="float32",
    )  # fmt: skip
    if draw.random() < 0.5:
        monkeypatch.setattr(kernel, "SELECT_WHOLE", 8)
    context, rotary = 64, Rotary(16, 16)
    widths = (
        g.heads * 2 * g.width, g.kv_heads * g.width, g.kv_heads * g.width,
        (g.index_heads + 1) * g.index_width,
    )  # fmt: skip
    sizes = (g.width, g.width, g.index_width, g.index_width)
    weights: Any = tuple(torch.randn(n) * 0.2 for n in sizes)
    frequencies = 1.0 / THETA ** (torch.arange(0, 16, 2).float() / 16)
    caches: Any = (
        torch.full((2, g.kv_heads, context, g.width), NAN),
        torch.full((2, g.kv_heads, context, g.width), NAN),
        torch.full((2, context // g.ratio, g.index_width), NAN),
    )
    state = torch.randn(2, g.ratio - 1, g.index_width)
    history = [torch.empty(0, sum(widths)) for _ in range(2)]
    for turn in range(4):
        if turn == 2:
            # Another sequence in the same slot; nothing of the old one is cleared.
            history[0] = history[0][:0]
        lengths = [draw.randint(0, 14) for _ in range(2)]
        steps = max(*lengths, 1) + draw.randint(0, 2)
        past, new = ints(*(len(h) for h in history)), ints(*lengths)
        fresh = torch.randn(2, steps, sum(widths))
        history = [torch.cat([h, f[:n]]) for h, f, n in zip(history, fresh, lengths, strict=True)]
        parts: Any = tuple(part.contiguous() for part in fresh.split(widths, dim=-1))
        made = kernel.prepare(
            g, rotary, EPS, parts, weights, (frequencies, frequencies), caches, state, past, new
        )
        state = made.index_state
        gate = parts[0].view(2, steps, g.heads, 2, g.width)[:, :, :, 1].flatten(2)
        scores, maxima = kernel.score(g, made.index_query, caches[2], past, new)
        blocks = kernel.select(g, scores, maxima, past, new)
        call = (g, made.query, *caches[:2], blocks, past, new, gate)
        once = replace(PLANS["once"], splits=plan.once_splits(g, TILES.columns))
        how_decoded = draw.choice([PLANS["whole"], PLANS["split"], once])
        decoded = kernel.attend_decode(*call, how_decoded)
        how = PrefillPlan(draw.choice([2, 4]), TILES, TILES, TILES, lines=16)
        prefilled = kernel.attend_prefill(*call, how)
        for slot, length in enumerate(lengths):
            assert (decoded[slot, length:] == 0).all() and (prefilled[slot, length:] == 0).all()
            if not length:
                continue
            rank = torch.arange(len(history[slot]))[None]
            whole = [part[None] for part in history[slot].split(widths, dim=-1)]
            right = reference.prepare(
                *whole, q_norm=weights[0], k_norm=weights[1], index_q_norm=weights[2],
                positions=rank, rotary_dim=16, index_rotary_dim=16, theta=THETA, eps=EPS,
            )  # fmt: skip
            pooled = reference.pool_index_keys(
                right.index_key, weights[3], ratio=g.ratio, rotary_dim=16, theta=THETA, eps=EPS
            )
            want = reference.sparse_attention(
                right.query, right.key, right.value, right.index_query, pooled, rank,
                selection=reference.Selection(g.ratio, g.blocks), scale=g.width**-0.5,
                gate=right.gate,
            )[0, -length:]  # fmt: skip
            near(decoded[slot, :length], want, 1e-4)
            near(prefilled[slot, :length], want, 1e-4)
            assert (decoded[slot, :length] - want.roll(1, -1)).abs().max() > 1e-2
