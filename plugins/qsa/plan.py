"""Which kernel runs with which tiles: the operations of QSA as kernel descriptions.

Tile sizes were chosen on an H200 (`benchmarks/README.md` has the numbers); they are correct on
every GPU. Everything here is a function of the geometry and of sizes known at build time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl

from plugins.aot.spec import Argument, KernelSpec, ceil_div
from plugins.qsa.geometry import Geometry as Geometry
from plugins.qsa.kernels import attention, dense, index, prefill, select
from plugins.qsa.kernels import prepare as preparing


@dataclass(frozen=True)
class Tiles:
    """Tile of a kernel: columns per step, warps, pipeline stages."""

    columns: int
    warps: int
    stages: int
    registers: int | None = None


def dot_type(geometry: Geometry) -> Any:
    """Operand type of matrix products. float16 holds every e4m3 value, and converts faster."""
    if triton.knobs.runtime.interpret:
        return tl.float32
    return tl.float16 if geometry.fp8 else getattr(tl, geometry.dtype)


def _power(value: int, least: int) -> int:
    return max(least, triton.next_power_of_2(value))


# Multiprocessors of the GPU that the tiles were chosen on.
PROCESSORS = 132
# Queries per tile of the prefill kernel for compute capability 9.0.
HOPPER_ROWS = 8

_CALL = (Argument("past", "int32"), Argument("new", "int32"))


def attention_constants(g: Geometry, tiles: Tiles) -> dict[str, Any]:
    """Constants that the two decode attention kernels share, in their order."""
    return {
        "K": g.blocks,
        "RATIO": g.ratio,
        "HQ": g.heads,
        "HK": g.kv_heads,
        "D": g.width,
        "HEADS": _power(g.heads // g.kv_heads, 16),
        "TOKENS": tiles.columns,
        "SCALE": g.width**-0.5 * g.k_scale,
        "V_SCALE": g.v_scale,
        "FP8": g.fp8,
    }


def _gate_constants(g: Geometry, interleaved: bool) -> dict[str, Any]:
    return {
        "GATE_STRIDE": g.width * (2 if interleaved else 1),
        "GATE_OFFSET": g.width if interleaved else 0,
    }


def _attention_inputs(g: Geometry) -> tuple[Argument, ...]:
    return (
        Argument("q", g.dtype),
        Argument("k_cache", g.cache_dtype),
        Argument("v_cache", g.cache_dtype),
        Argument("blocks", "int32"),
        *_CALL,
    )


def attend_whole(g: Geometry, tiles: Tiles, interleaved_gate: bool = False) -> KernelSpec:
    """Decode attention, one program per row and key head. Grid names: rows."""
    return KernelSpec(
        name="qsa_attend",
        function=attention.attend_whole,
        inputs=(*_attention_inputs(g), Argument("gate", g.dtype)),
        scalars=("S", "C"),
        outputs=(Argument("out", g.dtype),),
        constants={
            **attention_constants(g, tiles),
            **_gate_constants(g, interleaved_gate),
            "DOT": dot_type(g),
            "STAGES": tiles.stages,
        },
        grid=lambda v: (v["rows"] * g.kv_heads,),
        warps=tiles.warps,
        registers=tiles.registers,
    )


def attend_once(g: Geometry, tokens: int, warps: int) -> KernelSpec:
    """Decode attention of a few rows, one tile per program. Grid names: rows."""
    constants = attention_constants(g, Tiles(tokens, warps, 1))
    del constants["FP8"]
    return KernelSpec(
        name="qsa_attend_once",
        function=attention.attend_once,
        inputs=_attention_inputs(g),
        scalars=("S", "C", "rows"),
        outputs=(Argument("partial", "float32"), Argument("partial_lse", "float32")),
        constants={**constants, "DOT": dot_type(g)},
        early=True,
        grid=lambda v: (v["rows"] * g.kv_heads, once_splits(g, tokens)),
        warps=warps,
    )


def once_splits(g: Geometry, tokens: int) -> int:
    """Splits of `attend_once` with tiles of `tokens` columns."""
    return triton.cdiv(g.blocks * g.ratio + g.ratio - 1, tokens)


def attend_split(g: Geometry, tiles: Tiles) -> KernelSpec:
    """Decode attention over `splits` runs of columns. Grid names: rows, splits."""
    return KernelSpec(
        name="qsa_attend_split",
        function=attention.attend_split,
        inputs=_attention_inputs(g),
        scalars=("S", "C", "rows", "splits"),
        outputs=(Argument("partial", "float32"), Argument("partial_lse", "float32")),
        constants={
            **attention_constants(g, tiles),
            "DOT": dot_type(g),
            "STAGES": tiles.stages,
        },
        # Two float8 programs share a multiprocessor.
        early=not g.fp8,
        grid=lambda v: (v["rows"] * g.kv_heads, v["splits"]),
        warps=tiles.warps,
        registers=tiles.registers,
    )


def merge_splits(g: Geometry, most_splits: int, interleaved_gate: bool = False) -> KernelSpec:
    """Gated sum of up to `most_splits` partial outputs. Grid names: rows."""
    splits = _power(most_splits, 2)
    # The more splits, the fewer channels per program: its loads are all in flight at once.
    parts = 1 if splits <= 4 else 2 if splits <= 8 else 4
    part = max(16, g.width // parts)
    return KernelSpec(
        name="qsa_merge",
        function=attention.merge_splits,
        inputs=(
            Argument("partial", "float32"),
            Argument("partial_lse", "float32"),
            Argument("gate", g.dtype),
        ),
        scalars=("rows", "splits"),
        outputs=(Argument("out", g.dtype),),
        constants={
            "HQ": g.heads,
            "D": g.width,
            "PART": part,
            "SPLITS": splits,
            **_gate_constants(g, interleaved_gate),
        },
        early=True,
        grid=lambda v: (v["rows"], g.heads * (g.width // part)),
        warps=2 if splits <= 4 else 1 if splits <= 16 else 4,
    )


def padded(count: Any) -> Any:
    """Length of a row of `count` scores, see `index.padded`."""
    return ceil_div(count, 4) * 4


def score_blocks(g: Geometry, rows: int, tiles: Tiles, group: int = 0) -> KernelSpec:
    """Index scores for tiles of `rows` queries of a slot. Grid names: S, NB, tiles, batch.

    With `group`, a power of two that divides the tile's columns, also the largest visible score of
    every `group` neighbouring blocks.
    """
    tile_rows = _power(rows, _power(16 // _power(g.index_heads, 1), 1))
    return KernelSpec(
        name="qsa_score",
        function=index.score_groups if group else index.score_blocks,
        inputs=(Argument("index_query", g.dtype), Argument("index_keys", g.dtype), *_CALL),
        scalars=("S", "NB", "tiles"),
        outputs=tuple(
            Argument(name, "float32") for name in (("scores", "maxima") if group else ("scores",))
        ),
        constants={
            "RATIO": g.ratio,
            "HI": g.index_heads,
            "DI": g.index_width,
            "ROWS": tile_rows,
            "BLOCKS": tiles.columns,
            **({"GROUP": group} if group else {}),
            "SCALE": g.index_width**-0.5,
            "DOT": tl.float32 if triton.knobs.runtime.interpret else getattr(tl, g.dtype),
            "STAGES": tiles.stages,
        },
        grid=lambda v: (
            ceil_div(v["NB"], v["tiles"] * tiles.columns),
            ceil_div(v["S"], tile_rows),
            v["batch"],
        ),
        warps=tiles.warps,
        registers=tiles.registers,
    )


def select_row(g: Geometry, width: int, warps: int, log2_bins: int = 8) -> KernelSpec:
    """Top blocks of rows of at most `width` blocks. Grid names: rows."""
    return KernelSpec(
        name="qsa_select",
        function=select.select_row,
        inputs=(Argument("scores", "float32"), *_CALL),
        scalars=("S", "NB"),
        outputs=(Argument("ids", "int32"),),
        constants={
            "K": g.blocks,
            "RATIO": g.ratio,
            "N": _power(width, g.blocks),
            "LOG2_BINS": log2_bins,
        },
        early=True,
        grid=lambda v: (v["rows"],),
        warps=warps,
    )


def select_grouped(
    g: Geometry, width: int, group: int, warps: int, log2_bins: int = 8
) -> KernelSpec:
    """Top blocks of rows of at most `width` groups of `group` blocks. Grid names: rows."""
    return KernelSpec(
        name="qsa_select_grouped",
        function=select.select_grouped,
        inputs=(Argument("scores", "float32"), Argument("maxima", "float32"), *_CALL),
        scalars=("S", "NB"),
        outputs=(Argument("ids", "int32"),),
        constants={
            "K": g.blocks,
            "RATIO": g.ratio,
            "GROUP": group,
            "N": _power(width, g.blocks),
            "LOG2_BINS": log2_bins,
        },
        early=True,
        grid=lambda v: (v["rows"],),
        warps=warps,
    )


def unite_blocks(g: Geometry, rows: int, words: int = 2048, warps: int = 4) -> KernelSpec:
    """Union of the blocks of tiles of `rows` queries, an even number. Grid names: S, batch."""
    return KernelSpec(
        name="qsa_unite",
        function=prefill.unite_blocks,
        inputs=(Argument("blocks", "int32"), *_CALL),
        scalars=("S", "words"),
        outputs=(
            Argument("counts", "int32"),
            Argument("entries", "int32"),
            Argument("marks", "int32"),
        ),
        constants={
            "K": g.blocks,
            "RATIO": g.ratio,
            "ROWS": rows,
            "ROWS_PADDED": _power(rows, 1),
            "WORDS": words,
        },
        grid=lambda v: (ceil_div(v["S"], rows), v["batch"]),
        warps=warps,
    )


def _prefill_constants(
    g: Geometry, rows: int, rows_at_once: int, tiles: Tiles, interleaved_gate: bool
) -> dict[str, Any]:
    return {
        "K": g.blocks,
        "RATIO": g.ratio,
        "HQ": g.heads,
        "HK": g.kv_heads,
        "D": g.width,
        "ROWS": rows,
        "M": _power(rows_at_once * g.heads // g.kv_heads, 16),
        "TOKENS": tiles.columns,
        "TAIL": _power(rows_at_once + g.ratio - 1, 16),
        "LIMIT": union_limit(g, rows),
        "SCALE": g.width**-0.5 * g.k_scale,
        "V_SCALE": g.v_scale,
        **_gate_constants(g, interleaved_gate),
        "DOT": dot_type(g),
        "STAGES": tiles.stages,
    }


def attend_tile(g: Geometry, rows: int, tiles: Tiles, interleaved_gate: bool = False) -> KernelSpec:
    """Prefill attention of tiles of `rows` queries. Grid names: S, batch."""
    return KernelSpec(
        name="qsa_attend_tile",
        function=prefill.attend_tile,
        inputs=(
            Argument("q", g.dtype),
            Argument("k_cache", g.cache_dtype),
            Argument("v_cache", g.cache_dtype),
            Argument("counts", "int32"),
            Argument("entries", "int32"),
            *_CALL,
            Argument("gate", g.dtype),
        ),
        scalars=("S", "C"),
        outputs=(Argument("out", g.dtype),),
        constants=_prefill_constants(g, rows, rows, tiles, interleaved_gate),
        grid=lambda v: (ceil_div(v["S"], rows), g.kv_heads, v["batch"]),
        warps=tiles.warps,
        registers=tiles.registers,
    )


def fits_hopper(g: Geometry, capability: tuple[int, int]) -> bool:
    """Whether the kernels for compute capability 9.0 do this geometry on that device."""
    return (
        not triton.knobs.runtime.interpret
        and capability[0] == 9
        and (g.dtype, g.cache_dtype) == ("bfloat16", "bfloat16")
        and g.width == 256
        and g.ratio == 4
        and HOPPER_ROWS // 2 * g.heads // g.kv_heads <= 64
    )


def within_budget(g: Geometry, rows: int) -> bool:
    """Whether no context of at most `rows` tokens has more whole blocks than are kept."""
    return rows // g.ratio <= g.blocks


def attend_hopper(
    g: Geometry, rows: int, interleaved_gate: bool = False, whole: bool = False
) -> KernelSpec:
    """`attend_tile` and `attend_dense` for compute capability 9.0 in one launch, without a limit.
    Grid names: S, batch.

    whole: every context is `within_budget`, and nothing is read from the union's outputs.
    """
    from plugins.qsa.kernels import hopper

    group = g.heads // g.kv_heads
    tile = attend_tile(g, rows, Tiles(16, 4, 1), interleaved_gate)
    return replace(
        tile,
        name="qsa_attend_hopper",
        function=hopper.attend,
        # Compiled by 3.6 it is suspected of never ending on an H200, see benchmarks/README.md.
        needs_triton=(3, 9),
        early=True,
        scalars=(*tile.scalars, "batch"),
        constants={
            **_head_constants(g),
            "ROWS": rows,
            **_output_constants(g, interleaved_gate),
            "PROCESSORS": PROCESSORS,
            "WHOLE": whole,
        },
        grid=lambda v: (
            (ceil_div(v["S"] * group, 128) + ceil_div(v["S"], rows)) * g.kv_heads * v["batch"],
        ),
    )


def _head_constants(g: Geometry) -> dict[str, Any]:
    return {"K": g.blocks, "RATIO": g.ratio, "HQ": g.heads, "HK": g.kv_heads}


def _output_constants(g: Geometry, interleaved_gate: bool) -> dict[str, Any]:
    return {
        "SCALE": g.width**-0.5 * g.k_scale,
        "V_SCALE": g.v_scale,
        **_gate_constants(g, interleaved_gate),
    }


def attend_dense(
    g: Geometry, lines: int, tiles: Tiles, interleaved_gate: bool = False
) -> KernelSpec:
    """Causal attention of queries within the budget, in tiles of `lines` lines, a line being a
    query of a head. Grid names: S, batch.
    """
    group = g.heads // g.kv_heads
    return KernelSpec(
        name="qsa_attend_dense",
        function=dense.attend_dense,
        inputs=(
            *_attention_inputs(g)[:3],
            *_CALL,
            Argument("gate", g.dtype),
            Argument("together", g.dtype),
        ),
        scalars=("S", "C"),
        outputs=(Argument("out", g.dtype),),
        aliases={"out": "together"},
        constants={
            **_head_constants(g),
            "D": g.width,
            "M": lines,
            "TOKENS": tiles.columns,
            **_output_constants(g, interleaved_gate),
            "DOT": dot_type(g),
            "STAGES": tiles.stages,
        },
        grid=lambda v: (ceil_div(v["S"] * group, lines), g.kv_heads, v["batch"]),
        warps=tiles.warps,
        registers=tiles.registers,
    )


def union_limit(g: Geometry, rows: int) -> int:
    """Blocks in the union of `rows` queries up to which walking it together is faster."""
    return max(g.blocks, rows * g.blocks * 5 // 8)


def attend_apart(
    g: Geometry, rows: int, tiles: Tiles, interleaved_gate: bool = False
) -> KernelSpec:
    """Prefill attention of the tiles that `attend_tile` leaves out. Grid names: rows."""
    return KernelSpec(
        name="qsa_attend_apart",
        function=prefill.attend_apart,
        inputs=(
            *_attention_inputs(g)[:4],
            Argument("counts", "int32"),
            *_CALL,
            Argument("gate", g.dtype),
            Argument("together", g.dtype),
        ),
        scalars=("S", "C"),
        outputs=(Argument("out", g.dtype),),
        aliases={"out": "together"},
        constants=_prefill_constants(g, rows, 1, tiles, interleaved_gate),
        grid=lambda v: (v["rows"], g.kv_heads),
        warps=tiles.warps,
        registers=tiles.registers,
    )


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of a layer.

    Attributes:
        width, index_width: rotated channels of an attention head and of an index head.
        axes: 1 (a token's position is its rank) or 3 (temporal, height, width positions).
        sections: frequencies per axis, interleaved; used with three axes.
    """

    width: int = 64
    index_width: int = 64
    axes: int = 1
    sections: tuple[int, int, int] = (11, 11, 10)


