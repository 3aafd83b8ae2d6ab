"""`inspect` of a source checkpoint: formats of its matrices, and findings instead of failures."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch

from tests.build_scripts.conftest import Command
from tests.fixtures import qwen38_quantized as fixture
from tests.fixtures.qwen38_quantized import BASE, TABLE
from tests.fixtures.voxtral_deterministic import write_huggingface, write_mistral


def test_formats_by_pattern_of_names(command: Command, tmp_path: Path) -> None:
    source = fixture.nvidia().write(tmp_path / "hf")
    found = command("inspect", source, "--json").json
    rows = [tuple(row.values()) for row in found["tables"]["Formats"]]
    assert rows == sorted(rows)
    layers = f"{BASE}layers.*."
    for row in (
        (f"{layers}mlp.experts.*.up_proj", "NVFP4", "16", 128),
        (f"{TABLE.replace('.1.', '.*.')}.shard_*", "FP8", "", 12),
        ("mtp.layers.*.mlp.experts.*.down_proj", "FP8_BLOCK_SCALES", "128", 16),
        (f"{layers}self_attn.q_proj", "plain", "", 2),
    ):
        assert row in rows
    assert "Findings" not in found["tables"]
    assert found["quantization"] == {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "group_size": None,
    }
    # The converted checkpoint says the same of the same matrices.
    assert command("convert", source, tmp_path / "ckpt").code == 0
    converted = command("inspect", tmp_path / "ckpt", "--json").json
    assert converted["quantization"]["quant_algo"] == "MIXED_PRECISION"
    after = {row["module"]: row["algorithm"] for row in converted["tables"]["Formats"]}
    assert after["transformer.layers.*.mlp.experts.gate_up"] == "NVFP4"
    assert after["transformer.layers.*.ple.ngram_embedding"] == "FP8"
    assert after["mtp.layers.*.mlp.experts.down"] == "FP8_BLOCK_SCALES"


def test_contradictions_are_findings(command: Command, tmp_path: Path) -> None:
    checkpoint = fixture.radixark()
    checkpoint.config["quantization_config"]["quant_algo"] = "FP8"
    checkpoint.config["quantization_config"]["ignore"].append("*.nothing.*")
    name = f"{BASE}layers.3.self_attn.q_proj"
    weight = checkpoint.tensors[f"{name}.weight"]
    checkpoint.tensors[f"{name}.weight"] = weight.to(torch.float8_e4m3fn)
    checkpoint.tensors[f"{name}.weight_scale"] = torch.full(
        (weight.shape[0], weight.shape[1] // 32), 127, dtype=torch.uint8
    )
    source = checkpoint.write(tmp_path / "hf")
    done = command("inspect", source, "--json")
    assert done.code == 0
    findings = [tuple(row.values()) for row in done.json["tables"]["Findings"]]
    errors = [line for kind, line in findings if kind == "error"]
    notes = [line for kind, line in findings if kind == "note"]
    assert any(line.startswith("MXFP8 weights are not supported") for line in errors)
    # One line for all layers and experts of a projection.
    assert len([line for line in errors if "contradict each other" in line]) == 2
    assert any("'*.nothing.*' matches nothing" in line for line in notes)
    algorithms = {row["module"]: row["algorithm"] for row in done.json["tables"]["Formats"]}
    assert algorithms[f"{BASE}layers.*.self_attn.o_proj"] == "plain"
    shown = command("inspect", source)
    assert shown.code == 0
    for words in ("Findings", "contradict each other", "matches nothing", "not supported"):
        assert words in shown.out
    assert command("convert", source, tmp_path / "ckpt").code == 3


def test_an_unfinished_download(command: Command, tmp_path: Path) -> None:
    """What is there is listed; what is missing or cut short is said."""
    source = fixture.radixark().write(tmp_path / "hf")
    first, second, third = sorted(source.glob("*.safetensors"))
    whole = command("inspect", source, "--json").json["tensors"]
    first.unlink()
    second.write_bytes(second.read_bytes()[:1000])
    done = command("inspect", source, "--json")
    assert done.code == 0
    lines = [row["finding"] for row in done.json["tables"]["Findings"]]
    assert any("1 of 3 weight files are missing" in line and first.name in line for line in lines)
    assert any(second.name in line for line in lines)
    # A damaged file is said once, however often it was read.
    assert len([line for line in lines if second.name in line]) == 1
    assert 0 < done.json["tensors"] < whole
    assert "Formats" not in done.json["tables"]
    third.unlink()
    assert command("inspect", source, "--json").json["tensors"] == 0


def test_other_models_and_mistral_s_layout(command: Command, tmp_path: Path) -> None:
    plain = write_huggingface(tmp_path / "hf")
    found = command("inspect", write_mistral(plain, tmp_path / "mistral"), "--json").json
    assert found["model_type"] == "voxtral"
    assert found["family"] == "voxtral"
    assert {row["algorithm"] for row in found["tables"]["Formats"]} == {"plain"}
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    other = command("inspect", plain, "--json").json
    assert other["family"] == "not supported"
    assert other["tensors"] > 0
    assert "Formats" not in other["tables"]
    assert [row["kind"] for row in other["tables"]["Findings"]] == ["error"]
    assert "found llama" in other["tables"]["Findings"][0]["finding"]


def test_what_a_conversion_refuses_is_a_finding(command: Command, tmp_path: Path) -> None:
    source = write_huggingface(tmp_path / "hf")
    whole = (source / "config.json").read_text()

    def findings() -> list[str]:
        done = command("inspect", source, "--json")
        assert done.code == 0
        return [row["finding"] for row in done.json["tables"].get("Findings", [])]

    assert findings() == []
    (source / "tokenizer.json").write_text("{")
    (line,) = findings()
    assert line.startswith("the tokenizer.json is not valid JSON")
    refused = command("convert", source, tmp_path / "ckpt", "--json")
    assert refused.json["error"]["what"] == "the tokenizer.json is not valid JSON"
    (source / "tokenizer.json").unlink()
    # A name that cannot be looked up.
    (source / "config.json").write_text(json.dumps(json.loads(whole) | {"model_type": ["x"]}))
    (line,) = findings()
    assert line.startswith("no converter for this model type")
    file = next(source.glob("*.safetensors"))
    (source / "config.json").write_text(whole)
    for header in (b"[]", b'{"a": 1}', b'{"a": {"dtype": [], "shape": 1, "data_offsets": 2}}'):
        file.write_bytes(struct.pack("<Q", len(header)) + header)
        (line,) = findings()
        assert file.name in line


def test_empty_facts_are_none_for_people(command: Command, tmp_path: Path) -> None:
    shown = command("inspect", write_huggingface(tmp_path / "hf")).out
    facts = {
        key.strip(): value.strip()
        for key, _, value in (line.strip("│ ").partition("│") for line in shown.splitlines())
    }
    assert facts["left_out"] == "none"
    assert facts["quantization"] == "quant_algo none, kv_cache_quant_algo none, group_size none"
