"""The network of full TensorRT with FP8 caches, against transformers with dequantised ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from converters.definition import EngineLimits
from converters.qwen38.oracle import Oracle, canonical
from plugins.support.errors import CapabilityError, InputError
from runtime.cache_plan import CachePlan
from runtime.contract import TensorSpec
from tests.converters.qwen38.driver import Driver, defined
from tests.converters.qwen38.test_network import LONG
from tests.converters.qwen38.tiny import PERIOD, Tiny, tiny

LIMITS = EngineLimits(2, 256, chunk_size=128, max_draft_len=2, max_logits_tokens=128)
TOKENS = LONG[:110]
SCALES = {3: (0.02, 0.0015), 7: (0.05, 0.004)}
FP8 = torch.float8_e4m3fn


def scaled(checkpoint: Tiny, scales: Mapping[int, tuple[float, float]]) -> Tiny:
    """The checkpoint with FP8 caches declared and scaled."""
    quantization = checkpoint.config.quantization.model_copy(update={"kv_cache_quant_algo": "FP8"})
    added = {
        f"transformer.layers.{layer}.attention.kv_cache_scaling_factor": torch.tensor(pair)
        for layer, pair in scales.items()
    }
    config = checkpoint.config.model_copy(update={"quantization": quantization})
    return Tiny(checkpoint.hf_dir, config, {**checkpoint.weights, **added})


@pytest.fixture(scope="module")
def checkpoint() -> Tiny:
    return scaled(tiny(), SCALES)


@pytest.fixture(scope="module")
def driver(checkpoint: Tiny) -> Driver:
    return checkpoint.driver(LIMITS, plugins=True)


@pytest.fixture(autouse=True)
def _fresh(driver: Driver) -> None:
    driver.reset()


def rounded(x: Tensor, scale: float) -> Tensor:
    """What a cache gives back of x."""
    return (x / scale).clamp(-448, 448).to(FP8).float() * scale


@contextmanager
def dequantised(scales: Mapping[int, tuple[float, float]]) -> Iterator[None]:
    """transformers' caches hold what FP8 leaves of keys and values."""
    from transformers.cache_utils import Cache

    update = Cache.update

    def narrow(self: Cache, keys: Tensor, values: Tensor, layer: int, **named: Any) -> Any:
        key, value = scales[layer]
        return update(self, rounded(keys, key), rounded(values, value), layer, **named)

    with patch.object(Cache, "update", narrow):
        yield


def expected(hf_dir: Path, scales: Mapping[int, tuple[float, float]]) -> dict[str, Tensor]:
    with dequantised(scales):
        return Oracle(hf_dir, lowest_id_wins=True).run(TOKENS)


def logits_of(driver: Driver) -> Tensor:
    """Of TOKENS in the second slot: a prompt in two chunks, then steps of three."""
    rows = [driver.call("context", [[], TOKENS[:40]])[1]["logits"]]
    rows.append(driver.call("context", [[], TOKENS[40:80]])[1]["logits"])
    for start in range(80, 110, 3):
        rows.append(driver.call("generation", [[], TOKENS[start : start + 3]])[1]["logits"])
    return torch.cat(rows)


