"""Activation scales of a calibration result reach the weights they belong to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from converters.checkpoint.config import WEIGHTS_FILE
from converters.checkpoint.convert import ConversionReport, convert, plan_conversion
from converters.checkpoint.export_hf import export_hf
from plugins.support.errors import InputError, UsageError
from tests.fixtures import qwen38_quantized as fixture
from tests.fixtures.qwen38_quantized import BASE, Quantized, Tensors

EXPERTS = 16


def calibrated(make: Callable[..., Any] = fixture.as_nvfp4, algorithm: str = "NVFP4") -> Quantized:
    """Every expert projection with a scale of its own: its number over 1000."""
    checkpoint = fixture.plain()
    count = 0

    def numbered(module: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        nonlocal count
        count += 1
        tensors, restored = make(module, values)
        return tensors | {f"{module}.input_scale": torch.tensor(count / 1000)}, restored

    checkpoint.experts(BASE, numbered)
    checkpoint.config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": [],
    }
    return checkpoint


def run(
    calibration: Quantized, directory: Path, quantize: str = "nvfp4", **options: Any
) -> tuple[ConversionReport, dict[str, torch.Tensor]]:
    source = directory / "hf"
    if not source.exists():
        fixture.plain().write(source)
    result = calibration.write(directory / "calibration")
    report = convert(source, directory / "ckpt", quantize=quantize, calibration=result, **options)
    return report, load_file(directory / "ckpt" / WEIGHTS_FILE)


def expected(calibration: Quantized, layer: int, projections: tuple[str, ...]) -> torch.Tensor:
    base = f"{BASE}layers.{layer}.mlp.experts"
    return torch.tensor(
        [
            [float(calibration.tensors[f"{base}.{e}.{p}.input_scale"]) for p in projections]
            for e in range(EXPERTS)
        ]
    )


@pytest.mark.parametrize(
    ("quantize", "make", "algorithm"),
    [("nvfp4", fixture.as_nvfp4, "NVFP4"), ("fp8", fixture.as_fp8, "FP8")],
)
def test_every_projection_gets_its_own(
    quantize: str, make: Callable[..., Any], algorithm: str, tmp_path: Path
):
    """The source's experts are stacked, those of the calibration result lie one by one."""
    calibration = calibrated(make, algorithm)
    report, tensors = run(calibration, tmp_path, quantize)
    for layer in (0, 5):
        base = f"transformer.layers.{layer}.mlp.experts"
        found = tensors[f"{base}.gate_up.activation_scaling_factor"]
        assert torch.equal(found, expected(calibration, layer, ("gate_proj", "up_proj")))
        found = tensors[f"{base}.down.activation_scaling_factor"]
        assert torch.equal(found, expected(calibration, layer, ("down_proj",)))
    assert not [line for line in report.lines() if line.startswith("note")]
    # The weights are those of the source, not the calibration result's.
    convert(tmp_path / "hf", tmp_path / "alone", quantize=quantize)
    alone = load_file(tmp_path / "alone" / WEIGHTS_FILE)
    assert {n for n in tensors if n not in alone} == {n for n in tensors if "activation" in n}
    assert all(
        torch.equal(t.view(torch.uint8), tensors[n].view(torch.uint8))
        for n, t in ((n, t) for n, t in alone.items() if t.dim())
    )
    # With scales of activations it is no longer a weight-only checkpoint.
    export_hf(tmp_path / "ckpt", tmp_path / "exported")
    content = json.loads((tmp_path / "exported" / "hf_quant_config.json").read_text())
    assert content["quantization"]["quant_algo"] == algorithm


def test_experts_that_calibration_never_reached(tmp_path: Path):
    calibration = calibrated()
    gone = [f"{BASE}layers.2.mlp.experts.{e}.{p}" for e in (0, 9) for p in ("gate_proj", "up_proj")]
    for module in gone:
        del calibration.tensors[f"{module}.input_scale"]
    report, tensors = run(calibration, tmp_path)
    found = tensors["transformer.layers.2.mlp.experts.gate_up.activation_scaling_factor"]
    present = [e for e in range(EXPERTS) if e not in (0, 9)]
    assert (found[[0, 9]] == found[present].max()).all()
    assert len(found[present].unique()) == 2 * len(present)
    notes = [line for line in report.lines() if "never reached" in line]
    assert len(notes) == 2
    assert "2 × layers.*.mlp.experts.*.gate_proj" in notes[0]


