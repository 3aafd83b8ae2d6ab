"""Writes the weight file: every task streams one contiguous piece, any number at a time."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from converters.checkpoint.header import TensorEntry, build_header
from converters.checkpoint.partial import Partial
from converters.checkpoint.recipe import Output, Recipe
from plugins.support.dtypes import DType
from plugins.support.errors import InputError, UsageError
from plugins.support.progress import Reporter

# A piece that one worker holds in memory. Large enough for full disk speed.
CHUNK_BYTES = 16 * 1024 * 1024
# Names, places and recipes of one source tensor, measured on 300,000 of them.
_PLAN_BYTES_PER_TENSOR = 1200
# Libraries' buffers, threads, and what the memory allocator keeps of freed pieces, as a factor.
_FIXED_BYTES, _ALLOCATOR = 24 * 1024 * 1024, 2
# Elements that are checked and cast at a time: several passes over them stay in the cache.
_CAST_ELEMENTS = 256 * 1024
# Of each: as read, widened for checks, cast, its bits, and in a wider row.
_CAST_BYTES_PER_ELEMENT = 32
_INTEGERS = {16: torch.int16, 32: torch.int32}


def worker_count(workers: int | None) -> int:
    """`workers`, or one per core that this process may use.

    Raises UsageError for less than one.
    """
    if workers is None:
        return len(os.sched_getaffinity(0))
    if workers < 1:
        raise UsageError("at least one worker is needed", found=str(workers))
    return workers


def peak_bytes(workers: int, tensors: int, task: int) -> int:
    """Most memory of a run beyond the program itself: the plan, and for each worker its task.

    Args:
        workers: tasks at a time.
        tensors: of the source.
        task: bytes that the largest task needs.
    """
    return _FIXED_BYTES + tensors * _PLAN_BYTES_PER_TENSOR + workers * _ALLOCATOR * task


def memory_line(peak: int, workers: int) -> str:
    """What a plan says of its memory, for people."""
    return f"memory: at most {peak / 1e6:.0f} MB beyond the program itself, {workers} workers"


def written_line(directory: Path, seconds: float, nbytes: int) -> str:
    """What a report says of a run, for people; `nbytes` for the rate."""
    rate = nbytes / max(seconds, 1e-9) / 1e6
    return f"written to {directory} in {seconds:.1f} s ({rate:.0f} MB/s)"


def copy_memory(recipe: Recipe) -> int:
    """Bytes that `copy` needs for the largest source of a recipe."""
    if not recipe.sources:
        return 0
    dtype = recipe.outputs[0].dtype
    if recipe.positive or recipe.room or any(e.dtype != dtype for e in recipe.sources):
        row = recipe.room[-1] if recipe.room else 1
        elements = max(math.prod(entry.shape) for entry in recipe.sources)
        return min(elements, max(_CAST_ELEMENTS, row)) * _CAST_BYTES_PER_ELEMENT
    return min(CHUNK_BYTES // 4, max(entry.nbytes for entry in recipe.sources))


class _Buffers(threading.local):
    """Memory that a thread uses again: fresh pages cost more than the work done in them."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def of(self, role: str, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A flat tensor of `count` elements; any content, valid until the role is asked again."""
        size = count * dtype.itemsize
        kept = self._kept.get(role)
        if kept is None or kept.numel() < size:
            kept = self._kept[role] = torch.empty(size, dtype=torch.uint8)
        return kept[:size].view(dtype)


_buffers = _Buffers()


@dataclass(frozen=True)
class Segment:
    """A contiguous piece of a source tensor; `start` and `count` are elements."""

    entry: TensorEntry
    start: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.entry.dtype.nbytes(self.count)

    def read(self, start: int, count: int) -> torch.Tensor:
        """Elements [start, start + count) of the piece, as a flat tensor.

        The tensor is valid until the same thread reads again.
        """
        dtype = self.entry.dtype
        data = _buffers.of("read", torch.uint8, dtype.nbytes(count))
        view = memoryview(data.numpy().data)
        position = self.entry.offset + dtype.nbytes(self.start + start)
        with self.entry.file.open("rb", buffering=0) as file:
            while view:
                got = os.preadv(file.fileno(), [view], position)
                if got == 0:
                    raise _ended_early(self.entry)
                view, position = view[got:], position + got
        return data.view(dtype.torch)


