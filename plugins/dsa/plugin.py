"""DSA as plugin layers of full TensorRT, one per kernel.

A generation step of a full layer runs score, select_chunk and attend (many rows) or attend_split
and merge (few rows; where two runs fill a GPU of compute capability 9.0, attend_pair does both); a
context step the same, or dense while no query sees more tokens than it keeps. Rows longer than one
chunk also run select_among, once per level. A sliding layer runs window_scores and window_values,
or, on compute capability 9.0, window (many rows) or window_split and merge (few rows). The
attribute `hopper` chooses the kernels for compute capability 9.0 and Dots3's sizes; `small` the
tiles for GPUs with less than 160 KiB of shared memory per block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from plugins.aot.quick import Attributes, Operation, Shapes
from plugins.aot.spec import KernelSpec, ceil_div
from plugins.dsa import plan
from plugins.dsa.plan import Geometry, IndexTiles, WindowTiles

NAMESPACE = "dsa"
# Forward-compatible code for GPUs whose own matrix instructions TensorRT's launch cannot feed:
# Blackwell's need memory that a launcher reserves.
COMPILED_FOR = {"10.0": "8.0"}
_GEOMETRY = {f.name: type(getattr(Geometry(), f.name)) for f in fields(Geometry)}
_LARGE_SHARED_BYTES = 227 * 1024

Sizes = dict[str, Any]
Outputs = dict[str, tuple[Any, ...]]


def geometry_attributes(g: Geometry) -> dict[str, Any]:
    """The attributes by which a plugin layer knows its geometry."""
    return {f.name: getattr(g, f.name) for f in fields(g)}


def _geometry(attributes: Attributes) -> Geometry:
    return Geometry(**{name: attributes[name] for name in _GEOMETRY})


def _shared(attributes: Attributes) -> int:
    return plan.SMALL_SHARED_BYTES if attributes["small"] else _LARGE_SHARED_BYTES


def _dims(shape: Any, count: int) -> tuple[Any, ...]:
    """The first sizes of a symbolic shape, which can only be indexed."""
    return tuple(shape[axis] for axis in range(count))


def _operation(
    name: str,
    spec: Callable[[Attributes], KernelSpec],
    outputs: Callable[[Shapes, Attributes], Outputs],
    values: Callable[[Shapes, Attributes], Sizes],
    extra: Mapping[str, Any] | None = None,
    geometry: Geometry | None = None,
) -> Operation:
    """`extra`: further attributes with example values; their types are the attributes' types."""
    example = {**geometry_attributes(geometry or Geometry()), **(extra or {})}
    return Operation(
        id=f"{NAMESPACE}::{name}",
        attributes={**_GEOMETRY, **{n: type(v) for n, v in (extra or {}).items()}},
        spec=spec,
        example=example,
        outputs=outputs,
        values=values,
        compiled_for=COMPILED_FOR,
    )


def _score() -> Operation:
    return _operation(
        "score",
        lambda a: plan.score_tokens(
            _geometry(a), IndexTiles(a["queries"], a["tokens"], a["warps"], a["stages"])
        ),
        lambda s, a: {"scores": (*_dims(s["index_query"], 2), s["index_keys"][2])},
        lambda s, a: {
            "B": s["index_query"][0],
            "S": s["index_query"][1],
            "C": s["index_keys"][2],
            "N": s["index_keys"][2],
            "run": a["run"],
        },
        {"queries": 1, "tokens": 128, "warps": 8, "stages": 3, "run": 1024},
    )


def _scored(shapes: Shapes, a: Attributes) -> Sizes:
    batch, steps, count = _dims(shapes["scores"], 3)
    return {"S": steps, "N": count, "rows": batch * steps, "chunks": a["chunks"]}


def _among(shapes: Shapes, a: Attributes) -> Sizes:
    return {
        "N": shapes["scores"][2],
        "width": a["width"],
        "parts": ceil_div(a["width"], a["chunk"]),
        "rows": shapes["candidates"][0],
    }


def _selections() -> list[Operation]:
    def winners(shapes: Shapes, a: Attributes) -> Outputs:
        batch, steps = _dims(shapes["scores"], 2)
        return {"chosen": (batch * steps, a["chunks"] * a["kept"])}

    def chosen(shapes: Shapes, a: Attributes) -> Outputs:
        parts = ceil_div(a["width"], a["chunk"])
        return {"chosen": (shapes["candidates"][0], parts * a["kept"])}

    return [
        _operation(
            "select_chunk",
            lambda a: plan.select_chunk(_geometry(a), a["chunk"]),
            winners,
            _scored,
            {"chunk": 32768, "chunks": 4},
        ),
        _operation(
            "select_among",
            lambda a: plan.select_among(_geometry(a), a["chunk"]),
            chosen,
            _among,
            {"chunk": 8192, "width": 8192},
        ),
    ]


