"""What `examine` says of a checkpoint is what a conversion does with it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.checkpoint.convert import plan_conversion
from converters.checkpoint.examine import Examination, Stored, examine
from converters.checkpoint.source import SourceCheckpoint
from plugins.support.errors import InputError
from tests.converters.quantization.test_reading import BROKEN, Change
from tests.fixtures import qwen38_quantized as fixture
from tests.fixtures.dots3_fp8 import is_quantised, write_fp8
from tests.fixtures.qwen38_quantized import BASE, LAYOUTS, TABLE
from tests.fixtures.voxtral_deterministic import write_huggingface, write_mistral


def examined(directory: Path) -> Examination:
    return examine(SourceCheckpoint.open(directory))


def by_kind(stored: list[Stored]) -> dict[str, set[tuple[str, int | None]]]:
    """Which formats occur among experts of the text model and the draft layer, and the table."""
    found: dict[str, set[tuple[str, int | None]]] = {}
    for item in stored:
        kind = "rest"
        if ".mlp.experts." in item.module:
            kind = "draft experts" if item.module.startswith("mtp.") else "experts"
        elif item.module.startswith(TABLE):
            kind = "table"
        found.setdefault(kind, set()).add((item.algorithm, item.group_size))
    return found


PLAIN, NVFP4, FP8, BLOCKS = ("plain", None), ("NVFP4", 16), ("FP8", None), ("FP8_BLOCK_SCALES", 128)


@pytest.mark.parametrize(
    ("name", "experts", "table", "drafts", "rest"),
    [
        ("radixark", NVFP4, FP8, PLAIN, {PLAIN}),
        ("nvidia", NVFP4, FP8, BLOCKS, {PLAIN}),
        ("official fp8", BLOCKS, FP8, BLOCKS, {PLAIN}),
        ("nvfp4 table", NVFP4, NVFP4, PLAIN, {PLAIN}),
        ("mixed dense", NVFP4, FP8, PLAIN, {PLAIN, BLOCKS, FP8}),
        ("community a", NVFP4, NVFP4, PLAIN, {PLAIN}),
        ("community c", NVFP4, FP8, PLAIN, {PLAIN, BLOCKS}),
    ],
)
def test_formats_of_every_layout(
    name: str, experts: object, table: object, drafts: object, rest: object, tmp_path: Path
):
    checkpoint = LAYOUTS[name]()
    source = checkpoint.write(tmp_path / "hf")
    found = examined(source)
    expected = {"experts": {experts}, "table": {table}, "draft experts": {drafts}, "rest": rest}
    assert by_kind(found.stored) == expected
    assert found.errors == []
    # Every matrix on disk, once, by its own name.
    weights = (".weight", ".weight_packed", "experts.gate_up_proj", "experts.down_proj")
    matrices = Counter(
        tensor.removesuffix(".weight").removesuffix(".weight_packed")
        for tensor, values in checkpoint.tensors.items()
        if values.dim() > 1 and tensor.endswith(weights)
    )
    assert Counter(item.module for item in found.stored) == matrices
    plan = plan_conversion(source, tmp_path / "ckpt")
    assert found.quantization.quant_algo == plan.config.quantization.quant_algo
    assert found.notes == list(plan.notes)


@pytest.mark.parametrize(("name", "change", "message"), BROKEN)
def test_errors_are_those_of_the_conversion(
    name: str, change: Change, message: str, tmp_path: Path
):
    """All that stops a plan is found; values of scales are read by the conversion only."""
    checkpoint = LAYOUTS[name]()
    change(checkpoint)
    source = checkpoint.write(tmp_path / "hf")
    found = examined(source)
    try:
        plan_conversion(source, tmp_path / "ckpt")
    except InputError as error:
        assert message in str(error)
        assert message.removesuffix("\n") in "\n".join(found.errors)
        assert error.what in "\n".join(found.errors) or "tensors of the checkpoint" in error.what
    else:
        assert found.errors == []
    # The rest of the table is there all the same.
    assert {"experts", "table", "draft experts", "rest"} == by_kind(found.stored).keys()


def test_several_faults_are_told_together(tmp_path: Path):
    """Each once, with the number of modules, and none hides another."""
    checkpoint = fixture.nvidia()
    layers = checkpoint.config["quantization_config"]["quantized_layers"]
    layers["mtp.layers.0.mlp.experts"]["quant_algo"] = "NVFP4"
    layers["layers.9.mlp.experts"] = {"quant_algo": "NVFP4"}
    del checkpoint.tensors[f"{BASE}layers.2.mlp.experts.5.up_proj.weight_scale"]
    for layer in (3, 7):
        name = f"{BASE}layers.{layer}.self_attn.q_proj"
        weight = checkpoint.tensors[f"{name}.weight"]
        checkpoint.tensors[f"{name}.weight"] = weight.to(torch.float8_e4m3fn)
        scales = torch.full((weight.shape[0], weight.shape[1] // 32), 127, dtype=torch.uint8)
        checkpoint.tensors[f"{name}.weight_scale"] = scales
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["lm_head.weight"].to(
        torch.float8_e4m3fn
    )
    checkpoint.tensors[f"{BASE}layers.4.mlp.surprise"] = torch.zeros(3)
    source = checkpoint.write(tmp_path / "hf")
    found = examined(source)
    place = f"{source / 'config.json'}: quantization_config"
    both = "expected NVFP4 in groups of 128, as declared; found FP8_BLOCK_SCALES in groups of 128"
    assert found.errors == [
        "MXFP8 weights are not supported (found float8_e4m3fn with uint8 scales per 32 columns): "
        "2 × layers.*.self_attn.q_proj (layers.3.self_attn.q_proj, layers.7.self_attn.q_proj)",
        "missing: layers.2.mlp.experts.5.up_proj.weight_scale",
        f"unexpected: {BASE}layers.4.mlp.surprise",
        "expected bfloat16, found float8_e4m3fn: lm_head.weight",
        *(
            f"the configuration and the tensors contradict each other ({place}; {both}, by element "
            f"types and scales): mtp.layers.0.mlp.experts.0.{name}_proj"
            for name in ("down", "gate")
        ),
    ]
    assert found.notes == [f"quantised layer 'layers.9.mlp.experts' matches nothing ({place})"]
    refused = {item.module for item in found.stored if item.algorithm == "not supported"}
    assert refused == {"lm_head", *(f"{BASE}layers.{n}.self_attn.q_proj" for n in (3, 7))}


@pytest.mark.parametrize(
    ("change", "message", "has_table"),
    [
        (lambda c: c["text_config"].pop("indexer_budget"), "indexer_budget: missing", False),
        (lambda c: c.update(dtype="float16"), "declares another type than the weights", True),
        (
            lambda c: c.update(quantization_config={"quant_method": "awq"}),
            "unsupported quantisation method",
            True,
        ),
        (
            lambda c: c["quantization_config"].update(kv_cache_quant_algo="NVFP4"),
            "unsupported type of the key and value cache",
            True,
        ),
    ],
)
def test_configurations_that_stop_a_conversion(
    change: Callable[[dict[str, Any]], object], message: str, has_table: bool, tmp_path: Path
):
    checkpoint = fixture.nvidia()
    change(checkpoint.config)
    source = checkpoint.write(tmp_path / "hf")
    found = examined(source)
    assert len(found.errors) == 1
    assert message in found.errors[0]
    assert bool(found.stored) == has_table
    assert not any("declared nowhere" in note for note in found.notes)
    with pytest.raises(InputError) as caught:
        plan_conversion(source, tmp_path / "ckpt")
    assert message in str(caught.value)


def test_block_fp8_of_dots3(tmp_path: Path):
    source, _ = write_fp8(tmp_path / "hf")
    found = examined(source)
    tensors = load_file(source / "model-00002-of-00002.safetensors")
    assert {(item.module, item.algorithm) for item in found.stored} == {
        (name.removesuffix(".weight"), "FP8_BLOCK_SCALES" if is_quantised(name) else "plain")
        for name, tensor in tensors.items()
        if tensor.dim() > 1
    }
    assert found.errors == []
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.1.self_attn"]
    (source / "config.json").write_text(json.dumps(config))
    notes = examined(source).notes
    assert any("excluded but quantised: layers.1.self_attn.kv_a" in note for note in notes)


def test_voxtral_in_both_layouts_and_quantised(tmp_path: Path):
    """No engine of this family decodes weights, so what is quantised is told as refused."""
    plain = write_huggingface(tmp_path / "hf")
    mistral = write_mistral(plain, tmp_path / "mistral")
    for source in (plain, mistral):
        found = examined(source)
        assert {item.algorithm for item in found.stored} == {"plain"}
        assert found.errors == []
        (path,) = source.glob("*.safetensors")
        matrices = {
            name.removesuffix(".weight") for name, t in load_file(path).items() if t.dim() > 1
        }
        assert {item.module for item in found.stored} == matrices
    shutil.copytree(plain, tmp_path / "fp8")
    (path,) = (tmp_path / "fp8").glob("*.safetensors")
    tensors = load_file(path)
    (name,) = [n for n in tensors if n.endswith("language_model.model.layers.0.mlp.up_proj.weight")]
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = torch.ones(())
    save_file(tensors, path, {"format": "pt"})
    found = examined(tmp_path / "fp8")
    assert [i.module for i in found.stored if i.algorithm == "not supported"] == [name[:-7]]
    assert any(name in line and "float8_e4m3fn" in line for line in found.errors)
    with pytest.raises(InputError) as caught:
        plan_conversion(tmp_path / "fp8", tmp_path / "ckpt")
    for line in found.errors:
        assert line in str(caught.value)


def test_entries_of_single_experts(tmp_path: Path):
    """As Model Optimizer lists linear layers: each is held to the tensors, a fault is told once."""
    checkpoint = fixture.nvidia()
    layers = checkpoint.config["quantization_config"]["quantized_layers"]
    for layer in range(8):
        entry = layers.pop(f"{BASE}layers.{layer}.mlp.experts")
        for expert in range(16):
            for name in ("gate_proj", "up_proj", "down_proj"):
                layers[f"{BASE}layers.{layer}.mlp.experts.{expert}.{name}"] = dict(entry)
    found = examined(checkpoint.write(tmp_path / "hf"))
    assert not found.errors and not found.notes
    for expert in range(16):
        for name in ("gate_proj", "up_proj"):
            layers[f"{BASE}layers.2.mlp.experts.{expert}.{name}"]["quant_algo"] = "FP8"
    del layers[f"{BASE}layers.5.mlp.experts.3.up_proj"]
    layers[f"{BASE}layers.5.mlp.experts.16.up_proj"] = {"quant_algo": "NVFP4"}
    found = examined(checkpoint.write(tmp_path / "wrong"))
    (error,) = found.errors
    assert error.endswith("layers.2.mlp.experts.0.gate_proj")
    assert [note.split(" (")[0] for note in found.notes] == [
        "quantised layer 'layers.5.mlp.experts.16.up_proj' matches nothing"
    ]