def prepare(g: Geometry, rotary: Rotary, eps: float) -> KernelSpec:
    """Norms, rotary embedding, cache writes. Grid names: rows."""
    heads = _power(max(g.kv_heads, g.index_heads, 4), 1)
    parts = triton.cdiv(g.heads, heads) + 2
    return KernelSpec(
        name="qsa_prepare",
        function=preparing.prepare,
        inputs=(
            Argument("q_gate", g.dtype),
            Argument("key", g.dtype),
            Argument("value", g.dtype),
            Argument("index_qk", g.dtype),
            Argument("q_weight", g.dtype),
            Argument("k_weight", g.dtype),
            Argument("index_q_weight", g.dtype),
            Argument("index_k_weight", g.dtype),
            Argument("frequencies", "float32"),
            Argument("index_frequencies", "float32"),
            Argument("positions", "int32"),
            Argument("position_state", "int32"),
            Argument("index_state", g.dtype),
            Argument("key_cache_before", g.cache_dtype),
            Argument("value_cache_before", g.cache_dtype),
            Argument("index_keys_before", g.dtype),
            *_CALL,
        ),
        scalars=("S", "C", "NB", "batch"),
        outputs=(
            Argument("query", g.dtype),
            Argument("key_cache", g.cache_dtype),
            Argument("value_cache", g.cache_dtype),
            Argument("index_query", g.dtype),
            Argument("index_keys", g.dtype),
            Argument("next_index_state", g.dtype),
            Argument("next_position_state", "int32"),
        ),
        aliases={name: name + "_before" for name in ("key_cache", "value_cache", "index_keys")},
        constants={
            "EPS": eps,
            "RATIO": g.ratio,
            "HQ": g.heads,
            "HK": g.kv_heads,
            "D": g.width,
            "HI": g.index_heads,
            "DI": g.index_width,
            "ROTARY": rotary.width,
            "INDEX_ROTARY": rotary.index_width,
            "AXES": rotary.axes,
            "SECTION_H": rotary.sections[1],
            "SECTION_W": rotary.sections[2],
            "INVERSE_K_SCALE": 1.0 / g.k_scale,
            "INVERSE_V_SCALE": 1.0 / g.v_scale,
            "FP8": g.fp8,
            "HEADS": heads,
            "ROUND": getattr(tl, g.dtype),
        },
        grid=lambda v: (v["rows"], parts),
        warps=4,
    )