def _parts(shapes: Shapes, a: Attributes) -> Outputs:
    """What a kernel over runs gives to the sum."""
    head = (*_dims(shapes["q_latent"], 2), a["splits"], a["heads"])
    return {"partial": (*head, a["latent"]), "partial_lse": head}


def _attends() -> list[Operation]:
    def like_query(shapes: Shapes, a: Attributes) -> Outputs:
        return {"out": _dims(shapes["q_latent"], 4)}

    def pair(shapes: Shapes, a: Attributes) -> Outputs:
        runs = _parts(shapes, {**a, "splits": plan.HOPPER_PAIR})
        *head, channels = runs["partial"]
        halves = {"partial": (*head, channels // plan.HOPPER_PAIR)}
        return {**like_query(shapes, a), **runs, **halves}

    def sizes(shapes: Shapes, a: Attributes) -> Sizes:
        batch, steps = _dims(shapes["q_latent"], 2)
        return {
            "S": steps,
            "C": shapes["cache"][2],
            "K": shapes["tokens"][2],
            "rows": batch * steps,
            "splits": a.get("splits", 1),
        }

    def whole(a: Attributes) -> KernelSpec:
        g = _geometry(a)
        if a["hopper"]:
            return plan.attend_whole_hopper(g)
        return plan.attend_whole(g, plan.attend_tiles(_shared(a)))

    def split(a: Attributes) -> KernelSpec:
        g = _geometry(a)
        if a["hopper"]:
            return plan.attend_split_hopper(g)
        return plan.attend_split(g, plan.attend_tiles(_shared(a)))

    return [
        _operation("attend", whole, like_query, sizes, {"hopper": 0, "small": 0}),
        _operation("attend_pair", lambda a: plan.attend_pair_hopper(_geometry(a)), pair, sizes),
        _operation("attend_split", split, _parts, sizes, {"splits": 2, "hopper": 0, "small": 0}),
        _operation(
            "merge",
            lambda a: plan.merge_splits(_geometry(a), a["splits"]),
            lambda s, a: {"out": (*_dims(s["gate"], 2), a["heads"], a["latent"])},
            lambda s, a: {"splits": a["splits"], "rows": s["gate"][0] * s["gate"][1]},
            {"splits": 2},
        ),
    ]


def _windows() -> list[Operation]:
    def tiles(a: Attributes) -> WindowTiles:
        return WindowTiles(queries=a["queries"])

    def sizes(shapes: Shapes, a: Attributes) -> Sizes:
        batch, steps = _dims(shapes["gate" if "gate" in shapes else "q_latent"], 2)
        return {
            "S": steps,
            "R": shapes["cache"][2],
            "query_blocks": ceil_div(steps, a.get("queries", 1)),
            "B": batch,
            "rows": batch * steps,
            "splits": a.get("splits", 1),
        }

    def probabilities(shapes: Shapes, a: Attributes) -> Outputs:
        g = _geometry(a)
        count = plan.window_tiles(g, tiles(a))
        lines = a["queries"] * plan.power(g.heads)
        blocks = (shapes["q_latent"][0], ceil_div(shapes["q_latent"][1], a["queries"]))
        return {
            "probabilities": (*blocks, lines, count * tiles(a).tokens),
            "tile_max": (*blocks, count, lines),
            "tile_sum": (*blocks, count, lines),
        }

    def out(shapes: Shapes, a: Attributes) -> Outputs:
        return {"out": (*_dims(shapes["gate"], 2), a["heads"], a["latent"])}

    return [
        _operation(
            "window_scores",
            lambda a: plan.window_scores(_geometry(a), tiles(a)),
            probabilities,
            sizes,
            {"queries": 1},
            plan.SLIDING,
        ),
        _operation(
            "window_values",
            lambda a: plan.window_values(_geometry(a), tiles(a)),
            out,
            sizes,
            {"queries": 1},
            plan.SLIDING,
        ),
        _operation(
            "window",
            lambda a: plan.window_whole_hopper(_geometry(a)),
            out,
            sizes,
            geometry=plan.SLIDING,
        ),
        _operation(
            "window_split",
            lambda a: plan.window_split_hopper(_geometry(a)),
            _parts,
            sizes,
            {"splits": 2},
            plan.SLIDING,
        ),
    ]


def _dense() -> Operation:
    def spec(a: Attributes) -> KernelSpec:
        g = _geometry(a)
        if a["hopper"]:
            return plan.attend_dense_hopper(g)
        return plan.attend_dense(g, plan.dense_tiles(_shared(a)))

    return _operation(
        "dense",
        spec,
        lambda s, a: {"out": (*_dims(s["q_nope"], 3), a["value"])},
        lambda s, a: {
            "B": s["q_nope"][0],
            "S": s["q_nope"][1],
            "N": s["expanded"][1],
            "C": s["cache"][2],
        },
        {"hopper": 0, "small": 0},
    )


OPERATIONS: tuple[Operation, ...] = (
    _score(),
    *_selections(),
    *_attends(),
    *_windows(),
    _dense(),
)
