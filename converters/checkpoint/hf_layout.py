"""What a family's checkpoint looks like on the Hugging Face side, for export."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from converters.checkpoint.config import CheckpointConfig
from converters.checkpoint.header import TensorEntry
from converters.checkpoint.recipe import Wanted
from converters.quantization.kv_cache import Cached


@dataclass(frozen=True)
class HfLayout:
    """What a family's checkpoint looks like on the Hugging Face side.

    Attributes:
        config: `config.json` without quantisation.
        wanted: target tensors and the parts they were joined from.
        disk_name: canonical name -> name on disk.
        constants: tensors that the converted checkpoint keeps in its configuration.
        metadata: facts about the tensors that belong into the weight index.
        caches: layers whose keys and values may be cached in FP8.
    """

    config: dict[str, Any]
    wanted: Sequence[Wanted]
    disk_name: Callable[[str], str]
    constants: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    caches: Sequence[Cached] = ()


# A family's layout for a checkpoint whose tensors have these names and types.
LayoutOf = Callable[[CheckpointConfig, Mapping[str, TensorEntry]], HfLayout]
