"""Copies tensors into the weight file: inside the kernel where their values stay as they are."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from converters.checkpoint.recipe import Recipe
from converters.checkpoint.write import (
    CHUNK_BYTES,
    Counts,
    OutputFile,
    Segment,
    Task,
    buffers,
    ended_early,
)
from plugins.support.dtypes import DType
from plugins.support.errors import InputError

# Elements that are checked and cast at a time: several passes over them stay in the cache.
_ELEMENTS = 256 * 1024
# Of each: as read, widened for checks, cast, its bits, and in a wider row.
_BYTES_PER_ELEMENT = 32
_INTEGERS = {16: torch.int16, 32: torch.int32}
_E4M3 = "float8_e4m3fn"
_E4M3_NAN = 0x7F  # without its sign


def copy_memory(recipe: Recipe) -> int:
    """Bytes that `copy` needs for the largest task of a recipe."""
    if not recipe.sources:
        return 0
    if all(_is_verbatim(recipe, entry.dtype) for entry in recipe.sources):
        return min(CHUNK_BYTES // 4, max(entry.nbytes for entry in recipe.sources))
    row = recipe.room[-1] if recipe.room else 1
    elements = sum(math.prod(entry.shape) for entry in recipe.sources)
    return min(elements, max(_ELEMENTS, row)) * _BYTES_PER_ELEMENT


class _Files:
    """Source files that stay open for a task."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, int] = {}

    def descriptor(self, path: Path) -> int:
        """Of the file, opened when it is first asked for."""
        if path not in self._open:
            file = self._stack.enter_context(path.open("rb", buffering=0))
            self._open[path] = file.fileno()
        return self._open[path]


def copy(task: Task, file: OutputFile, advance: Callable[[int], None], counts: Counts) -> None:
    """Copy or cast source tensors into their place, zeros behind them where they have more room.

    Raises InputError when a value does not fit the target type, a scale is not positive, or an FP8
    value is NaN.
    """
    with ExitStack() as stack:
        files = _Files(stack)
        if _is_verbatim(task.recipe, task.segments[0].entry.dtype):
            for run in _runs(task, file):
                _copy_run(run, files.descriptor(run.file), file.descriptor, advance)
        else:
            _copy_values(task, file, files, advance, counts)


def _is_verbatim(recipe: Recipe, dtype: DType) -> bool:
    """Whether all bytes stay as they are and lie together. Scales are small, and looked at."""
    columns, wide = _row_widths(recipe)
    return dtype == recipe.outputs[0].dtype and not recipe.positive and wide == columns


def _row_widths(recipe: Recipe) -> tuple[int, int]:
    """Columns of a row in the sources and in the output; 1 and 1 where rows do not matter."""
    if recipe.room is None:
        return 1, 1
    return recipe.sources[0].shape[-1], recipe.room[-1]


@dataclass
class _Run:
    """Segments that lie one behind the other in a source file and in the target, and where."""

    file: Path
    source: int
    target: int
    nbytes: int = 0
    segments: list[Segment] = field(default_factory=list)


def _runs(task: Task, file: OutputFile) -> Iterator[_Run]:
    run: _Run | None = None
    for segment, place in task.placed():
        path, source = segment.entry.file, segment.position(0)
        target = file.position(task.recipe.outputs[0].name, place)
        begin = (path, source, target)
        if run is None or begin != (run.file, run.source + run.nbytes, run.target + run.nbytes):
            if run is not None:
                yield run
            run = _Run(path, source, target)
        run.segments.append(segment)
        run.nbytes += segment.nbytes
    if run is not None:
        yield run


