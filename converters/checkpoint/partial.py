"""An output directory that appears whole, and whose interrupted work can be taken up again."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from plugins.support.atomic import refuse_existing
from plugins.support.errors import InputError, ToolchainError, UsageError
from plugins.support.units import size

_JOURNAL = "journal"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Partial:
    """The work directory and the list of tasks that are already done in it."""

    def __init__(self, work: Path, done: set[int], journal: IO[str]) -> None:
        self.work, self.done, self._journal = work, done, journal

    def mark(self, task: int) -> None:
        """Record a task whose bytes have all been handed to the operating system."""
        self._journal.write(f"{task}\n")
        self._journal.flush()


def work_directory(path: Path) -> Path:
    """Where the work on the directory `path` goes on until it is whole."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def resumable_directory(path: Path, fingerprint: str, what: str) -> Iterator[Partial]:
    """Yield a work directory beside `path`; rename it to `path` when the block ends well.

    The work directory outlives a kill, an interrupt and a full disk. The next call with the same
    fingerprint continues in it, one with another fingerprint starts anew. It is removed after any
    other ToolchainError. Marks of a process that was killed are trusted only until the machine
    restarts, because written pages survive the process but not the machine.

    Raises UsageError when `path` exists or another process is writing it, InputError when it
    cannot be created or the disk gets full.
    """
    refuse_existing(path, what)
    work = work_directory(path)
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / _JOURNAL).open("a+")
    except OSError as error:
        raise InputError(
            f"the {what} cannot be created",
            where=str(path),
            found=error.strerror or str(error),
            fix="choose a place that can be written to",
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"another process is writing this {what}", where=str(path)) from error
        head = json.dumps({"fingerprint": fingerprint, "boot": _boot_id()})
        done, end = _finished_tasks(lock, head)
        # What a kill tore off would become part of the next mark; marks of other work must not
        # outlive its files, of which a kill may leave some.
        lock.truncate(0 if done is None else end)
        if done is None:
            _empty(work)
            lock.write(head + "\n")
            lock.flush()
        try:
            yield Partial(work, done or set(), lock)
        except ToolchainError:
            shutil.rmtree(work, ignore_errors=True)
            raise
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise InputError(
                f"the {what} is not finished: {os.strerror(error.errno)}",
                where=str(path),
                found=f"{size(shutil.disk_usage(work).free)} free; what is done is kept in {work}",
                fix="free space and give the same command again, which continues there; "
                "or remove that directory",
            ) from error
        (work / _JOURNAL).unlink()
        if path.is_dir():
            path.rmdir()
        work.rename(path)


def _finished_tasks(journal: IO[str], head: str) -> tuple[set[int] | None, int]:
    """Tasks done under this very head line, None when the work is another one's; and where the
    last whole line ends. The journal is ASCII.
    """
    journal.seek(0)
    text = journal.read()
    end = text.rfind("\n") + 1
    first, *marks = text[:end].splitlines() or [""]
    return ({int(mark) for mark in marks} if first == head else None), end


def _empty(work: Path) -> None:
    for entry in work.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _JOURNAL:
            entry.unlink()


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
