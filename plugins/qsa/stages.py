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


def _angles(places: Tensor, frequencies: Tensor, a: Attributes) -> tuple[Tensor, Tensor]:
    """cos and sin [..., P] of positions [..., axes] turned by P frequencies.

    Of three axes, frequency i turns by the height position when i % 3 == 1 and
    i < 3 * section_h, by the width position when i % 3 == 2 and i < 3 * section_w, else by the
    temporal one.
    """
    pair = torch.arange(frequencies.shape[0], device=frequencies.device)
    axis = torch.zeros_like(pair)
    if a["axes"] == 3:
        axis[(pair % 3 == 1) & (pair < 3 * a["section_h"])] = 1
        axis[(pair % 3 == 2) & (pair < 3 * a["section_w"])] = 2
    angles = places[..., axis].float() * frequencies
    return angles.cos(), angles.sin()


def _stored(x: Tensor, cache: Tensor, scale: float, a: Attributes) -> Tensor:
    """Values as the cache holds them, in its type; float8 saturates."""
    if a["layer_cache_dtype"] == "float8_e4m3fn":
        most = torch.finfo(torch.float8_e4m3fn).max
        x = (x.float() * (1.0 / scale)).clamp(-most, most)
    return x.to(cache.dtype)


def _write(cache: Tensor, slots: Tensor, places: Tensor, values: Tensor, wanted: Tensor) -> None:
    """Put values [B, S, heads, D] at places [B, S] of a cache [B, heads, C, D] where wanted."""
    places = places.clamp_max(cache.shape[2] - 1)
    values = values.to(cache.dtype)
    if cache.itemsize == 1:
        # Not all of torch knows float8.
        cache, values = cache.view(torch.uint8), values.view(torch.uint8)
    before = cache[slots, :, places]
    cache[slots, :, places] = torch.where(wanted[..., None, None], values, before)


