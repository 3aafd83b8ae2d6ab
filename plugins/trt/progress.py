"""Progress and cancellation of a build, from TensorRT's own events."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from plugins.support.progress import Reporter

# A build is reported as this many steps; the last ones belong to writing the plan, which
# happens after TensorRT's last event.
BUILD_STEPS = 100
_COMPILE_STEPS = 90


class Monitor(Protocol):
    """What `build_serialized` needs of the progress monitor."""

    cancelled: bool

    def written(self, nbytes: int) -> None:
        """Count bytes of the plan that reached the file."""

    def finish(self) -> None:
        """Report whatever is left."""


class _Phases:
    """Nested phases as one fraction."""

    def __init__(self) -> None:
        self._phases: dict[str, tuple[str | None, int, int]] = {}

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self._phases[name] = (parent, max(1, steps), 0)

    def step(self, name: str) -> None:
        if name in self._phases:
            parent, steps, done = self._phases[name]
            self._phases[name] = (parent, steps, min(steps, done + 1))

    def finish(self, name: str) -> None:
        self._phases.pop(name, None)

    def fraction(self) -> float:
        """How much of the outermost phase is done."""
        return max((self._of(n) for n, (p, _, _) in self._phases.items() if p is None), default=0.0)

    def _of(self, name: str) -> float:
        _, steps, done = self._phases[name]
        inner = max((self._of(n) for n, (p, _, _) in self._phases.items() if p == name), default=0)
        return min(1.0, (done + inner) / steps)


def make_monitor(trt: Any, reporter: Reporter, weight_bytes: int) -> Any:
    """Create a `Monitor` that is also a `trt.IProgressMonitor`.

    Args:
        trt: the TensorRT module.
        reporter: takes up to BUILD_STEPS steps.
        weight_bytes: bytes of constants, the part of the plan whose size is known before.
    """

    class ProgressMonitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.cancelled = False
            self._phases = _Phases()
            self._reported = 0
            self._written = 0
            self._lock = threading.Lock()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._lock:
                self._phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with self._lock:
                self._phases.step(phase_name)
                self._report(int(self._phases.fraction() * _COMPILE_STEPS), phase_name)
            return not self.cancelled

        def phase_finish(self, phase_name: str) -> None:
            with self._lock:
                self._phases.finish(phase_name)

        def written(self, nbytes: int) -> None:
            self._written += nbytes
            share = min(1.0, self._written / max(1, weight_bytes))
            last = BUILD_STEPS - _COMPILE_STEPS - 1
            self._report(_COMPILE_STEPS + int(share * last), "writing the plan")

        def finish(self) -> None:
            self._report(BUILD_STEPS, "done")

        def _report(self, steps: int, note: str) -> None:
            # Phases do not always finish all their steps, and a bar never goes back.
            if steps > self._reported:
                reporter.advance(steps - self._reported, note)
                self._reported = steps

    return ProgressMonitor()


@contextmanager
def cancel_on_interrupt(monitor: Monitor) -> Iterator[None]:
    """Turn Ctrl-C into a cancelled build; raise KeyboardInterrupt when the build has returned.

    An exception inside a callback would cross TensorRT's code, which ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def cancel(_: int, __: FrameType | None) -> None:
        monitor.cancelled = True

    previous = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if monitor.cancelled:
        raise KeyboardInterrupt
