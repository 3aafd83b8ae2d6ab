"""Which kernel runs with which tiles: the operations of DSA as kernel descriptions.

Tile sizes were chosen on an H200 (`benchmarks/README.md` has the numbers); they are correct on
every GPU. Everything here is a function of the geometry and of sizes known at build time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl

from plugins.aot.spec import Argument, KernelSpec, ceil_div
from plugins.dsa.geometry import Geometry as Geometry
from plugins.dsa.kernels import attention, dense, index, select, window

SLIDING = Geometry(
    heads=64, latent=1024, rope=64, nope=192, index_heads=0, index_width=0, kept=0, window=513
)


def dot_type(geometry: Geometry) -> Any:
    """Operand type of matrix products."""
    return tl.float32 if triton.knobs.runtime.interpret else getattr(tl, geometry.dtype)


def power(value: int, least: int = 16) -> int:
    """The next power of two, at least what a matrix product takes."""
    return max(least, triton.next_power_of_2(value))


# Heads per program of the kernels for compute capability 9.0, and their tokens per tile.
HOPPER_HEADS = 64
HOPPER_TOKENS = 64
# Programs that share a query and head block in their clusters.
HOPPER_PAIR = 2

# Multiprocessors of the GPUs that the kernels are tuned for.
PROCESSORS = 132

_CALL = (Argument("past", "int32"), Argument("new", "int32"))


def _parts() -> tuple[Argument, ...]:
    """What a kernel over runs gives to `merge_splits`."""
    return Argument("partial", "float32"), Argument("partial_lse", "float32")


def _queries(g: Geometry) -> tuple[Argument, ...]:
    return Argument("q_latent", g.dtype), Argument("q_rope", g.dtype)


@dataclass(frozen=True)
class AttendTiles:
    """Tiles of the sparse attention: heads and tokens per step, warps, pipeline stages."""

    heads: int = 64
    tokens: int = 64
    warps: int = 8
    stages: int = 2


# Shared memory per block of the smallest GPUs that the kernels are compiled for (8.9, 12.0).
SMALL_SHARED_BYTES = 99 * 1024


def attend_tiles(shared_bytes: int) -> AttendTiles:
    """Tiles of the sparse attention for a GPU's shared memory per block."""
    return AttendTiles() if shared_bytes >= 160 * 1024 else AttendTiles(32, 16, 4, 2)


def _attend_constants(g: Geometry, tiles: AttendTiles) -> dict[str, Any]:
    return {
        "SCALE": g.scale,
        "HEADS": g.heads,
        "LATENT": g.latent,
        "ROPE": g.rope,
        "BLOCK_H": min(tiles.heads, power(g.heads)),
        "BLOCK_L": power(g.latent),
        "BLOCK_R": power(g.rope),
        "BLOCK_N": tiles.tokens,
        "DOT": dot_type(g),
        "STAGES": tiles.stages,
    }


def attend_whole(g: Geometry, tiles: AttendTiles = AttendTiles()) -> KernelSpec:
    """Sparse attention, one program per query and head block. Grid names: rows."""
    constants = _attend_constants(g, tiles)
    head_blocks = ceil_div(g.heads, constants["BLOCK_H"])
    return KernelSpec(
        name="dsa_attend",
        function=attention.attend_whole,
        inputs=(
            *_queries(g),
            Argument("cache", g.dtype),
            Argument("tokens", "int32"),
            *_CALL,
            Argument("gate", g.dtype),
        ),
        scalars=("S", "C", "K"),
        outputs=(Argument("out", g.dtype),),
        constants=constants,
        grid=lambda v: (head_blocks, v["rows"]),
        warps=tiles.warps,
    )


def attend_split(g: Geometry, tiles: AttendTiles = AttendTiles()) -> KernelSpec:
    """Sparse attention over runs of each token list. Grid names: rows."""
    constants = _attend_constants(g, tiles)
    head_blocks = ceil_div(g.heads, constants["BLOCK_H"])
    return KernelSpec(
        name="dsa_attend_split",
        function=attention.attend_split,
        inputs=(*_queries(g), Argument("cache", g.dtype), Argument("tokens", "int32"), *_CALL),
        scalars=("S", "C", "K", "splits"),
        outputs=_parts(),
        constants=constants,
        early=True,
        grid=lambda v: (head_blocks, v["splits"], v["rows"]),
        warps=tiles.warps,
    )


