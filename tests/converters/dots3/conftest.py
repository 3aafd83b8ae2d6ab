"""Small checkpoints that the conversion tests bend."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.fixtures.dots3_random import write


class Bend:
    """A checkpoint in one file, and ways to spoil it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def config(self, **changes: Any) -> Path:
        return self.edit(lambda config: config.update(changes))

    def without(self, *keys: str) -> Path:
        return self.edit(lambda config: [config.pop(key) for key in keys])

    def edit(self, change: Callable[[dict[str, Any]], object]) -> Path:
        path = self.directory / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))
        return self.directory

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
        return self._save(change, self._metadata())

    def metadata(self, **metadata: str) -> Path:
        return self._save(lambda tensors: None, {"format": "pt", **metadata})

    def rename(self, rule: Callable[[str], str]) -> Path:
        def apply(tensors: dict[str, torch.Tensor]) -> None:
            for name in list(tensors):
                tensors[rule(name)] = tensors.pop(name)

        return self.tensors(apply)

    def _metadata(self) -> dict[str, str]:
        with safe_open(self.directory / "model.safetensors", "pt") as file:
            found: dict[str, str] = file.metadata()
            return found

    def _save(
        self, change: Callable[[dict[str, torch.Tensor]], object], metadata: dict[str, str]
    ) -> Path:
        path = self.directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata=metadata)
        return self.directory


@pytest.fixture(scope="session")
def _pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("dots3") / "hf")


@pytest.fixture
def bend(_pristine: Path, tmp_path: Path) -> Bend:
    """The tiny checkpoint in the released layout."""
    shutil.copytree(_pristine, tmp_path / "hf")
    return Bend(tmp_path / "hf")
