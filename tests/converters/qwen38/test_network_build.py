"""Real engines of the text network: what the compiler made of it, for every legal target."""

from __future__ import annotations

from pathlib import Path

import pytest

from converters.definition import Definition, EngineLimits, Phase
from converters.qwen38.network import define
from plugins.support.errors import InputError
from plugins.trt.backend import load_backend
from plugins.trt.builder import Plan, build_serialized
from plugins.trt.network import Network
from plugins.trt.weights import TensorSource, WeightPolicy
from tests.converters.qwen38.tiny import PERIOD, tiny

LAYERS = PERIOD["num_hidden_layers"]


def _built(
    tmp_path: Path, dtype: str, phase: Phase, policy: WeightPolicy | None = None, drafts: int = 0
) -> tuple[Network, Definition, Plan]:
    checkpoint = tiny(dtype=dtype, **PERIOD)
    backend = load_backend("tensorrt_rtx")
    net = Network(
        backend,
        # Every target that the type allows.
        backend.capability(None, {dtype}),
        TensorSource(checkpoint.weights),
        policy or WeightPolicy("auto", 4096),
    )
    limits = EngineLimits(8, 256, chunk_size=64, max_draft_len=drafts)
    definition = define(net, checkpoint.config, phase, limits)
    return net, definition, build_serialized(net, definition.profile, tmp_path / "plan")


@pytest.mark.parametrize(
    ("dtype", "phase", "drafts"),
    [
        ("bfloat16", "context", 0),
        ("bfloat16", "generation", 0),
        ("float16", "generation", 2),
        ("float32", "context", 0),
    ],
)
def test_engine_has_the_expected_kernels(
    tmp_path: Path, dtype: str, phase: Phase, drafts: int
) -> None:
    net, definition, plan = _built(tmp_path, dtype, phase, drafts=drafts)
    assert len(plan.targets) >= 4
    report = plan.report
    # No target has a fused float32 kernel.
    assert len(report.attention_kernels()) == (0 if dtype == "float32" else 1)
    # One router per layer and one selection of blocks.
    assert len(report.topk_kernels()) == LAYERS + 1
    assert report.cache_updates() == {
        f"{name}.3.updated": f"{name}.3" for name in ("key_cache", "value_cache", "index_key_cache")
    }
    assert not report.weight_dequantisations()
    # Every input is either described or a weight, and all of them reached the engine.
    names = {tensor.name for tensor in report.inputs}
    assert names == set(definition.kinds) | set(net.weight_inputs)
    assert set(definition.profile) == set(definition.kinds)
    states = {name for name, kind in definition.kinds.items() if kind == "state"}
    outputs = {tensor.name for tensor in report.outputs}
    assert {f"{name}.next" for name in states} | {"logits"} <= outputs


def test_weights_as_inputs_stay_out_of_the_plan(tmp_path: Path) -> None:
    _, _, plan = _built(tmp_path, "bfloat16", "generation", WeightPolicy("inputs"))
    total = sum(t.nbytes for t in tiny(dtype="bfloat16", **PERIOD).weights.values())
    # What is left are position tables and masks.
    assert plan.report.weights_bytes < total / 10


def test_limits_are_checked() -> None:
    checkpoint = tiny()
    net = Network(load_backend(), source=TensorSource(checkpoint.weights))
    with pytest.raises(InputError, match="exceeds what the model was trained for"):
        define(net, checkpoint.config, "context", EngineLimits(1, 5000))
    with pytest.raises(InputError, match="multiple of 64"):
        EngineLimits(1, 128, chunk_size=100)
    with pytest.raises(InputError, match="positive"):
        EngineLimits(0, 128)
    with pytest.raises(InputError, match="generation step"):
        EngineLimits(1, 128, chunk_size=64, max_draft_len=64)
