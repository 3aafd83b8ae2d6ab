"""What each plugin layer of QSA computes, in torch: `plugins.qsa.reference` cut like the kernels.

Names of tensors and attributes are those of `plugins.qsa.plugin`. Where a kernel leaves something
unwritten, or two of them share work in a way that only their sum defines, the values here are one
of the possible ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plugins.qsa import plan, reference
from plugins.qsa.plan import Geometry

Tensors = Mapping[str, Tensor]
Attributes = Mapping[str, Any]

# Stands for minus infinity: the difference of two of them is 0, not NaN.
_LOWEST = -1e30


def _positions(t: Tensors, steps: int) -> Tensor:
    """Positions of the queries, int32 [B, S], -1 for padding."""
    step = torch.arange(steps, device=t["past"].device)
    return torch.where(step < t["new"][:, None], t["past"][:, None] + step, -1).to(torch.int32)


def _visible(t: Tensors, steps: int, ratio: int) -> Tensor:
    return reference.visible_blocks(_positions(t, steps), ratio)


def score(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Scores of every block, also of those that a query does not see."""
    return {"scores": reference.block_scores(t["index_query"], t["index_keys"])}


def select(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The best visible blocks."""
    visible = _visible(t, t["scores"].shape[1], a["layer_ratio"])
    return {"ids": reference.select_blocks(t["scores"], visible, a["layer_blocks"])}


def select_chunk(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The best visible blocks of every run of `chunk` blocks."""
    scores, size = t["scores"], a["chunk"]
    visible = _visible(t, scores.shape[1], a["layer_ratio"])
    parts = []
    for index in range(a["chunks"]):
        first = index * size
        ids = reference.select_blocks(
            scores[..., first : first + size], (visible - first).clamp(0, size), a["layer_blocks"]
        )
        parts.append(torch.where(ids < 0, -1, ids + first))
    return {"candidates": torch.stack(parts, 2)}


def select_among(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The best of the candidates; they come in ascending order, unused ones in between."""
    candidates = t["candidates"].flatten(2)
    known = t["scores"].gather(2, candidates.clamp_min(0).long())
    known = known.masked_fill(candidates < 0, float("-inf"))
    order = known.sort(dim=-1, descending=True, stable=True).indices[..., : a["layer_blocks"]]
    last = torch.iinfo(torch.int32).max
    ids = candidates.gather(2, order)
    ids = torch.where(ids < 0, last, ids).sort(dim=-1).values
    return {"ids": torch.where(ids == last, -1, ids)}


def _gate(t: Tensors, a: Attributes) -> Tensor:
    """[B, S, Hq * D], also where each head's gate lies behind its query columns."""
    if not a["interleaved_gate"]:
        return t["gate"]
    both = t["gate"].unflatten(-1, (a["layer_heads"], 2, a["layer_width"]))
    return both[:, :, :, 1].flatten(2)


def _part(t: Tensors, a: Attributes, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over blocks int32 [B, S, n] and the tail: [B, S, Hq, D], lse [B, S, Hq]."""
    tokens = reference.expand_tokens(blocks, _positions(t, t["q"].shape[2]), a["layer_ratio"])
    return _over(t, a, tokens)


def _over(t: Tensors, a: Attributes, tokens: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = reference.attend_part(
        t["q"],
        t["k_cache"],
        t["v_cache"],
        tokens,
        scale=a["layer_width"] ** -0.5 * a["layer_k_scale"],
    )
    return out * a["layer_v_scale"], lse


def _gated(t: Tensors, a: Attributes, out: Tensor) -> Tensor:
    return (out.flatten(2) * torch.sigmoid(_gate(t, a).float())).to(t["gate"].dtype)


def attend(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Gated attention over the selected blocks and the tail."""
    return {"out": _gated(t, a, _part(t, a, t["blocks"])[0])}


def attend_split(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The same over runs of every token list, to be merged."""
    positions = _positions(t, t["q"].shape[2])
    tokens = reference.expand_tokens(t["blocks"], positions, a["layer_ratio"])
    run = -(-tokens.shape[-1] // a["splits"])
    tokens = torch.nn.functional.pad(tokens, (0, run * a["splits"] - tokens.shape[-1]), value=-1)
    parts = [_over(t, a, part) for part in tokens.split(run, dim=-1)]
    return {
        "partial": torch.stack([out.flatten(0, 1) for out, _ in parts]),
        "partial_lse": torch.stack([lse.flatten(0, 1) for _, lse in parts]).clamp_min(_LOWEST),
    }


def merge(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The gated sum of the runs, weighted by what each run saw."""
    weight = torch.softmax(t["partial_lse"] * math.log(2), dim=0)
    joined = (t["partial"] * weight[..., None]).sum(0)
    return {"out": _gated(t, a, joined.unflatten(0, t["gate"].shape[:2]))}


def unite(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Per tile of neighbouring queries each of their blocks once, with a bit per query."""
    rows, words, blocks = a["tile_rows"], a["words"], t["blocks"]
    batch, steps, kept = blocks.shape
    tiles = -(-steps // rows)
    real = _positions(t, steps)[..., None] >= 0
    blocks = torch.where(real, blocks, -1)
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, tiles * rows - steps), value=-1)
    blocks = blocks.unflatten(1, (tiles, rows)).long()
    # One more word for the unused entries.
    marks = torch.zeros(batch, tiles, words + 1, dtype=torch.int32, device=blocks.device)
    for row in range(rows):
        chosen = blocks[:, :, row]
        bit = torch.full_like(chosen, 1 << row, dtype=torch.int32)
        marks.scatter_add_(2, torch.where(chosen < 0, words, chosen), bit)
    marks = marks[..., :words]
    first = (marks == 0).to(torch.int32).sort(dim=-1, stable=True).indices[..., : rows * kept]
    entries = (first << rows | marks.gather(2, first)).to(torch.int32)
    entries = torch.nn.functional.pad(entries, (0, rows * kept - entries.shape[-1]))
    return {"counts": (marks != 0).sum(-1).to(torch.int32), "entries": entries, "marks": marks}


def _together(t: Tensors, a: Attributes) -> Tensor:
    """Which queries belong to a tile that is walked together: bool [B, S, 1]."""
    limit = plan.union_limit(_geometry(a), a["tile_rows"])
    steps = t["q"].shape[2]
    return (t["counts"] <= limit).repeat_interleave(a["tile_rows"], 1)[:, :steps, None]


def _geometry(a: Attributes) -> Geometry:
    return Geometry(**{name[6:]: value for name, value in a.items() if name.startswith("layer_")})


def attend_tile(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Attention of the tiles whose union is short; zeros elsewhere."""
    rows, steps = a["tile_rows"], t["q"].shape[2]
    entries = t["entries"]
    listed = torch.arange(entries.shape[-1], device=entries.device) < t["counts"][..., None]
    bits = torch.arange(rows, device=entries.device, dtype=torch.int32)[:, None]
    mine = listed[:, :, None] & ((entries[:, :, None] >> bits) & 1 != 0)
    blocks = torch.where(mine, entries[:, :, None] >> rows, -1).flatten(1, 2)[:, :steps]
    out = _gated(t, a, _part(t, a, blocks)[0])
    return {"out": torch.where(_together(t, a), out, torch.zeros_like(out))}


def attend_apart(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Attention of all other tiles, query by query, added to what `attend_tile` made."""
    out = _gated(t, a, _part(t, a, t["blocks"])[0])
    t["together"].copy_(torch.where(_together(t, a), t["together"], out))
    return {}


DEFINITIONS: dict[str, Callable[[Tensors, Attributes], dict[str, Tensor]]] = {
    "score": score,
    "select": select,
    "select_chunk": select_chunk,
    "select_among": select_among,
    "attend": attend,
    "attend_split": attend_split,
    "attend_once": attend_split,
    "merge": merge,
    "unite": unite,
    "attend_tile": attend_tile,
    "attend_apart": attend_apart,
}
