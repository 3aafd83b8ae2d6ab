"""Progress of long work: a bar with bytes and rate on a terminal, plain lines elsewhere.

Everything goes to standard error, so that `--json` output on standard output stays clean.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

# Without a terminal one line per this many seconds is enough to see that work goes on.
LINE_INTERVAL_S = 5.0


class Reporter(Protocol):
    """What long work calls."""

    def advance(self, amount: int, note: str = "") -> None:
        """Add `amount` units (bytes or steps); `note` names what is being worked on."""


class Silent:
    """A reporter for library callers that want none."""

    def advance(self, amount: int, note: str = "") -> None:
        """Do nothing."""


class _Bar:
    def __init__(self, progress: Progress, task: int, label: str) -> None:
        self._progress, self._task, self._label = progress, task, label

    def advance(self, amount: int, note: str = "") -> None:
        description = f"{self._label} {note}".rstrip()
        self._progress.update(self._task, advance=amount, description=description)  # type: ignore[arg-type]


class _Lines:
    def __init__(self, label: str, total: int, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done, self._start = 0, time.monotonic()
        self._next = self._start + LINE_INTERVAL_S

    def advance(self, amount: int, note: str = "") -> None:
        self._done += amount
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LINE_INTERVAL_S
            self._print(now, note)

    def finish(self) -> None:
        self._print(time.monotonic(), "")

    def _print(self, now: float, note: str) -> None:
        seconds = max(now - self._start, 1e-9)
        if self._unit == "bytes":
            amount = f"{self._done / 1e6:.1f}/{self._total / 1e6:.1f} MB"
            rate = f"{self._done / seconds / 1e6:.1f} MB/s"
        else:
            amount, rate = f"{self._done}/{self._total}", f"{seconds:.1f} s"
        print(f"{self._label}: {amount} {rate} {note}".rstrip(), file=sys.stderr, flush=True)


@contextmanager
def progress(label: str, total: int, unit: str = "steps") -> Iterator[Reporter]:
    """Report work of `total` units; `unit` is "steps" or "bytes"."""
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines(label, total, unit)
        yield lines
        lines.finish()
        return
    amount: tuple[ProgressColumn, ...] = (
        (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    )
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        yield _Bar(bar, bar.add_task(label, total=total), label)
