"""The few stream operations that the executors need, apart so that tests can stand in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

# Calls of one form before its graph is captured: the first ones may still compile or allocate.
WARM_UP_CALLS = 2


class Stream(Protocol):
    """An execution queue of one device."""

    @property
    def handle(self) -> int:
        """The address that `execute_async_v3` takes."""

    def ordered(self) -> AbstractContextManager[None]:
        """A context in which torch's work goes to this stream: after all that the caller queued
        before, and before all that the caller queues afterwards.
        """

    def capture(self, work: Callable[[int], None]) -> Callable[[], None]:
        """Record `work(handle)` as a graph without executing it; returns its replay."""


class CudaStream:
    """A stream of its own on one CUDA device (TensorRT synchronises on the default stream)."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        # Graphs of one stream never run at once, so they share the memory of what lies between.
        self._pool: Any = None

    @property
    def handle(self) -> int:
        """See `Stream.handle`."""
        return int(self._stream.cuda_stream)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """See `Stream.ordered`."""
        outer = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)

    def capture(self, work: Callable[[int], None]) -> Callable[[], None]:
        """See `Stream.capture`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work(self.handle)
        self._pool = graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay


def graph_widths(slots: int) -> list[int]:
    """Slot counts of generation calls: powers of two below `slots`, and `slots`; few forms to
    capture, little padding.
    """
    widths = [1]
    while widths[-1] * 2 < slots:
        widths.append(widths[-1] * 2)
    return widths if widths[-1] == slots else [*widths, slots]
