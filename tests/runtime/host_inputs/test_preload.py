"""Tables are brought into memory where they fit, and hold the same values then and otherwise."""

from __future__ import annotations

import errno
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from plugins.support.errors import InputError
from plugins.support.progress import Silent
from runtime.host_inputs import preload as module
from runtime.host_inputs.preload import Loaded, available_bytes, fits, preload
from runtime.host_inputs.table import MappedTable
from tests.runtime.host_inputs.test_table import gathered, nvfp4_table

HUGE = 2 << 20


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  8000 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8_192_000),
        # A container's own limit, less what its programs have; its page cache can be taken.
        (
            {
                "sys/fs/cgroup/memory.max": "5000000\n",
                "sys/fs/cgroup/memory.stat": "anon 1000000\nfile 3000000\n",
            },
            4_000_000,
        ),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 8_192_000),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "6000000\n",
                "sys/fs/cgroup/memory/memory.stat": "rss 1\ntotal_rss 500000\n",
            },
            5_500_000,
        ),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 8_192_000),
        ({"sys/fs/cgroup/memory.max": "10\n", "sys/fs/cgroup/memory.stat": "anon 11\n"}, 0),
    ],
)
def test_available_memory(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_bytes(system(tmp_path, MEMINFO | files)) == expected


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    assert not fits(1, None)


def test_a_quarter_of_the_memory_is_left() -> None:
    assert fits(750, 1000)
    assert not fits(751, 1000)


class Watched(mmap.mmap):
    """A mapping that notes the advice it is given, and refuses some of it."""

    given: list[tuple[int, int, int]]
    refused: dict[int, int]

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        if option in self.refused:
            raise OSError(self.refused[option], os.strerror(self.refused[option]))
        assert length is not None
        self.given.append((option, start, length))
        super().madvise(option, start, length)


POPULATE = 22
SIZE = 5 * HUGE + 123


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """More than five huge pages, and a chunk for each of them."""
    (tmp_path / "file").write_bytes(np.random.default_rng(0).bytes(SIZE))
    return tmp_path / "file"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", HUGE)


def watched(path: Path, **refused: int) -> Watched:
    with path.open("rb") as file:
        mapping = Watched(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapping.given = []
    codes = {"huge": mmap.MADV_HUGEPAGE, "not_huge": mmap.MADV_NOHUGEPAGE, "populate": POPULATE}
    mapping.refused = {codes[name]: code for name, code in refused.items()}
    return mapping


def load(path: Path, mapping: mmap.mmap, begin: int = 0, seconds: float = 60) -> Loaded:
    deadline = time.monotonic() + seconds
    return preload(path, mapping, begin, SIZE - begin, Silent(), deadline)


def mapped(path: Path) -> int:
    """Bytes of the file that this process has in its page tables."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split(" ")[0].endswith(":"):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_all_of_a_part_is_mapped(path: Path) -> None:
    mapping = watched(path)
    assert mapped(path) < HUGE
    assert load(path, mapping, begin=HUGE + 5).bytes == SIZE - HUGE - 5
    assert SIZE - HUGE <= mapped(path) < SIZE
    whole = (HUGE, SIZE - HUGE)
    # Huge pages for what is read now, single rows for what has to be read again later.
    assert mapping.given[0] == (mmap.MADV_HUGEPAGE, *whole)
    assert mapping.given[-2:] == [(mmap.MADV_NOHUGEPAGE, *whole), (mmap.MADV_RANDOM, *whole)]


@pytest.mark.parametrize("refused", [["huge", "not_huge"], ["huge", "not_huge", "populate"]])
def test_kernels_that_know_less_load_as_much(path: Path, refused: list[str]) -> None:
    mapping = watched(path, **dict.fromkeys(refused, errno.EINVAL))
    assert load(path, mapping).bytes == SIZE
    assert mapped(path) >= SIZE
    assert mmap.MADV_HUGEPAGE not in [option for option, *_ in mapping.given]


def test_a_file_that_cannot_be_read_is_an_error(path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read") as caught:
        load(path, watched(path, populate=errno.EFAULT))
    assert str(path) in str(caught.value.where)


def test_time_ends_it(path: Path) -> None:
    assert load(path, watched(path), seconds=-1).bytes == HUGE


@pytest.mark.parametrize(
    ("huge_pages", "dropped"),
    [
        # Huge from the start; never, which one chunk tells; and after being read again.
        ([1, 2, 3, 4, 5, 5], []),
        ([0, 0, 0, 0, 0, 0, 0], [0]),
        ([0, 1, 1, 2, 3, 4, 5, 5], [0, HUGE]),
    ],
)
def test_pages_cached_small_are_read_again_where_it_pays(
    path: Path, monkeypatch: pytest.MonkeyPatch, huge_pages: list[int], dropped: list[int]
) -> None:
    found = iter(huge_pages)
    monkeypatch.setattr(module, "_huge_bytes", lambda *_: next(found) * HUGE)
    forgotten: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, at, _size, _how: forgotten.append(at))
    mapping = watched(path)
    assert load(path, mapping) == Loaded(SIZE, huge_pages[-1] * HUGE)
    assert forgotten == dropped
    assert [at for option, at, _ in mapping.given if option == mmap.MADV_DONTNEED] == dropped


def test_a_preloaded_table_has_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, expected = nvfp4_table(tmp_path / "weights", torch.float32)
    size = 8 * 32 + 8 * 4
    asked: list[str] = []
    original = MappedTable.preload

    def noting(part: MappedTable, *rest: object) -> Loaded:
        asked.append(part.dtype.name)
        return original(part, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(MappedTable, "preload", noting)
    for available, decision in ((size, "rows are read on demand"), (2 * size, "in memory")):
        monkeypatch.setattr("runtime.host_inputs.table.available_bytes", lambda a=available: a)
        assert asked == []
        assert decision in table.preload()
        rows = np.array([2, 0, 2, 7])
        assert torch.equal(gathered(table, rows), expected[rows])
        assert not torch.equal(gathered(table, rows), expected[np.flip(rows).copy()])
    assert asked == ["uint8", "float8_e4m3fn"]


def test_evicted_rows_of_a_preloaded_table_are_requested_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, expected = nvfp4_table(tmp_path / "weights", torch.float32)
    table.preload()
    advised: list[int] = []
    monkeypatch.setattr("runtime.host_inputs.table._FETCH", 2)
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, _at, size, _how: advised.append(size))
    rows = np.array([1, 0, 7, 3, 4])
    assert torch.equal(gathered(table, rows), expected[rows])
    assert advised == []
    monkeypatch.setattr("runtime.host_inputs.table._WAITED_NS", -1)
    assert torch.equal(gathered(table, rows), expected[rows])
    # Scales of the two rows at hand, then both parts of the three that follow.
    assert advised == [4, 4, 32, 32, 32, 4, 4, 4]
