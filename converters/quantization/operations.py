"""The operations on a task's matrix, in bounded memory: read twice, once for the largest value.

A matrix that fits into one buffer is read once and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from converters.checkpoint.copying import copy, copy_memory
from converters.checkpoint.header import TensorEntry
from converters.checkpoint.recipe import Recipe
from converters.checkpoint.write import (
    CHUNK_BYTES,
    Counts,
    Operate,
    OutputFile,
    Segment,
    Task,
)
from converters.quantization import fp8, nvfp4
from converters.quantization.magnitude import largest_magnitude
from plugins.support.errors import InputError

Advance = Callable[[int], None]
# Rows at a time: a multiple of the FP8 block, so that blocks are never cut.
_ROW_STEP = fp8.BLOCK


def quantize_nvfp4(task: Task, file: OutputFile, advance: Advance, counts: Counts) -> None:
    """Codes, block scales and one global scale, which gate and up of an expert share, and the
    peers of the recipe too.
    """
    codes, blocks, scales = task.recipe.outputs
    rows, columns = task.recipe.matrix_shape
    matrix = _Matrix(task, advance)
    peaks = [matrix.largest(), *map(_peak, task.recipe.peers)]
    scale = nvfp4.global_scale(torch.stack(peaks).max())
    start = task.matrix * rows * columns
    for first, values in matrix.strips():
        packed, block_scales = nvfp4.quantize(values, scale)
        at = start + first * columns
        file.write(codes.name, at // 2, packed)
        file.write(blocks.name, at // nvfp4.BLOCK, block_scales)
        counts.vanished(codes.name, nvfp4.BLOCK * nvfp4.vanished_blocks(packed, block_scales))
    _write_scalar(task, file, scales.name, scale)


def quantize_fp8(task: Task, file: OutputFile, advance: Advance, counts: Counts) -> None:
    """Codes and one scale, which gate and up of an expert share."""
    codes, scales = task.recipe.outputs
    rows, columns = task.recipe.matrix_shape
    matrix = _Matrix(task, advance)
    scale = fp8.matrix_scale(matrix.largest())
    start = task.matrix * rows * columns
    for first, values in matrix.strips():
        file.write(codes.name, start + first * columns, fp8.quantize(values, scale))
    _write_scalar(task, file, scales.name, scale)


def quantize_fp8_blocks(task: Task, file: OutputFile, advance: Advance, counts: Counts) -> None:
    """Codes and a scale per block; blocks do not straddle gate and up."""
    codes, scales = task.recipe.outputs
    rows, columns = task.recipe.matrix_shape
    matrix = _Matrix(task, advance)
    start = task.matrix * rows * columns
    per_row = scales.shape[-1]
    block_row = task.matrix * scales.shape[-2]
    for first, values in matrix.strips(once=True):
        block_scales = fp8.block_scales(values)
        file.write(codes.name, start + first * columns, fp8.quantize_blocks(values, block_scales))
        file.write(scales.name, block_row * per_row, block_scales)
        block_row += block_scales.shape[0]


def take_reciprocal(task: Task, file: OutputFile, advance: Advance, counts: Counts) -> None:
    """Scales that a file holds as 1 / x."""
    results = []
    for segment in task.segments:
        values = segment.read(0, segment.elements)
        scales = 1.0 / values
        # The reciprocal of a number that is too small is not finite either.
        if not bool(((values > 0) & values.isfinite() & scales.isfinite()).all()):
            raise InputError(
                "a reciprocal scale is zero, negative or not finite",
                where=f"{segment.entry.file}: {segment.entry.name}",
                expected="finite numbers above zero, and a finite reciprocal",
                fix="the checkpoint was quantised wrongly; a default of 1 would give wrong text",
            )
        results.append(scales)
    file.write(task.recipe.outputs[0].name, task.start, torch.cat(results))
    advance(task.nbytes)


def write_ones(task: Task, file: OutputFile, advance: Advance, counts: Counts) -> None:
    """Scales that change nothing, where no others are known."""
    (output,) = task.recipe.outputs
    file.write(output.name, 0, torch.ones(output.shape, dtype=output.dtype.torch))
    advance(0)


OPERATIONS: dict[str, Operate] = {
    "copy": copy,
    "ones": write_ones,
    "nvfp4": quantize_nvfp4,
    "fp8": quantize_fp8,
    "fp8_block": quantize_fp8_blocks,
    "reciprocal": take_reciprocal,
}


# Bytes for each value of a strip of rows besides reading it: its code, and what is computed on the
# way in float32 (FP8: quotient, and that clamped; with blocks a scale for every value).
_BYTES_PER_VALUE = {"nvfp4": 2, "fp8": 9, "fp8_block": 14}


def task_memory(recipe: Recipe) -> int:
    """Bytes that a task of a recipe needs at a time."""
    if recipe.operation not in _BYTES_PER_VALUE:
        return copy_memory(recipe)
    rows, columns = recipe.matrix_shape
    width = max(math.ceil(entry.dtype.bits / 8) for entry in (*recipe.sources, *recipe.peers))
    strip = min(_strip_rows(columns), rows) * columns
    others = max((math.prod(entry.shape) for entry in recipe.peers), default=0)
    read = max(strip, min(others, CHUNK_BYTES // 16)) * width
    matrix = rows * columns * width
    kept = matrix if recipe.operation != "fp8_block" and matrix <= CHUNK_BYTES else 0
    buffers = nvfp4.BUFFER_BYTES if recipe.operation == "nvfp4" else 0
    return read + kept + buffers + strip * _BYTES_PER_VALUE[recipe.operation]


def _strip_rows(columns: int) -> int:
    """Rows at a time, a multiple of the FP8 block."""
    return max(CHUNK_BYTES // 16 // (columns * _ROW_STEP), 1) * _ROW_STEP


class _Matrix:
    """The matrix of a task: one or more segments that hold whole rows of it."""

    def __init__(self, task: Task, advance: Advance) -> None:
        self._task, self._advance = task, advance
        self._rows, self._columns = task.recipe.matrix_shape
        self._kept: list[tuple[int, torch.Tensor]] | None = None

    def largest(self) -> torch.Tensor:
        """The largest magnitude. Raises InputError for values that are not finite."""
        keep = self._task.nbytes <= CHUNK_BYTES
        kept, peaks = [], []
        for first, values in self._read():
            peaks.append(_finite_peak(values, self._task.segments[0].entry))
            if keep:
                kept.append((first, values.clone()))
        self._kept = kept if keep else None
        return torch.stack(peaks).max()

    def strips(self, *, once: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows [n, columns]) in order; with `once`, values are checked here."""
        for first, values in self._kept if self._kept is not None else self._read():
            if once:
                _finite_peak(values, self._task.segments[0].entry)
            yield first, values
        self._advance(self._task.nbytes)

    def _read(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Strips of rows; none goes over the border of two projections."""
        first = 0
        step = _strip_rows(self._columns)
        for segment in self._pieces():
            rows = segment.elements // self._columns
            for row in range(0, rows, step):
                count = min(step, rows - row)
                values = segment.read(row * self._columns, count * self._columns)
                yield first + row, values.view(count, self._columns)
            first += rows

    def _pieces(self) -> Iterator[Segment]:
        """Segments, one per projection: a stacked source is cut where gate ends and up begins."""
        pieces, segments = self._task.recipe.pieces, self._task.segments
        per_segment = max(pieces // len(segments), 1)
        for segment in segments:
            count = segment.elements // per_segment
            for number in range(per_segment):
                yield Segment(segment.entry, segment.start + number * count, count)


def _peak(entry: TensorEntry) -> torch.Tensor:
    """The largest magnitude of a whole tensor, float32 0-d."""
    return torch.stack([_finite_peak(values, entry) for values in _chunks(entry)]).max()


def _chunks(entry: TensorEntry) -> Iterator[torch.Tensor]:
    segment = Segment(entry, 0, math.prod(entry.shape))
    step = CHUNK_BYTES // 16
    for start in range(0, segment.elements, step):
        yield segment.read(start, min(step, segment.elements - start))


def _finite_peak(values: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """The largest magnitude of a piece of a tensor, float32 0-d.

    Raises InputError with the counts of the whole tensor when it is not finite.
    """
    peak = largest_magnitude(values)
    if bool(peak.isfinite()):
        return peak.float()
    nan = infinite = 0
    for piece in _chunks(entry):
        nan += int(piece.isnan().sum())
        infinite += int(piece.isinf().sum())
    raise InputError(
        f"{nan + infinite} values are NaN or infinite, so no scale can be found",
        where=f"{entry.file}: {entry.name}",
        expected="finite values",
        found=f"{nan} NaN and {infinite} infinite among {math.prod(entry.shape)}",
        fix="repair the checkpoint, or leave the weight out with a narrower --only",
    )


def _write_scalar(task: Task, file: OutputFile, name: str, scale: torch.Tensor) -> None:
    pieces = task.recipe.pieces
    file.write(name, task.matrix * pieces, scale.repeat(pieces))