def test_what_is_not_quantised_is_named(tmp_path: Path):
    calibration = calibrated()
    calibration.linears([f"{BASE}layers.3.self_attn.q_proj"], fixture.as_nvfp4)
    report, _ = run(calibration, tmp_path)
    (note,) = [line for line in report.lines() if "calibrated, but not quantised" in line]
    assert "layers.3.self_attn.q_proj.input_scale" in note


def test_scales_of_caches_come_along(tmp_path: Path):
    calibration = calibrated()
    for layer in (3, 7):
        for number, name in enumerate(("k_proj.k_scale", "v_proj.v_scale")):
            key = f"{BASE}layers.{layer}.self_attn.{name}"
            calibration.tensors[key] = torch.tensor(0.1 * layer + number)
    report, tensors = run(calibration, tmp_path, kv_cache="fp8")
    found = tensors["transformer.layers.7.attention.kv_cache_scaling_factor"]
    assert torch.equal(found, torch.tensor([0.7, 1.7]))
    assert not any("cast with scale 1" in line for line in report.lines())


NAME = f"{BASE}layers.2.mlp.experts.5.up_proj.input_scale"


def tensor(value: torch.Tensor) -> Callable[[Quantized], None]:
    return lambda checkpoint: checkpoint.tensors.update({NAME: value})


def drop(pattern: str) -> Callable[[Quantized], None]:
    def change(checkpoint: Quantized) -> None:
        for name in [n for n in checkpoint.tensors if pattern in n and n.endswith("input_scale")]:
            del checkpoint.tensors[name]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tensor(torch.tensor(0.0)), "1 scales are zero"),
        (tensor(torch.tensor(torch.inf)), "not finite"),
        (tensor(torch.ones(2)), "expected one float32 scale, found float32 [2]"),
        (tensor(torch.ones((), dtype=torch.bfloat16)), "found bfloat16 []"),
        (drop("layers.4.mlp.experts"), "layers.4.mlp.experts.0.gate_proj.input_scale"),
        (drop(""), "the calibration result has no scales of activations"),
    ],
)
def test_broken_results_are_refused(
    change: Callable[[Quantized], None], message: str, tmp_path: Path
):
    calibration = calibrated()
    change(calibration)
    with pytest.raises(InputError) as caught:
        run(calibration, tmp_path)
    assert message in str(caught.value)
    assert not (tmp_path / "ckpt").exists()


def test_scales_of_another_format_are_refused(tmp_path: Path):
    """They differ by a factor of 6, which nothing would notice later."""
    with pytest.raises(InputError) as caught:
        run(calibrated(fixture.as_fp8, "FP8"), tmp_path)
    assert "expected the activation scale of a NVFP4 weight, found that of FP8" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{}, {"quantize": "fp8-block"}, {"kv_cache": "none"}],
)
def test_a_result_that_nothing_takes(options: dict[str, Any], tmp_path: Path):
    source = fixture.plain().write(tmp_path / "hf")
    with pytest.raises(UsageError, match="nothing takes the scales"):
        convert(source, tmp_path / "ckpt", calibration=source, **options)


def test_another_result_does_not_continue_the_work(tmp_path: Path):
    """What was written under one calibration result is not kept under another."""
    from converters.checkpoint.convert import _fingerprint
    from converters.checkpoint.write import split_tasks

    source = fixture.plain().write(tmp_path / "hf")
    found = set()
    for number in (1, 2):
        calibration = calibrated()
        calibration.tensors[NAME] *= number
        directory = calibration.write(tmp_path / f"calibration {number}")
        plan = plan_conversion(source, tmp_path / "ckpt", quantize="nvfp4", calibration=directory)
        found.add(_fingerprint(plan, split_tasks(plan.recipes)))
    assert len(found) == 2
