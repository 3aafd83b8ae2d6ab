"""A Hugging Face checkpoint directory: its config, the place of every tensor, and its identity."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from converters.checkpoint.config import QUANT_FILE, SourceIdentity
from converters.checkpoint.header import TensorEntry, header_text, read_header, read_metadata
from converters.checkpoint.json_files import read_json_object
from plugins.support.errors import InputError

INDEX_FILE = "model.safetensors.index.json"
QUANT_CONFIG = "hf_quant_config.json"
# Mistral's own layout: other names, other configuration keys, one file.
MISTRAL_CONFIG, MISTRAL_WEIGHTS = "params.json", "consolidated.safetensors"

Layout = Literal["huggingface", "mistral"]
# Evenly spaced samples of each file that go into its identity; a disk may take a millisecond for
# each, so there are fewer per file where there are many files.
_SAMPLE_BYTES, _MOST_SAMPLES, _LEAST_SAMPLES, _ALL_SAMPLES = 4096, 512, 16, 16384


@dataclass(frozen=True)
class SourceCheckpoint:
    """An opened checkpoint; only headers and JSON files have been read.

    Attributes:
        directory: where it lies.
        config: the configuration file as it is.
        tensors: every tensor by the name it has on disk.
        layout: "huggingface" (`config.json`) or "mistral" (`params.json`); a directory with both
            is read by the Hugging Face files.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    layout: Layout = "huggingface"

    @classmethod
    def open(cls, directory: Path) -> SourceCheckpoint:
        """Read config, index and all headers.

        Raises InputError when there is no such directory, and for anything in it that is missing,
        damaged or contradictory.
        """
        if not directory.is_dir():
            raise InputError("the checkpoint directory does not exist", where=str(directory))
        mistral = directory / MISTRAL_WEIGHTS
        if mistral.is_file() and (directory / MISTRAL_CONFIG).is_file():
            others = [path for path in directory.glob("*.safetensors") if path != mistral]
            if not others:
                params = read_json_object(directory / MISTRAL_CONFIG, "model configuration")
                return cls(directory, params, read_header(mistral), "mistral")
        config = read_json_object(directory / "config.json", "model configuration")
        index = directory / INDEX_FILE
        tensors = _indexed(directory, index) if index.exists() else _single(directory)
        return cls(directory, config, tensors)

    @property
    def config_file(self) -> Path:
        """The file that `config` was read from."""
        name = MISTRAL_CONFIG if self.layout == "mistral" else "config.json"
        return self.directory / name

    @cached_property
    def files(self) -> list[Path]:
        """The safetensors files, sorted by name."""
        return sorted({entry.file for entry in self.tensors.values()})

    def metadata(self) -> Mapping[str, Any]:
        """Free-form metadata of the weight index, or of the file where there is no index."""
        index = self.directory / INDEX_FILE
        if index.exists():
            found = read_json_object(index, "weight index").get("metadata")
            return found if isinstance(found, Mapping) else {}
        return read_metadata(self.files[0]) if self.tensors else {}

    def optional_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the directory, None when it is not there."""
        path = self.directory / name
        return read_json_object(path, name) if path.exists() else None

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor. For small tensors; big ones are streamed."""
        entry = self.tensors[name]
        with entry.file.open("rb") as file:
            data = bytearray(os.pread(file.fileno(), entry.nbytes, entry.offset))
        if len(data) != entry.nbytes:
            raise InputError("the file ended early", where=f"{entry.file}: {name}")
        if not data:
            return torch.empty(entry.shape, dtype=entry.dtype.torch)
        return torch.frombuffer(data, dtype=entry.dtype.torch).reshape(entry.shape)

    def stamps(self) -> tuple[tuple[str, int, int], ...]:
        """Name, bytes and time of the last change of every file that a conversion depends on."""
        declarations = [self.directory / name for name in (QUANT_CONFIG, QUANT_FILE)]
        paths = [self.config_file, *self.files, *declarations]
        return tuple(
            (path.name, status.st_size, status.st_mtime_ns)
            for path in paths
            if path.exists()
            for status in [path.stat()]
        )

    def identity(self) -> SourceIdentity:
        """Digest of config, headers, sizes and content samples of all files."""
        digest = hashlib.sha256()
        digest.update(self.config_file.read_bytes())
        samples = max(min(_MOST_SAMPLES, _ALL_SAMPLES // max(len(self.files), 1)), _LEAST_SAMPLES)
        for path in self.files:
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            # Samples need not touch the header, but it says what they are samples of.
            digest.update(header_text(path))
            for sample in _samples(path, size, samples):
                digest.update(sample)
        return SourceIdentity(
            files=len(self.files),
            tensors=len(self.tensors),
            bytes=sum(entry.nbytes for entry in self.tensors.values()),
            digest=digest.hexdigest(),
        )


def _samples(path: Path, size: int, count: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        if size <= count * _SAMPLE_BYTES:
            yield file.read()
            return
        for number in range(count):
            offset = number * (size - _SAMPLE_BYTES) // (count - 1)
            yield os.pread(file.fileno(), _SAMPLE_BYTES, offset)


def _indexed(directory: Path, index: Path) -> dict[str, TensorEntry]:
    weight_map = read_json_object(index, "weight index").get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise InputError("the weight index has no proper weight_map", where=str(index))
    names = sorted(set(weight_map.values()))
    # A file name from a stranger must not lead out of the directory.
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise InputError(
            "the weight index names files outside the checkpoint",
            where=str(index),
            found=_some(outside),
        )
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise InputError(
            f"{len(absent)} of {len(names)} weight files are missing",
            where=str(directory),
            found=_some(absent),
            fix="download the checkpoint again; nothing was converted",
        )
    paths = {name: directory / name for name in names}
    tensors = _merge(paths.values())
    wrong = [
        name
        for name, file in weight_map.items()
        if name not in tensors or tensors[name].file is not paths[file]
    ]
    extra = sorted(tensors.keys() - weight_map.keys())
    for found, what in (
        (wrong, "tensors of the index are not in the file it names"),
        (extra, "tensors lie in the files but not in the index"),
    ):
        if found:
            raise InputError(f"{len(found)} {what}", where=str(index), found=_some(found))
    return tensors


def _single(directory: Path) -> dict[str, TensorEntry]:
    files = sorted(directory.glob("*.safetensors"))
    if len(files) > 1:
        # The same weights once more, in Mistral's layout.
        files = [path for path in files if path.name != MISTRAL_WEIGHTS]
    if len(files) == 1:
        return read_header(files[0])
    if not files:
        raise InputError(
            "the checkpoint has no safetensors files",
            where=str(directory),
            expected=f"model.safetensors or {INDEX_FILE}",
            found=_some(sorted(path.name for path in directory.iterdir())),
        )
    # Files that count themselves are complete without an index when none of them is missing.
    numbers = [re.fullmatch(r".+-(\d+)-of-(\d+)\.safetensors", path.name) for path in files]
    counted = {(int(m[1]), int(m[2])) for m in numbers if m}
    if counted == {(number, len(files)) for number in range(1, len(files) + 1)}:
        return _merge(files)
    raise InputError(
        "several safetensors files but no index",
        where=str(directory),
        expected=INDEX_FILE,
        found=_some([path.name for path in files]),
    )


def _merge(paths: Iterable[Path]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for path in paths:
        entries = read_header(path)
        if not tensors.keys().isdisjoint(entries):
            repeated = sorted(tensors.keys() & entries.keys())
            raise InputError(
                "tensors occur in two files",
                where=f"{tensors[repeated[0]].file.name} and {path.name}",
                found=_some(repeated),
            )
        tensors |= entries
    return tensors


def _some(names: list[str], limit: int = 3) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
