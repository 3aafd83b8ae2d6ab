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

from plugins.aot.launch import launch
from plugins.aot.spec import KernelSpec
from plugins.qsa import plan
from plugins.qsa.plan import Geometry, Rotary, Tiles
from plugins.support.dtypes import BY_TORCH
from plugins.support.errors import UsageError

# The longest row that is selected from in one step, and the most groups of a longer one.
SELECT_WHOLE = 2048
SELECT_GROUPS = 4096
# Queries of a slot that one program scores together.
SCORE_ROWS = 32


@dataclass(frozen=True)
class DecodePlan:
    """How decode attention is cut.

    Attributes:
        tiles: columns per step, warps, stages.
        splits: runs of columns per row and key head; their sum is a second kernel.
        once: one tile per program and no loop; `splits` follows from the tile.
    """

    tiles: Tiles
    splits: int
    once: bool = False


def decode_plan(
    g: Geometry, rows: int, processors: int = plan.PROCESSORS, deep: bool = True
) -> DecodePlan:
    """Tiles and splits for `rows` query rows on a GPU with `processors` multiprocessors.

    `deep`: the GPU has 142 KB of shared memory per block (compute capabilities 8.0, 9.0, 10.0, not
    8.9 and 12.0).
    """
    programs = rows * g.kv_heads
    columns = g.blocks * g.ratio
    if programs <= 4 and not g.fp8:
        return DecodePlan(Tiles(32, 4, 1), plan.once_splits(g, 32), once=True)
    # e4m3 needs two programs per multiprocessor to convert as fast as memory delivers.
    wave = (2 if g.fp8 else 1) * processors
    splits = 1
    while programs * splits * 2 <= wave and columns >= splits * 2 * 64:
        splits *= 2
    if programs * splits <= wave:
        return DecodePlan(Tiles(64, 2, 3 if deep or g.fp8 else 2), splits)
    few = g.fp8 or programs <= 2 * processors
    return DecodePlan(Tiles(64 if few else 32, 2, 2), splits)


@dataclass(frozen=True)
class PrefillPlan:
    """How prefill attention is cut.

    Attributes:
        rows: queries per tile.
        together, apart: tiles for shared and for single walks.
        dense: tiles for queries within the budget, and lines per program.
        hopper: use the kernels for compute capability 9.0 instead, which have their own tiles.
    """

    rows: int
    together: Tiles
    apart: Tiles
    dense: Tiles
    lines: int = 64
    hopper: bool = False


PREFILL = PrefillPlan(4, together=Tiles(32, 4, 2), apart=Tiles(64, 2, 2), dense=Tiles(32, 4, 2))


def prefill_plan(g: Geometry, capability: tuple[int, int] | None) -> PrefillPlan:
    """The plan for a GPU, None in Triton's interpreter."""
    fits = capability is not None and plan.fits_hopper(g, capability)
    if fits and plan.attend_hopper(g, plan.HOPPER_ROWS).compiles():
        return replace(PREFILL, rows=plan.HOPPER_ROWS, hopper=True)
    return PREFILL


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


def score_tiles(batch: int, steps: int, count: int) -> int:
    """Tiles of 64 block keys per program: one while there are too few to fill a GPU."""
    if steps > 16:
        return 16
    return 4 if batch * count >= 2048 * 64 else 1


def group_size(count: int) -> int:
    """Blocks per group of rows of `count` blocks; 0 where selection needs no groups."""
    if count <= SELECT_WHOLE:
        return 0
    return max(4, triton.next_power_of_2(triton.cdiv(count, SELECT_GROUPS)))


def score_tile(group: int) -> Tiles:
    """Block keys per step of the scoring kernel: whole groups."""
    return Tiles(max(64, group), 4, 3)


