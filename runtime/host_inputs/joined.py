"""A copy of a table in memory whose rows have all their parts side by side.

A row of two tensors (codes and their scales) waits for two addresses; side by side it waits for
one. The copy is the process's own: it takes as much memory as the tensors do, is shared with nobody
and not given back when memory runs short.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[Any]

# Rows that are copied at a time, so that other threads get the interpreter in between.
_ROWS = 16384


def reserve(size: int) -> Bytes | None:
    """Fresh memory, uint8 [size], in huge pages where there are such. None where there is none."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def join_rows(parts: Sequence[Bytes], memory: Bytes) -> list[Bytes]:
    """Copy rows so that all parts of a row lie side by side.

    Args:
        parts: uint8 [rows, row bytes] each, in the order in which a row shall have them.
        memory: for all of it, uint8.

    Returns:
        the parts again; two rows of each are as far apart as all parts of a row are wide.
    """
    ends = np.cumsum([part.shape[1] for part in parts])
    whole = memory.reshape(-1, ends[-1])
    joined = np.split(whole, ends[:-1], axis=1)
    for first in range(0, len(whole), _ROWS):
        rows = slice(first, first + _ROWS)
        for part, copy in zip(parts, joined, strict=True):
            copy[rows] = part[rows]
    return joined
