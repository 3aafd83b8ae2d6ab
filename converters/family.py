"""What a model family is to the rest of the house."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from converters.checkpoint.config import CheckpointConfig, ComputeDType
from converters.checkpoint.match import Ignored
from converters.checkpoint.recipe import Wanted
from converters.checkpoint.source import SourceCheckpoint
from converters.quantization.kv_cache import Cached
from plugins.attention import Allowlist

if TYPE_CHECKING:
    from converters.definition import Definition, EngineLimits, Phase
    from plugins.trt.network import Network


@dataclass(frozen=True)
class TensorPlan:
    """What a family makes of a checkpoint's tensors.

    Attributes:
        names: canonical name -> name on disk, for every tensor that may be used.
        wanted: the tensors of the target, in the order of the model.
        ignored: tensors that are left out on purpose.
        canonical: removes the prefixes of classes and exporters from a name.
        caches: layers whose keys and values may be cached in FP8.
    """

    names: dict[str, str]
    wanted: list[Wanted]
    ignored: list[Ignored]
    canonical: Callable[[str], str] = str
    caches: Sequence[Cached] = ()


class Family(Protocol):
    """One module of functions per concern, gathered in `converters/<family>/__init__.py`."""

    name: str
    model_types: tuple[str, ...]
    config_class: type[CheckpointConfig]

    def plan_config(self, source: SourceCheckpoint, dtype: ComputeDType) -> CheckpointConfig:
        """Check every precondition and translate the configuration. Raises InputError."""
        ...

    def plan_tensors(self, source: SourceCheckpoint, config: CheckpointConfig) -> TensorPlan:
        """Name every tensor of the target and its sources. Raises InputError."""
        ...

    def phases(self, config: CheckpointConfig, max_draft_len: int) -> tuple[Phase, ...]:
        """The engines of a build. Raises UsageError when the model cannot draft that many."""
        ...

    def define(
        self, net: Network, config: CheckpointConfig, phase: Phase, limits: EngineLimits
    ) -> Definition:
        """Add one engine's network to `net`."""
        ...

    def attention(self, config: CheckpointConfig) -> Allowlist:
        """What may compute the attention of a model of this configuration."""
        ...

    def host_inputs(self, config: CheckpointConfig) -> list[dict[str, Any]]:
        """Engine inputs that the runtime computes on the host, see `runtime.contract`."""
        ...
