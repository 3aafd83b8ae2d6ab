"""Exported FP8 checkpoints, loaded by transformers, which decodes them where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.checkpoint.config import WEIGHTS_FILE
from converters.checkpoint.convert import convert
from converters.checkpoint.export_hf import export_hf
from converters.quantization.restore import restored_weights
from tests.converters.qwen38.test_conversion import RENAMES
from tests.fixtures import dots3_random
from tests.fixtures.qwen38_deterministic import write_deterministic
from tests.fixtures.qwen38_quantized import BASE, official_fp8

# transformers asks for it before it loads any FP8 checkpoint.
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"


def loaded(kind: Any, directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights in memory by name, and the report of keys."""
    model, report = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    return model.state_dict(), report


def different(found: dict[str, torch.Tensor], ckpt: Path) -> list[str]:
    """Names of Qwen3.8's weights that are not what the converted checkpoint means."""
    meant = restored_weights(ckpt)
    names = []
    for name, tensor in found.items():
        target = name.replace("model.", BASE, 1)
        for old, new in RENAMES:
            target = target.replace(old, new)
        if target in meant and not torch.equal(tensor.float(), meant[target]):
            names.append(name)
    return names


def test_the_released_layout(tmp_path: Path):
    """Block FP8 experts, and the table that stays FP8 in memory, with its scale."""
    convert(official_fp8().write(tmp_path / "hf"), tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    found, report = loaded(transformers.Qwen4ExpForCausalLM, tmp_path / "out")
    assert not any(report.values()), report
    assert different(found, tmp_path / "ckpt") == [f"{TABLE}.weight"]
    table = found[f"{TABLE}.weight"].float() * found[f"{TABLE}.weight_scale"].float()
    meant = restored_weights(tmp_path / "ckpt")["transformer.layers.1.ple.ngram_embedding.weight"]
    assert torch.equal(table, meant)

    # And it would be seen: one scale of one expert.
    path = tmp_path / "out" / "model-00001-of-00001.safetensors"
    name = "model.layers.2.mlp.experts.5.up_proj.weight_scale_inv"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name] * 2}, path, {"format": "pt"})
    found, _ = loaded(transformers.Qwen4ExpForCausalLM, tmp_path / "out")
    assert "model.layers.2.mlp.experts.gate_up_proj" in different(found, tmp_path / "ckpt")


def test_block_fp8_that_was_made_here(tmp_path: Path):
    source = write_deterministic(
        tmp_path / "hf", dtype=torch.bfloat16, vision=False, moe_intermediate_size=48
    )
    convert(source, tmp_path / "ckpt", quantize="fp8-block", only="all")
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    found, report = loaded(transformers.Qwen4ExpForCausalLM, tmp_path / "out")
    assert not any(report.values()), report
    # It finds the size of blocks by division, so that a partial last one is decoded otherwise.
    partial = [
        name
        for name, tensor in found.items()
        if tensor.dim() == 2 and any(n > 128 and n % 128 for n in tensor.shape)
    ]
    assert set(different(found, tmp_path / "ckpt")) <= set(partial)
    codes = load_file(tmp_path / "ckpt" / WEIGHTS_FILE)
    for name in ("attention.q", "mlp.experts.gate_up", "mlp.shared_expert.down"):
        assert codes[f"transformer.layers.3.{name}.weight"].dtype == torch.float8_e4m3fn
    assert "model.layers.3.self_attn.q_proj.weight" not in partial


def test_block_fp8_of_dots3(tmp_path: Path):
    """The text class takes everything but the draft layer, which it has not."""
    # No partial blocks, of which transformers finds other sizes.
    source = dots3_random.write(tmp_path / "hf", intermediate_size=128)
    convert(source, tmp_path / "ckpt", quantize="fp8-block", only="all")
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    found, report = loaded(transformers.Dots3NoteForCausalLM, tmp_path / "out")
    unexpected = report.pop("unexpected_keys")
    assert not any(report.values()), report
    layers = len([n for n in found if n.endswith("input_layernorm.weight")])
    draft = ("model.mtp.", f"model.layers.{layers}.")
    assert unexpected and all(name.startswith(draft) for name in unexpected)
    meant = restored_weights(tmp_path / "ckpt")
    for name, target in (
        ("layers.1.self_attn.q_b_proj.weight", "layers.1.attention.q_b.weight"),
        ("layers.0.self_attn.o_proj.weight", "layers.0.attention.dense.weight"),
        ("layers.0.mlp.down_proj.weight", "layers.0.mlp.down.weight"),
        ("layers.1.mlp.experts.gate_up_proj", "layers.1.mlp.experts.gate_up.weight"),
        ("layers.1.mlp.experts.down_proj", "layers.1.mlp.experts.down.weight"),
        ("layers.0.self_attn.indexer.wk.weight", "layers.0.attention.indexer.k.weight"),
        ("layers.1.mlp.gate.weight", "layers.1.mlp.router.weight"),
    ):
        expected = meant[f"transformer.{target}"]
        assert torch.equal(found[f"model.{name}"].float(), expected), name
    assert torch.equal(found["lm_head.weight"], meant["lm_head.weight"])
