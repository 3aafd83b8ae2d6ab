"""Quantised linears and experts in the network: equal to a network of the decoded values."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from converters.definition import EngineLimits
from converters.quantization import nvfp4
from plugins.trt.builder import build_serialized
from plugins.trt.weights import WeightPolicy
from tests.converters.qwen38.driver import defined
from tests.converters.qwen38.tiny import PERIOD, Tiny, tiny
from tests.fixtures.qwen38_deterministic import GOLDEN_PROMPT

LIMITS = EngineLimits(2, 128, chunk_size=64, max_logits_tokens=64)
LINEARS = (
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.dense",
    "shared_expert.gate",
    "shared_expert.up",
    "shared_expert.down",
    "ple.key",
    "ple.value",
)
Weights = dict[str, Tensor]


def _nvfp4(x: Tensor, parts: int) -> tuple[Weights, Tensor]:
    """Stacked matrices with a global scale for each part of the rows; and their values."""
    codes, scales, globals_, values = [], [], [], []
    for matrix in x:
        for part in matrix.chunk(parts):
            scale = nvfp4.global_scale(part.abs().amax())
            packed, blocks = nvfp4.quantize(part.contiguous(), scale)
            codes.append(packed)
            scales.append(blocks)
            globals_.append(scale)
            values.append(nvfp4.dequantize(packed, blocks, scale))

    def joined(pieces: list[Tensor]) -> Tensor:
        rows = torch.cat([piece.view(torch.uint8) for piece in pieces]).view(pieces[0].dtype)
        return rows.reshape(x.shape[0], x.shape[1], -1)

    quantised = {
        "weight": joined(codes),
        "weights_scaling_factor": joined(scales),
        "weights_scaling_factor_2": torch.stack(globals_).reshape(-1, parts),
    }
    return quantised, torch.cat(values).reshape(x.shape)


def _fp8_blocks(x: Tensor) -> tuple[Weights, Tensor]:
    """One scale per 128 x 128 block, of which the tiny matrices have one or a few."""
    rows, columns = (-(-n // 128) for n in x.shape)
    scale = torch.ones(rows, columns)
    codes = torch.zeros_like(x)
    values = torch.zeros_like(x)
    for i in range(rows):
        for j in range(columns):
            place = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
            scale[i, j] = (x[place].abs().amax() / 448).bfloat16().float()
            codes[place] = x[place] / scale[i, j]
    stored = codes.to(torch.float8_e4m3fn)
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    values = stored.float() * spread[: x.shape[0], : x.shape[1]]
    return {"weight": stored, "weights_scaling_factor": scale.bfloat16()}, values


def _quantised(checkpoint: Tiny) -> tuple[Tiny, Tiny]:
    """Experts in NVFP4 and linears in block FP8; and the same values in float32."""
    stored, plain = dict(checkpoint.weights), dict(checkpoint.weights)
    for name, x in checkpoint.weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(("experts.gate_up", "experts.down")):
            pieces, values = _nvfp4(x.float(), 2 if module.endswith("gate_up") else 1)
        elif module.endswith(LINEARS):
            # Deterministic weights all have one range; blocks must differ to show their order.
            falling = torch.linspace(1.0, 0.2, x.shape[0])[:, None]
            pieces, values = _fp8_blocks(x.float() * falling)
        else:
            continue
        stored |= {f"{module}.{suffix}": piece for suffix, piece in pieces.items()}
        plain[name] = values.to(x.dtype)
    return (
        dataclasses.replace(checkpoint, weights=stored),
        dataclasses.replace(checkpoint, weights=plain),
    )


def _logits(checkpoint: Tiny, targets: tuple[str, ...] = ("12.0",)) -> Tensor:
    driver = checkpoint.driver(LIMITS, targets=targets)
    rows = [driver.call("context", [GOLDEN_PROMPT[:45]])[0]["logits"]]
    rows += [driver.call("generation", [[token]])[0]["logits"] for token in GOLDEN_PROMPT[45:]]
    return torch.cat(rows)


@pytest.fixture(scope="module")
def both() -> tuple[Tiny, Tiny]:
    return _quantised(tiny(**PERIOD))


@pytest.fixture(scope="module")
def expected(both: tuple[Tiny, Tiny]) -> Tensor:
    return _logits(both[1])


@pytest.mark.parametrize("target", ["12.0", "8.9", "8.0"])
def test_logits_are_those_of_the_decoded_weights(
    both: tuple[Tiny, Tiny], expected: Tensor, target: str
) -> None:
    torch.testing.assert_close(_logits(both[0], (target,)), expected, atol=1e-5, rtol=0.0)


def _changed(checkpoint: Tiny, suffix: str, change) -> Tiny:
    weights = {
        name: change(x) if name.endswith(suffix) else x for name, x in checkpoint.weights.items()
    }
    return dataclasses.replace(checkpoint, weights=weights)


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        ("experts.gate_up.weight", lambda x: (x >> 4) | (x << 4)),
        (
            "experts.gate_up.weights_scaling_factor_2",
            lambda x: torch.stack([x[:, 0], x[:, 0] * 1.3], 1),
        ),
        ("attention.q.weights_scaling_factor", lambda x: x.flip(0)),
        ("in_proj_z.weights_scaling_factor", torch.ones_like),
    ],
    ids=["nibbles swapped", "wrong global scale for up", "blocks in wrong order", "no scale"],
)
def test_mistakes_are_seen(both: tuple[Tiny, Tiny], expected: Tensor, suffix: str, change) -> None:
    wrong = _logits(_changed(both[0], suffix, change))
    assert (wrong - expected).abs().max() > 2e-3


@pytest.mark.parametrize("target", ["12.0", "8.0"])
def test_engines_of_quantised_weights_build(tmp_path: Path, target: str) -> None:
    checkpoint, _ = _quantised(tiny(dtype="bfloat16", **PERIOD))
    net, definition = defined(
        checkpoint.config,
        checkpoint.weights,
        "generation",
        LIMITS,
        WeightPolicy("inputs"),
        (target,),
    )
    plan = build_serialized(net, definition.profile, tmp_path / "plan")
    kinds = {tensor.dtype for tensor in plan.report.inputs}
    types = {net.dtype(net.inputs[name]) for name in net.weight_inputs}
    if target == "12.0":
        assert {"float4_e2m1fn", "float8_e4m3fn"} <= types
    else:
        assert "uint8" in types
        assert not types & {"float4_e2m1fn", "float8_e4m3fn"}
    assert kinds
    # The experts of a step are gathered before or while they are decoded.
    assert not [
        kernel.name
        for kernel in plan.report.weight_dequantisations(16 * 64 * 32)
        if "experts" in kernel.metadata
    ]
