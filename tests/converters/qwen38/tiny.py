"""The tiny deterministic checkpoint, converted: what the network's tests start from."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from converters.checkpoint.config import WEIGHTS_FILE, read_config
from converters.checkpoint.convert import convert
from converters.definition import EngineLimits
from converters.qwen38 import FAMILY
from converters.qwen38.config import Qwen38CheckpointConfig
from tests.converters.qwen38.driver import Driver
from tests.fixtures.qwen38_deterministic import write_deterministic

# One period of the model: a PLE block, three recurrent layers and a sparse one.
PERIOD: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}


@dataclass(frozen=True)
class Tiny:
    """One checkpoint: the Hugging Face directory and the tensors of its conversion."""

    hf_dir: Path
    config: Qwen38CheckpointConfig
    weights: Mapping[str, Tensor]

    def driver(self, limits: EngineLimits, **options: Any) -> Driver:
        """Both networks on the interpreter."""
        return Driver(
            self.config,
            self.weights,
            limits,
            host_inputs=FAMILY.host_inputs(self.config),
            **options,
        )


def tiny(dtype: str = "float32", **changes: Any) -> Tiny:
    """The checkpoint with some configuration keys replaced; made once per process."""
    return _tiny(dtype, json.dumps(changes, sort_keys=True))


@functools.cache
def _tiny(dtype: str, changes: str) -> Tiny:
    directory = Path(tempfile.mkdtemp(prefix="qwen38-tiny-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    hf_dir = write_deterministic(directory / "hf", vision=False, mtp=False, **json.loads(changes))
    convert(hf_dir, directory / "checkpoint", dtype)
    config = read_config(directory / "checkpoint", Qwen38CheckpointConfig)
    return Tiny(hf_dir, config, load_file(directory / "checkpoint" / WEIGHTS_FILE))
