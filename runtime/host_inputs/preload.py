"""A part of a mapped file brought into memory as a whole, in huge pages where there are such.

Rows at random places of a large table wait for their address more than for their bytes: with pages
of 4 KB every row misses the translation buffer, and its page table is not in the cache either.
File systems with large folios (ext4 since Linux 6.16) cache files in pages of 2 MB when that is
asked for before the file is read. All of it stays ordinary page cache: shared between processes,
kept from one start to the next, and given back when memory runs short.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plugins.support.errors import InputError
from plugins.support.progress import Reporter

# Python's mmap has no name for it (Linux 5.14).
_MADV_POPULATE_READ = 22
_HUGE = 2 << 20
# A multiple of the huge page: so much is read between two looks at the clock and at the pages.
_CHUNK = 128 * _HUGE
# Page cache that is needed for other files, and memory that sequences take later.
_LARGEST_SHARE = 0.75
# A server has to be ready some time: what a slow disk has not given by then comes on demand.
LONGEST_S = 120.0


@dataclass(frozen=True)
class Loaded:
    """What a preload came to.

    Attributes:
        bytes: brought into memory, fewer than asked for where time ran out.
        huge: of these, mapped in huge pages.
    """

    bytes: int
    huge: int


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can be taken without taking it from a program, page cache included.

    What the kernel calls available, or less where a control group (a container) allows less. None
    where the system does not tell.
    """
    found = _field(root / "proc/meminfo", "MemAvailable:")
    if found is None:
        return None
    available = found * 1024
    group = root / "sys/fs/cgroup"
    for limit, status, used in (
        (group / "memory.max", group / "memory.stat", "anon"),
        (group / "memory/memory.limit_in_bytes", group / "memory/memory.stat", "total_rss"),
    ):
        with suppress(OSError, ValueError):
            allowed = int(limit.read_text())
            available = min(available, allowed - (_field(status, used) or 0))
    return max(0, available)


def fits(size: int, available: int | None) -> bool:
    """Whether `size` bytes may be kept in memory of which `available` bytes can be taken."""
    return available is not None and size <= _LARGEST_SHARE * available


def preload(
    path: Path, mapping: mmap.mmap, begin: int, size: int, reporter: Reporter, deadline: float
) -> Loaded:
    """Bring `size` bytes from `begin` on into memory and map them.

    Args:
        path: the mapped file.
        mapping: of the whole file, shared and read-only.
        begin, size: the part.
        reporter: told of bytes.
        deadline: of `time.monotonic`, after which the rest is left on disk.

    Raises InputError when the file cannot be read.
    """
    pages = np.frombuffer(mapping, np.uint8)
    place = pages.ctypes.data
    start, end = begin // _HUGE * _HUGE, begin + size
    _advise(mapping, mmap.MADV_HUGEPAGE, start, end)
    file = os.open(path, os.O_RDONLY)
    huge, dropping_pays, done = 0, True, begin
    try:
        for first in range(start, end, _CHUNK):
            last = min(first + _CHUNK, end)
            possible = (last - first) // _HUGE * _HUGE
            _populate(path, mapping, pages, first, last)
            found = _huge_bytes(place + start, place + end)
            if dropping_pays and found - huge < possible // 2:
                # Cached in small pages, as copied files are: read again, they may become huge.
                _advise(mapping, mmap.MADV_DONTNEED, first, last)
                os.posix_fadvise(file, first, last - first, os.POSIX_FADV_DONTNEED)
                _populate(path, mapping, pages, first, last)
                found = _huge_bytes(place + start, place + end)
                dropping_pays = found - huge >= possible // 2
            huge = found
            reporter.advance(last - done)
            done = last
            if time.monotonic() > deadline:
                break
    finally:
        os.close(file)
        # What is evicted later comes back row by row, not 2 MB for each.
        _advise(mapping, mmap.MADV_NOHUGEPAGE, start, end)
        _advise(mapping, mmap.MADV_RANDOM, start, end)
    return Loaded(done - begin, min(huge, done - begin))


def _populate(path: Path, mapping: mmap.mmap, pages: np.ndarray, first: int, last: int) -> None:
    try:
        mapping.madvise(_MADV_POPULATE_READ, first, last - first)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise InputError(
                "the n-gram table cannot be read",
                where=str(path),
                found=f"{error.strerror} between bytes {first} and {last}",
                fix="look at the disk, or copy the file again",
            ) from None
    # In a virtual machine the first access to each page costs 5 to 7 us more, once; and a kernel
    # that does not know the advice reads the page only now.
    pages[first : last : mmap.PAGESIZE].max()


def _advise(mapping: mmap.mmap, advice: int, first: int, last: int) -> None:
    """Give the kernel advice; one that it does not know changes speed only."""
    with suppress(OSError):
        mapping.madvise(advice, first, last - first)


def _huge_bytes(first: int, last: int) -> int:
    """Bytes mapped in huge pages in the mappings of this process from address `first` to `last`."""
    total, inside = 0, False
    with suppress(OSError):
        for line in Path("/proc/self/smaps").read_text().splitlines():
            word = line.partition(" ")[0]
            if not word.endswith(":"):
                lower, _, upper = word.partition("-")
                inside = int(lower, 16) < last and int(upper, 16) > first
            elif inside and word == "FilePmdMapped:":
                total += int(line.split()[1]) * 1024
    return total


def _field(path: Path, name: str) -> int | None:
    """The number behind `name` in a file of such lines."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words and words[0] == name:
                return int(words[1])
    return None
