"""Exported checkpoints, read by declaration alone as serving engines do."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.checkpoint.convert import convert
from converters.checkpoint.export_hf import export_hf
from converters.quantization.restore import restored_weights
from tests.converters.quantization.hf_reader import HfReader, Unreadable
from tests.converters.qwen38.test_conversion import RENAMES
from tests.fixtures.qwen38_deterministic import write_deterministic
from tests.fixtures.qwen38_quantized import BASE, LAYOUTS, TABLE

EXPORTED_TABLE = TABLE.replace(BASE, "model.")
Values = dict[str, np.ndarray[Any, Any]]


def read_all(directory: Path, rules: str) -> Values:
    """Canonical in-memory name -> values, experts stacked, gate above up."""
    reader = HfReader(directory, rules)
    values: Values = {}
    single: dict[str, dict[int, dict[str, Any]]] = {}
    for module, matrix in reader.linears():
        name = module if module.startswith(("lm_head", "mtp.")) else f"{BASE}{module[6:]}"
        if ".experts." in name:
            base, _, rest = name.partition(".experts.")
            number, _, projection = rest.partition(".")
            single.setdefault(base, {}).setdefault(int(number), {})[projection] = matrix
        else:
            values[f"{name}.weight"] = matrix
    for name in list(reader.tensors):
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            assert reader.algorithm(name) is None
            canonical = name if name.startswith("mtp.") else f"{BASE}{name[6:]}"
            values[canonical] = reader._plain(name)
    for base, experts in single.items():
        assert sorted(experts) == list(range(len(experts)))
        ordered = [experts[number] for number in range(len(experts))]
        values[f"{base}.experts.down_proj"] = np.stack([e["down_proj"] for e in ordered])
        values[f"{base}.experts.gate_up_proj"] = np.stack(
            [np.concatenate([e["gate_proj"], e["up_proj"]]) for e in ordered]
        )
    values[f"{TABLE}.weight"] = reader.table(EXPORTED_TABLE)
    if reader.unexplained():
        raise Unreadable(f"nothing declares {sorted(reader.unexplained())[:3]}")
    return values


def wrong(found: Values, expected: dict[str, torch.Tensor]) -> list[str]:
    """Matrices whose values differ, or that are missing on one side."""
    matrices = {name: t.float().numpy() for name, t in expected.items() if t.dim() > 1}
    return [
        name
        for name in sorted(found.keys() | matrices.keys())
        if name not in found
        or name not in matrices
        or not np.array_equal(found[name], matrices[name])
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_read_exactly(name: str, tmp_path: Path):
    checkpoint = LAYOUTS[name]()
    convert(checkpoint.write(tmp_path / "hf"), tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    for rules in ("trtllm", "vllm"):
        assert wrong(read_all(tmp_path / "out", rules), checkpoint.dequantised) == []


@pytest.fixture(scope="module")
def plain_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices that engines join differ in their largest values, so that sharing shows."""
    directory = write_deterministic(
        tmp_path_factory.mktemp("hf") / "plain",
        dtype=torch.bfloat16,
        vision=False,
        files=1,
        moe_intermediate_size=48,
    )
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(
            ("k_proj.weight", "in_proj_z.weight", "up_proj.weight", "key_proj.weight")
        ):
            tensors[name] = tensor * 3
        elif name.endswith("experts.gate_up_proj"):
            tensors[name] = torch.cat([tensor[:, :48], tensor[:, 48:] * 3], dim=1)
    save_file(tensors, path)
    return directory


