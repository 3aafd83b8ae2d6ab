"""Real engines of all three networks: what the compiler made of them, for every legal target."""

from __future__ import annotations

from pathlib import Path

import pytest

from converters.definition import Definition, EngineLimits, Phase
from converters.dots3 import network
from converters.dots3.network import define
from plugins.support.errors import InputError
from plugins.trt.backend import load_backend
from plugins.trt.builder import Plan, build_serialized
from plugins.trt.network import Network
from plugins.trt.weights import TensorSource, WeightPolicy
from tests.converters.dots3.tiny import Tiny, tiny

# One layer of each shape: dense full, sliding with experts, full with experts.
SHAPES = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}


def _checkpoint(dtype: str) -> Tiny:
    return tiny(dtype, **SHAPES)  # type: ignore[arg-type]


def _built(
    tmp_path: Path, dtype: str, phase: Phase, drafts: int, policy: WeightPolicy | None = None
) -> tuple[Network, Definition, Plan]:
    checkpoint = _checkpoint(dtype)
    backend = load_backend("tensorrt_rtx")
    net = Network(
        backend,
        # Every target that the type allows.
        backend.capability(None, {dtype}),
        TensorSource(checkpoint.weights),
        policy or WeightPolicy("auto", 4096),
    )
    limits = EngineLimits(8, 128, chunk_size=64, max_draft_len=drafts)
    definition = define(net, checkpoint.config, phase, limits)
    return net, definition, build_serialized(net, definition.profile, tmp_path / "plan")


@pytest.mark.parametrize(
    ("dtype", "phase", "drafts"),
    [
        ("bfloat16", "context", 2),
        ("bfloat16", "generation", 2),
        ("bfloat16", "draft", 2),
        ("float32", "generation", 0),
    ],
)
def test_engine_has_the_expected_parts(
    tmp_path: Path, dtype: str, phase: Phase, drafts: int
) -> None:
    net, definition, plan = _built(tmp_path, dtype, phase, drafts)
    assert len(plan.targets) >= 4
    report = plan.report
    full = () if phase == "draft" else (0, 2)
    assert report.cache_updates() == {
        f"{name}.{i}.updated": f"{name}.{i}"
        for i in full
        for name in ("latent_cache", "index_key_cache")
    }
    assert not report.weight_dequantisations()
    # Every input is either described or a weight, and all of them reached the engine.
    names = {tensor.name for tensor in report.inputs}
    assert names == set(definition.kinds) | set(net.weight_inputs)
    assert set(definition.profile) == set(definition.kinds)
    states = {name for name, kind in definition.kinds.items() if kind == "state"}
    assert states == ({"window_state.3"} if phase == "draft" else {"window_state.1"})
    outputs = {tensor.name for tensor in report.outputs}
    assert {f"{name}.next" for name in states} | {"logits"} <= outputs
    hidden = {"draft": "hidden_states.next_draft"}.get(phase, "hidden_states")
    assert (hidden in outputs) == (drafts > 0)
    assert ("rejected_lengths" in definition.kinds) == (drafts > 0)


def test_weights_as_inputs_stay_out_of_the_plan(tmp_path: Path) -> None:
    _, _, plan = _built(tmp_path, "bfloat16", "generation", 0, WeightPolicy("inputs"))
    total = sum(t.nbytes for t in _checkpoint("bfloat16").weights.values())
    # What is left are position tables.
    assert plan.report.weights_bytes < total / 4


def test_limits_are_checked() -> None:
    checkpoint = _checkpoint("bfloat16")
    net = Network(load_backend(), source=TensorSource(checkpoint.weights))
    with pytest.raises(InputError, match="exceeds what the model was trained for"):
        define(net, checkpoint.config, "context", EngineLimits(1, 2000))


def test_the_fused_draft_input_is_one_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookup, zero and both norms; the unfused order takes three."""

    def kernels(name: str) -> tuple[int, list[str]]:
        (tmp_path / name).mkdir()
        _, _, plan = _built(tmp_path / name, "bfloat16", "draft", 2, WeightPolicy("inputs"))
        found = plan.report.kernels
        return len(found), [k.name for k in found if "mtp.input" in str(k.metadata)]

    total, inside = kernels("fused")
    assert len([name for name in inside if not name.startswith("mtp.input.matmul")]) == 1
    assert len(inside) == 2
    monkeypatch.setattr(network, "replicated_embed", lambda *_: False)
    assert kernels("unfused")[0] == total + 2
