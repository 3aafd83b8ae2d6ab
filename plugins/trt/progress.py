"""Progress and cancellation of a build, from TensorRT's own events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from plugins.support.progress import Reporter

# A build is reported as this many steps; the last ones belong to writing the plan, which
# happens after TensorRT's last event.
BUILD_STEPS = 100
_COMPILE_STEPS = 90

T = TypeVar("T")


class Monitor(Protocol):
    """What `build_serialized` needs of the progress monitor."""

    cancelled: bool

    def written(self, nbytes: int) -> None:
        """Count bytes of the plan that reached the file."""

    def heartbeat(self) -> None:
        """Say what goes on, without a step."""

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
            self._note = "starting"
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
            with self._lock:
                self._report(_COMPILE_STEPS + int(share * last), "writing the plan")

        def heartbeat(self) -> None:
            with self._lock:
                reporter.advance(0, self._note)

        def finish(self) -> None:
            with self._lock:
                self._report(BUILD_STEPS, "done")

        def _report(self, steps: int, note: str) -> None:
            # Phases do not always finish all their steps, and a bar never goes back.
            if steps > self._reported:
                reporter.advance(steps - self._reported, note)
                self._reported = steps
                self._note = note

    return ProgressMonitor()


def run_cancellable(work: Callable[[], T], monitor: Monitor, interval_s: float = 0.25) -> T:
    """Run `work` in a thread of its own and wait for it.

    TensorRT compiles for most of a build without calling back, and Ctrl-C cannot reach python
    code that waits inside a library. So the caller's thread stays free: it keeps the progress
    display alive and takes the interrupt at once. The abandoned build ends at TensorRT's next
    event, or with the process.

    Raises what `work` raises, or KeyboardInterrupt.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:  # handed to the waiting thread
            failures.append(error)

    thread = threading.Thread(target=body, name="tensorrt-build", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(interval_s)
            monitor.heartbeat()
    except KeyboardInterrupt:
        monitor.cancelled = True
        raise
    if failures:
        raise failures[0]
    return results[0]
