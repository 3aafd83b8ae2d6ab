"""Dots3 NOTE (`dots3_note`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.attention import allowlist
from converters.checkpoint.config import CheckpointConfig, ComputeDType
from converters.checkpoint.source import SourceCheckpoint
from converters.dots3 import config as _config
from converters.dots3 import weights as _weights
from converters.dots3.config import Dots3CheckpointConfig
from converters.family import TensorPlan
from plugins.attention import Allowlist
from plugins.support.errors import UsageError

if TYPE_CHECKING:
    from converters.definition import Definition, EngineLimits, Phase
    from plugins.trt.network import Network


class Dots3:
    """The family as `converters.family.Family` describes it."""

    name: str = "dots3"
    model_types: tuple[str, ...] = _config.MODEL_TYPES
    config_class: type[CheckpointConfig] = Dots3CheckpointConfig

    def plan_config(self, source: SourceCheckpoint, dtype: ComputeDType) -> CheckpointConfig:
        """See `converters.dots3.config.plan_config`."""
        return _config.plan_config(source, dtype)

    def plan_tensors(self, source: SourceCheckpoint, config: CheckpointConfig) -> TensorPlan:
        """See `converters.dots3.weights.plan_tensors`."""
        return _weights.plan_tensors(source, _own(config))

    def phases(self, config: CheckpointConfig, max_draft_len: int) -> tuple[Phase, ...]:
        """The text engines, and the draft engine when drafts are verified."""
        if not max_draft_len:
            return ("context", "generation")
        if not _own(config).dots3.draft_layers:
            raise UsageError(
                "the checkpoint has no draft layer",
                where="max_draft_len",
                expected="0, or a checkpoint with the MTP tensors",
                found=str(max_draft_len),
            )
        return ("context", "generation", "draft")

    def define(
        self, net: Network, config: CheckpointConfig, phase: Phase, limits: EngineLimits
    ) -> Definition:
        """See `converters.dots3.network.define`."""
        # Conversion needs no TensorRT, so the network is imported only where one is built.
        from converters.dots3.network import define

        return define(net, _own(config), phase, limits)

    def attention(self, config: CheckpointConfig) -> Allowlist:
        """The interpreter, and engines of both flavours."""
        return allowlist(config.model_type, ("decoder",), ran_on_cuda=False)

    def host_inputs(self, config: CheckpointConfig) -> list[dict[str, Any]]:
        """None: everything this model reads is in the engine."""
        return []


def _own(config: CheckpointConfig) -> Dots3CheckpointConfig:
    if not isinstance(config, Dots3CheckpointConfig):
        raise TypeError(f"not a Dots3 configuration: {type(config).__name__}")
    return config


FAMILY = Dots3()
