"""Exported checkpoints convert back to the very bytes, and other readers understand them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.checkpoint.config import QUANT_FILE, WEIGHTS_FILE
from converters.checkpoint.convert import convert
from converters.checkpoint.export_hf import export_hf, plan_export
from plugins.support.errors import InputError, UsageError
from tests.converters.quantization.hf_reader import stray_names
from tests.fixtures import dots3_random
from tests.fixtures import qwen38_quantized as fixture
from tests.fixtures.dots3_fp8 import CHANGES
from tests.fixtures.qwen38_deterministic import (
    GOLDEN_ARGMAX,
    GOLDEN_LAST_LOGITS,
    GOLDEN_PROMPT,
    write_deterministic,
)
from tests.fixtures.qwen38_quantized import LAYOUTS


def assert_round_trip(ckpt: Path, directory: Path) -> Path:
    """Export, convert the export, compare; the exported directory."""
    report = export_hf(ckpt, directory / "exported")
    again = directory / "again"
    converted = convert(directory / "exported", again)
    assert (again / WEIGHTS_FILE).read_bytes() == (ckpt / WEIGHTS_FILE).read_bytes()
    mixed = (ckpt / QUANT_FILE).exists()
    assert (again / QUANT_FILE).exists() == mixed
    if mixed:
        assert (again / QUANT_FILE).read_bytes() == (ckpt / QUANT_FILE).read_bytes()
    # What the export declares is what its tensors are.
    assert not converted.plan.notes
    assert stray_names(directory / "exported") == []
    assert report.as_dict()["tensors"] == len(names(directory / "exported"))
    return directory / "exported"


def names(directory: Path) -> dict[str, str]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    weight_map: dict[str, str] = index["weight_map"]
    return weight_map


@pytest.mark.parametrize("name", LAYOUTS)
def test_quantised_layouts_come_back(name: str, tmp_path: Path):
    source = LAYOUTS[name]().write(tmp_path / "hf")
    convert(source, tmp_path / "ckpt")
    assert_round_trip(tmp_path / "ckpt", tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "declared"),
    [("nvfp4", "W4A16_NVFP4"), ("fp8", None), ("fp8-block", None)],
)
def test_what_was_quantised_here_comes_back(tmp_path: Path, algorithm: str, declared: str | None):
    source = write_deterministic(
        tmp_path / "hf", dtype=torch.bfloat16, vision=False, moe_intermediate_size=48
    )
    convert(source, tmp_path / "ckpt", quantize=algorithm, only="all")
    exported = assert_round_trip(tmp_path / "ckpt", tmp_path)
    inline = json.loads((exported / "config.json").read_text())["quantization_config"]
    separate = exported / "hf_quant_config.json"
    assert separate.exists() == (declared is not None)
    if declared is None:
        # Without scales of activations; as Model Optimizer's FP8 a reader would look for them.
        assert (inline["quant_method"], inline["activation_scheme"]) == ("fp8", "dynamic")
        assert inline.get("weight_block_size") == ([128, 128] if "block" in algorithm else None)
        assert "mtp.layers.0.mlp.experts" in inline["modules_to_not_convert"]
        return
    content = json.loads(separate.read_text())
    assert content["quantization"]["quant_algo"] == declared
    # Keys that a reader demands even where they say nothing.
    assert {"group_size", "kv_cache_quant_algo", "exclude_modules"} <= content[
        "quantization"
    ].keys()
    assert "mtp.layers.0.mlp.experts" in content["quantization"]["exclude_modules"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export = pytest.importorskip("modelopt.torch.export.convert_hf_config")
    expected: dict[str, Any] = export.convert_hf_quant_config_format(content)
    for key in ("config_groups", "ignore", "quant_algo", "producer"):
        assert inline[key] == expected[key], key


def test_each_expert_has_model_optimizer_s_tensors(tmp_path: Path):
    source = LAYOUTS["nvidia"]().write(tmp_path / "hf")
    convert(source, tmp_path / "ckpt")
    exported = assert_round_trip(tmp_path / "ckpt", tmp_path)
    files = names(exported)
    tensors = load_file(exported / files["lm_head.weight"])
    expert = "model.layers.2.mlp.experts.5.up_proj"
    found = {n.removeprefix(f"{expert}."): t for n, t in tensors.items() if n.startswith(expert)}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in found.items()} == {
        "weight": (torch.uint8, (48, 32)),
        "weight_scale": (torch.float8_e4m3fn, (48, 4)),
        "weight_scale_2": (torch.float32, ()),
        "input_scale": (torch.float32, ()),
    }
    assert "mtp.layers.0.mlp.experts.5.up_proj.weight_scale_inv" in files
    layers = json.loads((exported / "hf_quant_config.json").read_text())["quantization"]
    assert layers["quant_algo"] == "MIXED_PRECISION"
    assert layers["quantized_layers"]["mtp.layers.0.mlp.experts"] == {
        "quant_algo": "FP8_PB_WO",
        "group_size": 128,
    }
    table = "model.layers.1.ple.ple_embedding.ngram_embedding"
    assert layers["quantized_layers"][table] == {"quant_algo": "FP8"}


@torch.no_grad()
def test_plain_export_runs_under_transformers(deterministic_checkpoint: Path, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    convert(deterministic_checkpoint, tmp_path / "ckpt")
    exported = assert_round_trip(tmp_path / "ckpt", tmp_path)
    model, report = transformers.Qwen4ExpForCausalLM.from_pretrained(
        exported, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    logits = model.eval()(input_ids=torch.tensor([GOLDEN_PROMPT])).logits[0, -1]
    torch.testing.assert_close(logits[:6], torch.tensor(GOLDEN_LAST_LOGITS), atol=5e-6, rtol=0)
    assert int(logits.argmax()) == GOLDEN_ARGMAX


def test_tokenizer_files_go_along(trained_checkpoint: Path, tmp_path: Path):
    convert(trained_checkpoint, tmp_path / "ckpt")
    exported = assert_round_trip(tmp_path / "ckpt", tmp_path)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (exported / name).read_bytes() == (trained_checkpoint / name).read_bytes()


def test_large_checkpoints_are_cut_in_files(
    deterministic_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("converters.checkpoint.export_hf._FILE_BYTES", 500_000)
    convert(deterministic_checkpoint, tmp_path / "ckpt")
    exported = assert_round_trip(tmp_path / "ckpt", tmp_path)
    assert len(set(names(exported).values())) > 10


def test_wrong_exports_leave_nothing(deterministic_checkpoint: Path, tmp_path: Path):
    ckpt = tmp_path / "ckpt"
    convert(deterministic_checkpoint, ckpt)
    with pytest.raises(UsageError, match="same directory"):
        export_hf(ckpt, ckpt)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(UsageError, match="already exists"):
        export_hf(ckpt, tmp_path / "there")
    tensors = load_file(ckpt / WEIGHTS_FILE)
    tensors["stray"] = tensors.pop("lm_head.weight")
    save_file(tensors, ckpt / WEIGHTS_FILE)
    with pytest.raises(InputError, match="2 tensors") as caught:
        export_hf(ckpt, tmp_path / "out")
    assert "missing: lm_head.weight" in str(caught.value)
    assert "unexpected: stray" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "there"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("attention.kv_cache_scaling_factor", lambda t: t[:1], "float32 [2], found float32 [1]"),
        (
            "mlp.experts.down.weights_scaling_factor_2",
            lambda t: t.flatten(),
            "expected float32 [16, 1], found float32 [16]",
        ),
        ("mlp.experts.down.weight", lambda t: t[None], "found uint8 [1, 16, 64, 24]"),
        (
            "mlp.experts.down.weights_scaling_factor",
            lambda t: t.float(),
            "expected float8_e4m3fn [16, 64, 3], found float32 [16, 64, 3]",
        ),
        ("mlp_hyper_connection.up.weight", lambda t: t.T.contiguous(), "found bfloat16 [16, 256]"),
    ],
)
def test_tensors_that_are_not_as_converted(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
):
    ckpt = tmp_path / "ckpt"
    convert(LAYOUTS["nvidia"]().write(tmp_path / "hf"), ckpt, kv_cache="fp8")
    tensors = load_file(ckpt / WEIGHTS_FILE)
    name = f"transformer.layers.3.{name}"
    save_file(tensors | {name: change(tensors[name])}, ckpt / WEIGHTS_FILE)
    with pytest.raises(InputError) as caught:
        export_hf(ckpt, tmp_path / "out")
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_experts_are_declared_together(tmp_path: Path):
    """Weight-only where one projection has no scale of activations; not at all in two formats."""
    checkpoint = LAYOUTS["radixark"]()
    for name in [n for n in checkpoint.tensors if "layers.6.mlp" in n and "down_proj.input" in n]:
        del checkpoint.tensors[name]
    convert(checkpoint.write(tmp_path / "hf"), tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    content = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    layers = content["quantized_layers"]
    assert layers["model.layers.6.mlp.experts"]["quant_algo"] == "W4A16_NVFP4"
    assert layers["model.layers.5.mlp.experts"]["quant_algo"] == "NVFP4"

    def in_two_formats(module: str, values: torch.Tensor) -> Any:
        return (fixture.as_fp8 if "down_proj" in module else fixture.as_nvfp4)(module, values)

    checkpoint = fixture.plain()
    checkpoint.experts(fixture.BASE, in_two_formats)
    convert(checkpoint.write(tmp_path / "two"), tmp_path / "two ckpt")
    with pytest.raises(InputError, match="two formats") as caught:
        export_hf(tmp_path / "two ckpt", tmp_path / "two out")
    assert caught.value.found == "NVFP4 and FP8"
    assert not (tmp_path / "two out").exists()


def test_what_some_readers_cannot_take_is_said(tmp_path: Path):
    """FP8 without scales of activations, alone and among others, and a quantised cache alone."""
    source = write_deterministic(
        tmp_path / "hf", dtype=torch.bfloat16, vision=False, moe_intermediate_size=48
    )
    convert(source, tmp_path / "fp8", quantize="fp8")
    (note,) = export_hf(tmp_path / "fp8", tmp_path / "fp8 out").as_dict()["notes"]
    assert "TensorRT-LLM and transformers find no declaration of it; --calibration" in note
    convert(source, tmp_path / "cache", kv_cache="fp8")
    (note,) = export_hf(tmp_path / "cache", tmp_path / "cache out").as_dict()["notes"]
    assert "vLLM takes no such declaration" in note
    convert(source, tmp_path / "both", quantize="fp8-block", kv_cache="fp8")
    (note,) = export_hf(tmp_path / "both", tmp_path / "both out").as_dict()["notes"]
    assert "engines take it by their own option only" in note
    convert(source, tmp_path / "nvfp4", quantize="nvfp4", kv_cache="fp8")
    assert plan_export(tmp_path / "nvfp4", tmp_path / "out").notes == []

    checkpoint = LAYOUTS["mixed dense"]()
    for name in [n for n in checkpoint.tensors if "shared_expert" in n and "input_scale" in n]:
        del checkpoint.tensors[name]
    convert(checkpoint.write(tmp_path / "mixed"), tmp_path / "mixed ckpt")
    (note,) = plan_export(tmp_path / "mixed ckpt", tmp_path / "out").notes
    assert "vLLM finds no declaration of it" in note

    for name in ("mixed dense", "official fp8"):
        source = LAYOUTS[name]().write(tmp_path / name)
        convert(source, tmp_path / f"{name} ckpt")
        assert plan_export(tmp_path / f"{name} ckpt", tmp_path / "out").notes == []


@pytest.mark.parametrize("algorithm", ["nvfp4", "fp8", "fp8-block"])
def test_dots3_comes_back(tmp_path: Path, algorithm: str):
    """The draft layer stays plain, and lies behind the last layer."""
    sizes = CHANGES | {"intermediate_size": 128, "moe_shared_expert_intermediate_size": 128}
    source = dots3_random.write(tmp_path / "hf", **sizes)
    convert(source, tmp_path / "ckpt", quantize=algorithm, only="all")
    exported = assert_round_trip(tmp_path / "ckpt", tmp_path)
    inline = json.loads((exported / "config.json").read_text())["quantization_config"]
    plain = set(inline.get("ignore", inline.get("modules_to_not_convert")))
    assert {
        *("lm_head", "model.embed_tokens", "model.mtp.embed_tokens", "model.layers.1.mlp.gate"),
        *("model.layers.3.eh_proj", "model.layers.3.self_attn.o_proj"),
        *("model.layers.0.self_attn.indexer.wk", "model.layers.0.self_attn.g_proj"),
    } <= plain
    assert "model.layers.0.self_attn.o_proj" not in plain