class OutputFile:
    """The weight file, open for writing at any place.

    A new file gets its header and all its space at once, so a full disk shows before the work.
    """

    def __init__(self, path: Path, outputs: Sequence[Output]) -> None:
        header, offsets = build_header((o.name, o.dtype, o.shape) for o in outputs)
        self._offsets = {o.name: offset for o, offset in zip(outputs, offsets, strict=True)}
        self._dtypes = {o.name: o.dtype for o in outputs}
        size = offsets[-1] + outputs[-1].nbytes if outputs else len(header)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.fstat(self._fd).st_size != size:
            self._reserve(size)
            os.pwrite(self._fd, header, 0)

    def _reserve(self, size: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError:
            # What could be had is of no use, and others may need it.
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            raise

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Write contiguous values at element `start` of a tensor."""
        view = memoryview(values.contiguous().flatten().view(torch.uint8).numpy().data)
        position = self.position(name, start)
        while view:
            written = os.pwrite(self._fd, view, position)
            view, position = view[written:], position + written

    def position(self, name: str, start: int) -> int:
        """Offset in the file of element `start` of a tensor."""
        return self._offsets[name] + self._dtypes[name].nbytes(start)

    @property
    def descriptor(self) -> int:
        """For copies inside the kernel."""
        return self._fd

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class Task:
    """One piece of work: source pieces in order, and where the results begin in each output."""

    recipe: Recipe
    segments: tuple[Segment, ...]
    matrix: int
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(segment.nbytes for segment in self.segments)


def split_tasks(recipes: Sequence[Recipe]) -> list[Task]:
    """Independent tasks: one per source tensor of a copy, one per matrix of a quantisation."""
    tasks = []
    for recipe in recipes:
        if not recipe.sources:
            tasks.append(Task(recipe, (), 0, 0))
        elif recipe.operation in ("copy", "reciprocal"):
            start = 0
            for entry in recipe.sources:
                count = math.prod(entry.shape)
                tasks.append(Task(recipe, (Segment(entry, 0, count),), 0, start))
                start += math.prod(recipe.room) if recipe.room else count
        else:
            tasks += _matrix_tasks(recipe)
    return tasks


def _matrix_tasks(recipe: Recipe) -> list[Task]:
    """The sources hold `matrices` equal matrices, each made of whole sources or a slice of one."""
    if recipe.matrices >= len(recipe.sources):
        per_source = recipe.matrices // len(recipe.sources)
        groups: list[tuple[Segment, ...]] = [
            (Segment(entry, slot * count, count),)
            for entry in recipe.sources
            for count in [math.prod(entry.shape) // per_source]
            for slot in range(per_source)
        ]
    else:
        step = len(recipe.sources) // recipe.matrices
        groups = [
            tuple(Segment(e, 0, math.prod(e.shape)) for e in recipe.sources[at : at + step])
            for at in range(0, len(recipe.sources), step)
        ]
    return [Task(recipe, group, matrix, 0) for matrix, group in enumerate(groups)]


class Counts:
    """Values that lost more than precision, by target tensor; may be used from any thread.

    Attributes:
        small: made subnormal or zero by a cast to a narrower type.
        zeroed: made zero by quantisation because their whole block is too small for its scale.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.small: Counter[str] = Counter()
        self.zeroed: Counter[str] = Counter()

    def narrowed(self, name: str, count: int) -> None:
        """Add to a tensor's values that a cast changed."""
        self._add(self.small, name, count)

    def vanished(self, name: str, count: int) -> None:
        """Add to a tensor's values that quantisation lost."""
        self._add(self.zeroed, name, count)

    def _add(self, counter: Counter[str], name: str, count: int) -> None:
        if count:
            with self._lock:
                counter[name] += count


# What an operation that computes does: (task, file, report of bytes read, counts).
Compute = Callable[[Task, OutputFile, Callable[[int], None], Counts], None]


def run_tasks(
    tasks: Sequence[Task],
    partial: Partial,
    file: OutputFile,
    *,
    operations: dict[str, Compute],
    workers: int,
    bar: Reporter,
    first: int = 0,
) -> Counts:
    """Do all tasks that are not done yet, `workers` at a time.

    The tasks count from `first` in the journal, so that several files can share one.

    Raises the first error of any task after the running ones have stopped.
    """
    lock, stop, counts = threading.Lock(), threading.Event(), Counts()

    def advance(amount: int, note: str) -> None:
        with lock:
            bar.advance(amount, note)

    def run(number: int) -> None:
        task = tasks[number]
        name = task.recipe.outputs[0].name
        if stop.is_set():
            return
        # Workers share the cores; threads inside an operation would only wait for each other.
        torch.set_num_threads(1)
        try:
            if task.recipe.operation == "copy":
                copy(task, file, lambda amount: advance(amount, name), counts)
            else:
                operation = operations[task.recipe.operation]
                operation(task, file, lambda amount: advance(amount, name), counts)
            with lock:
                partial.mark(first + number)
        except BaseException:
            stop.set()
            raise

    todo = []
    for number, task in enumerate(tasks):
        if first + number in partial.done:
            bar.advance(task.nbytes, "resumed")
        else:
            todo.append(number)
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(run, number) for number in todo]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            # An interrupt: running tasks end, waiting ones return at once.
            stop.set()
            raise
        for future in futures:
            future.result()
    return counts