def _copy_run(run: _Run, source: int, target: int, advance: Callable[[int], None]) -> None:
    done, in_kernel = 0, True
    coded = run.segments[0].entry.dtype.name == _E4M3
    while done < run.nbytes:
        size = min(run.nbytes - done, CHUNK_BYTES)
        if coded:
            _look(run, done, size, source)
        while size:
            if in_kernel:
                places = (run.source + done, run.target + done)
                try:
                    got = os.copy_file_range(source, target, size, *places)
                except OSError:
                    # Not between these file systems.
                    in_kernel = False
                    continue
            else:
                data = os.pread(source, min(size, CHUNK_BYTES // 4), run.source + done)
                got = os.pwrite(target, data, run.target + done) if data else 0
            if got == 0:
                raise ended_early(run.segments[0].entry)
            done, size = done + got, size - got
            advance(got)


def _look(run: _Run, start: int, size: int, source: int) -> None:
    """Raise InputError when bytes [start, start + size) of a run of e4m3 values hold a NaN.

    They are read once more than they are copied, into a buffer that stays in the processor's
    cache. That takes a tenth of a second per gigabyte, while other workers write.
    """
    buffer = buffers.of("read", torch.uint8, min(size, _ELEMENTS))
    for first in range(start, start + size, _ELEMENTS):
        values = buffer[: min(_ELEMENTS, start + size - first)]
        got = os.preadv(source, [memoryview(values.numpy().data)], run.source + first)
        # A file that has become too short is noticed by the copy.
        if got and not _are_codes(values[:got]):
            for segment in run.segments:
                _refuse(segment, torch.isnan, _CODES)


@dataclass
class _Piece:
    """Values of one type that lie together in the target.

    Attributes:
        values: flat.
        place: element of the output where they go.
        parts: the segments they come from, and how many of each.
    """

    values: torch.Tensor
    place: int
    parts: list[tuple[Segment, int]]


def _copy_values(
    task: Task,
    file: OutputFile,
    files: _Files,
    advance: Callable[[int], None],
    counts: Counts,
) -> None:
    output, dtype = task.recipe.outputs[0], task.segments[0].entry.dtype
    columns, wide = _row_widths(task.recipe)
    for piece in _pieces(task, files):
        values = piece.values
        if task.recipe.positive:
            _check(piece, _are_scales, _is_no_scale, _SCALES)
        elif dtype.name == _E4M3:
            _check(piece, _are_codes, torch.isnan, _CODES)
        if dtype != output.dtype:
            values = _cast(piece, output.dtype, output.name, counts)
        if wide != columns:
            # Zero rows need no writing: a new file is all zeros.
            rows = values.new_zeros(values.numel() // columns, wide)
            rows[:, :columns] = values.view(-1, columns)
            values = rows
        file.write(output.name, piece.place, values)
        advance(dtype.nbytes(piece.values.numel()))


def _pieces(task: Task, files: _Files) -> Iterator[_Piece]:
    """The values of a task, read into one buffer as far as they lie together in the target."""
    dtype = task.segments[0].entry.dtype
    columns, wide = _row_widths(task.recipe)
    step = max(_ELEMENTS // columns, 1) * columns
    elements = sum(segment.elements for segment in task.segments)
    data = buffers.of("read", torch.uint8, dtype.nbytes(min(step, elements)))
    view, values = memoryview(data.numpy().data), data.view(dtype.torch)
    parts: list[tuple[Segment, int]] = []
    filled = place = 0
    for segment, target in task.placed():
        at = 0
        while at < segment.elements:
            here = target + at // columns * wide
            if parts and (filled == step or here != place + filled // columns * wide):
                yield _Piece(values[:filled], place, parts)
                parts, filled = [], 0
            if not parts:
                place = here
            count = min(segment.elements - at, step - filled)
            part = view[dtype.nbytes(filled) : dtype.nbytes(filled + count)]
            segment.read_into(part, at, files.descriptor(segment.entry.file))
            parts.append((segment, count))
            filled, at = filled + count, at + count
    if parts:
        yield _Piece(values[:filled], place, parts)


def _cast(piece: _Piece, dtype: DType, name: str, counts: Counts) -> torch.Tensor:
    values = piece.values
    result = buffers.of("cast", dtype.torch, values.numel()).copy_(values)
    source, target = torch.finfo(values.dtype), torch.finfo(dtype.torch)
    if source.max <= target.max and source.smallest_normal >= target.smallest_normal:
        return result
    # Magnitudes of floating-point numbers are ordered as their bits are, which compare quicker.
    bits = result.view(_INTEGERS[dtype.bits]) & (1 << (dtype.bits - 1)) - 1
    infinity, smallest = (
        int(torch.tensor(value, dtype=dtype.torch).view(_INTEGERS[dtype.bits]))
        for value in (torch.inf, target.smallest_normal)
    )
    if int(bits.amax()) >= infinity:
        _check_overflow(piece, result, dtype)
    below = int(torch.count_nonzero(bits < smallest))
    zeros = values.numel() - int(torch.count_nonzero(values))
    counts.narrowed(name, below - zeros)
    return result


def _check_overflow(piece: _Piece, result: torch.Tensor, dtype: DType) -> None:
    lost = piece.values.isfinite() & ~result.isfinite()
    first = 0
    for segment, count in piece.parts:
        here = lost[first : first + count]
        if bool(here.any()):
            values = piece.values[first : first + count]
            raise InputError(
                f"{int(here.sum())} values do not fit into {dtype.name}",
                where=f"{segment.entry.file}: {segment.entry.name}",
                expected=f"magnitudes up to {torch.finfo(dtype.torch).max:g}",
                found=f"{float(values[values.isfinite()].abs().max()):g}",
                fix="convert to bfloat16 or float32",
            )
        first += count


def _are_codes(values: torch.Tensor) -> bool:
    """Whether no e4m3 value is NaN; torch's own test takes a hundred times as long."""
    scratch = buffers.of("check", torch.uint8, values.numel())
    torch.bitwise_and(values.view(torch.uint8), _E4M3_NAN, out=scratch)
    return int(scratch.amax()) < _E4M3_NAN


def _are_scales(values: torch.Tensor) -> bool:
    """Whether all values are finite and above zero."""
    if values.dtype == torch.float8_e4m3fn:
        low, high = torch.aminmax(values.view(torch.int8))
        return int(low) > 0 and int(high) < _E4M3_NAN
    return not bool(_is_no_scale(values).any())


def _is_no_scale(values: torch.Tensor) -> torch.Tensor:
    wide = values.float()
    return ~((wide > 0) & wide.isfinite())


@dataclass(frozen=True)
class _Fault:
    what: str
    expected: str
    fix: str


_SCALES = _Fault(
    "scales are zero, negative or not finite",
    "finite numbers above zero",
    "the checkpoint was quantised wrongly; a default of 1 would give wrong text",
)
_CODES = _Fault(
    "FP8 values are NaN",
    "finite values: no code 0x7F or 0xFF",
    "the checkpoint is damaged or was quantised wrongly: use another copy of it",
)
Find = Callable[[torch.Tensor], torch.Tensor]


def _check(
    piece: _Piece, is_good: Callable[[torch.Tensor], bool], find: Find, fault: _Fault
) -> None:
    """Raise InputError for the first tensor with bad values."""
    if not is_good(piece.values):
        for segment, _ in piece.parts:
            _refuse(segment, find, fault)


def _refuse(segment: Segment, find: Find, fault: _Fault) -> None:
    """Raise InputError when a tensor has bad values, with their number in all of it."""
    bad = sum(
        int(find(segment.read(start, min(_ELEMENTS, segment.elements - start))).sum())
        for start in range(0, segment.elements, _ELEMENTS)
    )
    if bad:
        raise InputError(
            f"{bad} {fault.what}",
            where=f"{segment.entry.file}: {segment.entry.name}",
            expected=fault.expected,
            found=f"{bad} among {segment.elements}",
            fix=fault.fix,
        )
