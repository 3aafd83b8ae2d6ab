"""Voxtral (`voxtral`) and Voxtral realtime (`voxtral_realtime`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.attention import allowlist
from converters.checkpoint.config import CheckpointConfig, ComputeDType
from converters.checkpoint.source import SourceCheckpoint
from converters.family import TensorPlan
from converters.voxtral import config as _config
from converters.voxtral import weights as _weights
from converters.voxtral.config import VoxtralCheckpointConfig, mistral_model_type
from plugins.attention import Allowlist
from plugins.support.errors import UsageError

if TYPE_CHECKING:
    from converters.definition import Definition, EngineLimits, Phase
    from plugins.trt.network import Network

__all__ = ["FAMILY", "mistral_model_type"]


class Voxtral:
    """The family as `converters.family.Family` describes it."""

    name: str = "voxtral"
    model_types: tuple[str, ...] = _config.MODEL_TYPES
    config_class: type[CheckpointConfig] = VoxtralCheckpointConfig

    def plan_config(self, source: SourceCheckpoint, dtype: ComputeDType) -> CheckpointConfig:
        """See `converters.voxtral.config.plan_config`."""
        return _config.plan_config(source, dtype)

    def plan_tensors(self, source: SourceCheckpoint, config: CheckpointConfig) -> TensorPlan:
        """See `converters.voxtral.weights.plan_tensors`."""
        return _weights.plan_tensors(source, _own(config))

    def phases(self, config: CheckpointConfig, max_draft_len: int) -> tuple[Phase, ...]:
        """The audio encoder and the two text engines."""
        if max_draft_len:
            raise UsageError(
                "this model has no draft layer", where="max_draft_len", found=str(max_draft_len)
            )
        return ("audio", "context", "generation")

    def define(
        self, net: Network, config: CheckpointConfig, phase: Phase, limits: EngineLimits
    ) -> Definition:
        """See `converters.voxtral.network.define`."""
        # Conversion needs no TensorRT, so the network is imported only where one is built.
        from converters.voxtral.network import define

        return define(net, _own(config), phase, limits)

    def attention(self, config: CheckpointConfig) -> Allowlist:
        """The interpreter, and engines of both flavours."""
        return allowlist(config.model_type, ("decoder", "audio_encoder"), ran_on_cuda=False)

    def host_inputs(self, config: CheckpointConfig) -> list[dict[str, Any]]:
        """The audio rows of the text engines."""
        block = _own(config).voxtral
        return [
            {
                "kind": "audio_embedding",
                "name": "audio_embeddings",
                "placeholder_id": block.audio_token_id,
            }
        ]


def _own(config: CheckpointConfig) -> VoxtralCheckpointConfig:
    if not isinstance(config, VoxtralCheckpointConfig):
        raise TypeError(f"not a Voxtral configuration: {type(config).__name__}")
    return config


FAMILY = Voxtral()
