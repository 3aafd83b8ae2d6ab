"""The DSA kernels in Triton's interpreter: slots used again, caches of more than 2^31 elements.

Run by test_kernels.py, like kernel_cases.py. Large tensors are sparse files: only the rows that are
touched take memory. An offset computed in 32 bits would wrap to before the first element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plugins.dsa import kernel, plan, reference
from plugins.dsa.plan import AttendTiles, DenseTiles, Geometry, IndexTiles, WindowTiles
from tests.plugins.dsa.kernel_cases import FULL, NAN, SLIDING, ints, queries

LIMIT = 2**31
ATTEND = kernel.AttendPlan(AttendTiles(16, 16, 4, 2), 1)
WINDOW = WindowTiles(queries=1, tokens=16, reduction=16, channels=32)
DENSE = DenseTiles(queries=16, tokens=16)
# A sequence in one slot: tokens cached before the call, tokens of the call.
State = tuple[int, int]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


# Slots used again ---------------------------------------------------------------------------


def _used_again(call: Callable[[Tensor, State], Tensor], cache: Tensor, fresh_rows: Tensor) -> None:
    """A short sequence in a slot where a long one was gives every bit of a slot never used.

    Args:
        call: the kernels on a cache [1, 1, C, width] and the sequence's state.
        cache: holds a long sequence of C - 2 tokens, finite and plausible to the last row.
        fresh_rows: [n, width], the short sequence's rows, at the start of the slot.
    """
    rows, count = cache.shape[-2], len(fresh_rows)
    call(cache, (rows - 2, 2))
    cache[0, 0, :count] = fresh_rows
    unused = torch.full_like(cache, NAN)
    unused[0, 0, :count] = fresh_rows
    state = (count - 2, 2)
    got = call(cache, state)
    assert torch.equal(got, call(unused, state))
    assert torch.isfinite(got).all()
    # One token of the former sequence too many is seen.
    wrong = call(cache, (count - 1, 2))
    assert (wrong.float() - got.float()).abs().max() > 1e-3


@pytest.mark.parametrize("count", [5, 16, 17, 40], ids=lambda n: f"{n} tokens")
def test_scores_selection_and_attention_of_a_slot_used_again(count: int) -> None:
    rows = 100
    query = torch.randn(1, 2, FULL.index_heads, FULL.index_width)
    weights = torch.randn(1, 2, FULL.index_heads)
    q = queries(FULL, 1, 2)
    both = FULL.index_width + FULL.latent + FULL.rope

    def call(caches: Tensor, state: State) -> Tensor:
        past, new = ints(state[0]), ints(state[1])
        keys = caches[..., : FULL.index_width].contiguous()
        cache = caches[..., FULL.index_width :].contiguous()
        tiles = IndexTiles(2, 16, 4, 2)
        scores = kernel.score(FULL, query, keys, weights, past, new, tiles=tiles, runs=2)
        tokens = kernel.select(FULL, scores, past, new)
        visible = reference.visible_counts(past, new, 2)
        want = reference.select_tokens(
            reference.index_scores(query, keys[:, 0], weights).nan_to_num(), visible, FULL.kept
        )
        assert torch.equal(tokens, want)
        return kernel.attend(
            FULL, q["q_latent"], q["q_rope"], cache, tokens, past, new, q["gate"], ATTEND
        )

    # The former sequence's keys win everywhere, were they looked at.
    cache = torch.randn(1, 1, rows, both)
    cache[..., : FULL.index_width] *= 10
    _used_again(call, cache, torch.randn(count, both))


@pytest.mark.parametrize("rows", [12, 60], ids=["ring", "linear"])
@pytest.mark.parametrize("count", [3, 9, 11], ids=lambda n: f"{n} tokens")
def test_window_of_a_slot_used_again(rows: int, count: int) -> None:
    q = queries(SLIDING, 1, 2)

    def call(cache: Tensor, state: State) -> Tensor:
        past, new = ints(state[0]), ints(state[1])
        return kernel.attend_window(
            SLIDING, q["q_latent"], q["q_rope"], cache, past, new, ints(0), q["gate"], WINDOW
        )

    width = SLIDING.latent + SLIDING.rope
    _used_again(call, torch.randn(1, 1, rows, width), torch.randn(count, width))


@pytest.mark.parametrize("count", [3, 16, 17], ids=lambda n: f"{n} tokens")
def test_dense_attention_over_a_slot_used_again(count: int) -> None:
    g = FULL
    q_nope, q_rope = torch.randn(1, 2, g.heads, g.nope), torch.randn(1, 2, g.heads, g.rope)
    gate, both = torch.randn(1, 2, g.heads), g.heads * (g.nope + g.value)

    def call(caches: Tensor, state: State) -> Tensor:
        expanded = caches[:, 0, :, :both].reshape(1, -1, g.heads, g.nope + g.value)
        cache = caches[..., both:].contiguous()
        past, new = ints(state[0]), ints(state[1])
        return kernel.attend_dense(g, q_nope, q_rope, expanded, cache, past, new, gate, DENSE)

    width = both + g.latent + g.rope
    _used_again(call, torch.randn(1, 1, 40, width), torch.randn(count, width))


# Offsets beyond 32 bits ---------------------------------------------------------------------


def _sparse_file(path: Path, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    size = 1
    for extent in shape:
        size *= extent
    assert size > LIMIT
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).reshape(shape)


def _far(got: Tensor, want: Tensor) -> None:
    """Half-precision inputs, float32 sums: the last slot's result is there and right."""
    assert got[-1].float().abs().max() > 0.05
    assert (got.float() - want.float()).abs().max() < 5e-3
    # Slots are different: reading another one's rows would be noticed.
    assert (want[-1].float() - want[0].float()).abs().max() > 0.05


