"""DSA on tensors: the kernels with the tiles that fit the call.

Tensors are contiguous and on one device (a CPU only under Triton's interpreter). Names of sizes as
in `reference.py`: B slots, S query tokens per slot, C cache rows per slot. `past` int32 [B] counts
the cached tokens before this call, `new` int32 [B] the valid tokens in it: query s of slot b stands
at past[b] + s, or is padding when s >= new[b]. Padding queries give zeros and write nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from plugins.aot.launch import launch
from plugins.aot.spec import KernelSpec
from plugins.dsa import plan
from plugins.dsa.plan import (
    PROCESSORS,
    AttendTiles,
    DenseTiles,
    Geometry,
    IndexTiles,
    WindowTiles,
)

# Most scores that one program selects from, of many rows and of few.
SELECT_CHUNK = 32768
SELECT_CHUNK_FEW = 8192


@dataclass(frozen=True)
class AttendPlan:
    """How sparse attention is cut.

    Attributes:
        tiles: of the portable kernel.
        splits: runs of a row's token list.
        hopper: use the kernel for compute capability 9.0 instead.
    """

    tiles: AttendTiles = field(default_factory=AttendTiles)
    splits: int = 1
    hopper: bool = False

    @property
    def pair(self) -> bool:
        """Whether the runs are summed by the kernel itself."""
        return self.hopper and self.splits == plan.HOPPER_PAIR


def splits_for(programs: int, most: int, processors: int = PROCESSORS) -> int:
    """Runs that keep the multiprocessors busy when a launch has `programs` without splitting."""
    return max(1, min(most, processors // max(1, programs)))


def attend_plan(g: Geometry, rows: int, device: torch.device) -> AttendPlan:
    """Kernel, tiles and splits for `rows` query rows."""
    tiles = AttendTiles()
    programs = rows * triton.cdiv(g.heads, tiles.heads)
    splits = splits_for(programs, triton.cdiv(g.kept, tiles.tokens))
    return AttendPlan(tiles, splits, _hopper(g, device))


def _hopper(g: Geometry, device: torch.device) -> bool:
    return device.type == "cuda" and plan.fits_hopper(g, torch.cuda.get_device_capability(device))


def score(
    g: Geometry,
    index_query: Tensor,
    index_keys: Tensor,
    head_weights: Tensor,
    past: Tensor,
    new: Tensor,
    *,
    tokens: int | None = None,
    tiles: IndexTiles | None = None,
    runs: int | None = None,
) -> Tensor:
    """Index scores float32 [B, S, N]; tokens that a query does not see hold arbitrary values.

    Args:
        index_query: [B, S, Hi, Di].
        index_keys: [B, 1, C, Di].
        head_weights: [B, S, Hi].
        tokens: N, at least every slot's past + new; default C.
        tiles, runs: override the tiles and the number of token runs per query block.
    """
    batch, steps = index_query.shape[:2]
    rows = index_keys.shape[-2]
    count = rows if tokens is None else tokens
    tiles = tiles or score_tiles(steps)
    run = score_run(tiles, batch, steps, count, runs)
    scores = torch.empty((batch, steps, count), dtype=torch.float32, device=index_query.device)
    launch(
        plan.score_tokens(g, tiles),
        {
            "index_query": index_query,
            "index_keys": index_keys,
            "head_weights": head_weights,
            "past": past,
            "new": new,
            "scores": scores,
        },
        {"S": steps, "C": rows, "N": count, "run": run, "B": batch},
    )
    return scores


def score_tiles(steps: int) -> IndexTiles:
    """Tiles of the index scores for `steps` queries per slot."""
    if steps == 1:
        return IndexTiles(queries=1, tokens=128, warps=8)
    return IndexTiles(queries=min(4, triton.next_power_of_2(steps)), tokens=64, warps=4)


def score_run(
    tiles: IndexTiles, batch: int, steps: int, count: int, runs: int | None = None
) -> int:
    """Tokens that one program scores, of `count`, cut in `runs` (default: to fill a GPU)."""
    if runs is None:
        blocks = batch * triton.cdiv(steps, tiles.queries)
        runs = max(1, min(triton.cdiv(count, tiles.tokens), 8 * PROCESSORS // max(1, blocks)))
    return triton.cdiv(triton.cdiv(count, runs), tiles.tokens) * tiles.tokens


def select_levels(g: Geometry, rows: int, count: int) -> list[tuple[int, int]]:
    """How the selection from `rows` rows of `count` tokens is cut.

    Returns:
        (chunk, parts) of each level: what one program selects from, and programs per row. The first
        level selects from the row, every other from what the level before has chosen, the last in
        one program.
    """
    few = rows * triton.cdiv(count, SELECT_CHUNK_FEW) <= PROCESSORS
    longest = SELECT_CHUNK_FEW if few else SELECT_CHUNK
    chunk = max(g.kept, min(longest, triton.next_power_of_2(count)))
    levels = [(chunk, triton.cdiv(count, chunk))]
    while levels[-1][1] > 1:
        width = levels[-1][1] * g.kept
        # At least two chunks' winners at a time, or their number would not go down.
        chunk = max(2 * g.kept, min(longest, triton.next_power_of_2(width)))
        levels.append((chunk, triton.cdiv(width, chunk)))
    return levels


def select(g: Geometry, scores: Tensor, past: Tensor, new: Tensor) -> Tensor:
    """Indices of the best visible tokens, int32 [B, S, K], ascending, -1 behind the last.

    Equal scores: the lower index is kept.
    """
    batch, steps, count = scores.shape
    rows = batch * steps
    sizes = {"S": steps, "N": count, "rows": rows}

    def empty(parts: int) -> Tensor:
        return torch.empty((rows, parts * g.kept), dtype=torch.int32, device=scores.device)

    (chunk, parts), *levels = select_levels(g, rows, count)
    chosen = empty(parts)
    launch(
        plan.select_chunk(g, chunk),
        {"scores": scores, "past": past, "new": new, "chosen": chosen},
        {**sizes, "chunks": parts},
    )
    for chunk, parts in levels:
        candidates, chosen = chosen, empty(parts)
        launch(
            plan.select_among(g, chunk),
            {"scores": scores, "candidates": candidates, "chosen": chosen},
            {**sizes, "width": candidates.shape[1], "parts": parts},
        )
    return chosen.view(batch, steps, g.kept)


def attend(
    g: Geometry,
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    tokens: Tensor,
    past: Tensor,
    new: Tensor,
    gate: Tensor,
    how: AttendPlan | None = None,
) -> Tensor:
    """Gated absorbed attention over each query's token list.

    Args:
        q_latent: [B, S, H, L]; q_rope: [B, S, H, R].
        cache: [B, 1, C, L + R].
        tokens: int32 [B, S, K] as `select` gives them.
        gate: [B, S, H], before the logistic function.
        how: overrides tiles and splits.

    Returns:
        [B, S, H, L].
    """
    batch, steps = q_latent.shape[:2]
    rows = batch * steps
    how = how or attend_plan(g, rows, q_latent.device)
    inputs = {
        "q_latent": q_latent,
        "q_rope": q_rope,
        "cache": cache,
        "tokens": tokens,
        "past": past,
        "new": new,
    }
    values = {"S": steps, "C": cache.shape[-2], "K": tokens.shape[-1], "rows": rows}
    out = torch.empty_like(q_latent)
    if how.splits == 1:
        spec = plan.attend_whole_hopper(g) if how.hopper else plan.attend_whole(g, how.tiles)
        launch(spec, {**inputs, "gate": gate, "out": out}, values)
        return out
    if how.pair:
        work = _runs(g, out, plan.HOPPER_PAIR, g.latent // plan.HOPPER_PAIR)
        launch(plan.attend_pair_hopper(g), {**inputs, **work, "gate": gate, "out": out}, values)
        return out
    spec = plan.attend_split_hopper(g) if how.hopper else plan.attend_split(g, how.tiles)
    _split(g, spec, inputs, values, how.splits, gate, out)
    return out


def _runs(g: Geometry, out: Tensor, runs: int, channels: int) -> dict[str, Tensor]:
    """Room for the partial outputs of runs."""
    parts = (*out.shape[:2], runs, g.heads)
    return {
        "partial": torch.empty((*parts, channels), dtype=torch.float32, device=out.device),
        "partial_lse": torch.empty(parts, dtype=torch.float32, device=out.device),
    }


def _split(
    g: Geometry,
    spec: KernelSpec,
    inputs: dict[str, Tensor],
    values: dict[str, int],
    splits: int,
    gate: Tensor,
    out: Tensor,
) -> None:
    """Launch a kernel over runs and the sum of its partial outputs."""
    work = _runs(g, out, splits, g.latent)
    values = {**values, "splits": splits}
    launch(spec, {**inputs, **work}, values)
    launch(plan.merge_splits(g, splits), {**work, "gate": gate, "out": out}, values)


def window_splits(g: Geometry, rows: int) -> int:
    """Runs of a window for `rows` query rows, for the kernels of compute capability 9.0."""
    programs = rows * plan.HOPPER_PAIR * g.heads // plan.HOPPER_HEADS
    return splits_for(programs, g.window // plan.HOPPER_TOKENS)


def window_tiles(steps: int) -> WindowTiles:
    """Tiles of the portable window kernels for `steps` queries per slot."""
    return WindowTiles(queries=min(4, triton.next_power_of_2(steps)))


def attend_window(
    g: Geometry,
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    past: Tensor,
    new: Tensor,
    base: Tensor,
    gate: Tensor,
    tiles: WindowTiles | None = None,
    splits: int | None = None,
) -> Tensor:
    """Gated absorbed attention over the last W tokens.

    Args:
        q_latent: [B, S, H, L]; q_rope: [B, S, H, R].
        cache: [B, 1, C, L + R], the token at position p in row (p - base) mod C; holds at least the
            W - 1 + S newest tokens.
        base: int32 [B].
        gate: [B, S, H], before the logistic function.
        tiles: use the portable kernels with these tiles.
        splits: override the runs of a window of the kernels for compute capability 9.0.

    Returns:
        [B, S, H, L].
    """
    batch, steps = q_latent.shape[:2]
    out = torch.empty_like(q_latent)
    call = {"cache": cache, "past": past, "new": new, "base": base}
    if tiles is None and _hopper(g, q_latent.device):
        inputs = {"q_latent": q_latent, "q_rope": q_rope, **call}
        sizes = {"S": steps, "R": cache.shape[-2], "rows": batch * steps}
        splits = window_splits(g, batch * steps) if splits is None else splits
        if splits == 1:
            launch(plan.window_whole_hopper(g), {**inputs, "gate": gate, "out": out}, sizes)
        else:
            _split(g, plan.window_split_hopper(g), inputs, sizes, splits, gate, out)
        return out
    tiles = tiles or window_tiles(steps)
    blocks = triton.cdiv(steps, tiles.queries)
    count = plan.window_tiles(g, tiles)
    lines = tiles.queries * plan.power(g.heads)
    device = q_latent.device
    stats = (batch, blocks, count, lines)
    work = {
        "probabilities": torch.empty(
            (batch, blocks, lines, count * tiles.tokens), dtype=q_latent.dtype, device=device
        ),
        "tile_max": torch.empty(stats, dtype=torch.float32, device=device),
        "tile_sum": torch.empty(stats, dtype=torch.float32, device=device),
    }
    values = {"S": steps, "R": cache.shape[-2], "query_blocks": blocks, "B": batch}
    launch(
        plan.window_scores(g, tiles),
        {"q_latent": q_latent, "q_rope": q_rope, **call, **work},
        values,
    )
    launch(plan.window_values(g, tiles), {**work, **call, "gate": gate, "out": out}, values)
    return out


def attend_dense(
    g: Geometry,
    q_nope: Tensor,
    q_rope: Tensor,
    expanded: Tensor,
    cache: Tensor,
    past: Tensor,
    new: Tensor,
    gate: Tensor,
    tiles: DenseTiles | None = None,
) -> Tensor:
    """Gated causal attention over expanded keys and values, windowed when the geometry has one.

    Args:
        q_nope: [B, S, H, nope]; q_rope: [B, S, H, R].
        expanded: [B, N, H, nope + V], keys first: row j is the token at position j, or, with a
            window, at position past - (W - 1) + j.
        cache: [B, 1, C, L + R], rows numbered like those of `expanded`; only the rotary keys are
            read.
        gate: [B, S, H], before the logistic function.
        tiles: use the portable kernel with these tiles.

    Returns:
        [B, S, H, V].
    """
    batch, steps = q_nope.shape[:2]
    out = q_nope.new_empty((batch, steps, g.heads, g.value))
    if tiles is None and _hopper(g, q_nope.device):
        spec = plan.attend_dense_hopper(g)
    else:
        spec = plan.attend_dense(g, tiles or DenseTiles())
    launch(
        spec,
        {
            "q_nope": q_nope,
            "q_rope": q_rope,
            "expanded": expanded,
            "cache": cache,
            "past": past,
            "new": new,
            "gate": gate,
            "out": out,
        },
        {"S": steps, "N": expanded.shape[1], "C": cache.shape[-2], "B": batch},
    )
    return out
