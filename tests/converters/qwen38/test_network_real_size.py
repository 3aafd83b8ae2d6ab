"""The released model's widths: defined without its weights, and what its caches cost.

One period of four layers stands for the twelve of the model, because every shape check of a
definition costs time in proportion to what is defined already.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from converters.definition import Definition, EngineLimits, Phase
from converters.qwen38.config import PleLayer, Qwen38CheckpointConfig
from converters.qwen38.network import define
from converters.qwen38.weights import wanted_tensors
from plugins.aot.compile import compile_kernel, newest_ptx
from plugins.ngram import layer_constants
from plugins.operations import OPERATIONS
from plugins.trt.backend import load_backend
from plugins.trt.network import Network
from plugins.trt.weights import WeightInfo, WeightPolicy
from runtime.cache_plan import CachePlan
from runtime.contract import TensorSpec
from tests.converters.qwen38.tiny import tiny
from tests.plugins.full_trt import capability_for, full_backend

PERIODS = 12
LIMITS = EngineLimits(max_batch_size=16, max_seq_len=32768, chunk_size=1024)


def _released() -> Qwen38CheckpointConfig:
    constants = layer_constants(
        vocab_size=248320,
        ngram_size=3,
        heads_per_ngram=8,
        ngram_vocab_size_base=20_000_000,
        divisor=128,
        seed=1234,
        layer_number=0,
    )
    small = tiny(dtype="bfloat16").config
    block = small.qwen38.model_copy(
        update={
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 640,
            "shared_expert_intermediate_size": 640,
            "hc_lowrank": 320,
            "indexer_n_heads": 4,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "mrope_section": [11, 11, 10],
            "ple_embed_dim": 2560,
            "heads_per_ngram": 8,
            "split_ngram_parts": 128,
            "ple_layers": [
                PleLayer(
                    layer=1,
                    multipliers=list(constants.multipliers),
                    sizes=list(constants.sizes),
                    offsets=list(constants.offsets),
                    rows=constants.rows,
                )
            ],
        }
    )
    return small.model_copy(
        update={
            "vocab_size": 248320,
            "vocab_size_padded": 248320,
            "hidden_size": 2560,
            "num_hidden_layers": 4,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "head_size": 256,
            "max_position_embeddings": 262144,
            "rotary_embedding_dim": 64,
            "rotary_base": 1e7,
            "qwen38": block,
        }
    )


class _Headers:
    """What conversion would write, as a weight source without values."""

    def __init__(self, config: Qwen38CheckpointConfig) -> None:
        self.shapes = {w.target: w.shape for w in wanted_tensors(config, stacked_experts=True)}

    def names(self) -> Iterable[str]:
        return self.shapes

    def info(self, name: str) -> WeightInfo | None:
        if name not in self.shapes:
            return None
        return WeightInfo("bfloat16", self.shapes[name])

    def tensor(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} is an input; its values must not be read")


@pytest.fixture(scope="module")
def generation() -> tuple[Network, Definition, _Headers]:
    config = _released()
    source = _Headers(config)
    net = Network(load_backend(), source=source, policy=WeightPolicy("inputs"))
    return net, define(net, config, "generation", LIMITS), source


def test_the_network_uses_every_converted_tensor_but_the_tables(generation) -> None:
    net, _, source = generation
    assert set(source.shapes) - set(net.weight_inputs) == {
        "transformer.layers.1.ple.ngram_embedding.weight"
    }


def test_context_defines_too() -> None:
    config = _released()
    net = Network(load_backend(), source=_Headers(config), policy=WeightPolicy("inputs"))
    definition = define(net, config, "context", LIMITS)
    assert definition.profile["attention_span"] == ((2048,), (32768,), (32768,))
    assert net.shape(net.outputs["logits"]) == (-1, -1, 248320)


def _cache_plan(net: Network, definition: Definition) -> CachePlan:
    specs = [
        TensorSpec(
            name=name, dtype=net.dtype(net.inputs[name]), shape=net.shape(net.inputs[name]), kind=k
        )
        for name, k in definition.kinds.items()
    ]
    return CachePlan.from_tensors(specs, LIMITS.max_batch_size, LIMITS.max_seq_len)


def test_caches_cost_what_the_architecture_says(generation) -> None:
    plan = _cache_plan(*generation[:2])
    assert PERIODS * plan.bytes_per_token == 25_344
    per_sequence = {g.name: g.bytes_per_sequence for g in plan.groups if g.kind == "state"}
    gated_delta = per_sequence["conv_state"] + per_sequence["recurrent_state"]
    assert PERIODS * gated_delta == 115_458_048
    assert per_sequence["ple_conv_state"] == 184_320
    # Three raw keys of an unfinished block.
    assert per_sequence["index_key_state"] == 3 * 128 * 2


class _ScaledHeaders(_Headers):
    """The same, with the scales of FP8 caches, the only values that a definition reads."""

    NAME = "transformer.layers.3.attention.kv_cache_scaling_factor"

    def info(self, name: str) -> WeightInfo | None:
        return WeightInfo("float32", (2,)) if name == self.NAME else super().info(name)

    def tensor(self, name: str) -> torch.Tensor:
        return torch.tensor([0.02, 0.3]) if name == self.NAME else super().tensor(name)


@pytest.mark.parametrize("phase", ["context", "generation"])
def test_fp8_caches_cost_half_and_their_kernels_compile(phase: Phase) -> None:
    released = _released()
    quantization = released.quantization.model_copy(update={"kv_cache_quant_algo": "FP8"})
    config = released.model_copy(update={"quantization": quantization})
    backend, capability = full_backend(), capability_for("9.0")
    net = Network(backend, capability, _ScaledHeaders(config), WeightPolicy("inputs"))
    definition = define(net, config, phase, LIMITS)
    # 24,576 of keys and values become half of it.
    assert PERIODS * _cache_plan(net, definition).bytes_per_token == 13_056
    for call in net.plugins.values():
        spec = OPERATIONS[call.op].spec(call.attributes)
        compiled = compile_kernel(spec, "9.0", newest_ptx(580))
        assert ("e4m3x2" in compiled.ptx) == ("float8_e4m3fn" in {a.dtype for a in spec.tensors})
    constants = [OPERATIONS[c.op].spec(c.attributes).constants for c in net.plugins.values()]
    assert constants[0]["INVERSE_K_SCALE"] == 1 / torch.tensor(0.02).item()
    scales = [(c["SCALE"], c["V_SCALE"]) for c in constants if "V_SCALE" in c]
    assert scales and set(scales) == {(torch.tensor(0.02).item() / 16, torch.tensor(0.3).item())}
