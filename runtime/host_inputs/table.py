"""Rows of a stored n-gram table as numbers: plain, FP8 or NVFP4, decided by its element type.

Beside an FP8 table lies `X.weights_scaling_factor` [1]; beside an NVFP4 table one e4m3 scale per 16
columns, `X.weights_scaling_factor`, and one for all, `X.weights_scaling_factor_2` [1].
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from plugins.support.dtypes import BY_NAME, COMPUTE_DTYPES
from plugins.support.errors import InputError
from plugins.support.progress import Reporter, progress
from plugins.support.units import size
from runtime.host_inputs.preload import LONGEST_S, Loaded, available_bytes, fits, preload
from runtime.identity import read_header

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[Any]

# Rows that are fetched at a time, and that are decoded at a time: what is decoded and its buffers
# stay in the second-level cache.
_FETCH, _STRIP = 1024, 256
# Rows after which to ask whether the disk was waited for: at first, and then.
_PROBE, _PIECE = 16, 128
# A piece from memory takes a tenth of this, reads from disk more.
_WAITED_NS = 200_000
_NVFP4_BLOCK = 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class MappedTable:
    """A two-dimensional tensor of a safetensors file, read row by row.

    Args:
        path: safetensors file.
        name: tensor [rows, width].

    Attributes:
        rows, width: of the tensor.
        dtype: of its elements.
        row_bytes: bytes of a row.
        nbytes: bytes of all rows.
        bytes: the mapped rows, uint8 [rows, row_bytes].
        preloaded: whether all rows were brought into memory.

    Raises InputError when the tensor is missing, not two-dimensional or of unknown dtype.
    """

    def __init__(self, path: Path, name: str) -> None:
        stored = read_header(path).get(name)
        if stored is None or len(stored.shape) != 2 or stored.dtype not in BY_NAME:
            raise InputError(
                "the n-gram table is not in the weights file as it must be",
                where=f"{path}: {name}",
                expected="a tensor [rows, width]",
                found=f"{stored.dtype} {list(stored.shape)}" if stored else "no such tensor",
            )
        self.rows, self.width = stored.shape
        self.dtype = BY_NAME[stored.dtype]
        self.row_bytes = self.dtype.nbytes(self.width)
        self.nbytes = self.rows * self.row_bytes
        self._begin = stored.begin
        self._path = path
        self.preloaded = False
        self._file = path.open("rb")
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        # Rows are a few hundred bytes at random places: reading ahead would multiply the traffic.
        self._map.madvise(mmap.MADV_RANDOM)
        flat = np.frombuffer(self._map, np.uint8, self.nbytes, offset=self._begin)
        self.bytes = flat.reshape(self.rows, self.row_bytes)

    def preload(self, reporter: Reporter, deadline: float) -> Loaded:
        """Bring the whole table into memory, see `runtime.host_inputs.preload.preload`."""
        loaded = preload(self._path, self._map, self._begin, self.nbytes, reporter, deadline)
        self.preloaded = loaded.bytes == self.nbytes
        return loaded

    def gather(self, rows: Int64, out: Bytes, *, probe: bool = True) -> bool:
        """Copy rows to `out`, uint8 [n, row_bytes].

        Args:
            rows: numbers below `rows`, int64 [n]; others are clipped, not noticed.
            out: where the bytes go.
            probe: whether nothing is known yet about where the rows are.

        Returns:
            whether the disk had to be waited for. Then all rows that were left were requested
            together, so that their reads ran side by side instead of one after the other.
        """
        done, count, waited = 0, _PROBE if probe else _PIECE, False
        if self.preloaded:
            # Asking costs as much as the rows of a small piece.
            count = len(rows)
        while done < len(rows):
            piece = slice(done, done + count)
            start = time.perf_counter_ns()
            self.bytes.take(rows[piece], axis=0, out=out[piece], mode="clip")
            done, count = done + count, _PIECE
            limit = _WAITED_NS * max(1, len(out[piece]) // _PIECE)
            if not waited and time.perf_counter_ns() - start > limit:
                waited, count = True, len(rows)
                self.request(rows[done:])
        return waited

    def request(self, rows: Int64) -> None:
        """Have rows read into the page cache, without waiting for them."""
        file = self._file.fileno()
        for offset in (self._begin + rows * self.row_bytes).tolist():
            os.posix_fadvise(file, offset, self.row_bytes, os.POSIX_FADV_WILLNEED)


class StoredTable:
    """The values of a table's rows.

    Plain rows are copied and cast. Codes are looked up: FP8 codes two at a time, NVFP4 bytes (two
    codes) together with their block's scale, in a table of the values that they mean, each rounded
    once to the wanted type. It has at most 65536 entries and stays in the processor's cache.

    Args:
        path: safetensors file.
        name: the table, ending in `.weight`.
        dtype: of the values.

    Attributes:
        rows, width: of the values.
        dtype: of the values.
        parts: what is stored: the codes or plain values and, of NVFP4, their scales.
        meanings: values of the codes, FP8 [256], NVFP4 [256 scales, 16 codes]; None where rows are
            plain.

    Raises InputError for an element type that cannot be read or a scale that is missing or unfit:
    codes without their scale would give wrong text and no error. Not for several threads, except
    `prefetch`.
    """

    def __init__(self, path: Path, name: str, dtype: torch.dtype) -> None:
        self._codes = MappedTable(path, name)
        self.rows, self.width, self.dtype = self._codes.rows, self._codes.width, dtype
        self._blocks: MappedTable | None = None
        self.meanings: torch.Tensor | None = None
        self._values: Bytes | None = None
        module = name.removesuffix(".weight")
        kind = self._codes.dtype.name
        if kind == "float8_e4m3fn":
            factor = _one_value(path, f"{module}.weights_scaling_factor")
            self.meanings = _fp8_meanings(factor, dtype)
            self._values = _fp8_values(self.meanings, pairs=self.width % 2 == 0)
        elif kind == "uint8":
            self.width *= 2
            self._blocks = MappedTable(path, f"{module}.weights_scaling_factor")
            expected = (self.rows, self.width // _NVFP4_BLOCK)
            if (self._blocks.rows, self._blocks.width) != expected:
                raise InputError(
                    "the scales of the n-gram table do not fit it",
                    where=f"{path}: {module}.weights_scaling_factor",
                    expected=str(list(expected)),
                    found=str([self._blocks.rows, self._blocks.width]),
                )
            factor = _one_value(path, f"{module}.weights_scaling_factor_2")
            self.meanings = _nvfp4_meanings(factor, dtype)
            self._values = _nvfp4_values(self.meanings)
        elif kind not in COMPUTE_DTYPES:
            raise InputError(
                "no way to read an n-gram table of this type",
                where=f"{path}: {name}",
                expected=f"{', '.join(COMPUTE_DTYPES)}, float8_e4m3fn or uint8 (NVFP4)",
                found=kind,
            )
        self.parts = [self._codes] if self._blocks is None else [self._codes, self._blocks]
        # Used again by every call: fresh memory costs more than the work done in it.
        self._buffers = [np.empty((_FETCH, part.row_bytes), np.uint8) for part in self.parts]
        self._lookups = self._new_lookups()

    def _new_lookups(self) -> tuple[Bytes, ...]:
        """Buffers for the places of values: int64, and for NVFP4 what they are put together of."""
        if self._values is None:
            return ()
        count = self.width * self.dtype.itemsize // self._values.itemsize
        places = np.empty((_STRIP, count), np.int64)
        if self._blocks is None:
            return (places,)
        scales = np.empty((_STRIP, self._blocks.width), np.int64)
        spread = np.empty((_STRIP, self._blocks.width), _SPREAD.dtype)
        return places, scales, spread, np.empty((_STRIP, count), np.uint16)

    def preload(self) -> str:
        """Bring the table into memory where it fits; one line that says what was done."""
        total = sum(part.nbytes for part in self.parts)
        about = f"n-gram table of {size(total)}"
        available = available_bytes()
        if not fits(total, available):
            memory = "an unknown amount" if available is None else size(available)
            return f"{about}: rows are read on demand, {memory} of memory is available"
        deadline = time.monotonic() + LONGEST_S
        with progress("n-gram table", total, "bytes") as reporter:
            loaded = [part.preload(reporter, deadline) for part in self.parts]
        done, huge = (sum(getattr(p, name) for p in loaded) for name in ("bytes", "huge"))
        rest = "" if done == total else f"; the rest is read on demand, {LONGEST_S:.0f} s are over"
        return f"{about}: {size(done)} in memory, {size(huge)} in huge pages{rest}"

    def gather(self, rows: Int64, out: torch.Tensor) -> None:
        """Write rows by number, int64 [n], to `out`, contiguous [n, width] of type `dtype`."""
        target = out.view(torch.uint8).numpy()
        direct = self._codes.dtype.torch == self.dtype
        requested = False
        for first in range(0, len(rows), _FETCH):
            piece = rows[first : first + _FETCH]
            into = target[first : first + _FETCH]
            fetched = [into] if direct else [buffer[: len(piece)] for buffer in self._buffers]
            waited = False
            for part, buffer in zip(self.parts, fetched, strict=True):
                if waited and not requested:
                    part.request(piece)
                waited |= part.gather(piece, buffer, probe=first == 0)
            if waited and not requested:
                # What comes later is not there either: have it read while this is decoded.
                requested = True
                self.request(rows[first + _FETCH :])
            if self._values is not None:
                values = into.view(self._values.dtype)
                for start in range(0, len(piece), _STRIP):
                    strip = slice(start, start + _STRIP)
                    self._look_up([buffer[strip] for buffer in fetched], values[strip])
            elif not direct:
                plain = torch.from_numpy(fetched[0]).view(self._codes.dtype.torch)
                out[first : first + _FETCH].copy_(plain)

    def request(self, rows: Int64) -> None:
        """Have rows read into the page cache, without waiting for them."""
        for part in self.parts:
            part.request(rows)

    def prefetch(self, rows: Int64) -> None:
        """Read rows so that a later `gather` finds them in memory. From any one thread."""
        for part in self.parts:
            scratch = np.empty((_FETCH, part.row_bytes), np.uint8)
            for first in range(0, len(rows), _FETCH):
                piece = rows[first : first + _FETCH]
                part.gather(piece, scratch[: len(piece)], probe=first == 0)

    def _look_up(self, fetched: list[Bytes], out: Bytes) -> None:
        assert self._values is not None
        codes = fetched[0]
        places, *more = [buffer[: len(codes)] for buffer in self._lookups]
        if self._blocks is None:
            np.copyto(places, codes.view(np.uint16) if self.width % 2 == 0 else codes)
        else:
            scales, spread, both = more
            np.copyto(scales, fetched[1])
            _SPREAD.take(scales, mode="clip", out=spread)
            np.bitwise_or(spread.view(np.uint16), codes, out=both)
            np.copyto(places, both)
        self._values.take(places, mode="clip", out=out)


# Every scale in the upper half of eight 16-bit numbers, as one element: a block has eight bytes of
# codes, and inner loops over eight elements would be the slowest part.
_SPREAD = np.repeat(np.arange(256, dtype=np.uint16) << 8, _NVFP4_BLOCK // 2).view(np.complex128)


def _fp8_meanings(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What every e4m3 code means, [256]."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return (codes.float() * factor).to(dtype)


def _fp8_values(meanings: torch.Tensor, *, pairs: bool) -> Bytes:
    """The same as elements, or of every two codes, the first in the low byte."""
    if not pairs:
        return _as_elements(meanings[:, None])
    both = torch.arange(65536)
    return _as_elements(torch.stack([meanings[both & 255], meanings[both >> 8]], dim=1))


def _nvfp4_meanings(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What every code means with every scale of its block, [256 scales, 16 codes]."""
    magnitudes = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * factor
    return (magnitudes * scales[:, None]).to(dtype)