def score(
    g: Geometry, index_query: Tensor, index_keys: Tensor, past: Tensor, new: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Index scores float32 [B, S, NB] and the largest one of each group [B, S, groups].

    Both are padded to a multiple of 4. Blocks that a query does not see have arbitrary scores.
    Short rows have no groups: None.
    index_query [B, Hi, S, Di], index_keys [B, NB, Di].
    """
    batch, _, steps, _ = index_query.shape
    count = index_keys.shape[1]
    group = group_size(count)
    tensors = {"index_query": index_query, "index_keys": index_keys, "past": past, "new": new}
    widths = {"scores": count}
    if group:
        widths["maxima"] = triton.cdiv(count, group)
    for name, width in widths.items():
        shape = (batch, steps, plan.padded(width))
        tensors[name] = index_query.new_empty(shape, dtype=torch.float32)
    spec = plan.score_blocks(g, min(steps, SCORE_ROWS), score_tile(group), group)
    tiles = score_tiles(batch, steps, count)
    launch(spec, tensors, {"S": steps, "NB": count, "tiles": tiles, "batch": batch})
    return tensors["scores"], tensors.get("maxima")


def select_spec(g: Geometry, count: int) -> KernelSpec:
    """The kernel that selects from rows of `count` blocks."""
    group = group_size(count)
    if group:
        width = triton.cdiv(count, group)
        return plan.select_grouped(g, width, group, select_warps(width))
    return plan.select_row(g, count, select_warps(count))


def select_warps(width: int) -> int:
    """Warps for selecting among `width` elements: 8 elements per thread, within reason."""
    return max(1, min(16, triton.next_power_of_2(width) // 256))


def select(g: Geometry, scores: Tensor, maxima: Tensor | None, past: Tensor, new: Tensor) -> Tensor:
    """Ids of the best visible blocks, int32 [B, S, K], ascending, -1 behind the last.

    Equal scores: the lower id is kept. scores and maxima as `score` gives them.
    """
    batch, steps, count = scores.shape
    tensors = {"scores": scores, "past": past, "new": new}
    if maxima is not None:
        tensors["maxima"] = maxima
    tensors["ids"] = torch.empty((batch, steps, g.blocks), dtype=torch.int32, device=scores.device)
    launch(select_spec(g, count), tensors, {"S": steps, "NB": count, "rows": batch * steps})
    return tensors["ids"]


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
        launch(plan.attend_whole(g, how.tiles, interleaved), tensors, values)
        return out
    device = query.device
    tensors["partial"] = torch.empty(
        (how.splits, rows, heads, width), dtype=torch.float32, device=device
    )
    tensors["partial_lse"] = torch.empty(
        (how.splits, rows, heads), dtype=torch.float32, device=device
    )
    launch(decode_partial(g, how), tensors, values)
    launch(plan.merge_splits(g, how.splits, interleaved), tensors, values)
    return out


def decode_partial(g: Geometry, how: DecodePlan) -> KernelSpec:
    """The kernel that computes the partial outputs of a split plan."""
    if how.once:
        return plan.attend_once(g, how.tiles.columns, how.tiles.warps)
    return plan.attend_split(g, how.tiles)


def unite(
    g: Geometry, blocks: Tensor, past: Tensor, new: Tensor, rows: int, count: int
) -> tuple[Tensor, Tensor]:
    """Union of the blocks of tiles of `rows` queries.

    Args:
        blocks: int32 [B, S, K].
        rows: queries per tile.
        count: block keys per slot (NB).

    Returns:
        int32 counts [B, tiles, 3] and entries [B, tiles, 3, rows / 2 * K]: blocks that only the
        first half of a tile's queries keeps, only the second half, both. An entry is block id
        * 2^rows plus one bit per query that keeps it. Queries within the budget keep none here.
    """
    batch, steps, _ = blocks.shape
    tiles = triton.cdiv(steps, rows)
    device = blocks.device
    counts = torch.empty((batch, tiles, 3), dtype=torch.int32, device=device)
    entries = torch.empty((batch, tiles, 3, rows // 2 * g.blocks), dtype=torch.int32, device=device)
    marks = torch.empty((batch, tiles, count), dtype=torch.int32, device=device)
    launch(
        plan.unite_blocks(g, rows),
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
    """The same as `attend_decode`, with neighbouring queries reading their blocks together.

    Queries whose whole context fits in the budget get causal attention over it; their `blocks` are
    not read. Not over float8 caches: converting them costs more than reading them, so every query
    reads its own blocks.
    """
    g = _with_cache(g, key_cache)
    if g.fp8 and how is None:
        return attend_decode(g, query, key_cache, value_cache, blocks, past, new, gate)
    batch, heads, steps, width = query.shape
    if how is None:
        on_gpu = query.is_cuda
        how = prefill_plan(g, torch.cuda.get_device_capability(query.device) if on_gpu else None)
    rows = how.rows
    # Of whole contexts no lists are read; the kernel still needs addresses.
    whole = how.hopper and plan.within_budget(g, key_cache.shape[2])
    if whole:
        counts = entries = past
    else:
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
    if how.hopper:
        launch(plan.attend_hopper(g, rows, interleaved, whole), tensors, values)
        return out
    launch(plan.attend_tile(g, rows, how.together, interleaved), tensors, values)
    launch(plan.attend_apart(g, rows, how.apart, interleaved), tensors, values)
    launch(plan.attend_dense(g, how.lines, how.dense, interleaved), tensors, values)
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
    launch(
        plan.prepare(g, rotary, eps),
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