def test_index_scores_far_away(tmp_path: Path) -> None:
    g, slots, count = replace(FULL, dtype="float16"), 3, 40
    # The last slot's keys, and its scores, lie behind 2^31 elements.
    rows, columns = LIMIT // 2 // g.index_width + 10, LIMIT // 2 + 16
    keys = _sparse_file(tmp_path / "keys", slots, 1, rows, g.index_width)
    scores = _sparse_file(tmp_path / "scores", slots, 1, columns, dtype=torch.float32)
    keys[:, 0, :count] = torch.randn(slots, count, g.index_width).half()
    inputs = {
        "index_query": torch.randn(slots, 1, g.index_heads, g.index_width).half(),
        "index_keys": keys,
        "head_weights": torch.randn(slots, 1, g.index_heads).half(),
    }
    call = {"past": ints(*[count - 1] * slots), "new": ints(*[1] * slots)}
    sizes = {"S": 1, "C": rows, "N": columns, "run": columns, "B": slots}
    plan.score_tokens(g, IndexTiles(1, 16, 4, 2)).launch(
        {**inputs, **call, "scores": scores}, sizes
    )
    want = reference.index_scores(inputs["index_query"], keys[:, 0, :count], inputs["head_weights"])
    _far(scores[..., :count], want)


def test_selection_far_away(tmp_path: Path) -> None:
    rows, count, chunk, columns = 3, 60, 32, LIMIT // 2 + 16
    scores = _sparse_file(tmp_path / "scores", rows, 1, columns, dtype=torch.float32)
    scores[..., :count] = torch.randn(rows, 1, count)
    past, new = ints(*[count - 1] * rows), ints(*[1] * rows)
    sizes = {"S": 1, "N": columns, "rows": rows, "chunks": 2, "width": 2 * FULL.kept, "parts": 1}
    found = torch.empty(rows, 2 * FULL.kept, dtype=torch.int32)
    plan.select_chunk(FULL, chunk).launch(
        {"scores": scores, "past": past, "new": new, "chosen": found}, sizes
    )
    chosen = torch.empty(rows, 1, FULL.kept, dtype=torch.int32)
    plan.select_among(FULL, chunk).launch(
        {"scores": scores, "candidates": found, "chosen": chosen}, sizes
    )
    visible = reference.visible_counts(past, new, 1)
    want = reference.select_tokens(scores[..., :count], visible, FULL.kept)
    assert torch.equal(chosen, want)
    assert not torch.equal(want[-1], want[0])


def _halves(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.half() for name, value in values.items()}


