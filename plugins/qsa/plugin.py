"""QSA as plugin layers of full TensorRT, one per kernel.

A generation step runs prepare, score, select and one of attend (many rows) or attend_split and
merge (few rows); a context step runs prepare, score, select, unite, attend_tile, attend_apart and
attend_dense, or attend_hopper instead of these three where `plan.fits_hopper` says so. Long rows
use score_groups and select_grouped instead of score and select.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from plugins.aot.quick import Attributes, Operation, Shapes
from plugins.aot.spec import KernelSpec, ceil_div
from plugins.qsa import plan
from plugins.qsa.plan import Geometry, Rotary, Tiles

NAMESPACE = "qsa"
# Where Triton would use tensor memory, which a plugin cannot launch, kernels are compiled for an
# older capability that the GPU runs as well.
COMPILED_FOR = {"10.0": "8.9"}
# Tensors and attributes share one name space in a plugin.
_PREFIX = "layer_"
_GEOMETRY = {_PREFIX + f.name: type(getattr(Geometry(), f.name)) for f in fields(Geometry)}
_TILES = {"columns": int, "warps": int, "stages": int}
_TILE_EXAMPLE = {"columns": 32, "warps": 4, "stages": 2}


def geometry_attributes(g: Geometry) -> dict[str, Any]:
    """The attributes by which a plugin layer knows its geometry."""
    return {_PREFIX + f.name: getattr(g, f.name) for f in fields(g)}


_EXAMPLE = geometry_attributes(Geometry())


def _geometry(attributes: Attributes) -> Geometry:
    return Geometry(**{name.removeprefix(_PREFIX): attributes[name] for name in _GEOMETRY})


def _tiles(attributes: Attributes) -> Tiles:
    return Tiles(attributes["columns"], attributes["warps"], attributes["stages"])


def _query_sizes(shapes: Shapes, attributes: Attributes) -> dict[str, Any]:
    query = shapes["q"]
    return {
        "S": query[2],
        "C": shapes["k_cache"][2],
        "batch": query[0],
        "rows": query[0] * query[2],
        "splits": attributes.get("splits", 1),
    }


def _attended(shapes: Shapes, attributes: Attributes) -> dict[str, tuple[Any, ...]]:
    query = shapes["q"]
    return {"out": (query[0], query[2], attributes["layer_heads"] * attributes["layer_width"])}


def _operation(
    name: str,
    spec: Any,
    outputs: Any,
    values: Any,
    extra: Mapping[str, type] | None = None,
    example: Mapping[str, Any] | None = None,
) -> Operation:
    return Operation(
        id=f"{NAMESPACE}::{name}",
        attributes={**_GEOMETRY, **(extra or {})},
        spec=spec,
        example={**_EXAMPLE, **(example or {})},
        outputs=outputs,
        values=values,
        compiled_for=COMPILED_FOR,
    )


def _prepare() -> Operation:
    extra = {"eps": float, "rotary": int, "index_rotary": int, "axes": int}
    extra |= {"section_t": int, "section_h": int, "section_w": int}
    example = {"eps": 1e-6, "rotary": 64, "index_rotary": 64, "axes": 1}
    example |= {"section_t": 11, "section_h": 11, "section_w": 10}

    def spec(a: Attributes) -> Any:
        sections = (a["section_t"], a["section_h"], a["section_w"])
        rotary = Rotary(a["rotary"], a["index_rotary"], a["axes"], sections)
        return plan.prepare(_geometry(a), rotary, a["eps"])

    def outputs(shapes: Shapes, a: Attributes) -> dict[str, tuple[Any, ...]]:
        batch, steps = shapes["q_gate"][0], shapes["q_gate"][1]
        return {
            "query": (batch, a["layer_heads"], steps, a["layer_width"]),
            "index_query": (batch, a["layer_index_heads"], steps, a["layer_index_width"]),
            "next_index_state": (batch, a["layer_ratio"] - 1, a["layer_index_width"]),
            "next_position_state": (batch, a["layer_ratio"] - 1, a["axes"]),
        }

    def values(shapes: Shapes, a: Attributes) -> dict[str, Any]:
        batch, steps = shapes["q_gate"][0], shapes["q_gate"][1]
        return {
            "S": steps,
            "C": shapes["key_cache_before"][2],
            "NB": shapes["index_keys_before"][2],
            "batch": batch,
            "rows": batch * steps,
        }

    return _operation("prepare", spec, outputs, values, extra, example)


def _scores() -> list[Operation]:
    extra = {"query_rows": int, "tiles": int, **_TILES}
    example = {"query_rows": 4, "tiles": 4, **_TILE_EXAMPLE, "columns": 64}

    def sizes(shapes: Shapes, a: Attributes) -> dict[str, Any]:
        batch, _, steps, _ = shapes["index_query"]
        count = shapes["index_keys"][1]
        return {"S": steps, "NB": count, "tiles": a["tiles"], "batch": batch}

    def scores(shapes: Shapes, a: Attributes) -> dict[str, tuple[Any, ...]]:
        batch, _, steps, _ = shapes["index_query"]
        count = shapes["index_keys"][1]
        made = {"scores": (batch, steps, plan.padded(count))}
        if "group" in a:
            made["maxima"] = (batch, steps, plan.padded(ceil_div(count, a["group"])))
        return made

    def spec(a: Attributes) -> KernelSpec:
        return plan.score_blocks(_geometry(a), a["query_rows"], _tiles(a), a.get("group", 0))

    return [
        _operation("score", spec, scores, sizes, extra, example),
        _operation(
            "score_groups", spec, scores, sizes, {**extra, "group": int}, {**example, "group": 8}
        ),
    ]


def _selections() -> list[Operation]:
    def sizes(shapes: Shapes, a: Attributes) -> dict[str, Any]:
        batch, steps, count = shapes["scores"]
        return {"S": steps, "NB": count, "rows": batch * steps}

    def ids(shapes: Shapes, a: Attributes) -> dict[str, tuple[Any, ...]]:
        return {"ids": (*shapes["scores"][:2], a["layer_blocks"])}

    extra = {"width": int, "warps": int}
    example = {"width": 8192, "warps": 16}
    return [
        _operation(
            "select",
            lambda a: plan.select_row(_geometry(a), a["width"], a["warps"]),
            ids,
            sizes,
            extra,
            example,
        ),
        _operation(
            "select_grouped",
            lambda a: plan.select_grouped(_geometry(a), a["width"], a["group"], a["warps"]),
            ids,
            sizes,
            {**extra, "group": int},
            {**example, "group": 8},
        ),
    ]


def _decode() -> list[Operation]:
    gate = {"interleaved_gate": int}

    def partial(shapes: Shapes, a: Attributes) -> dict[str, tuple[Any, ...]]:
        rows = shapes["q"][0] * shapes["q"][2]
        return {
            "partial": (a["splits"], rows, a["layer_heads"], a["layer_width"]),
            "partial_lse": (a["splits"], rows, a["layer_heads"]),
        }

    return [
        _operation(
            "attend",
            lambda a: plan.attend_whole(_geometry(a), _tiles(a), bool(a["interleaved_gate"])),
            _attended,
            _query_sizes,
            {**gate, **_TILES},
            {"interleaved_gate": 0, **_TILE_EXAMPLE},
        ),
        _operation(
            "attend_split",
            lambda a: plan.attend_split(_geometry(a), _tiles(a)),
            partial,
            _query_sizes,
            {"splits": int, **_TILES},
            {"splits": 8, **_TILE_EXAMPLE},
        ),
        _operation(
            "attend_once",
            lambda a: plan.attend_once(_geometry(a), a["columns"], a["warps"]),
            partial,
            _query_sizes,
            {"splits": int, "columns": int, "warps": int},
            {"splits": 65, "columns": 32, "warps": 4},
        ),
        _operation(
            "merge",
            lambda a: plan.merge_splits(_geometry(a), a["splits"], bool(a["interleaved_gate"])),
            lambda s, a: {"out": (s["gate"][0], s["gate"][1], a["layer_heads"] * a["layer_width"])},
            lambda s, a: {"rows": s["partial"][1], "splits": a["splits"]},
            {"splits": int, **gate},
            {"splits": 8, "interleaved_gate": 0},
        ),
    ]


def _prefill() -> list[Operation]:
    gate: dict[str, type] = {"interleaved_gate": int}
    rows = {"tile_rows": int, **gate, **_TILES}
    example = {"tile_rows": 4, "interleaved_gate": 0, **_TILE_EXAMPLE}

    def united(shapes: Shapes, a: Attributes) -> dict[str, tuple[Any, ...]]:
        batch, steps = shapes["blocks"][0], shapes["blocks"][1]
        tiles = ceil_div(steps, a["tile_rows"])
        return {
            "counts": (batch, tiles, 3),
            "entries": (batch, tiles, 3, a["tile_rows"] // 2 * a["layer_blocks"]),
            "marks": (batch, tiles, a["words"]),
        }

    return [
        _operation(
            "unite",
            lambda a: plan.unite_blocks(_geometry(a), a["tile_rows"]),
            united,
            lambda s, a: {
                "S": s["blocks"][1],
                "words": a["words"],
                "batch": s["blocks"][0],
            },
            {"tile_rows": int, "words": int},
            {"tile_rows": 4, "words": 8192},
        ),
        _operation(
            "attend_tile",
            lambda a: plan.attend_tile(
                _geometry(a), a["tile_rows"], _tiles(a), bool(a["interleaved_gate"])
            ),
            _attended,
            _query_sizes,
            rows,
            example,
        ),
        _operation(
            "attend_apart",
            lambda a: plan.attend_apart(
                _geometry(a), a["tile_rows"], _tiles(a), bool(a["interleaved_gate"])
            ),
            lambda s, a: {},
            _query_sizes,
            rows,
            example,
        ),
        _operation(
            "attend_dense",
            lambda a: plan.attend_dense(
                _geometry(a), a["lines"], _tiles(a), bool(a["interleaved_gate"])
            ),
            lambda s, a: {},
            _query_sizes,
            {"lines": int, **gate, **_TILES},
            {"lines": 64, "interleaved_gate": 0, **_TILE_EXAMPLE},
        ),
        _operation(
            "attend_hopper",
            lambda a: plan.attend_hopper(
                _geometry(a), a["tile_rows"], bool(a["interleaved_gate"]), bool(a["whole"])
            ),
            _attended,
            _query_sizes,
            {"tile_rows": int, **gate, "whole": int},
            {"tile_rows": 8, "interleaved_gate": 0, "whole": 0},
        ),
    ]


OPERATIONS: tuple[Operation, ...] = (
    _prepare(),
    *_scores(),
    *_selections(),
    *_decode(),
    *_prefill(),
)