def prepare(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Queries of the new tokens, zero for padding; caches are written in place.

    Where positions have one axis, the kept ones are zeros.
    """
    batch, steps, _ = t["q_gate"].shape
    ratio, eps, device = a["layer_ratio"], a["eps"], t["q_gate"].device
    kept = ratio - 1
    step = torch.arange(steps, device=device)
    real = step < t["new"][:, None]
    # Places of the state's tokens and of this call's, [B, R - 1 + S, axes].
    if a["axes"] == 3:
        places = torch.cat([t["position_state"], t["positions"].permute(1, 2, 0)], 1)
    else:
        places = (t["past"][:, None] + torch.arange(-kept, steps, device=device))[..., None]
    own = places[:, kept:]
    ready = reference.prepare_turned(
        (t["q_gate"], t["key"], t["value"], t["index_qk"]),
        (t["q_weight"], t["k_weight"], t["index_q_weight"]),
        _angles(own, t["frequencies"], a),
        _angles(own, t["index_frequencies"], a),
        eps,
    )
    every = torch.arange(batch, device=device)[:, None]
    # No shape depends on lengths. Padding repeats what the last token writes, which is what was
    # there where nothing is new.
    some = t["new"][:, None] > 0
    token = torch.minimum(step, (t["new"][:, None] - 1).clamp_min(0))
    place = t["past"][:, None] + token
    for name, new, scale in (
        ("key_cache_before", ready.key, a["layer_k_scale"]),
        ("value_cache_before", ready.value, a["layer_v_scale"]),
    ):
        values = _stored(new[every, :, token], t[name], scale, a)
        _write(t[name], every, place, values, some)

    # Every token of a block writes the block's key, once all of the block is there.
    rows = torch.cat([t["index_state"], ready.index_key], 1)
    end = place - place % ratio + kept - t["past"][:, None]
    complete = some & (end < t["new"][:, None])
    end = end.clamp_max(steps - 1)
    # A block begins `kept` rows before its end, which is the end's own index in `rows`.
    members = rows[every[..., None], end[..., None] + torch.arange(ratio, device=device)]
    angles = _angles(places[every, end], t["index_frequencies"], a)
    pooled = reference.pool_blocks(members, t["index_k_weight"], angles, eps)
    _write(t["index_keys_before"], every, place // ratio, pooled[:, :, None], complete)

    last = t["new"][:, None] + torch.arange(kept, device=device)
    shown = real[:, None, :, None]
    return {
        "query": ready.query.masked_fill(~shown, 0.0),
        "index_query": ready.index_query.masked_fill(~shown, 0.0),
        "next_index_state": rows[every, last],
        "next_position_state": (
            places[every, last]
            if a["axes"] == 3
            else torch.zeros(batch, kept, 1, dtype=torch.int32, device=device)
        ),
    }


def score(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Scores of every block, also of those that a query does not see."""
    return {"scores": _padded(reference.block_scores(t["index_query"], t["index_keys"]), 4)}


def _padded(scores: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(scores, (0, -scores.shape[-1] % multiple))


def select(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The best visible blocks."""
    visible = _visible(t, t["scores"].shape[1], a["layer_ratio"])
    return {"ids": reference.select_blocks(t["scores"], visible, a["layer_blocks"])}


def score_groups(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The same, and the largest visible score of every group of blocks."""
    scores = score(t, a)["scores"]
    count, group = scores.shape[-1], a["group"]
    visible = _visible(t, scores.shape[1], a["layer_ratio"])
    seen = torch.arange(count, device=scores.device) < visible[..., None]
    grouped = _padded(scores.masked_fill(~seen, 0.0), group).unflatten(-1, (-1, group))
    return {"scores": scores, "maxima": _padded(grouped.amax(-1), 4)}


def select_grouped(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """The best visible blocks of the best groups."""
    scores, group, kept = t["scores"], a["group"], a["layer_blocks"]
    count = scores.shape[-1]
    visible = _visible(t, scores.shape[1], a["layer_ratio"])
    groups = reference.select_blocks(t["maxima"], (visible + group - 1) // group, kept)
    inside = torch.arange(group, device=scores.device)
    blocks = torch.where(groups[..., None] < 0, -1, groups[..., None] * group + inside).flatten(2)
    known = (blocks >= 0) & (blocks < visible[..., None])
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    # Unused entries repeat the first one, which is always there where any is.
    chosen.scatter_(2, torch.where(known, blocks, blocks[..., :1]).clamp(0, count - 1).long(), True)
    return {"ids": reference.select_blocks(scores.masked_fill(~chosen, -1.0), visible, kept)}


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


def _sparse(t: Tensors, a: Attributes, steps: int) -> Tensor:
    """Queries that see more blocks than they keep, bool [B, S]; for the others it is dense."""
    return _visible(t, steps, a["layer_ratio"]) > a["layer_blocks"]


def unite(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Per tile of neighbouring queries each of their blocks once, with a bit per query.

    Three runs per tile: blocks of its first half's queries only, of its second half's, of both.
    """
    rows, words, blocks = a["tile_rows"], a["words"], t["blocks"]
    batch, steps, kept = blocks.shape
    tiles = -(-steps // rows)
    blocks = torch.where(_sparse(t, a, steps)[..., None], blocks, -1)
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, tiles * rows - steps), value=-1)
    blocks = blocks.unflatten(1, (tiles, rows)).long()
    # One more word for the unused entries.
    marks = torch.zeros(batch, tiles, words + 1, dtype=torch.int32, device=blocks.device)
    for row in range(rows):
        chosen = blocks[:, :, row]
        bit = torch.full_like(chosen, 1 << row, dtype=torch.int32)
        marks.scatter_add_(2, torch.where(chosen < 0, words, chosen), bit)
    marks = marks[..., :words]
    half = rows // 2
    first, second = marks % (1 << half) != 0, marks >> half != 0
    members = torch.stack([first & ~second, second & ~first, first & second], 2)
    width = half * kept
    order = (~members).to(torch.int32).sort(dim=-1, stable=True).indices[..., :width]
    words_of = marks[:, :, None].expand(-1, -1, 3, -1).gather(3, order)
    entries = (order << rows | words_of).to(torch.int32)
    entries = torch.nn.functional.pad(entries, (0, width - entries.shape[-1]))
    return {"counts": members.sum(-1).to(torch.int32), "entries": entries, "marks": marks}


def _together(t: Tensors, a: Attributes) -> Tensor:
    """Which queries belong to a tile that is walked together: bool [B, S, 1]."""
    limit = plan.union_limit(_geometry(a), a["tile_rows"])
    steps = t["q"].shape[2]
    short = t["counts"].sum(-1) <= limit
    return short.repeat_interleave(a["tile_rows"], 1)[:, :steps, None]


def _geometry(a: Attributes) -> Geometry:
    return Geometry(**{name[6:]: value for name, value in a.items() if name.startswith("layer_")})


def _united(t: Tensors, a: Attributes) -> Tensor:
    """Attention over what the lists of `unite` hold."""
    rows, steps = a["tile_rows"], t["q"].shape[2]
    entries = t["entries"]
    listed = torch.arange(entries.shape[-1], device=entries.device) < t["counts"][..., None]
    entries, listed = entries.flatten(2), listed.flatten(2)
    bits = torch.arange(rows, device=entries.device, dtype=torch.int32)[:, None]
    mine = listed[:, :, None] & ((entries[:, :, None] >> bits) & 1 != 0)
    blocks = torch.where(mine, entries[:, :, None] >> rows, -1).flatten(1, 2)[:, :steps]
    return _gated(t, a, _part(t, a, blocks)[0])


def attend_tile(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Attention of the tiles whose union is short; zeros elsewhere."""
    out = _united(t, a)
    return {"out": torch.where(_together(t, a), out, torch.zeros_like(out))}


def attend_apart(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Attention of all other tiles, query by query, added to what `attend_tile` made."""
    out = _gated(t, a, _part(t, a, t["blocks"])[0])
    t["together"].copy_(torch.where(_together(t, a), t["together"], out))
    return {}


def _dense(t: Tensors, a: Attributes, out: Tensor) -> Tensor:
    """`out`, with causal attention for the queries within the budget."""
    steps = t["q"].shape[2]
    positions = _positions(t, steps)
    tokens = torch.arange(t["k_cache"].shape[2], device=out.device, dtype=torch.int32)
    tokens = torch.where(tokens <= positions[..., None], tokens, -1)
    within = (positions >= 0) & ~_sparse(t, a, steps)
    return torch.where(within[..., None], _gated(t, a, _over(t, a, tokens)[0]), out)


def attend_dense(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Causal attention of the queries within the budget, added to what others made."""
    t["together"].copy_(_dense(t, a, t["together"]))
    return {}


def attend_hopper(t: Tensors, a: Attributes) -> dict[str, Tensor]:
    """Attention of all tiles; of `whole` contexts there is no union."""
    none = t["gate"].new_zeros(*t["gate"].shape[:2], a["layer_heads"] * a["layer_width"])
    return {"out": _dense(t, a, none if a["whole"] else _united(t, a))}


DEFINITIONS: dict[str, Callable[[Tensors, Attributes], dict[str, Tensor]]] = {
    "prepare": prepare,
    "score": score,
    "select": select,
    "score_groups": score_groups,
    "select_grouped": select_grouped,
    "attend": attend,
    "attend_split": attend_split,
    "attend_once": attend_split,
    "merge": merge,
    "unite": unite,
    "attend_tile": attend_tile,
    "attend_apart": attend_apart,
    "attend_dense": attend_dense,
    "attend_hopper": attend_hopper,
}
