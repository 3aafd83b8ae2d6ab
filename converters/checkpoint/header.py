"""Headers of safetensors files, read without touching the data and without trusting the file."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from converters.checkpoint.json_files import parse_json_object
from plugins.support.dtypes import BY_SAFETENSORS, DType
from plugins.support.errors import InputError

# The limit of the format's own reader.
MAX_HEADER_BYTES = 100_000_000
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

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
    _check_cover(entries.values(), start, size, str(path))
    return entries


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The free-form metadata of one file; empty when it has none. Raises as `read_header`."""
    metadata = _read_json(path)[0].get("__metadata__", {})
    return metadata if isinstance(metadata, Mapping) else {}


def _read_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the data starts, and the size of the file."""
    where = str(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise InputError("the file is too short for safetensors", where=where)
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES or length > size - 8:
                raise InputError(
                    "the safetensors header is longer than the file or the format allow",
                    where=where,
                    expected=f"at most {min(MAX_HEADER_BYTES, size - 8)} bytes",
                    found=f"{length} bytes",
                    fix="the file is damaged or incomplete: download it again",
                )
            text = file.read(length)
    except OSError as error:
        raise InputError(
            "the safetensors file cannot be read",
            where=where,
            found=error.strerror or str(error),
        ) from error
    return parse_json_object(text, where, "safetensors header"), 8 + length, size


def _entry(name: str, value: Any, path: Path, start: int) -> TensorEntry:
    where = f"{path}: {name}"
    if not name.isprintable():
        # Also keeps half surrogates out, which could be neither printed nor written again.
        raise InputError("a tensor has an unprintable name", where=f"{path}: {name!a}")
    if not isinstance(value, Mapping):
        raise InputError("a safetensors header entry is not an object", where=where)
    code, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(code, str) or code not in BY_SAFETENSORS:
        raise InputError(
            "element type is not supported",
            where=where,
            expected=", ".join(BY_SAFETENSORS),
            found=str(code),
        )
    if not (_natural_numbers(shape) and _natural_numbers(offsets) and len(offsets) == 2):
        raise InputError(
            "a safetensors header entry has no proper shape or data_offsets",
            where=where,
            found=f"shape {shape}, data_offsets {offsets}",
        )
    begin, end = offsets
    entry = TensorEntry(name, BY_SAFETENSORS[code], tuple(shape), path, start + begin)
    if end - begin != entry.nbytes:
        raise InputError(
            "the tensor's bytes do not fit its shape and type",
            where=where,
            expected=f"{entry.nbytes} bytes for {code} {list(shape)}",
            found=f"{end - begin} bytes",
        )
    return entry


def _natural_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(entries: Iterable[TensorEntry], start: int, size: int, where: str) -> None:
    """Every data byte belongs to exactly one tensor, so nothing is read twice or left hidden."""
    position = start
    for entry in sorted(entries, key=lambda item: (item.offset, item.nbytes)):
        if entry.offset != position:
            kind = "overlap" if entry.offset < position else "leave a hole"
            raise InputError(
                f"tensors in the safetensors file {kind}",
                where=f"{where}: {entry.name}",
                expected=f"data offset {position - start}",
                found=str(entry.offset - start),
            )
        position += entry.nbytes
    if position != size:
        raise InputError(
            "the safetensors file has another size than its header says",
            where=where,
            expected=f"{position} bytes",
            found=f"{size} bytes",
            fix="the file is damaged or incomplete: download it again",
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
