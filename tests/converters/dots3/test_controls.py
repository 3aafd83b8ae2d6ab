"""Every typical mistake must be visible in the logits, far above the bound of a right result."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from converters.controls import NegativeControl
from converters.definition import EngineLimits
from converters.dots3.controls import negative_controls
from converters.dots3.oracle import Oracle
from tests.converters.dots3.driver import Driver
from tests.converters.dots3.tiny import Tiny, tiny

# What a right fp32 result stays below.
BOUND = 5e-5
LIMITS = EngineLimits(1, 64, chunk_size=64, max_logits_tokens=64)
IDS = torch.randint(3, 500, (60,), generator=torch.Generator().manual_seed(3)).tolist()
CONTROLS = {c.name: c for c in negative_controls(tiny().config) if c.phase == "context"}


@pytest.fixture(scope="module")
def driver() -> Driver:
    return tiny().driver(LIMITS, phases=("context",))


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return Oracle(tiny().hf_dir).run(IDS)["logits"]


def _error(driver: Driver, expected: Tensor, control: NegativeControl | None = None) -> float:
    """Largest distance of the logits."""
    right = tiny()
    changed = control.weights(right.weights) if control else {}
    driver.bind({**right.weights, **changed})
    driver.reset()
    return float((driver.call("context", [IDS])[0]["logits"] - expected).abs().max())


def test_the_right_weights_pass(driver: Driver, expected: Tensor) -> None:
    assert _error(driver, expected) < BOUND


@pytest.mark.parametrize("name", CONTROLS)
def test_the_mistake_is_seen(driver: Driver, expected: Tensor, name: str) -> None:
    assert _error(driver, expected, CONTROLS[name]) > 1000 * BOUND


def test_controls_change_what_they_claim() -> None:
    """Shapes stay, and every mistake changes a weight."""
    right = tiny()
    for control in CONTROLS.values():
        changed = control.weights(right.weights)
        for name, tensor in changed.items():
            assert tensor.shape == right.weights[name].shape
        assert any(not torch.equal(tensor, right.weights[n]) for n, tensor in changed.items())
        assert control.host_inputs([]) == []


def _other(**wrong: object) -> Tiny:
    """The same weights under a wrong description."""
    right = tiny()
    block = right.config.dots3.model_copy(update=wrong)
    return dataclasses.replace(right, config=right.config.model_copy(update={"dots3": block}))


@pytest.mark.parametrize(
    "wrong",
    [
        # The off-by-one that a missing key makes of 513.
        {"sliding_window": 8},
        {"sliding_window": 10},
        {"index_topk": 11},
        {"index_topk": 13},
        {"index_rope": "tail"},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 2.5},
        {"num_experts_per_tok": 2},
    ],
    ids=str,
)
def test_another_model_is_seen(expected: Tensor, wrong: dict[str, object]) -> None:
    """Mistakes in the description instead of the weights."""
    driver = _other(**wrong).driver(LIMITS, phases=("context",))
    logits = driver.call("context", [IDS])[0]["logits"]
    assert (logits - expected).abs().max() > 1000 * BOUND


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_another_rotary_base_is_seen(expected: Tensor, kind: str) -> None:
    geometry = getattr(tiny().config.dots3, kind).model_copy(update={"rotary_base": 1e4})
    driver = _other(**{kind: geometry}).driver(LIMITS, phases=("context",))
    logits = driver.call("context", [IDS])[0]["logits"]
    assert (logits - expected).abs().max() > 1000 * BOUND


def test_biased_router_weights_are_seen(expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The correction bias chooses experts; it must not weigh them."""
    from converters.dots3 import network
    from converters.layers.moe import sigmoid_router as right
    from plugins.trt.network import Network

    def biased(net: Network, x: Tensor, name: str, experts: object, **options: object) -> object:
        gathered = net.gather_elements

        def gather(_scores: Tensor, ids: Tensor, axis: int) -> object:
            logits = net.matmul(
                net.cast(x, "float32"),
                net.cast(net.weight(f"{name}.weight", "float32", (8, 96)), "float32"),
                transpose_b=True,
            )
            bias = net.unsqueeze(net.weight(f"{name}.bias", "float32", (8,)), [0])
            return gathered(net.add(net.sigmoid(logits), bias), ids, axis)

        monkeypatch.setattr(net, "gather_elements", gather)
        try:
            return right(net, x, name, experts, **options)  # type: ignore[arg-type]
        finally:
            monkeypatch.setattr(net, "gather_elements", gathered)

    monkeypatch.setattr(network, "sigmoid_router", biased)
    driver = tiny().driver(LIMITS, phases=("context",))
    logits = driver.call("context", [IDS])[0]["logits"]
    assert (logits - expected).abs().max() > 1000 * BOUND


def test_the_other_layout_of_the_index_heads_is_the_same_model(expected: Tensor) -> None:
    """Moving weights and rotation together changes nothing, in whichever layout they come."""
    moved = CONTROLS["rotary lanes of the indexer at the other end"].weights(tiny().weights)
    other = _other(index_rope="tail")
    driver = dataclasses.replace(other, weights={**other.weights, **moved}).driver(
        LIMITS, phases=("context",)
    )
    assert (driver.call("context", [IDS])[0]["logits"] - expected).abs().max() < BOUND