def _nvfp4_values(meanings: torch.Tensor) -> Bytes:
    """What a byte of two codes means: [scale * 256 + byte]."""
    byte = torch.arange(256)
    both = torch.stack([meanings[:, byte & 15], meanings[:, byte >> 4]], dim=2)
    return _as_elements(both.flatten(0, 1))


def _as_elements(values: torch.Tensor) -> Bytes:
    """[n, k] as n integers that hold k values each."""
    data = values.contiguous().view(torch.uint8).numpy()
    return data.view(np.dtype(f"u{data.shape[1]}")).reshape(-1)


def _one_value(path: Path, name: str) -> torch.Tensor:
    """A stored scale [1] as float32 0-d tensor."""
    stored = read_header(path).get(name)
    if stored is None or stored.dtype not in COMPUTE_DTYPES or tuple(stored.shape) != (1,):
        raise InputError(
            "the scale of the n-gram table is not in the weights file as it must be",
            where=f"{path}: {name}",
            expected="one value [1]",
            found=f"{stored.dtype} {list(stored.shape)}" if stored else "no such tensor",
            fix="convert the checkpoint again",
        )
    dtype = BY_NAME[stored.dtype]
    with path.open("rb") as file:
        file.seek(stored.begin)
        data = bytearray(file.read(dtype.nbytes(1)))
    return torch.frombuffer(data, dtype=dtype.torch).float().reshape(())
