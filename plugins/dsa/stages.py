"""What each plugin layer of DSA computes, in torch: `plugins.dsa.reference` cut like the kernels.

Names of tensors and attributes are those of `plugins.dsa.plugin`. Where a kernel leaves something
unwritten, the values here are one of the possible ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plugins.dsa import plan, reference
from plugins.dsa.plan import WindowTiles

Tensors = Mapping[str, Tensor]
Attributes = Mapping[str, Any]

# Stands for minus infinity: the difference of two of them is 0, not NaN.
_LOWEST = -1e30
_LOG2_E = 1 / math.log(2)


def _visible(t: Tensors, steps: int) -> Tensor:
    return reference.visible_counts(t["past"], t["new"], steps)


def _scale(a: Attributes) -> float:
    return float((a["nope"] + a["rope"]) ** -0.5)


def score(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Scores of every token, also of those that a query does not see."""
    scores = reference.index_scores(t["index_query"], t["index_keys"][:, 0], t["head_weights"])
    return {"scores": scores}


def select_chunk(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The best visible tokens of every run of `chunk` tokens."""
    scores, size = t["scores"], a["chunk"]
    visible = _visible(t, scores.shape[1])
    chosen = []
    for index in range(a["chunks"]):
        first = index * size
        part = scores[..., first : first + size]
        ids = reference.select_tokens(part, (visible - first).clamp(0, size), a["kept"])
        chosen.append(torch.where(ids < 0, -1, ids + first))
    return {"chosen": torch.cat(chosen, 2).flatten(0, 1)}


def select_among(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The best of every run of `chunk` candidates, which ascend, with -1 in between."""
    scores = t["scores"].flatten(0, 1)
    tokens = scores.shape[1]
    chosen = []
    for run in t["candidates"].split(a["chunk"], 1):
        # Candidates in front, still ascending, so that places order like tokens.
        ordered = torch.where(run < 0, tokens, run).sort(1).values.long()
        found = scores.gather(1, ordered.clamp_max(tokens - 1))
        places = reference.select_tokens(found, (run >= 0).sum(1), a["kept"])
        best = ordered.gather(1, places.clamp_min(0).long())
        chosen.append(torch.where(places < 0, -1, best).to(torch.int32))
    return {"chosen": torch.cat(chosen, 1)}


def _list(t: Tensors) -> Tensor:
    """The tokens of every query, -1 behind the last."""
    tokens = t["tokens"]
    order = torch.arange(tokens.shape[2], device=tokens.device)
    return torch.where(order < _visible(t, tokens.shape[1])[..., None], tokens, -1)


def attend(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Gated absorbed attention over every query's tokens."""
    out = reference.latent_attention(
        t["q_latent"], t["q_rope"], t["cache"][:, 0], _list(t), scale=_scale(a), gate=t["gate"]
    )
    return {"out": out}


def attend_split(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The same over runs of every token list, to be merged."""
    return _runs(t, a, _list(t))


def attend_pair(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """`attend`, and what the programs of two runs give to each other: the first run the second half
    of its channels, the second run the first half.
    """
    runs = _runs(t, {**a, "splits": plan.HOPPER_PAIR}, _list(t))
    first, second = runs["partial"].unbind(2)
    half = a["latent"] // 2
    given = torch.stack([first[..., half:], second[..., :half]], 2)
    return {**attend(t, a), "partial": given, "partial_lse": runs["partial_lse"]}


def _runs(t: Tensors, a: Attributes, tokens: Tensor) -> dict[str, Tensor]:
    """Attention over runs of lists int32 [B, S, any], in which -1 stands for no token."""
    run = -(-tokens.shape[2] // a["splits"])
    tokens = torch.nn.functional.pad(tokens, (0, run * a["splits"] - tokens.shape[2]), value=-1)
    parts = [
        reference.latent_part(t["q_latent"], t["q_rope"], t["cache"][:, 0], part, scale=_scale(a))
        for part in tokens.split(run, dim=2)
    ]
    return {
        "partial": torch.stack([out for out, _ in parts], 2),
        "partial_lse": torch.stack([lse for _, lse in parts], 2).clamp_min(_LOWEST),
    }


def merge(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The gated sum of the runs, weighted by what each run saw."""
    weight = torch.softmax(t["partial_lse"] * math.log(2), dim=2)
    joined = (t["partial"] * weight[..., None]).sum(2)
    gate = t["gate"]
    return {"out": (joined * torch.sigmoid(gate.float())[..., None]).to(gate.dtype)}


def _window_rows(t: Tensors, a: Attributes, steps: int) -> Tensor:
    return reference.window_rows(
        t["past"],
        t["new"],
        t["base"],
        queries=steps,
        window=a["window"],
        rows=t["cache"].shape[2],
    )


def window(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Gated absorbed attention over every query's window."""
    out = reference.latent_attention(
        t["q_latent"],
        t["q_rope"],
        t["cache"][:, 0],
        _window_rows(t, a, t["q_latent"].shape[1]),
        scale=_scale(a),
        gate=t["gate"],
    )
    return {"out": out}


def window_split(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The same over runs of every window, to be merged."""
    return _runs(t, a, _window_rows(t, a, t["q_latent"].shape[1]))


def _blocks(x: Tensor, queries: int) -> Tensor:
    """[B, S, ...] in blocks of queries, [B, blocks, queries, ...], padded with zeros."""
    short = -x.shape[1] % queries
    padding = x.new_zeros((x.shape[0], short, *x.shape[2:]))
    return torch.cat([x, padding], 1).unflatten(1, (-1, queries))


def window_scores(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Exponentials of a span's scores, relative to the maximum of each tile of it.

    A block of queries sees the span of tokens that any of them sees; query q of the block those
    from entry q on.
    """
    queries, width = a["queries"], a["window"]
    steps, heads = t["q_latent"].shape[1:3]
    tiles = WindowTiles(queries=queries)
    count = plan.window_tiles(_geometry(a), tiles)
    ids = _window_rows(t, a, steps)
    batch = torch.arange(ids.shape[0], device=ids.device)[:, None, None]
    rows = t["cache"][:, 0][batch, ids.clamp_min(0).long()].float()
    query = torch.cat([t["q_latent"], t["q_rope"]], -1).float()
    logits = torch.einsum("bshd,bswd->bshw", query, rows) * (_scale(a) * _LOG2_E)
    logits = logits.masked_fill(ids[:, :, None] < 0, float("-inf"))
    blocks = _blocks(logits, queries)
    real = _blocks((ids >= 0)[:, :, None].expand_as(logits).to(torch.int8), queries)
    shape = (*blocks.shape[:3], plan.power(heads), count * tiles.tokens)
    spread = blocks.new_full(shape, float("-inf"))
    for place in range(queries):
        part = torch.where(real[:, :, place] > 0, blocks[:, :, place], float("-inf"))
        spread[:, :, place, :heads, place : place + width] = part
    by_tile = spread.flatten(2, 3).unflatten(-1, (count, tiles.tokens))
    highest = by_tile.amax(-1).clamp_min(_LOWEST)
    weight = (by_tile - highest[..., None]).exp2()
    return {
        "probabilities": weight.flatten(-2).to(t["q_latent"].dtype),
        "tile_max": highest.transpose(-1, -2).contiguous(),
        "tile_sum": weight.sum(-1).transpose(-1, -2).contiguous(),
    }


def _geometry(a: Attributes) -> plan.Geometry:
    names = plan.Geometry.__dataclass_fields__
    return plan.Geometry(**{name: a[name] for name in names})


def window_values(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The exponentials times the latents of their span, normalised and gated."""
    queries, heads, latent = a["queries"], a["heads"], a["latent"]
    cache, gate = t["cache"][:, 0], t["gate"]
    batch, steps = gate.shape[:2]
    tiles = t["tile_max"].shape[2]
    tokens = t["probabilities"].shape[-1] // tiles
    highest = t["tile_max"].amax(2, keepdim=True)
    factor = (t["tile_max"] - highest).exp2()
    normalizer = (t["tile_sum"] * factor).sum(2)
    weight = t["probabilities"].float().unflatten(-1, (tiles, tokens))
    weight = (weight * factor.transpose(-1, -2)[..., None]).flatten(-2)
    weight = weight / torch.where(normalizer > 0, normalizer, 1.0)[..., None]
    # Cache rows of every block's span.
    device = cache.device
    first = torch.arange(weight.shape[1], device=device) * queries
    entry = torch.arange(weight.shape[-1], device=device)
    past = t["past"].long()[:, None, None]
    position = past + first[:, None] - (a["window"] - 1) + entry
    row = (position.clamp_min(0) - t["base"].long()[:, None, None]) % cache.shape[1]
    present = (position >= 0) & (entry < a["window"] - 1 + queries)
    present &= (first < t["new"][:, None])[..., None]
    rows = cache[torch.arange(batch, device=device)[:, None, None], row][..., :latent].float()
    rows = rows.masked_fill(~present[..., None], 0.0)
    mixed = torch.einsum("bqmn,bqnl->bqml", weight, rows)
    mixed = mixed.unflatten(2, (queries, -1))[:, :, :, :heads].flatten(1, 2)[:, :steps]
    out = mixed * torch.sigmoid(gate.float())[..., None]
    return {"out": out.masked_fill(_visible(t, steps)[..., None, None] == 0, 0.0).to(gate.dtype)}


def dense(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Gated attention over expanded keys and values; with a window, row j is the token at position
    past - (W - 1) + j.
    """
    steps, nope = t["q_nope"].shape[1], a["nope"]
    visible, first, width = _visible(t, steps), None, None
    if a["window"]:
        width = a["window"]
        step = torch.arange(steps, device=visible.device)
        visible = torch.where(visible > 0, step + width, 0)
        first = width - 1 - t["past"]
    out = reference.expanded_attention(
        t["q_nope"],
        t["q_rope"],
        reference.Expanded(t["expanded"][..., :nope], t["expanded"][..., nope:]),
        t["cache"][:, 0, : t["expanded"].shape[1], a["latent"] :],
        visible,
        scale=_scale(a),
        window=width,
        first=first,
        gate=t["gate"],
    )
    return {"out": out}


DEFINITIONS: dict[str, Callable[[Tensors, Attributes], dict[str, Tensor]]] = {
    "score": score,
    "select_chunk": select_chunk,
    "select_among": select_among,
    "attend": attend,
    "attend_pair": attend_pair,
    "attend_split": attend_split,
    "merge": merge,
    "window_scores": window_scores,
    "window_values": window_values,
    "window": window,
    "window_split": window_split,
    "dense": dense,
}
