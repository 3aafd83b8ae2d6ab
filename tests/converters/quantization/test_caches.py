"""FP8 caches: declared and scaled as the checkpoint has it, and never by accident."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from build_scripts import engines
from converters.checkpoint.config import WEIGHTS_FILE
from converters.checkpoint.convert import ConversionReport, convert
from converters.checkpoint.export_hf import export_hf
from converters.registry import read_checkpoint_config
from plugins.support.errors import CapabilityError, InputError, UsageError
from tests.fixtures import dots3_random
from tests.fixtures import qwen38_quantized as fixture
from tests.fixtures.qwen38_quantized import BASE, Quantized

LAYERS = (3, 7)
TARGET = "transformer.layers.{}.attention.kv_cache_scaling_factor"
DRAFTS = "mtp.layers.0.attention.kv_cache_scaling_factor"


def scaled(
    checkpoint: Quantized, spelling: tuple[str, str] = ("k_proj.k_scale", "v_proj.v_scale")
) -> Quantized:
    """Every layer with caches gets scales of its own, and a declaration."""
    for layer in LAYERS:
        for number, suffix in enumerate(spelling):
            name = f"{BASE}layers.{layer}.self_attn.{suffix}"
            checkpoint.tensors[name] = torch.tensor(0.01 * layer + 0.003 * number)
    block = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    checkpoint.config.setdefault("quantization_config", block)["kv_cache_quant_algo"] = "FP8"
    return checkpoint


def run(
    checkpoint: Quantized, directory: Path, **options: Any
) -> tuple[ConversionReport, dict[str, torch.Tensor]]:
    report = convert(checkpoint.write(directory / "hf"), directory / "ckpt", **options)
    return report, load_file(directory / "ckpt" / WEIGHTS_FILE)


def kept(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: t.tolist() for name, t in tensors.items() if "kv_cache" in name}


@pytest.mark.parametrize("spelling", [("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale")])
def test_scales_of_the_checkpoint_are_kept(spelling: tuple[str, str], tmp_path: Path):
    checkpoint = scaled(fixture.nvidia(), spelling)
    _, tensors = run(checkpoint, tmp_path)
    expected = {
        TARGET.format(layer): [
            float(checkpoint.tensors[f"{BASE}layers.{layer}.self_attn.{s}"]) for s in spelling
        ]
        for layer in LAYERS
    }
    # Calibration leaves the draft layer out.
    assert kept(tensors) == expected | {DRAFTS: [1.0, 1.0]}
    assert read_checkpoint_config(tmp_path / "ckpt").quantization.kv_cache_quant_algo == "FP8"

    exported = tmp_path / "exported"
    export_hf(tmp_path / "ckpt", exported)
    content = json.loads((exported / "hf_quant_config.json").read_text())["quantization"]
    assert content["kv_cache_quant_algo"] == "FP8"
    inline = json.loads((exported / "config.json").read_text())["quantization_config"]
    assert inline["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    convert(exported, tmp_path / "again")
    again = (tmp_path / "again" / WEIGHTS_FILE).read_bytes()
    assert again == (tmp_path / "ckpt" / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize("quantize", [None, "nvfp4", "fp8", "fp8-block"])
def test_asked_for_without_scales(quantize: str | None, tmp_path: Path):
    """They are cast with scale 1, which is said; readers find the declaration and the scales."""
    report, tensors = run(fixture.plain(), tmp_path, quantize=quantize, kv_cache="fp8")
    names = [TARGET.format(layer) for layer in LAYERS] + [DRAFTS]
    assert kept(tensors) == {name: [1.0, 1.0] for name in names}
    assert "note: no scales of the cache: keys and values are cast with scale 1" in report.lines()
    exported = tmp_path / "exported"
    export_hf(tmp_path / "ckpt", exported)
    inline = json.loads((exported / "config.json").read_text())["quantization_config"]
    assert inline["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    assert (inline.get("quant_algo") is None) == (quantize != "nvfp4")
    index = json.loads((exported / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.3.self_attn.k_proj.k_scale"
    assert load_file(exported / index[name])[name].shape == ()
    convert(exported, tmp_path / "again")
    again = read_checkpoint_config(tmp_path / "again").quantization
    assert again == read_checkpoint_config(tmp_path / "ckpt").quantization


def test_scales_can_be_left_out(tmp_path: Path):
    report, tensors = run(scaled(fixture.nvidia()), tmp_path, kv_cache="none")
    assert not kept(tensors)
    assert read_checkpoint_config(tmp_path / "ckpt").quantization.kv_cache_quant_algo is None
    assert any("left out, these are to be in the computing type" in line for line in report.lines())


def test_nothing_is_declared_by_accident(tmp_path: Path):
    report, tensors = run(fixture.plain(), tmp_path)
    assert not kept(tensors)
    assert read_checkpoint_config(tmp_path / "ckpt").quantization.kv_cache_quant_algo is None
    assert not [line for line in report.lines() if "cache" in line]


def test_scales_without_a_declaration(tmp_path: Path):
    checkpoint = scaled(fixture.plain())
    del checkpoint.config["quantization_config"]
    report, tensors = run(checkpoint, tmp_path)
    assert len(kept(tensors)) == 3
    assert any("declared nowhere: taken as FP8" in line for line in report.lines())


Change = Callable[[Quantized], Any]
KEY = f"{BASE}layers.3.self_attn.k_proj.k_scale"


def put(value: torch.Tensor | None) -> Change:
    def change(checkpoint: Quantized) -> None:
        del checkpoint.tensors[KEY]
        if value is not None:
            checkpoint.tensors[KEY] = value

    return change


def declare(kind: str) -> Change:
    return lambda c: c.config["quantization_config"].update(kv_cache_quant_algo=kind)


def both_gone(checkpoint: Quantized) -> None:
    for name in (KEY, KEY.replace("k_proj.k_scale", "v_proj.v_scale")):
        del checkpoint.tensors[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(None), "missing: layers.3.self_attn.k_proj.k_scale"),
        (both_gone, "layers.3.self_attn.v_proj.v_scale"),
        (put(torch.tensor(0.0)), "1 scales are zero"),
        (put(torch.tensor(torch.nan)), "not finite"),
        (put(torch.tensor(-0.1)), "negative"),
        (put(torch.ones(2)), "expected one scale in a float type, found float32 [2]"),
        (put(torch.ones((), dtype=torch.int32)), "expected one scale in a float type, found int32"),
        (declare("NVFP4"), "unsupported type of the key and value cache"),
        (declare("INT8"), "unsupported type of the key and value cache"),
        (
            lambda c: (
                c.config["quantization_config"].update(
                    kv_cache_quant_algo="INT8", kv_cache_scheme=None
                )
                or c.config["text_config"].update(
                    quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
                )
            ),
            "contradict each other",
        ),
    ],
)
def test_broken_scales_are_refused(change: Change, message: str, tmp_path: Path):
    checkpoint = scaled(fixture.plain())
    change(checkpoint)
    with pytest.raises(InputError) as caught:
        run(checkpoint, tmp_path)
    assert message in str(caught.value)
    assert not (tmp_path / "ckpt").exists()


def test_engines_of_tensorrt_for_rtx_refuse_fp8_caches(tmp_path: Path):
    """Its cache update takes no FP8, so an engine would have other caches than declared."""
    run(fixture.plain(), tmp_path, kv_cache="fp8")
    request = engines.Request(1, 64, None, 0, 64, 8192, "tensorrt_rtx", None, "auto")
    with pytest.raises(CapabilityError) as caught:
        engines.build(tmp_path / "ckpt", tmp_path / "engine", request)
    assert "tensorrt_rtx has no plugin layers that would" in str(caught.value)
    for way in ("--flavor tensorrt)", "--kv-cache none"):
        assert way in (caught.value.fix or "")
    assert not (tmp_path / "engine").exists()


def test_other_families_have_no_such_caches(tmp_path: Path):
    source = dots3_random.write(tmp_path / "hf")
    with pytest.raises(UsageError, match="cannot be FP8"):
        convert(source, tmp_path / "ckpt", kv_cache="fp8")
    with pytest.raises(UsageError, match="unknown type of caches"):
        convert(source, tmp_path / "ckpt", kv_cache="int8")
    assert not (tmp_path / "ckpt").exists()


def test_the_type_by_name(tmp_path: Path):
    """Model Optimizer writes a name where compressed-tensors' form has no bits for it."""
    checkpoint = scaled(fixture.nvidia())
    block = checkpoint.config["quantization_config"]
    del block["kv_cache_quant_algo"]
    block["kv_cache_scheme"] = "fp8"
    report, tensors = run(checkpoint, tmp_path)
    assert len(kept(tensors)) == 3
    assert not any("declared nowhere" in line for line in report.lines())
    block["kv_cache_scheme"] = "NVFP4"
    source = checkpoint.write(tmp_path / "nvfp4")
    with pytest.raises(InputError, match="unsupported type of the key and value cache") as caught:
        convert(source, tmp_path / "again")
    assert caught.value.found == "NVFP4"
    convert(source, tmp_path / "again", kv_cache="none")
    assert not kept(load_file(tmp_path / "again" / WEIGHTS_FILE))


def test_a_cache_in_one_of_two_declarations(tmp_path: Path):
    """Readers of the one get another cache than readers of the other, so it is told."""
    checkpoint = scaled(fixture.nvidia())
    source = checkpoint.write(tmp_path / "hf")
    block = dict(checkpoint.config["quantization_config"], kv_cache_quant_algo=None)
    block.pop("quant_method")
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": block}))
    report = convert(source, tmp_path / "ckpt")
    place = f"{source / 'config.json'}: quantization_config"
    assert f"note: only {place} declares a cache in FP8" in report.lines()
    assert len(kept(load_file(tmp_path / "ckpt" / WEIGHTS_FILE))) == 3
    # One that both declare, in two forms, is no difference.
    block["kv_cache_quant_algo"] = "FP8"
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": block}))
    lines = convert(source, tmp_path / "again").lines()
    assert not any("declares a cache" in line for line in lines)
