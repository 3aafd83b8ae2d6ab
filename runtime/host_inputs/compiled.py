"""A decode step's rows of the n-gram table by compiled code, where the machine has a C compiler.

`gather.c` is compiled for the processor at hand when a server starts, in a directory of its own
that is gone before the first call: nothing is left that could be stale, shared or foreign. It takes
half a second. Without a compiler numpy does the same.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from plugins.ngram import NgramConstants
from plugins.support.errors import CapabilityError, UsageError

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[Any]

SOURCE = Path(__file__).with_name("gather.c")
INSTALL = "install a C compiler, on Debian: apt-get install gcc libc6-dev"
_COMPILERS = ("cc", "gcc", "clang")
# At -O2 the loops over tables take two to five times as long.
OPTIONS = ("-O3", "-march=native")
_LIBRARY = ("-std=gnu11", "-shared", "-fPIC")
_LONGEST_S = 60
_NO_LIMIT = 2**63 - 1


def find_compiler() -> str | None:
    """The C compiler of this machine, or None."""
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


@cache
def compile_library(options: Sequence[str] = OPTIONS) -> ctypes.CDLL:
    """Compile and load `gather.c`, once per process.

    Raises CapabilityError with the reason where that fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CapabilityError("no C compiler was found", fix=INSTALL)
    with tempfile.TemporaryDirectory(prefix="gather-") as folder:
        path = Path(folder) / "gather.so"
        command = [compiler, *options, *_LIBRARY, "-o", str(path), str(SOURCE)]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=_LONGEST_S, check=False
            )
            if result.returncode:
                said = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
                errors = [line for line in said if "error" in line]
                raise CapabilityError(
                    f"{compiler} cannot compile it", found=(errors or said)[0], fix=INSTALL
                )
            library = ctypes.CDLL(str(path))
        except subprocess.TimeoutExpired:
            raise CapabilityError(f"{compiler} took more than {_LONGEST_S} s") from None
        except OSError as error:
            raise CapabilityError(
                "what was compiled cannot be loaded",
                found=str(error),
                fix="let TMPDIR name a directory of a file system whose programs may run",
            ) from None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.hash_rows.argtypes = [*[pointer] * 4, count, count, pointer]
    library.hash_rows.restype = None
    library.gather_rows.argtypes = [pointer, pointer, count, count, pointer, count]
    library.gather_rows.restype = count
    return library


