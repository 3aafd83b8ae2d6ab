"""Where a network's weights come from and whether the engine contains them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open

from plugins.support.dtypes import BY_SAFETENSORS, BY_TORCH
from plugins.support.errors import InputError

Mode = Literal["auto", "inputs", "embedded"]


@dataclass(frozen=True)
class WeightPolicy:
    """How checkpoint tensors enter the network.

    Attributes:
        mode: "inputs" makes every tensor a network input, "embedded" a constant of the plan,
            "auto" decides by size.
        threshold_bytes: in mode "auto", tensors of at least this many bytes are inputs; small
            ones are constants, so that the compiler can fold them.
    """

    mode: Mode = "auto"
    threshold_bytes: int = 65536

    def is_input(self, nbytes: int) -> bool:
        """Whether a tensor of `nbytes` becomes a network input."""
        if self.mode == "auto":
            return nbytes >= self.threshold_bytes
        return self.mode == "inputs"


@dataclass(frozen=True)
class WeightInfo:
    """Dtype (project name) and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """A checkpoint seen by tensor name."""

    def names(self) -> Iterable[str]:
        """Names of all tensors."""

    def info(self, name: str) -> WeightInfo | None:
        """Dtype and shape of `name`, None when the checkpoint has no such tensor."""

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, contiguous; memory-mapped where that is possible."""


class TensorSource:
    """Weights that are already in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        """See `WeightSource`."""
        return self._tensors.keys()

    def info(self, name: str) -> WeightInfo | None:
        """See `WeightSource`."""
        found = self._tensors.get(name)
        if found is None:
            return None
        return WeightInfo(BY_TORCH[found.dtype].name, tuple(found.shape))

    def tensor(self, name: str) -> torch.Tensor:
        """See `WeightSource`."""
        return self._tensors[name].contiguous()


class SafetensorsSource:
    """One safetensors file; headers are read at once, tensors are mapped when asked for.

    Raises InputError when the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(str(path), "pt")
        except (OSError, SafetensorError) as error:
            raise InputError(
                "the weight file cannot be read", where=str(path), found=str(error)
            ) from error
        self._names = dict.fromkeys(self._file.keys())

    def names(self) -> Iterable[str]:
        """See `WeightSource`."""
        return self._names.keys()

    def info(self, name: str) -> WeightInfo | None:
        """See `WeightSource`."""
        if name not in self._names:
            return None
        piece = self._file.get_slice(name)
        return WeightInfo(BY_SAFETENSORS[piece.get_dtype()].name, tuple(piece.get_shape()))

    def tensor(self, name: str) -> torch.Tensor:
        """See `WeightSource`."""
        return self._file.get_tensor(name)
