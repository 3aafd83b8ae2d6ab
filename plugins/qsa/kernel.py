"""QSA on tensors: the kernels with the tiles that fit the call.

Tensors are contiguous and on one device (a CPU only under Triton's interpreter). Names of sizes as
in `reference.py`: B slots, S query tokens per slot, C cache rows per slot, NB block keys per slot.
`past` int32 [B] counts the cached tokens before this call, `new` int32 [B] the valid tokens in it:
query s of slot b has position past[b] + s, or is padding when s >= new[b]. Padding queries give
zeros and write nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from plugins.qsa import plan
from plugins.qsa.plan import Geometry, Rotary, Tiles
from plugins.support.dtypes import BY_TORCH
from plugins.support.errors import UsageError

# The longest row that one program selects from; longer rows are cut into chunks.
SELECT_CHUNK = 8192


@dataclass(frozen=True)
class DecodePlan:
    """How decode attention is cut: tiles and splits per row and key head."""

    tiles: Tiles
    splits: int


def decode_plan(g: Geometry, rows: int, processors: int = 132) -> DecodePlan:
    """Tiles and splits for `rows` query rows on a GPU with `processors` multiprocessors."""
    programs = rows * g.kv_heads
    columns = g.blocks * g.ratio
    splits = 1
    while programs * splits * 2 <= 2 * processors and columns // (splits * 2) >= 32:
        splits *= 2
    return DecodePlan(Tiles(32 if splits > 16 else 64, 4, 3), splits)


@dataclass(frozen=True)
class PrefillPlan:
    """How prefill attention is cut: queries per tile, tiles for shared and for single walks."""

    rows: int = 4
    together: Tiles = Tiles(32, 4, 2)
    apart: Tiles = Tiles(64, 2, 2)


PREFILL = PrefillPlan()


def _with_cache(g: Geometry, cache: Tensor) -> Geometry:
    name = BY_TORCH[cache.dtype].name
    if name not in (g.dtype, "float8_e4m3fn"):
        raise UsageError(
            "the cache's element type does not fit the layer",
            where="key_cache",
            expected=f"{g.dtype} or float8_e4m3fn",
            found=name,
        )
    return replace(g, cache_dtype=name)


def score(
    g: Geometry, index_query: Tensor, index_keys: Tensor, past: Tensor, new: Tensor
) -> Tensor:
    """Index scores float32 [B, S, NB]; blocks that a query does not see hold arbitrary values.

    index_query [B, Hi, S, Di], index_keys [B, NB, Di].
    """
    batch, _, steps, _ = index_query.shape
    count = index_keys.shape[1]
    scores = torch.empty((batch, steps, count), dtype=torch.float32, device=index_query.device)
    decode = steps <= 16
    spec = plan.score_blocks(g, min(steps, 16), Tiles(128 if decode else 64, 4, 3))
    tiles = max(1, min(8, batch * count // (128 * 1024)))
    spec.launch(
        {
            "index_query": index_query,
            "index_keys": index_keys,
            "past": past,
            "new": new,
            "scores": scores,
        },
        {"S": steps, "NB": count, "tiles": tiles, "batch": batch},
    )
    return scores


def select(g: Geometry, scores: Tensor, past: Tensor, new: Tensor) -> Tensor:
    """Ids of the best visible blocks, int32 [B, S, K], ascending, -1 behind the last.

    Equal scores: the lower id is kept.
    """
    batch, steps, count = scores.shape
    rows = batch * steps
    call = {"scores": scores, "past": past, "new": new}
    ids = torch.empty((batch, steps, g.blocks), dtype=torch.int32, device=scores.device)
    if count <= SELECT_CHUNK:
        chunk = max(32, g.blocks, triton.next_power_of_2(count))
        spec = plan.select_row(g, chunk, warps=max(1, min(16, chunk // 512)))
        spec.launch({**call, "ids": ids}, {"S": steps, "NB": count, "rows": rows})
        return ids
    chunks = triton.cdiv(count, SELECT_CHUNK)
    candidates = torch.empty((rows, chunks, g.blocks), dtype=torch.int32, device=scores.device)
    plan.select_chunk(g, SELECT_CHUNK, warps=16).launch(
        {**call, "candidates": candidates}, {"S": steps, "NB": count, "chunks": chunks, "rows": rows}
    )
    plan.select_among(g, chunks, warps=min(16, max(4, 2 * chunks))).launch(
        {"scores": scores, "candidates": candidates, "ids": ids},
        {"NB": count, "width": chunks * g.blocks, "rows": rows},
    )
    return ids


def attend_decode(
    g: Geometry,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: Tensor,
    past: Tensor,
    new: Tensor,
    gate: Tensor,
    how: DecodePlan | None = None,
) -> Tensor:
    """Gated attention over the selected blocks and the tail, every row by itself.

    Args:
        query: [B, Hq, S, D].
        key_cache, value_cache: [B, Hk, C, D].
        blocks: int32 [B, S, K] as `select` gives them.
        gate: [B, S, Hq * D], or [B, S, Hq * 2D] with each head's gate behind its query columns.

    Returns:
        [B, S, Hq * D].
    """
    g = _with_cache(g, key_cache)
    batch, heads, steps, width = query.shape
    rows = batch * steps
    how = how or decode_plan(g, rows)
    interleaved = gate.shape[-1] == 2 * heads * width
    out = query.new_empty((batch, steps, heads * width))
    tensors = {
        "q": query,
        "k_cache": key_cache,
        "v_cache": value_cache,
        "blocks": blocks,
        "past": past,
        "new": new,
        "gate": gate,
        "out": out,
    }
    values = {"S": steps, "C": key_cache.shape[2], "rows": rows, "splits": how.splits}
    if how.splits == 1:
        plan.attend_whole(g, how.tiles, interleaved).launch(tensors, values)
        return out
    device = query.device
    tensors["partial"] = torch.empty(
        (how.splits, rows, heads, width), dtype=torch.float32, device=device
    )
    tensors["partial_lse"] = torch.empty(
        (how.splits, rows, heads), dtype=torch.float32, device=device
    )
    plan.attend_split(g, how.tiles).launch(tensors, values)
    plan.merge_splits(g, how.splits, interleaved).launch(tensors, values)
    return out


def unite(
    g: Geometry, blocks: Tensor, past: Tensor, new: Tensor, rows: int, count: int
) -> tuple[Tensor, Tensor]:
    """Union of the blocks of tiles of `rows` queries: counts [B, tiles], entries [B, tiles, rows * K].

    `count`: block keys per slot (NB). An entry is block id * 2^rows + one bit per query.
    """
    batch, steps, _ = blocks.shape
    tiles = triton.cdiv(steps, rows)
    device = blocks.device
    counts = torch.empty((batch, tiles), dtype=torch.int32, device=device)
    entries = torch.empty((batch, tiles, rows * g.blocks), dtype=torch.int32, device=device)
    marks = torch.empty((batch, tiles, count), dtype=torch.int32, device=device)
    plan.unite_blocks(g, rows).launch(
        {
            "blocks": blocks,
            "past": past,
            "new": new,
            "counts": counts,
            "entries": entries,
            "marks": marks,
        },
        {"S": steps, "words": count, "batch": batch},
    )
    return counts, entries


def attend_prefill(
    g: Geometry,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: Tensor,
    past: Tensor,
    new: Tensor,
    gate: Tensor,
    how: PrefillPlan | None = None,
) -> Tensor:
    """The same as `attend_decode`, with neighbouring queries reading their blocks together."""
    g = _with_cache(g, key_cache)
    batch, heads, steps, width = query.shape
    how = how or PREFILL
    rows = how.rows
    counts, entries = unite(g, blocks, past, new, rows, key_cache.shape[2] // g.ratio)
    out = query.new_empty((batch, steps, heads * width))
    tensors = {
        "q": query,
        "k_cache": key_cache,
        "v_cache": value_cache,
        "blocks": blocks,
        "counts": counts,
        "entries": entries,
        "past": past,
        "new": new,
        "gate": gate,
        "out": out,
    }
    values = {"S": steps, "C": key_cache.shape[2], "batch": batch, "rows": batch * steps}
    interleaved = gate.shape[-1] == 2 * heads * width
    plan.attend_tile(g, rows, how.together, interleaved).launch(tensors, values)
    plan.attend_apart(g, rows, how.apart, interleaved).launch(tensors, values)
    return out


@dataclass(frozen=True)
class Prepared:
    """What `prepare` returns besides the caches it wrote in place.

    Attributes:
        query: [B, Hq, S, D]; index_query: [B, Hi, S, Di].
        index_state: [B, R - 1, Di], position_state: int32 [B, R - 1, axes]; for the next call.
    """

    query: Tensor
    index_query: Tensor
    index_state: Tensor
    position_state: Tensor


def prepare(
    g: Geometry,
    rotary: Rotary,
    eps: float,
    projections: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    frequencies: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor, Tensor],
    index_state: Tensor,
    past: Tensor,
    new: Tensor,
    positions: Tensor | None = None,
    position_state: Tensor | None = None,
) -> Prepared:
    """Norms, rotary embedding, cache writes and block keys of the new tokens.

    Args:
        projections: q_gate [B, S, Hq * 2D], key and value [B, S, Hk * D], index_qk
            [B, S, (Hi + 1) * Di].
        weights: centred norm weights of query [D], key [D], index query [Di], index key [Di].
        frequencies: float32 rotary frequencies of attention and index heads, one per pair.
        caches: key and value cache [B, Hk, C, D] and block keys [B, NB, Di], written in place.
        index_state: raw index keys of the last R - 1 tokens, [B, R - 1, Di].
        positions: int32 [3, B, S] when the rotary embedding has three axes.
        position_state: int32 [B, R - 1, 3] in that case.
    """
    q_gate, key, value, index_qk = projections
    key_cache, value_cache, index_keys = caches
    g = _with_cache(g, key_cache)
    batch, steps, _ = q_gate.shape
    if (rotary.axes == 3) != (positions is not None and position_state is not None):
        raise UsageError(
            "positions and their state belong to a rotary embedding with three axes",
            expected=f"{rotary.axes} axes",
            found="positions given" if positions is not None else "no positions",
        )
    # With one axis the kernel reads neither; it still needs an address.
    positions = past if positions is None else positions
    position_state = past if position_state is None else position_state
    result = Prepared(
        query=q_gate.new_empty((batch, g.heads, steps, g.width)),
        index_query=q_gate.new_empty((batch, g.index_heads, steps, g.index_width)),
        index_state=torch.empty_like(index_state),
        position_state=torch.empty(
            (batch, g.ratio - 1, rotary.axes), dtype=torch.int32, device=q_gate.device
        ),
    )
    names = ("q_weight", "k_weight", "index_q_weight", "index_k_weight")
    plan.prepare(g, rotary, eps).launch(
        {
            "q_gate": q_gate,
            "key": key,
            "value": value,
            "index_qk": index_qk,
            **dict(zip(names, weights, strict=True)),
            "frequencies": frequencies[0],
            "index_frequencies": frequencies[1],
            "positions": positions,
            "position_state": position_state,
            "index_state": index_state,
            "past": past,
            "new": new,
            "query": result.query,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "index_query": result.index_query,
            "index_keys": index_keys,
            "next_index_state": result.index_state,
            "next_position_state": result.position_state,
        },
        {
            "S": steps,
            "C": key_cache.shape[2],
            "NB": index_keys.shape[1],
            "batch": batch,
            "rows": batch * steps,
        },
    )
    return result