def _latent_cache(path: Path, g: Geometry) -> tuple[Tensor, int]:
    """Two slots of float16 [2, 1, rows, L + R], each longer than 2^31 elements."""
    width = g.latent + g.rope
    rows = LIMIT // width + 100
    return _sparse_file(path, 2, 1, rows, width), rows


def _attention(g: Geometry, call: dict[str, Tensor], cache: Tensor, rows: Tensor) -> Tensor:
    return reference.latent_attention(
        call["q_latent"].float(),
        call["q_rope"].float(),
        cache[:, 0],
        rows,
        scale=g.scale,
        gate=call["gate"],
    )


@pytest.mark.parametrize("splits", [1, 2])
def test_sparse_attention_far_away(splits: int, tmp_path: Path) -> None:
    g = replace(FULL, dtype="float16")
    cache, rows = _latent_cache(tmp_path / "cache", g)
    call = _halves(queries(g, 2, 1))
    past, new = ints(3, rows - 1), ints(1, 1)
    tokens = torch.full((2, 1, g.kept), -1, dtype=torch.int32)
    tokens[0, 0, :4] = torch.arange(4)
    tokens[1, 0] = torch.arange(rows - g.kept, rows)
    cache[0, 0, :4] = torch.randn(4, cache.shape[-1]).half()
    cache[1, 0, rows - g.kept :] = torch.randn(g.kept, cache.shape[-1]).half()
    how = replace(ATTEND, splits=splits)
    got = kernel.attend(
        g, call["q_latent"], call["q_rope"], cache, tokens, past, new, call["gate"], how
    )
    _far(got, _attention(g, call, cache, tokens))


def test_window_far_away(tmp_path: Path) -> None:
    g = replace(SLIDING, dtype="float16")
    cache, rows = _latent_cache(tmp_path / "cache", g)
    call = _halves(queries(g, 2, 2))
    # The second slot's window ends with the last row, and goes on with the first one.
    past, new, base = ints(6, rows - 1), ints(2, 2), ints(0, 0)
    ids = reference.window_rows(past, new, base, queries=2, window=g.window, rows=rows)
    for slot in range(2):
        used = ids[slot].unique()
        used = used[used >= 0].long()
        cache[slot, 0, used] = torch.randn(len(used), cache.shape[-1]).half()
    got = kernel.attend_window(
        g, call["q_latent"], call["q_rope"], cache, past, new, base, call["gate"], WINDOW
    )
    _far(got, _attention(g, call, cache, ids))


def test_dense_attention_far_away(tmp_path: Path) -> None:
    g, slots, steps, count = replace(FULL, dtype="float16"), 3, 4, 20
    both, width = g.nope + g.value, g.latent + g.rope
    # The last slot's expanded rows, and its rotary keys, lie behind 2^31 elements.
    rows, cached = LIMIT // 2 // (g.heads * both) + 10, LIMIT // 2 // width + 10
    expanded = _sparse_file(tmp_path / "expanded", slots, rows, g.heads, both)
    cache = _sparse_file(tmp_path / "cache", slots, 1, cached, width)
    expanded[:, :count] = torch.randn(slots, count, g.heads, both).half()
    cache[:, 0, :count] = torch.randn(slots, count, width).half()
    past, new = ints(*[count - steps] * slots), ints(*[steps] * slots)
    call = _halves(
        {
            "q_nope": torch.randn(slots, steps, g.heads, g.nope),
            "q_rope": torch.randn(slots, steps, g.heads, g.rope),
            "gate": torch.randn(slots, steps, g.heads),
        }
    )
    inputs = {**call, "expanded": expanded, "cache": cache, "past": past, "new": new}
    out = torch.full((slots, steps, g.heads, g.value), NAN, dtype=torch.float16)
    plan.attend_dense(g, DENSE).launch(
        {**inputs, "out": out}, {"S": steps, "N": rows, "C": cached, "B": slots}
    )
    seen = expanded[:, :count].float()
    want = reference.expanded_attention(
        call["q_nope"].float(),
        call["q_rope"].float(),
        reference.Expanded(seen[..., : g.nope], seen[..., g.nope :]),
        cache[:, 0, :count, g.latent :].float(),
        reference.visible_counts(past, new, steps),
        scale=g.scale,
        window=None,
        gate=call["gate"],
    )
    _far(out, want)
