"""The draft layer's input: one operation where ranks hold the whole table, else step by step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.checkpoint.config import Mapping
from converters.definition import EngineLimits
from converters.dots3 import network
from converters.dots3.oracle import DraftOracle, Oracle
from converters.layers.embedding import replicated_embed
from plugins.trt.weights import WeightInfo
from runtime.contract import read_config
from tests.converters.dots3.driver import Driver
from tests.converters.dots3.tiny import tiny
from tests.fixtures.dots3_fp8 import quantise

LIMITS = EngineLimits(2, 128, chunk_size=64, max_draft_len=2, max_logits_tokens=64)
IDS = torch.randint(3, 500, (41,), generator=torch.Generator().manual_seed(13)).tolist()
HIDDEN = torch.randn(40, 96, generator=torch.Generator().manual_seed(14))
OUTPUTS = ("logits", "hidden_states.next_draft")


def _run(driver: Driver) -> list[Tensor]:
    """A first call, one behind it beside a padding slot, and a single token."""
    driver.reset()
    calls = [
        driver.call("draft", [IDS[1:26]], hidden=[HIDDEN[:25]], past=[0])[0],
        driver.call("draft", [IDS[26:40], []], hidden=[HIDDEN[25:39], HIDDEN[:0]], past=[25, 0])[0],
        driver.call("draft", [IDS[40:]], hidden=[HIDDEN[39:]], past=[39])[0],
    ]
    return [torch.cat([call[name] for call in calls]) for name in OUTPUTS]


def _driver(monkeypatch: pytest.MonkeyPatch, *, fused: bool, plugins: bool) -> Driver:
    monkeypatch.setattr(network, "replicated_embed", lambda *_: fused)
    driver = tiny().driver(LIMITS, phases=("draft",), plugins=plugins)
    assert driver.definitions["draft"].decisions == {"replicated_embed": fused}
    return driver


def _inside(driver: Driver) -> list[str]:
    """Kinds of the layers of the draft input, plugin layers by their operation."""
    nodes = driver.programs["draft"].nodes
    return [
        node.attributes["op"] if node.kind == "plugin" else node.kind
        for node in nodes
        if node.scope == "mtp.input"
    ]


def test_both_orders_are_equal_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, out of native layers and of plugin layers."""
    oracle = DraftOracle(tiny().hf_dir, Oracle(tiny().hf_dir))
    wanted = oracle.run(IDS[1:], HIDDEN)
    for plugins in (False, True):
        fused = _run(_driver(monkeypatch, fused=True, plugins=plugins))
        unfused = _run(_driver(monkeypatch, fused=False, plugins=plugins))
        for one, other, right in zip(fused, unfused, wanted, strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, right, atol=5e-5, rtol=0.0)


def test_the_fused_input_is_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = _inside(_driver(monkeypatch, fused=True, plugins=True))
    assert plugin.count("mtp::embed_norms") == 1
    # What is left is the projection.
    assert not {"gather", "select", "reduce", "concat"} & set(plugin)
    steps = _inside(_driver(monkeypatch, fused=False, plugins=True))
    assert steps.count("mtp::rms_norm") == 2 and "gather" in steps
    assert _inside(_driver(monkeypatch, fused=True, plugins=False)).count("reduce") == 1
    assert _inside(_driver(monkeypatch, fused=False, plugins=False)).count("reduce") == 2


def test_a_difference_of_one_bit_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _driver(monkeypatch, fused=True, plugins=False)
    before = _run(driver)
    weights = dict(tiny().weights)
    changed = weights["mtp.enorm.weight"].clone()
    changed[0] = torch.nextafter(changed[0], torch.tensor(2.0))
    driver.bind({**weights, "mtp.enorm.weight": changed})
    assert not torch.equal(_run(driver)[1], before[1])


@pytest.mark.parametrize(
    ("mapping", "table", "whole"),
    [
        ({}, WeightInfo("bfloat16", (512, 96)), True),
        ({}, WeightInfo("float32", (512, 96)), True),
        ({}, WeightInfo("float8_e4m3fn", (512, 96)), False),
        ({}, WeightInfo("uint8", (512, 48)), False),
        ({}, WeightInfo("bfloat16", (256, 96)), False),
        ({}, None, False),
        ({"tp_size": 2, "world_size": 2}, WeightInfo("bfloat16", (512, 96)), False),
        ({"pp_size": 2, "world_size": 2}, WeightInfo("bfloat16", (512, 96)), True),
    ],
    ids=str,
)
def test_when_a_rank_can_look_up_by_itself(
    mapping: dict[str, Any], table: WeightInfo | None, whole: bool
) -> None:
    assert replicated_embed(Mapping(**mapping), table, 512, 96) == whole


def test_a_quantised_table_is_decoded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tiny()
    codes, scales, values = quantise(right.weights["mtp.vocab_embedding.weight"])
    plain = {**right.weights, "mtp.vocab_embedding.weight": values}
    stored = {
        **right.weights,
        "mtp.vocab_embedding.weight": codes,
        "mtp.vocab_embedding.weights_scaling_factor": scales,
    }
    drivers = [
        dataclasses.replace(right, weights=weights).driver(LIMITS, phases=("draft",))
        for weights in (plain, stored)
    ]
    decided = [driver.definitions["draft"].decisions for driver in drivers]
    assert decided == [{"replicated_embed": True}, {"replicated_embed": False}]
    for one, other in zip(*(_run(driver) for driver in drivers), strict=True):
        torch.testing.assert_close(one, other, atol=5e-5, rtol=0.0)


def test_the_decision_is_recorded_with_the_engine(drafting_engine: Path) -> None:
    engines = read_config(drafting_engine).engines
    assert engines["draft"].decisions == {"replicated_embed": True}
    assert not engines["context"].decisions and not engines["generation"].decisions