def close(found: Tensor, right: Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(found, right, atol=tolerance, rtol=0.0)


def test_every_tap_equals_the_oracle(checkpoint: Tiny, driver: Driver) -> None:
    taps = list(driver.programs["context"].taps)
    pieces = [driver.call("context", [TOKENS[:64]], fetch=taps)[0]]
    pieces.append(driver.call("context", [TOKENS[64:]], fetch=taps)[0])
    for name, right in expected(checkpoint.hf_dir, SCALES).items():
        found = canonical(name, torch.cat([piece[name] for piece in pieces]))
        if name.endswith("selected_blocks"):
            assert torch.equal(found, right), name
        else:
            close(found, right)


def test_chunks_and_steps_equal_the_oracle_and_no_other(checkpoint: Tiny, driver: Driver) -> None:
    found = logits_of(driver)
    close(found, expected(checkpoint.hf_dir, SCALES)["logits"])
    exact = Oracle(checkpoint.hf_dir, lowest_id_wins=True).run(TOKENS)["logits"]
    swapped = {layer: (value, key) for layer, (key, value) in SCALES.items()}
    moved = {3: SCALES[7], 7: SCALES[3]}
    others = [expected(checkpoint.hf_dir, wrong)["logits"] for wrong in (swapped, moved)]
    for name, other in zip(("exact", "swapped", "moved"), (exact, *others), strict=True):
        assert (found - other).abs().max() > 2e-2, name
    # Values reach the end of the range, keys do not.
    assert driver.memory["value_cache.3"][1].float().abs().max() == 448
    assert 50 < driver.memory["key_cache.7"][1].float().abs().max() < 448


def test_a_used_slot_equals_a_fresh_one(checkpoint: Tiny, driver: Driver) -> None:
    driver.call("context", [[], [9] * 90])
    driver.call("generation", [[], [7, 7, 7]])
    driver.free(1)
    close(logits_of(driver), expected(checkpoint.hf_dir, SCALES)["logits"])


def test_in_float32_caches_are_exact_but_for_what_saturates(checkpoint: Tiny) -> None:
    """What `verify` holds against transformers: the scales are applied, nothing is rounded."""
    exact = Oracle(checkpoint.hf_dir, lowest_id_wins=True).run(TOKENS)["logits"]
    wide = {layer: (0.05, 0.05) for layer in SCALES}
    for scales, same in ((wide, True), (SCALES, False)):
        driver = scaled(tiny(), scales).driver(LIMITS, plugins=True, promote_floats=True)
        assert driver.memory["key_cache.3"].dtype == torch.float32
        off = (logits_of(driver) - exact).abs().max()
        assert off < 1e-4 if same else off > 1e-2


def test_a_token_costs_half() -> None:
    plans = []
    for one in (scaled(tiny("bfloat16"), SCALES), tiny("bfloat16")):
        net, definition = defined(one.config, one.weights, "generation", LIMITS, plugins=True)
        specs = [
            TensorSpec(name=name, dtype=net.dtype(t), shape=net.shape(t), kind="cache")
            for name, t in net.inputs.items()
            if definition.kinds.get(name) == "cache"
        ]
        plans.append(CachePlan.from_tensors(specs, 2, 256))
    fp8, plain = ({group.name: group for group in plan.groups} for plan in plans)
    for name in ("key_cache", "value_cache"):
        assert fp8[name].dtype == "float8_e4m3fn" and plain[name].dtype == "bfloat16"
        assert 2 * fp8[name].bytes_per_token == plain[name].bytes_per_token
        assert 2 * fp8[name].bytes_per_sequence == plain[name].bytes_per_sequence


def test_other_engines_refuse_them(checkpoint: Tiny) -> None:
    def message(checkpoint: Tiny, plugins: bool) -> str:
        with pytest.raises(CapabilityError) as caught:
            defined(checkpoint.config, checkpoint.weights, "context", LIMITS, plugins=plugins)
        return str(caught.value)

    said = message(checkpoint, plugins=False)
    assert "tensorrt_rtx has no plugin layers" in said
    assert "--flavor tensorrt)" in said and "--kv-cache none" in said
    odd = scaled(tiny(**PERIOD, indexer_budget=24, indexer_compress_ratio=8), {3: SCALES[3]})
    assert "no plugin layers for attention of these sizes" in message(odd, plugins=True)


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (None, "found:    no such tensor"),
        (torch.tensor([0.1]), r"found:    float32 \[1\]"),
        (torch.tensor([0.1, 0.2]).bfloat16(), r"found:    bfloat16 \[2\]"),
        (torch.tensor([0.1, 0.0]), "positive and finite"),
        (torch.tensor([torch.inf, 0.1]), "positive and finite"),
    ],
)
def test_broken_scales_are_refused(checkpoint: Tiny, stored: Tensor | None, said: str) -> None:
    name = "transformer.layers.7.attention.kv_cache_scaling_factor"
    weights = {n: t for n, t in checkpoint.weights.items() if n != name}
    if stored is not None:
        weights[name] = stored
    with pytest.raises(InputError, match=said) as caught:
        defined(checkpoint.config, weights, "context", LIMITS, plugins=True)
    assert name in str(caught.value)
