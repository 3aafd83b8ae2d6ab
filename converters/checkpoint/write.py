"""Writes the weight file: every task streams one contiguous piece, any number at a time."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from converters.checkpoint.header import TensorEntry, build_header
from converters.checkpoint.partial import Partial
from converters.checkpoint.recipe import Output, Recipe
from plugins.support.errors import InputError, UsageError
from plugins.support.progress import Reporter

# A piece that one worker holds in memory. Large enough for full disk speed.
CHUNK_BYTES = 16 * 1024 * 1024
# Names, places and recipes of one source tensor, measured on 300,000 of them.
_PLAN_BYTES_PER_TENSOR = 1200
# Libraries' buffers, threads, and what the memory allocator keeps of freed pieces, as a factor.
_FIXED_BYTES, _ALLOCATOR = 24 * 1024 * 1024, 2


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


class Buffers(threading.local):
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


buffers = Buffers()


class Segment(NamedTuple):
    """A contiguous piece of a source tensor; `start` and `elements` count elements."""

    entry: TensorEntry
    start: int
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.entry.dtype.nbytes(self.elements)

    def read(self, start: int, count: int) -> torch.Tensor:
        """Elements [start, start + count) of the piece, as a flat tensor.

        The tensor is valid until the same thread reads again.
        """
        dtype = self.entry.dtype
        data = buffers.of("read", torch.uint8, dtype.nbytes(count))
        with self.entry.file.open("rb", buffering=0) as file:
            self.read_into(memoryview(data.numpy().data), start, file.fileno())
        return data.view(dtype.torch)

    def read_into(self, view: memoryview, start: int, descriptor: int) -> None:
        """Fill `view` from element `start` on; `descriptor` is the open file.

        Raises InputError when the file has become too short.
        """
        position = self.position(start)
        while view:
            got = os.preadv(descriptor, [view], position)
            if got == 0:
                raise ended_early(self.entry)
            view, position = view[got:], position + got

    def position(self, start: int) -> int:
        """Offset in the file of an element of the piece."""
        return self.entry.offset + self.entry.dtype.nbytes(self.start + start)


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
    """One piece of work: source pieces in order, and where the results begin in each output.

    Attributes:
        recipe: what is done to them.
        segments: the pieces; of a copy, of one type.
        matrix: number of the matrix that is quantised.
        start: of a copy: element of the output where the first piece goes.
    """

    recipe: Recipe
    segments: tuple[Segment, ...]
    matrix: int
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(segment.nbytes for segment in self.segments)

    def placed(self) -> Iterator[tuple[Segment, int]]:
        """The pieces of a copy, each with the element of the output where it goes."""
        start = self.start
        for segment in self.segments:
            yield segment, start
            start += math.prod(self.recipe.room) if self.recipe.room else segment.elements


def split_tasks(recipes: Sequence[Recipe]) -> list[Task]:
    """Independent tasks: as many source tensors of a copy as make a chunk, a matrix to quantise.

    A task costs more than the bytes of most tensors: scales are single numbers, and a checkpoint
    has a hundred thousand of them.
    """
    tasks = []
    for recipe in recipes:
        if not recipe.sources:
            tasks.append(Task(recipe, (), 0, 0))
        elif recipe.operation in ("copy", "reciprocal"):
            tasks += _copy_tasks(recipe)
        else:
            tasks += _matrix_tasks(recipe)
    return tasks


def _copy_tasks(recipe: Recipe) -> Iterator[Task]:
    room = math.prod(recipe.room) if recipe.room else None
    group: list[Segment] = []
    start = place = size = 0
    for entry in recipe.sources:
        count = math.prod(entry.shape)
        nbytes = entry.dtype.nbytes(count)
        if group and (size + nbytes > CHUNK_BYTES or entry.dtype is not group[0].entry.dtype):
            yield Task(recipe, tuple(group), 0, start)
            group, start, size = [], place, 0
        group.append(Segment(entry, 0, count))
        size += nbytes
        place += count if room is None else room
    yield Task(recipe, tuple(group), 0, start)


def cut_of(tasks: Sequence[Task]) -> str:
    """Changes with how the work is divided: numbers of one division mean nothing in another."""
    return repr([(task.matrix, task.start, len(task.segments)) for task in tasks])


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


# What an operation does: (task, file, report of bytes read, counts).
Operate = Callable[[Task, OutputFile, Callable[[int], None], Counts], None]


def run_tasks(
    tasks: Sequence[Task],
    partial: Partial,
    file: OutputFile,
    *,
    operations: dict[str, Operate],
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


def ended_early(entry: TensorEntry) -> InputError:
    """The error for a file that has fewer bytes than its header said."""
    return InputError(
        "the file became shorter while it was read", where=f"{entry.file}: {entry.name}"
    )
