"""Weights of an engine directory, mapped from their file and shared by both engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from runtime.identity import read_header


class MappedWeights(Mapping[str, torch.Tensor]):
    """Tensors of a safetensors file, mapped on first use and kept, so that both phases share them.

    Args:
        path: safetensors file.
        device: where they are used; on the CPU nothing is copied.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._names = list(read_header(path))
        self._file = safe_open(path, "pt")
        self._device = device
        self._opened: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._opened:
            if name not in self._names:
                raise KeyError(name)
            self._opened[name] = self._file.get_tensor(name).to(self._device)
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
