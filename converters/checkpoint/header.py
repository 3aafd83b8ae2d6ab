"""Headers of safetensors files, read without touching the data and without trusting the file."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from converters.checkpoint.json_files import parse_json_object
from plugins.support.dtypes import BY_SAFETENSORS, DType
from plugins.support.errors import InputError

# The limit of the format's own reader.
MAX_HEADER_BYTES = 100_000_000
_DAMAGED = "the file is damaged or incomplete: download it again"
Shape = tuple[int, ...]


class TensorEntry(NamedTuple):
    """Where one tensor lies. A tuple, because a checkpoint has hundreds of thousands.

    Attributes:
        name: as in the file.
        dtype: element type.
        shape: dimensions, row-major.
        file: the safetensors file.
        offset: of the first byte, from the start of the file.
    """

    name: str
    dtype: DType
    shape: Shape
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.nbytes(math.prod(self.shape))


def read_header(path: Path) -> dict[str, TensorEntry]:
    """All tensors of one file.

    Raises InputError for a header that is truncated, oversized, not JSON, or that describes
    tensors which do not cover the data exactly once.
    """
    header, start, size = _read_json(path)
    header.pop("__metadata__", None)
    entries = {name: _entry(name, value, path, start) for name, value in header.items()}
    offsets = ((value["data_offsets"], name) for name, value in header.items())
    _check_cover(offsets, start, size, str(path))
    return entries


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The free-form metadata of one file; empty when it has none. Raises as `read_header`."""
    metadata = _read_json(path)[0].get("__metadata__", {})
    return metadata if isinstance(metadata, Mapping) else {}


def header_text(path: Path) -> bytes:
    """The header of one file as it is. Raises InputError when it is truncated or oversized."""
    return _read(path)[0]


def _read_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the data starts, and the size of the file."""
    text, size = _read(path)
    return parse_json_object(text, str(path), "safetensors header"), 8 + len(text), size


def _read(path: Path) -> tuple[bytes, int]:
    """The header's text, and the size of the file."""
    where = str(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise InputError(
                    "the file is too short for safetensors",
                    where=where,
                    expected="at least 8 bytes",
                    found=f"{size} bytes",
                    fix=_DAMAGED,
                )
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES or length > size - 8:
                raise InputError(
                    "the safetensors header is longer than the file or the format allow",
                    where=where,
                    expected=f"at most {min(MAX_HEADER_BYTES, size - 8)} bytes",
                    found=f"{length} bytes",
                    fix=_DAMAGED,
                )
            return file.read(length), size
    except OSError as error:
        raise InputError(
            "the safetensors file cannot be read",
            where=where,
            found=error.strerror or str(error),
        ) from error


def _entry(name: str, value: Any, path: Path, start: int) -> TensorEntry:
    if not name.isprintable():
        # Also keeps half surrogates out, which could be neither printed nor written again.
        raise InputError("a tensor has an unprintable name", where=f"{path}: {name!a}")
    if not isinstance(value, dict):
        raise InputError("a safetensors header entry is not an object", where=f"{path}: {name}")
    code, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    dtype = BY_SAFETENSORS.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise InputError(
            "element type is not supported",
            where=f"{path}: {name}",
            expected=", ".join(BY_SAFETENSORS),
            found=str(code),
        )
    if not (_natural_numbers(shape) and _natural_numbers(offsets) and len(offsets) == 2):
        raise InputError(
            "a safetensors header entry has no proper shape or data_offsets",
            where=f"{path}: {name}",
            found=f"shape {shape}, data_offsets {offsets}",
        )
    begin, end = offsets
    nbytes = dtype.nbytes(math.prod(shape))
    if end - begin != nbytes:
        raise InputError(
            "the tensor's bytes do not fit its shape and type",
            where=f"{path}: {name}",
            expected=f"{nbytes} bytes for {code} {shape}",
            found=f"{end - begin} bytes",
        )
    return TensorEntry(name, dtype, tuple(shape), path, start + begin)


def _natural_numbers(value: Any) -> TypeGuard[list[int]]:
    # True is an int, too.
    return (
        isinstance(value, list)
        and {int}.issuperset(map(type, value))
        and min(value, default=0) >= 0
    )


def _check_cover(
    tensors: Iterable[tuple[list[int], str]], start: int, size: int, where: str
) -> None:
    """Every data byte belongs to exactly one tensor, so nothing is read twice or left hidden."""
    position = 0
    for (begin, end), name in sorted(tensors, key=itemgetter(0)):
        if begin != position:
            kind = "overlap" if begin < position else "leave a hole"
            raise InputError(
                f"tensors in the safetensors file {kind}",
                where=f"{where}: {name}",
                expected=f"data offset {position}",
                found=str(begin),
            )
        position = end
    if start + position != size:
        raise InputError(
            "the safetensors file has another size than its header says",
            where=where,
            expected=f"{start + position} bytes",
            found=f"{size} bytes",
            fix=_DAMAGED,
        )


def build_header(tensors: Iterable[tuple[str, DType, Shape]]) -> tuple[bytes, list[int]]:
    """Header bytes for tensors that lie one after another, and their offsets in the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: list[int] = []
    position = 0
    for name, dtype, shape in tensors:
        end = position + dtype.nbytes(math.prod(shape))
        header[name] = {
            "dtype": dtype.safetensors,
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        starts.append(position)
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Data starts at a multiple of 8 bytes, which the format recommends for mapped access.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [8 + len(text) + start for start in starts]
