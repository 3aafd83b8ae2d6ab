"""What a safetensors file is, without reading it: its header and a few content samples.

The header gives names, dtypes, shapes and places; the samples tell two fine-tunes of one model
apart. Both cost milliseconds whatever the file's size.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from plugins.support.dtypes import BY_SAFETENSORS
from plugins.support.errors import InputError

# Content is sampled at three places of up to this many tensors.
_SENTINELS = 16
_SAMPLE_BYTES = 16
# A header beyond this size is not a header (the format's own limit).
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file.

    Attributes:
        dtype: our dtype name, or the safetensors code where we have no name for it.
        shape: dimensions.
        begin, end: byte offsets in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class WeightsIdentity(BaseModel):
    """Identity of one safetensors file.

    Attributes:
        version: of the way it is computed.
        bytes: file size.
        tensors: number of tensors.
        header: sha256 of every tensor's name, dtype, shape and place.
        samples: per sentinel tensor the hexadecimal bytes at its start, middle and end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    bytes: int
    tensors: int
    header: str
    samples: dict[str, str]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a safetensors file by name, in file order.

    Raises InputError when the file is missing, cut short or no safetensors file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise _not_safetensors(path, f"{size} bytes, header length {length}")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise InputError("the weights file is missing", where=str(path)) from None
    except OSError as error:
        raise _not_safetensors(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _not_safetensors(path, str(error)) from error
    if not isinstance(header, dict):
        raise _not_safetensors(path, f"a header that is a {type(header).__name__}")
    base = 8 + length
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = entry["data_offsets"]
            known = BY_SAFETENSORS.get(entry["dtype"])
            tensors[name] = StoredTensor(
                dtype=known.name if known else entry["dtype"],
                shape=tuple(map(int, entry["shape"])),
                begin=base + begin,
                end=base + end,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _not_safetensors(path, f"no proper header entry for {name!r}") from error
    ordered = dict(sorted(tensors.items(), key=lambda item: item[1].begin))
    last = max((tensor.end for tensor in ordered.values()), default=base)
    if last != size:
        raise InputError(
            "the weights file does not have the size that its header gives",
            where=str(path),
            expected=f"{last} bytes",
            found=f"{size} bytes",
            fix="copy the file again; it was cut or overwritten",
        )
    return ordered


def _not_safetensors(path: Path, found: str) -> InputError:
    return InputError("not a readable safetensors file", where=str(path), found=found)


def weights_identity(path: Path) -> WeightsIdentity:
    """Identity of the safetensors file at `path`. Raises InputError as `read_header` does."""
    tensors = read_header(path)
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(json.dumps([name, tensor.dtype, tensor.shape, tensor.begin]).encode())
    samples = {}
    with path.open("rb") as file:
        for name in _sentinels(tensors):
            tensor = tensors[name]
            size = tensor.end - tensor.begin
            count = min(_SAMPLE_BYTES, size)
            places = (0, (size - count) // 2, size - count)
            parts = []
            for place in places:
                file.seek(tensor.begin + place)
                parts.append(file.read(count))
            samples[name] = b"".join(parts).hex()
    return WeightsIdentity(
        bytes=path.stat().st_size, tensors=len(tensors), header=digest.hexdigest(), samples=samples
    )


def _sentinels(tensors: dict[str, StoredTensor]) -> list[str]:
    """Evenly spaced names, and always the largest tensor."""
    names = list(tensors)
    if len(names) <= _SENTINELS:
        return names
    step = len(names) / (_SENTINELS - 1)
    chosen = {names[int(index * step)] for index in range(_SENTINELS - 1)}
    chosen.add(max(names, key=lambda name: tensors[name].end - tensors[name].begin))
    return [name for name in names if name in chosen]


def check_identity(path: Path, expected: WeightsIdentity, fix: str) -> None:
    """Raise InputError naming the first difference between the file and `expected`."""
    found = weights_identity(path)
    if found == expected:
        return
    if found.bytes != expected.bytes:
        what = "the weights file is not the one the engine was built from: other size"
        facts = f"{expected.bytes} bytes", f"{found.bytes} bytes"
    elif found.header != expected.header:
        what = "the weights file is not the one the engine was built from: other tensors"
        facts = (
            f"{expected.tensors} tensors, header {expected.header[:12]}",
            f"{found.tensors} tensors, header {found.header[:12]}",
        )
    else:
        name = next(n for n in expected.samples if found.samples.get(n) != expected.samples[n])
        what = f"the weights are not those the engine was built from: {name} has other values"
        facts = expected.samples[name][:24], found.samples.get(name, "nothing")[:24]
    raise InputError(what, where=str(path), expected=facts[0], found=facts[1], fix=fix)
