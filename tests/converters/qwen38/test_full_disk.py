"""Conversions and exports onto a disk that is too small, or gets full while they run."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from converters.checkpoint import write
from converters.checkpoint.convert import convert, plan_conversion
from converters.checkpoint.export_hf import export_hf, plan_export
from plugins.support import units
from plugins.support.errors import InputError
from tests.converters.qwen38.conftest import Bend

Write = Callable[[Path], object]


@pytest.fixture(params=["convert", "quantize", "export"])
def verb(request: pytest.FixtureRequest, bend: Bend, tmp_path: Path) -> Write:
    """Writes a checkpoint to the directory that it is given."""
    if request.param == "convert":
        return lambda target: convert(bend.directory, target)
    if request.param == "quantize":
        return lambda target: convert(bend.directory, target, quantize="fp8-block")
    convert(bend.directory, tmp_path / "ckpt")
    return lambda target: export_hf(tmp_path / "ckpt", target)


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = namedtuple("usage", "total used free")(10**12, 10**12 - free, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def needed(kind: str, bend: Bend, tmp_path: Path) -> tuple[int, Write]:
    """Bytes of the result, without what configurations get, and how to write it."""
    if kind == "convert":
        plan = plan_conversion(bend.directory, tmp_path / "out")
        return plan.bytes_written, lambda target: convert(bend.directory, target)
    convert(bend.directory, tmp_path / "ckpt")
    return (
        plan_export(tmp_path / "ckpt", tmp_path / "out").bytes_written,
        lambda target: export_hf(tmp_path / "ckpt", target),
    )


@pytest.mark.parametrize("kind", ["convert", "export"])
def test_too_small_a_disk_is_told_before_the_first_byte(
    kind: str, bend: Bend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    size, write = needed(kind, bend, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with_free(monkeypatch, size)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("wrote"))
    with pytest.raises(InputError, match="not enough disk space") as caught:
        write(tmp_path / "out")
    assert caught.value.found == f"{units.size(size)} free"
    # A megabyte more, for the configurations: told apart however small the disk is.
    assert caught.value.expected == units.size(size + 1024 * 1024) != units.size(size)
    assert "nothing was written" in str(caught.value.fix)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    # Two megabytes more are enough for the tensors and all configurations.
    monkeypatch.undo()
    with_free(monkeypatch, size + 2 * 2**20)
    write(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def fill(monkeypatch: pytest.MonkeyPatch, space: int, code: int) -> None:
    """Writes fail with that error once `space` bytes are written."""
    left, lock = [space], threading.Lock()
    copy, pwrite = os.copy_file_range, os.pwrite

    def take(count: int) -> int:
        with lock:
            granted = min(count, left[0])
            left[0] -= granted
        if not granted:
            raise OSError(code, os.strerror(code))
        return granted

    def limited_copy(source: int, target: int, count: int, *places: int) -> int:
        return copy(source, target, take(count), *places)

    def limited_write(file: int, data: bytes, place: int) -> int:
        return pwrite(file, memoryview(data)[: take(len(data))], place)

    monkeypatch.setattr(os, "copy_file_range", limited_copy)
    monkeypatch.setattr(os, "pwrite", limited_write)


def contents(directory: Path) -> dict[str, bytes]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_gets_full(
    verb: Write,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
):
    """Nothing stands under the result's name, the message says what to do, and that works."""
    # Some tasks are done before.
    small_tasks = pytest.MonkeyPatch()
    request.addfinalizer(small_tasks.undo)
    small_tasks.setattr(write, "CHUNK_BYTES", 4096)
    verb(tmp_path / "whole")
    fill(monkeypatch, 200_000, code)
    with pytest.raises(InputError, match="not finished") as caught:
        verb(tmp_path / "out")
    assert os.strerror(code) in str(caught.value)
    assert not (tmp_path / "out").exists()
    work = tmp_path / ".out.partial"
    assert str(work) in str(caught.value.found)
    assert "same command again" in str(caught.value.fix)
    done = len((work / "journal").read_text().splitlines()) - 1
    assert done > 0
    monkeypatch.undo()
    verb(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not work.exists()


def test_other_faults_of_a_disk_are_not_called_full(
    verb: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fill(monkeypatch, 200_000, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        verb(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_space_that_cannot_be_reserved_is_given_back(
    verb: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reserve = os.posix_fallocate

    def half(file: int, start: int, size: int) -> None:
        reserve(file, start, size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(InputError, match="not finished"):
        verb(tmp_path / "out")
    work = tmp_path / ".out.partial"
    assert sum(path.stat().st_size for path in work.iterdir() if path.name != "journal") == 0
    monkeypatch.undo()
    verb(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()
