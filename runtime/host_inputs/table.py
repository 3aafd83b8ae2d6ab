"""Rows of a stored n-gram table as numbers: plain, FP8 or NVFP4, decided by its element type.

Beside an FP8 table lies `X.weights_scaling_factor` [1]; beside an NVFP4 table one e4m3 scale per 16
columns, `X.weights_scaling_factor`, and one for all, `X.weights_scaling_factor_2` [1].
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from plugins.support.dtypes import BY_NAME, COMPUTE_DTYPES
from plugins.support.errors import InputError
from runtime.identity import read_header

Int64 = npt.NDArray[np.int64]

_NVFP4_BLOCK = 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class MappedTable:
    """A two-dimensional tensor of a safetensors file, read row by row.

    Args:
        path: safetensors file.
        name: tensor [rows, width].

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
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Rows are a few hundred bytes at random places: reading ahead would multiply the traffic.
        self._map.madvise(mmap.MADV_RANDOM)
        row_bytes = self.dtype.nbytes(self.width)
        flat = np.frombuffer(self._map, np.uint8, self.rows * row_bytes, offset=stored.begin)
        self._bytes = flat.reshape(self.rows, row_bytes)

    def gather(self, rows: Int64) -> torch.Tensor:
        """Rows by number, int64 [n]; returns [n, width] in the table's dtype."""
        return torch.from_numpy(self._bytes.take(rows, axis=0)).view(self.dtype.torch)


class StoredTable:
    """The values of a table's rows.

    Args:
        path: safetensors file.
        name: the table, ending in `.weight`.

    Attributes:
        rows, width: of the values.

    Raises InputError for an element type that cannot be read or a scale that is missing or unfit:
    codes without their scale would give wrong text and no error.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._codes = MappedTable(path, name)
        self.rows, self.width = self._codes.rows, self._codes.width
        self._blocks: MappedTable | None = None
        self._factor = torch.tensor(1.0)
        module = name.removesuffix(".weight")
        kind = self._codes.dtype.name
        if kind in COMPUTE_DTYPES:
            return
        if kind == "float8_e4m3fn":
            self._factor = _one_value(path, f"{module}.weights_scaling_factor")
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
            self._factor = _one_value(path, f"{module}.weights_scaling_factor_2")
        else:
            raise InputError(
                "no way to read an n-gram table of this type",
                where=f"{path}: {name}",
                expected=f"{', '.join(COMPUTE_DTYPES)}, float8_e4m3fn or uint8 (NVFP4)",
                found=kind,
            )

    def gather(self, rows: Int64, dtype: torch.dtype) -> torch.Tensor:
        """Rows by number, int64 [n]; returns [n, width] in `dtype`, rounded once."""
        codes = self._codes.gather(rows)
        if self._blocks is not None:
            blocks = _e4m3_values(self._blocks.gather(rows)).mul_(self._factor)
            values = torch.from_numpy(_PAIRS[codes.numpy()]).view(torch.float32)
            values = values.view(*blocks.shape, _NVFP4_BLOCK) * blocks.unsqueeze(-1)
            return values.view(-1, self.width).to(dtype)
        if codes.dtype == torch.float8_e4m3fn:
            return _e4m3_values(codes).mul_(self._factor).to(dtype)
        return codes.to(dtype)


def _pairs() -> npt.NDArray[np.int64]:
    """The two float32 values of every byte, low half first, as one 64-bit element."""
    values = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], dtype=np.float32)
    byte = np.arange(256)
    pairs = np.stack([values[byte % 16], values[byte // 16]], axis=1)
    return np.ascontiguousarray(pairs).view(np.int64).reshape(-1)


_PAIRS = _pairs()


def _e4m3_values(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of e4m3 codes, several times as fast as the library's cast.

    The code's exponent and fraction, put where float32 has them, are the value times 2^-120, also
    for the smallest ones. (The code for NaN becomes 480; conversion lets none through.)
    """
    bits = codes.view(torch.int8).int().bitwise_left_shift_(20)
    return bits.bitwise_and_(_E4M3_MASK).view(torch.float32).mul_(2.0**120)


# Sign in bit 31, exponent and fraction in bits 20 to 26.
_E4M3_MASK = 0x87F00000 - (1 << 32)


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