def copy(task: Task, file: OutputFile, advance: Callable[[int], None], counts: Counts) -> None:
    """Copy or cast one source tensor into its place, zeros behind it where it has more room.

    Raises InputError when a value does not fit the target type, or a scale is not positive.
    """
    (segment,) = task.segments
    output = task.recipe.outputs[0]
    # Zero rows need no writing: a new file is all zeros.
    columns = segment.entry.shape[-1] if segment.entry.shape else 1
    wide = task.recipe.room[-1] if task.recipe.room else columns
    if segment.entry.dtype == output.dtype and not task.recipe.positive and wide == columns:
        _copy_bytes(segment, file, file.position(output.name, task.start), advance)
        return
    step = _CAST_ELEMENTS if wide == columns else max(_CAST_ELEMENTS // columns, 1) * columns
    for start in range(0, segment.count, step):
        count = min(step, segment.count - start)
        values = segment.read(start, count)
        if task.recipe.positive:
            _check_positive(values, segment.entry)
        if segment.entry.dtype != output.dtype:
            values = _cast(values, output.dtype, segment.entry, output.name, counts)
        if wide != columns:
            rows = values.new_zeros(count // columns, wide)
            rows[:, :columns] = values.view(-1, columns)
            values = rows
        file.write(output.name, task.start + start // columns * wide, values)
        advance(segment.entry.dtype.nbytes(count))


def _copy_bytes(
    segment: Segment, file: OutputFile, target: int, advance: Callable[[int], None]
) -> None:
    entry = segment.entry
    position = entry.offset + entry.dtype.nbytes(segment.start)
    left = segment.nbytes
    with entry.file.open("rb", buffering=0) as source:
        in_kernel = True
        while left:
            size = min(left, 4 * CHUNK_BYTES)
            if in_kernel:
                try:
                    done = os.copy_file_range(
                        source.fileno(), file.descriptor, size, position, target
                    )
                except OSError:
                    # Not between these file systems.
                    in_kernel = False
                    continue
            else:
                data = os.pread(source.fileno(), min(size, CHUNK_BYTES // 4), position)
                done = os.pwrite(file.descriptor, data, target) if data else 0
            if done == 0:
                raise _ended_early(entry)
            position, target, left = position + done, target + done, left - done
            advance(done)


def _cast(
    values: torch.Tensor, dtype: DType, entry: TensorEntry, name: str, counts: Counts
) -> torch.Tensor:
    result = _buffers.of("cast", dtype.torch, values.numel()).copy_(values)
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
        overflow = int((values.isfinite() & ~result.isfinite()).sum())
        if overflow:
            raise InputError(
                f"{overflow} values do not fit into {dtype.name}",
                where=f"{entry.file}: {entry.name}",
                expected=f"magnitudes up to {target.max:g}",
                found=f"{float(values[values.isfinite()].abs().max()):g}",
                fix="convert to bfloat16 or float32",
            )
    below = int(torch.count_nonzero(bits < smallest))
    zeros = values.numel() - int(torch.count_nonzero(values))
    counts.narrowed(name, below - zeros)
    return result


def _check_positive(values: torch.Tensor, entry: TensorEntry) -> None:
    wide = values.float()
    bad = int((~((wide > 0) & wide.isfinite())).sum())
    if bad:
        raise InputError(
            f"{bad} scales are zero, negative or not finite",
            where=f"{entry.file}: {entry.name}",
            expected="finite numbers above zero",
            fix="the checkpoint was quantised wrongly; a default of 1 would give wrong text",
        )


def _ended_early(entry: TensorEntry) -> InputError:
    return InputError(
        "the file became shorter while it was read", where=f"{entry.file}: {entry.name}"
    )