class _Table(ctypes.Structure):
    """The same in `gather.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "values")),
        *((name, ctypes.c_int64) for name in ("rows", "row_bytes", "code_stride")),
        *((name, ctypes.c_int64) for name in ("blocks", "scale_stride")),
        *((name, ctypes.c_void_p) for name in ("multipliers", "sizes", "offsets")),
        *((name, ctypes.c_int64) for name in ("orders", "heads", "eos")),
    )


class CompiledGather:
    """Hashes, gathers and decodes rows of one table. Other threads run meanwhile.

    Args:
        parts: the rows, uint8 [rows, row bytes]; of NVFP4 also the scales [rows, blocks]. Rows may
            lie apart from each other, as columns of a wider array do.
        values: what codes mean, of a type of 16 bits: FP8 [256], NVFP4 [256 scales, 16 codes]. None
            for rows that are copied.
        constants: of the hash.
        eos: as for `plugins.ngram.row_ids`.
        library: compiled `gather.c`.

    Raises ValueError for arrays that are none of these.
    """

    def __init__(
        self,
        parts: Sequence[Bytes],
        values: torch.Tensor | None,
        constants: NgramConstants,
        eos: int,
        library: ctypes.CDLL,
    ) -> None:
        codes, *scales = parts
        blocks = scales[0].shape[1] if scales else 0
        _require_rows("codes", codes, (len(codes), 8 * blocks or codes.shape[1]))
        for part in scales:
            _require_rows("scales", part, (len(codes), blocks))
        self._out_bytes = codes.shape[1]
        meanings: Bytes | None = None
        if values is not None or scales:
            meanings = np.array([] if values is None else values.view(torch.int16).numpy())
            _require("values", meanings, (256, 16) if scales else (256,), np.int16)
            self._out_bytes = 2 * (16 * blocks or codes.shape[1])
        sizes, offsets = constants.heads
        multipliers = np.array(constants.multipliers, np.int64)
        if sizes.min() < 1:
            raise ValueError(f"hash heads without rows: {constants.sizes}")
        self._orders, self._heads = len(multipliers) - 1, sizes.size
        self._table = _Table(
            codes=codes.ctypes.data,
            scales=scales[0].ctypes.data if scales else None,
            values=None if meanings is None else meanings.ctypes.data,
            rows=len(codes),
            row_bytes=codes.shape[1],
            code_stride=codes.strides[0],
            blocks=blocks,
            scale_stride=scales[0].strides[0] if scales else 0,
            multipliers=multipliers.ctypes.data,
            sizes=sizes.ctypes.data,
            offsets=offsets.ctypes.data,
            orders=self._orders,
            heads=sizes.shape[1],
            eos=eos,
        )
        # Whatever the addresses are of.
        self._kept = (*parts, meanings, multipliers, sizes, offsets)
        self._library = library
        self._address = ctypes.addressof(self._table)

    def hash(self, tokens: Int64, context: Int64, lengths: Int64) -> Int64:
        """What `plugins.ngram.row_ids` gives, and -1 from a sequence's length on.

        Args:
            tokens: int [B, T].
            context: int [B, N-1], the ids before them.
            lengths: int [B].

        Returns:
            int64 [B * T * heads].

        Raises ValueError for other shapes.
        """
        batch, columns = tokens.shape
        ids = np.ascontiguousarray(tokens, np.int64)
        before = np.ascontiguousarray(context, np.int64)
        valid = np.ascontiguousarray(lengths, np.int64)
        if before.shape != (batch, self._orders) or valid.shape != (batch,):
            raise ValueError(f"{batch} sequences, ids before {before.shape}, lengths {valid.shape}")
        rows = np.empty(batch * columns * self._heads, np.int64)
        self._library.hash_rows(
            self._address,
            ids.ctypes.data,
            before.ctypes.data,
            valid.ctypes.data,
            batch,
            columns,
            rows.ctypes.data,
        )
        return rows

    def gather(self, rows: Int64, out: torch.Tensor, limit_ns: int = _NO_LIMIT) -> int:
        """Write rows by number to `out`, zeros for -1.

        Args:
            rows: int64 [n].
            out: contiguous, n rows of values.
            limit_ns: after 128 rows that took longer the rest is left.

        Returns:
            rows that are done.

        Raises UsageError for a number that is no row, ValueError for other arrays than these.
        """
        count = len(rows)
        _require("numbers of rows", rows, (count,), np.int64)
        if not out.is_contiguous() or out.nbytes != count * self._out_bytes:
            raise ValueError(f"{count} rows of {self._out_bytes} bytes do not fit {out.shape}")
        done: int = self._library.gather_rows(
            self._address, rows.ctypes.data, count, limit_ns, out.data_ptr(), self._out_bytes
        )
        if done < 0:
            wrong = rows[(rows < -1) | (rows >= self._table.rows)]
            raise UsageError(
                "no such row in the n-gram table",
                expected=f"numbers from 0 to {self._table.rows - 1}",
                found=f"{wrong[0]}" + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""),
            )
        return done


def _require_rows(what: str, array: Bytes, shape: tuple[int, ...]) -> None:
    """Bytes of a row in order; rows one behind the other, at any distance."""
    _require(what, array[:1], (1, shape[1]), np.uint8)
    if array.shape != shape or array.strides[0] < shape[1]:
        raise ValueError(
            f"compiled code takes {what} as rows {list(shape)} one behind the other, "
            f"not {list(array.shape)} {array.strides[0]} bytes apart"
        )


def _require(what: str, array: Bytes, shape: tuple[int, ...], dtype: type) -> None:
    """Compiled code sees addresses only."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"compiled code takes {what} as contiguous {dtype.__name__} {list(shape)}, "
            f"not {array.dtype} {list(array.shape)}"
        )
