"""The DSA kernels in Triton's interpreter, against the definition.

Run by test_kernels.py in a process of its own: the interpreter must be chosen before a kernel is
imported, and other tests compile the same kernels.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from plugins.dsa import kernel, plan, reference
from plugins.dsa.plan import AttendTiles, DenseTiles, Geometry, IndexTiles, WindowTiles

FULL = Geometry(
    heads=6, latent=40, rope=8, nope=16, value=20, index_heads=5, index_width=24, kept=16,
    dtype="float32",
)  # fmt: skip
SLIDING = Geometry(heads=5, latent=56, rope=8, nope=24, value=20, kept=0, window=9, dtype="float32")
NAN = float("nan")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def near(got: Tensor, want: Tensor) -> None:
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() < 2e-5


def queries(g: Geometry, batch: int, steps: int) -> dict[str, Tensor]:
    return {
        "q_latent": torch.randn(batch, steps, g.heads, g.latent),
        "q_rope": torch.randn(batch, steps, g.heads, g.rope),
        "gate": torch.randn(batch, steps, g.heads),
    }


@pytest.mark.parametrize("steps", [1, 3])
def test_index_scores(steps: int) -> None:
    rows, past, new = 70, ints(60, 0, 33), ints(steps, 1, 0)
    query = torch.randn(3, steps, FULL.index_heads, FULL.index_width)
    keys = torch.randn(3, 1, rows, FULL.index_width)
    weights = torch.randn(3, steps, FULL.index_heads)
    seen = torch.arange(rows) < reference.visible_counts(past, new, steps)[..., None]
    want = reference.index_scores(query, keys[:, 0], weights)
    for tiles in (IndexTiles(1, 16, 4, 2), IndexTiles(2, 32, 4, 2)):
        got = kernel.score(FULL, query, keys, weights, past, new, tiles=tiles, runs=2)
        near(got[seen], want[seen])
        # Unsigned weights are a typical mistake.
        wrong = kernel.score(FULL, query, keys, weights.abs(), past, new, tiles=tiles)
        assert (wrong[seen] - want[seen]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("chunk", "levels"),
    [
        (32768, [(128, 1)]),
        (32, [(32, 4), (32, 2), (32, 1)]),
        # No longer than what is kept.
        (8, [(16, 7), (32, 4), (32, 2), (32, 1)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["signed", "ties", "negative", "equal"])
def test_selection(
    chunk: int, levels: list[tuple[int, int]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "SELECT_CHUNK", chunk)
    monkeypatch.setattr(kernel, "SELECT_CHUNK_FEW", chunk)
    # Several parts of a chunk, that the running counts go on over.
    monkeypatch.setattr(plan, "SELECT_PART", 16)
    assert kernel.select_levels(FULL, 12, 100) == levels
    # Around the budget of 16, and past several chunks.
    past, new, steps = ints(0, 14, 15, 16, 98, 40), ints(1, 2, 2, 2, 2, 0), 2
    scores = torch.randn(6, steps, 100)
    if kind == "ties":
        scores = (scores * 2).round() / 2
        scores[scores == 0] *= -1.0
    elif kind == "negative":
        scores = -scores.abs() - 1.0
    elif kind == "equal":
        scores = torch.full_like(scores, -0.25)
    visible = reference.visible_counts(past, new, steps)
    got = kernel.select(FULL, scores, past, new)
    want = reference.select_tokens(scores, visible, FULL.kept)
    assert torch.equal(got, want)
    if kind != "equal":
        assert not torch.equal(kernel.select(FULL, -scores, past, new), want)


def test_selection_is_cut_for_the_number_of_rows() -> None:
    real = Geometry()
    assert kernel.select_levels(real, 1, 32768) == [(8192, 4), (8192, 1)]
    assert kernel.select_levels(real, 33, 32768) == [(8192, 4), (8192, 1)]
    assert kernel.select_levels(real, 34, 32768) == [(32768, 1)]
    assert kernel.select_levels(real, 128, 131072) == [(32768, 4), (8192, 1)]
    assert kernel.select_levels(real, 1, 524288) == [(8192, 64), (8192, 16), (8192, 4), (8192, 1)]
    assert kernel.select_levels(real, 1, 100) == [(2048, 1)]
    wide = replace(real, kept=16384)
    assert kernel.select_levels(wide, 1, 40000) == [(16384, 3), (32768, 2), (32768, 1)]


@pytest.mark.parametrize("splits", [1, 3])
def test_sparse_attention(splits: int) -> None:
    past, new, steps, rows = ints(0, 14, 15, 16, 50, 9), ints(1, 2, 2, 2, 1, 0), 2, 60
    call = queries(FULL, 6, steps)
    cache = torch.randn(6, 1, rows, FULL.latent + FULL.rope)
    visible = reference.visible_counts(past, new, steps)
    # What lies behind a slot's tokens is another sequence's, or was never written.
    for slot, count in enumerate((past + new).tolist()):
        cache[slot, 0, count:] = NAN
    tokens = reference.select_tokens(torch.randn(6, steps, rows), visible, FULL.kept)
    how = kernel.AttendPlan(AttendTiles(16, 16, 4, 2), splits)

    def attend(g: Geometry) -> Tensor:
        return kernel.attend(
            g, call["q_latent"], call["q_rope"], cache, tokens, past, new, call["gate"], how
        )

    want = reference.latent_attention(
        call["q_latent"], call["q_rope"], cache[:, 0], tokens, scale=FULL.scale, gate=call["gate"]
    )
    got = attend(FULL)
    near(got, want)
    assert not got[5].any() and not got[0, 1].any() and not got[4, 1].any()
    # The scale of the latent instead of the expanded head is a typical mistake.
    assert (attend(replace(FULL, nope=FULL.latent)) - want).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("rows", "base"),
    [(12, (0, 0, 0)), (60, (0, 0, 0)), (16, (30, 0, 3))],
    ids=["ring", "linear", "moving base"],
)
@pytest.mark.parametrize("block", [1, 4])
def test_window_attention(rows: int, base: tuple[int, ...], block: int) -> None:
    steps = 3
    for past in ((39, 4, 9), (39, 7, 8)):
        past_lengths, new = ints(*past), ints(3, 2, 0)
        call = queries(SLIDING, 3, steps)
        cache = torch.randn(3, 1, rows, SLIDING.latent + SLIDING.rope)
        cache[2] = NAN
        tiles = WindowTiles(queries=block, tokens=16, reduction=16, channels=32)
        args = (call["q_latent"], call["q_rope"], cache, past_lengths, new, ints(*base))
        got = kernel.attend_window(SLIDING, *args, call["gate"], tiles)
        ids = reference.window_rows(
            past_lengths, new, ints(*base), queries=steps, window=SLIDING.window, rows=rows
        )
        want = reference.latent_attention(
            call["q_latent"],
            call["q_rope"],
            cache[:, 0],
            ids,
            scale=SLIDING.scale,
            gate=call["gate"],
        )
        near(got, want)
        assert not got[2].any() and not got[1, 2].any()
        # One token less (512 instead of 513) is a typical mistake.
        shorter = replace(SLIDING, window=SLIDING.window - 1)
        wrong = kernel.attend_window(shorter, *args, call["gate"], tiles)
        assert (wrong[0] - want[0]).abs().max() > 1e-3


@pytest.mark.parametrize("g", [FULL, SLIDING], ids=["causal", "window"])
def test_dense_attention(g: Geometry) -> None:
    steps, past, new = 21, ints(30, 4, 0), ints(21, 7, 0)
    rows = (g.window - 1 if g.window else 30) + steps
    q_nope, q_rope = torch.randn(3, steps, g.heads, g.nope), torch.randn(3, steps, g.heads, g.rope)
    expanded = torch.randn(3, rows, g.heads, g.nope + g.value)
    cache = torch.randn(3, 1, rows, g.latent + g.rope)
    gate = torch.randn(3, steps, g.heads)
    tiles = DenseTiles(queries=16, tokens=16)
    got = kernel.attend_dense(g, q_nope, q_rope, expanded, cache, past, new, gate, tiles)
    visible = reference.visible_counts(past, new, steps)
    for slot in range(3):
        # With a window row j stands at position past - (W - 1) + j; rows before 0 do not exist.
        lead = int(past[slot]) - (g.window - 1) if g.window else 0
        skip = max(0, -lead)
        seen = visible[slot : slot + 1]
        both = expanded[slot : slot + 1, skip:]
        want = reference.expanded_attention(
            q_nope[slot : slot + 1],
            q_rope[slot : slot + 1],
            reference.Expanded(both[..., : g.nope], both[..., g.nope :]),
            cache[slot : slot + 1, 0, skip:, g.latent :],
            torch.where(seen > 0, seen - lead - skip, 0),
            scale=g.scale,
            window=g.window or None,
            gate=gate[slot : slot + 1],
        )
        near(got[slot : slot + 1], want)
    assert not got[1, 7:].any() and not got[2].any()
