"""Every typical mistake must be visible in the logits, far above the bound of a right result."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from converters.definition import EngineLimits
from converters.qwen38 import FAMILY
from converters.qwen38.controls import NegativeControl, negative_controls
from tests.converters.qwen38.driver import Driver
from tests.converters.qwen38.tiny import tiny
from tests.fixtures.qwen38_deterministic import GOLDEN_LAST_LOGITS, GOLDEN_PROMPT

# What a right fp32 result stays below.
BOUND = 2e-4
CONTROLS = {control.name: control for control in negative_controls(tiny().config)}


@pytest.fixture(scope="module")
def driver() -> Driver:
    return tiny().driver(EngineLimits(1, 128, chunk_size=64, max_logits_tokens=64))


def _error(driver: Driver, control: NegativeControl | None) -> float:
    """Largest distance of the golden logits."""
    right = tiny()
    changed = control.weights(right.weights) if control else {}
    driver.bind({**right.weights, **changed})
    hosts = FAMILY.host_inputs(right.config)
    driver.host_inputs = control.host_inputs(hosts) if control else hosts
    driver.reset()
    logits = driver.call("context", [GOLDEN_PROMPT])[0]["logits"][-1]
    return float((logits[:6] - torch.tensor(GOLDEN_LAST_LOGITS)).abs().max())


def test_the_right_weights_pass(driver: Driver) -> None:
    assert _error(driver, None) < BOUND


@pytest.mark.parametrize("name", CONTROLS)
def test_the_mistake_is_seen(driver: Driver, name: str) -> None:
    assert _error(driver, CONTROLS[name]) > 20 * BOUND


@pytest.mark.parametrize(
    "wrong",
    [
        {"output_gate_type": "silu"},
        {"norm_topk_prob": False},
        {"indexer_budget": 20},
        {"indexer_budget": 12},
    ],
    ids=str,
)
def test_another_model_is_seen(wrong: dict[str, object]) -> None:
    """Mistakes in the network instead of the weights."""
    right = tiny()
    block = right.config.qwen38.model_copy(update=wrong)
    other = dataclasses.replace(right, config=right.config.model_copy(update={"qwen38": block}))
    driver = other.driver(EngineLimits(1, 128, chunk_size=64, max_logits_tokens=64))
    logits = driver.call("context", [GOLDEN_PROMPT])[0]["logits"][-1]
    assert float((logits[:6] - torch.tensor(GOLDEN_LAST_LOGITS)).abs().max()) > 20 * BOUND


def test_controls_change_what_they_claim() -> None:
    """Shapes stay, and every mistake changes a weight or a host input."""
    right = tiny()
    hosts = FAMILY.host_inputs(right.config)
    for control in CONTROLS.values():
        changed = control.weights(right.weights)
        for name, tensor in changed.items():
            assert tensor.shape == right.weights[name].shape
        moved = [n for n, tensor in changed.items() if not torch.equal(tensor, right.weights[n])]
        assert moved or control.host_inputs(hosts) != hosts, control.name