def fits_hopper(g: Geometry, capability: tuple[int, int]) -> bool:
    """Whether the kernels for compute capability 9.0 do this geometry on that device."""
    absorbed = (512, 64) if not g.window else (1024, 64)
    return (
        not triton.knobs.runtime.interpret
        and capability[0] == 9
        and g.dtype == "bfloat16"
        and (g.latent, g.rope) == absorbed
        and (g.nope, g.value) in ((128, 128), (192, 128))
        and g.heads % HOPPER_HEADS == 0
        and g.window in (0, SLIDING.window)
    )


def attend_whole_hopper(g: Geometry) -> KernelSpec:
    """`attend_whole` for compute capability 9.0. Grid names: rows."""
    from plugins.dsa.kernels import hopper

    return replace(
        attend_whole(g),
        function=hopper.attend_whole,
        constants={"SCALE": g.scale, "HEADS": g.heads},
        grid=lambda v: (g.heads // HOPPER_HEADS, v["rows"]),
        warps=4,
    )


def attend_pair_hopper(g: Geometry) -> KernelSpec:
    """`attend_whole_hopper` in two runs, by clusters. Grid names: rows."""
    from plugins.dsa.kernels import hopper

    whole = attend_whole_hopper(g)
    return replace(
        whole,
        name="dsa_attend_pair",
        function=hopper.attend_pair,
        outputs=(*whole.outputs, *_parts()),
        grid=lambda v: (HOPPER_PAIR * g.heads // HOPPER_HEADS, v["rows"]),
        cluster=HOPPER_PAIR,
        early=True,
    )


def attend_split_hopper(g: Geometry) -> KernelSpec:
    """`attend_split` for compute capability 9.0. Grid names: rows."""
    from plugins.dsa.kernels import hopper

    return replace(
        attend_split(g),
        function=hopper.attend_split,
        constants={"SCALE": g.scale, "HEADS": g.heads},
        grid=lambda v: (g.heads // HOPPER_HEADS, v["splits"], v["rows"]),
        warps=4,
    )


def _window_inputs(g: Geometry) -> tuple[Argument, ...]:
    return *_queries(g), Argument("cache", g.dtype), *_CALL, Argument("base", "int32")


def _window_hopper(
    g: Geometry,
    name: str,
    function: Any,
    gate: tuple[Argument, ...],
    splits: tuple[str, ...],
    outputs: tuple[Argument, ...],
) -> KernelSpec:
    programs = HOPPER_PAIR * g.heads // HOPPER_HEADS
    return KernelSpec(
        name=name,
        function=function,
        inputs=(*_window_inputs(g), *gate),
        scalars=("S", "R", *splits),
        outputs=outputs,
        constants={"SCALE": g.scale, "WINDOW": g.window, "HEADS": g.heads},
        grid=lambda v: (programs, *(v[name] for name in splits), v["rows"]),
        warps=4,
        cluster=HOPPER_PAIR,
        early=bool(splits),
    )


def window_whole_hopper(g: Geometry) -> KernelSpec:
    """Window attention for compute capability 9.0, two programs per query. Grid names: rows."""
    from plugins.dsa.kernels import hopper_window

    gate, out = (Argument("gate", g.dtype),), (Argument("out", g.dtype),)
    return _window_hopper(g, "dsa_window", hopper_window.window_whole, gate, (), out)


def window_split_hopper(g: Geometry) -> KernelSpec:
    """`window_whole_hopper` over runs of each window. Grid names: rows."""
    from plugins.dsa.kernels import hopper_window

    function, parts = hopper_window.window_split, _parts()
    return _window_hopper(g, "dsa_window_split", function, (), ("splits",), parts)


def merge_splits(g: Geometry, most_splits: int) -> KernelSpec:
    """Sum of the splits, gated. Grid names: rows."""
    splits = power(most_splits, 1)
    # A few 16-byte loads per thread: more programs hide more latency than larger ones.
    heads = max(1, min(power(g.heads, 1), 2048 // (power(g.latent) * splits)))
    return KernelSpec(
        name="dsa_merge",
        function=attention.merge_splits,
        inputs=(
            Argument("partial", "float32"),
            Argument("partial_lse", "float32"),
            Argument("gate", g.dtype),
        ),
        scalars=("splits",),
        outputs=(Argument("out", g.dtype),),
        constants={
            "HEADS": g.heads,
            "LATENT": g.latent,
            "BLOCK_H": heads,
            "BLOCK_L": power(g.latent),
            "SPLITS": splits,
        },
        early=True,
        grid=lambda v: (ceil_div(g.heads, heads), v["rows"]),
        warps=4 if splits <= 8 else 8,
    )


@dataclass(frozen=True)
class IndexTiles:
    """Tiles of the index scores: queries per program, tokens per step, warps, stages."""

    queries: int = 1
    tokens: int = 128
    warps: int = 4
    stages: int = 3


def score_tokens(g: Geometry, tiles: IndexTiles = IndexTiles()) -> KernelSpec:
    """Index scores. Grid names: B, S, N, run."""
    return KernelSpec(
        name="dsa_index_scores",
        function=index.score_tokens,
        inputs=(
            Argument("index_query", g.dtype),
            Argument("index_keys", g.dtype),
            Argument("head_weights", g.dtype),
            *_CALL,
        ),
        scalars=("S", "C", "N", "run"),
        outputs=(Argument("scores", "float32"),),
        constants={
            "HEADS": g.index_heads,
            "WIDTH": g.index_width,
            "BLOCK_D": power(g.index_width),
            "BLOCK_H": power(g.index_heads),
            "BLOCK_Q": tiles.queries,
            "BLOCK_N": tiles.tokens,
            "DOT": dot_type(g),
            "STAGES": tiles.stages,
        },
        grid=lambda v: (ceil_div(v["N"], v["run"]), ceil_div(v["S"], tiles.queries), v["B"]),
        warps=tiles.warps,
    )


# Chosen tokens are put in place from so many at a time; their running counts take registers too.
SELECT_PART = 8192


def _selection(g: Geometry, chunk: int) -> dict[str, Any]:
    return {"K": g.kept, "CHUNK": chunk, "PART": min(chunk, SELECT_PART)}


def _selection_warps(chunk: int) -> int:
    """16 scores per thread, or the largest program."""
    return max(1, min(32, chunk // 512))


def select_chunk(g: Geometry, chunk: int) -> KernelSpec:
    """Top-k of each chunk of a row. Grid names: chunks, rows."""
    return KernelSpec(
        name="dsa_select_chunk",
        function=select.select_chunk,
        inputs=(Argument("scores", "float32"), *_CALL),
        scalars=("S", "N", "chunks"),
        outputs=(Argument("chosen", "int32"),),
        constants=_selection(g, chunk),
        early=True,
        grid=lambda v: (v["chunks"], v["rows"]),
        warps=_selection_warps(chunk),
    )


def select_among(g: Geometry, chunk: int) -> KernelSpec:
    """Top-k of runs of `chunk` candidates. Grid names: parts, rows."""
    return KernelSpec(
        name="dsa_select_among",
        function=select.select_among,
        inputs=(Argument("scores", "float32"), Argument("candidates", "int32")),
        scalars=("N", "width", "parts"),
        outputs=(Argument("chosen", "int32"),),
        constants=_selection(g, chunk),
        early=True,
        grid=lambda v: (v["parts"], v["rows"]),
        warps=_selection_warps(chunk),
    )


@dataclass(frozen=True)
class WindowTiles:
    """Tiles of the window attention.

    Attributes:
        queries: queries per block, which share one read of the latents.
        tokens: span entries per tile.
        reduction: channels per step of the scores.
        channels: output channels per program.
    """

    queries: int = 1
    tokens: int = 64
    reduction: int = 64
    channels: int = 128
    score_warps: int = 4
    value_warps: int = 4
    score_stages: int = 4
    value_stages: int = 3


def window_tiles(g: Geometry, tiles: WindowTiles) -> int:
    """Tiles in the span of one query block."""
    return triton.cdiv(g.window - 1 + tiles.queries, tiles.tokens)


def window_scores(g: Geometry, tiles: WindowTiles = WindowTiles()) -> KernelSpec:
    """Probabilities of a window. Grid names: query_blocks, B."""
    count = window_tiles(g, tiles)
    return KernelSpec(
        name="dsa_window_scores",
        function=window.window_scores,
        inputs=_window_inputs(g),
        scalars=("S", "R", "query_blocks"),
        outputs=(
            Argument("probabilities", g.dtype),
            Argument("tile_max", "float32"),
            Argument("tile_sum", "float32"),
        ),
        constants={
            "SCALE": g.scale,
            "WINDOW": g.window,
            "HEADS": g.heads,
            "LATENT": g.latent,
            "ROPE": g.rope,
            "TILES": count,
            "BLOCK_Q": tiles.queries,
            "BLOCK_H": power(g.heads),
            "BLOCK_N": tiles.tokens,
            "BLOCK_K": tiles.reduction,
            "BLOCK_R": power(g.rope),
            "DOT": dot_type(g),
            "STAGES": tiles.score_stages,
        },
        grid=lambda v: (count, v["query_blocks"], v["B"]),
        warps=tiles.score_warps,
    )


def window_values(g: Geometry, tiles: WindowTiles = WindowTiles()) -> KernelSpec:
    """Probabilities times latents. Grid names: query_blocks, B."""
    count = window_tiles(g, tiles)
    channels = min(tiles.channels, power(g.latent))
    return KernelSpec(
        name="dsa_window_values",
        function=window.window_values,
        inputs=(
            Argument("probabilities", g.dtype),
            Argument("tile_max", "float32"),
            Argument("tile_sum", "float32"),
            Argument("cache", g.dtype),
            *_CALL,
            Argument("base", "int32"),
            Argument("gate", g.dtype),
        ),
        scalars=("S", "R", "query_blocks"),
        outputs=(Argument("out", g.dtype),),
        constants={
            "WINDOW": g.window,
            "HEADS": g.heads,
            "LATENT": g.latent,
            "ROPE": g.rope,
            "TILES": count,
            "BLOCK_T": power(count, 1),
            "BLOCK_Q": tiles.queries,
            "BLOCK_H": power(g.heads),
            "BLOCK_N": tiles.tokens,
            "BLOCK_V": channels,
            "DOT": dot_type(g),
            "STAGES": tiles.value_stages,
        },
        grid=lambda v: (ceil_div(g.latent, channels), v["query_blocks"], v["B"]),
        warps=tiles.value_warps,
    )


@dataclass(frozen=True)
class DenseTiles:
    """Tiles of the dense attention: queries and tokens per step, warps, stages."""

    queries: int = 128
    tokens: int = 64
    warps: int = 8
    stages: int = 3


def dense_tiles(shared_bytes: int) -> DenseTiles:
    """Tiles of the dense attention for a GPU's shared memory per block."""
    return DenseTiles() if shared_bytes >= 220 * 1024 else DenseTiles(64, 32, 4, 2)


def attend_dense(g: Geometry, tiles: DenseTiles = DenseTiles()) -> KernelSpec:
    """Attention over expanded keys and values. Grid names: B, S."""
    first = 1 << (g.nope.bit_length() - 1)
    rest = g.nope - first
    return KernelSpec(
        name="dsa_attend_dense",
        function=dense.attend_dense,
        inputs=(
            Argument("q_nope", g.dtype),
            Argument("q_rope", g.dtype),
            Argument("expanded", g.dtype),
            Argument("cache", g.dtype),
            *_CALL,
            Argument("gate", g.dtype),
        ),
        scalars=("S", "N", "C"),
        outputs=(Argument("out", g.dtype),),
        constants={
            "SCALE": g.scale,
            "WINDOW": g.window,
            "HEADS": g.heads,
            "NOPE": g.nope,
            "ROPE": g.rope,
            "VALUE": g.value,
            "LATENT": g.latent,
            "BLOCK_M": tiles.queries,
            "BLOCK_N": tiles.tokens,
            "FIRST": first,
            "SECOND": power(rest) if rest else 0,
            "BLOCK_R": power(g.rope),
            "BLOCK_V": power(g.value),
            "DOT": dot_type(g),
            "STAGES": tiles.stages,
        },
        grid=lambda v: (ceil_div(v["S"], tiles.queries), g.heads, v["B"]),
        warps=tiles.warps,
    )


def attend_dense_hopper(g: Geometry) -> KernelSpec:
    """`attend_dense` for compute capability 9.0. Grid names: B, S."""
    from plugins.dsa.kernels import hopper_dense

    portable = attend_dense(g)
    names = ("SCALE", "WINDOW", "HEADS", "NOPE", "ROPE", "VALUE", "LATENT", "FIRST", "SECOND")
    constants = {name: portable.constants[name] for name in names}
    # The widest tiles of which two fit in shared memory beside the queries; then as many as fit.
    constants["TOKENS"], constants["STAGES"] = (64, 3) if constants["SECOND"] else (128, 2)
    return replace(
        portable,
        function=hopper_dense.attend_dense,
        scalars=(*portable.scalars, "B"),
        constants=constants,
        grid=lambda v: (PROCESSORS,),
        warps=4,
    )
