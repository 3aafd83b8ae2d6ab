"""Qwen3.8-Flash-Next (`qwen4_exp`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.attention import allowlist
from converters.checkpoint.config import CheckpointConfig, ComputeDType
from converters.checkpoint.source import SourceCheckpoint
from converters.family import TensorPlan
from converters.qwen38 import config as _config
from converters.qwen38 import weights as _weights
from converters.qwen38.config import Qwen38CheckpointConfig
from plugins.attention import Allowlist

if TYPE_CHECKING:
    from converters.definition import Definition, EngineLimits, Phase
    from plugins.trt.network import Network


class Qwen38:
    """The family as `converters.family.Family` describes it."""

    name: str = "qwen38"
    model_types: tuple[str, ...] = _config.MODEL_TYPES
    config_class: type[CheckpointConfig] = Qwen38CheckpointConfig

    def plan_config(self, source: SourceCheckpoint, dtype: ComputeDType) -> CheckpointConfig:
        """See `converters.qwen38.config.plan_config`."""
        return _config.plan_config(source, dtype)

    def plan_tensors(self, source: SourceCheckpoint, config: CheckpointConfig) -> TensorPlan:
        """See `converters.qwen38.weights.plan_tensors`."""
        return _weights.plan_tensors(source, _own(config))

    def phases(self, config: CheckpointConfig, max_draft_len: int) -> tuple[Phase, ...]:
        """Text engines only; a generation step of several tokens needs no further engine."""
        return ("context", "generation")

    def define(
        self, net: Network, config: CheckpointConfig, phase: Phase, limits: EngineLimits
    ) -> Definition:
        """See `converters.qwen38.network.define`."""
        # Conversion needs no TensorRT, so the network is imported only where one is built.
        from converters.qwen38.network import define

        return define(net, _own(config), phase, limits)

    def attention(self, config: CheckpointConfig) -> Allowlist:
        """The interpreter, and engines of both flavours."""
        return allowlist(config.model_type, ("decoder",), ran_on_cuda=True)

    def host_inputs(self, config: CheckpointConfig) -> list[dict[str, Any]]:
        """One n-gram lookup for each PLE layer."""
        block = _own(config).qwen38
        return [
            {
                "kind": "ngram_embedding",
                "name": f"ple_embeddings.{layer.layer}",
                "table": f"transformer.layers.{layer.layer}.ple.ngram_embedding.weight",
                "multipliers": layer.multipliers,
                "sizes": layer.sizes,
                "offsets": layer.offsets,
                "eos_token_id": block.ngram_eos_token_id,
            }
            for layer in block.ple_layers
        ]


def _own(config: CheckpointConfig) -> Qwen38CheckpointConfig:
    if not isinstance(config, Qwen38CheckpointConfig):
        raise TypeError(f"not a Qwen3.8 configuration: {type(config).__name__}")
    return config


FAMILY = Qwen38()
