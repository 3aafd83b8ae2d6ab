"""Small checkpoints that the conversion tests bend."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.qwen38_deterministic import write_deterministic


class Bend:
    """A checkpoint in one file, and ways to spoil it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def config(self, change: Callable[[dict[str, Any]], object]) -> Path:
        path = self.directory / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))
        return self.directory

    def text(self, **changes: Any) -> Path:
        return self.config(lambda config: config["text_config"].update(changes))

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
        path = self.directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        return self.directory

    def rename(self, rule: Callable[[str], str]) -> Path:
        def apply(tensors: dict[str, torch.Tensor]) -> None:
            for name in list(tensors):
                tensors[rule(name)] = tensors.pop(name)

        return self.tensors(apply)


@pytest.fixture
def bend(tmp_path: Path) -> Bend:
    """The tiny checkpoint without vision and draft tensors."""
    return Bend(write_deterministic(tmp_path / "hf", files=1, mtp=False, vision=False))