@pytest.fixture(scope="module")
def exported(
    plain_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    """(converted, exported) directories of all that can be quantised, once per algorithm."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(algorithm: str) -> tuple[Path, Path]:
        if algorithm not in made:
            directory = tmp_path_factory.mktemp(algorithm)
            convert(plain_source, directory / "ckpt", quantize=algorithm, only="all")
            export_hf(directory / "ckpt", directory / "out")
            made[algorithm] = directory / "ckpt", directory / "out"
        return made[algorithm]

    return make


@pytest.mark.parametrize("algorithm", ["nvfp4", "fp8-block"])
def test_what_was_quantised_here_is_read(
    algorithm: str, exported: Callable[[str], tuple[Path, Path]]
):
    ckpt, out = exported(algorithm)
    restored = restored_weights(ckpt)
    for rules in ("trtllm", "vllm"):
        for name, found in read_all(out, rules).items():
            target = name
            for old, new in RENAMES:
                target = target.replace(old, new)
            assert np.array_equal(found, restored[target].numpy()), name


def test_model_optimizer_decodes_the_same(exported: Callable[[str], tuple[Path, Path]]):
    """By its own tensor class, from the exported bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    ckpt, out = exported("nvfp4")
    restored = restored_weights(ckpt)
    tensors = {n: t for path in out.glob("model-0*") for n, t in load_file(path).items()}
    experts = "model.layers.5.mlp.experts.7."
    gate_up = restored["transformer.layers.5.mlp.experts.gate_up.weight"][7]
    for module, expected in (
        ("model.layers.3.self_attn.q_proj", restored["transformer.layers.3.attention.q.weight"]),
        (f"{experts}gate_proj", gate_up[:48]),
        (f"{experts}up_proj", gate_up[48:]),
        (f"{experts}down_proj", restored["transformer.layers.5.mlp.experts.down.weight"][7]),
    ):
        packed = tensors[f"{module}.weight"]
        options = {
            "scale": tensors[f"{module}.weight_scale"],
            "double_scale": tensors[f"{module}.weight_scale_2"],
            "block_sizes": {-1: 16},
        }
        for codes, is_right in ((packed, True), ((packed >> 4) | (packed << 4), False)):
            read = qtensor.NVFP4QTensor(expected.shape, torch.float32, codes)
            assert torch.equal(read.dequantize(torch.float32, **options), expected) == is_right


def test_products_that_engines_join_have_one_global_scale(
    exported: Callable[[str], tuple[Path, Path]],
):
    """Engines take the larger of two scales for both, which changes the other's values."""
    reader = HfReader(exported("nvfp4")[1], "vllm")
    for group in (
        [f"model.layers.3.self_attn.{name}_proj" for name in "qkv"],
        ["model.layers.0.linear_attn.in_proj_qkv", "model.layers.0.linear_attn.in_proj_z"],
        [f"model.layers.5.mlp.shared_expert.{name}_proj" for name in ("gate", "up")],
        [f"model.layers.5.mlp.experts.7.{name}_proj" for name in ("gate", "up")],
        [f"model.layers.1.ple.{name}_proj" for name in ("key", "value")],
    ):
        scales = {float(reader._scalar(f"{module}.weight_scale_2")) for module in group}
        assert len(scales) == 1, group
        largest = [float(np.abs(reader.linear(module)).max()) for module in group]
        assert max(largest) > 2 * min(largest), group


def test_every_plain_matrix_is_declared_plain(exported: Callable[[str], tuple[Path, Path]]):
    _, out = exported("nvfp4")
    content = json.loads((out / "hf_quant_config.json").read_text())
    excluded = content["quantization"]["exclude_modules"]
    layer = "model.layers.3."
    assert {
        *("lm_head", "model.embed_tokens", f"{layer}mlp.gate", f"{layer}mlp.shared_expert_gate"),
        *(f"{layer}self_attn.indexer.index_qk_proj", "model.layers.0.linear_attn.in_proj_a"),
        f"{layer}attn_hyper_connection.block_inject_weight",
        *("mtp.fc_hidden", "mtp.layers.0.mlp.experts", EXPORTED_TABLE),
    } <= set(excluded)
    assert not [name for name in excluded if "*" in name]


def test_the_reader_notices(
    tmp_path: Path, exported: Callable[[str], tuple[Path, Path]], plain_source: Path
):
    """A router that nobody excludes, a table that nobody names, and swapped halves."""
    out = exported("nvfp4")[1]
    config, separate = out / "config.json", out / "hf_quant_config.json"
    before = config.read_text(), separate.read_text()
    assert all('"model.layers.3.mlp.gate",' in text for text in before)
    try:
        for path, text in zip((config, separate), before, strict=True):
            path.write_text(text.replace('"model.layers.3.mlp.gate",', ""))
        for rules in ("trtllm", "vllm"):
            with pytest.raises(Unreadable, match=r"layers\.3\.mlp\.gate\.weight_scale_2"):
                read_all(out, rules)
    finally:
        config.write_text(before[0])
        separate.write_text(before[1])
    checkpoint = LAYOUTS["nvidia"]()
    convert(checkpoint.write(tmp_path / "hf"), tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text().replace("ple_embedding_dtype", "unknown"))
    with pytest.raises(Unreadable, match="declared plain, found F8_E4M3"):
        read_all(tmp_path / "out", "vllm")
