"""The tiny random checkpoint, converted: what the network's tests start from."""

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
from converters.dots3.config import Dots3CheckpointConfig
from tests.converters.dots3.driver import Driver
from tests.fixtures.dots3_random import write


@dataclass(frozen=True)
class Tiny:
    """One checkpoint: the Hugging Face directory and the tensors of its conversion."""

    hf_dir: Path
    config: Dots3CheckpointConfig
    weights: Mapping[str, Tensor]

    def driver(self, limits: EngineLimits, **options: Any) -> Driver:
        """The networks on the interpreter."""
        return Driver(self.config, self.weights, limits, **options)


def tiny(dtype: str = "float32", *, draft: bool = True, **changes: Any) -> Tiny:
    """The checkpoint with some configuration keys replaced; made once per process."""
    return _tiny(dtype, draft, json.dumps(changes, sort_keys=True))


@functools.cache
def _tiny(dtype: str, draft: bool, changes: str) -> Tiny:
    directory = Path(tempfile.mkdtemp(prefix="dots3-tiny-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    hf_dir = write(directory / "hf", draft=draft, **json.loads(changes))
    convert(hf_dir, directory / "checkpoint", dtype)
    config = read_config(directory / "checkpoint", Dots3CheckpointConfig)
    return Tiny(hf_dir, config, load_file(directory / "checkpoint" / WEIGHTS_FILE))
