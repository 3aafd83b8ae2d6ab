"""Outputs that exist whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plugins.support.errors import InputError, UsageError


def refuse_existing(path: Path, what: str) -> None:
    """Raise UsageError when `path` exists and is not an empty directory."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise UsageError(
            f"the {what} already exists",
            where=str(path),
            fix="choose another path or remove it first; nothing was changed",
        )


@contextmanager
def atomic_directory(path: Path, what: str = "output directory") -> Iterator[Path]:
    """Yield a temporary sibling of `path`; rename it to `path` when the block ends well.

    On any exception the temporary directory is removed and `path` does not exist.
    Raises UsageError when `path` exists, InputError when its parent cannot be written.
    """
    refuse_existing(path, what)
    work = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
    except OSError as error:
        raise InputError(
            f"the {what} cannot be created",
            where=str(path),
            found=error.strerror or str(error),
            fix="choose a place that can be written to",
        ) from error
    try:
        yield work
        if path.is_dir():
            path.rmdir()
        work.rename(path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link `source` to `target`; copy where the file system does not link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
