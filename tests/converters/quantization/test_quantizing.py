"""`--quantize`: what Model Optimizer would have written, and nothing else changes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from converters.checkpoint import write
from converters.checkpoint.config import QUANT_FILE, WEIGHTS_FILE
from converters.checkpoint.convert import convert
from converters.quantization import fp8, nvfp4
from converters.quantization.restore import restored_weights
from converters.registry import read_checkpoint_config
from plugins.support.errors import InputError, UsageError
from tests.fixtures import qwen38_quantized as fixture
from tests.fixtures.qwen38_deterministic import write_deterministic

SIZES = {"moe_intermediate_size": 144, "hidden_size": 64}
PRECISE = (
    *(
        "hyper_connection",
        "norm",
        "router",
        "indexer",
        "in_proj_a",
        "in_proj_b",
        "shared_expert_gate",
    ),
    *("vocab_embedding", "lm_head", "conv1d", "A_log", "dt_bias", "ngram_embedding", "mtp."),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BF16, experts one by one; 144 rows make a partial FP8 block in gate and in up."""
    return write_deterministic(
        tmp_path_factory.mktemp("hf") / "bf16",
        dtype=torch.bfloat16,
        stacked_experts=False,
        vision=False,
        **SIZES,
    )


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    directory = tmp_path_factory.mktemp("plain") / "ckpt"
    convert(source, directory)
    return load_file(directory / WEIGHTS_FILE)


LINEAR = ("in_proj_qkv", "in_proj_z", "out_proj")


def expected_modules(only: str) -> set[str]:
    """Exactly what a scope quantises; all else keeps its precision."""
    found = set()
    for layer in range(8):
        base = f"transformer.layers.{layer}."
        found |= {f"{base}mlp.experts.{name}" for name in ("gate_up", "down")}
        if only in ("mlp", "all"):
            found |= {f"{base}mlp.shared_expert.{name}" for name in ("gate", "up", "down")}
        if only == "all" and layer % 4 == 3:
            found |= {f"{base}attention.{name}" for name in ("q", "k", "v", "dense")}
        elif only == "all":
            found |= {f"{base}linear_attention.{name}" for name in LINEAR}
    if only == "all":
        found |= {f"transformer.layers.1.ple.{name}" for name in ("key", "value")}
    return found


def kept() -> set[str]:
    """Tensors that no scope touches, besides those of draft layers."""
    gated = ("attention_hyper_connection", "mlp_hyper_connection")
    found = {"transformer.vocab_embedding.weight", "lm_head.weight"}
    found |= {
        f"transformer.hyper_connection_mixer.{name}.weight" for name in ("norm", "down", "up")
    }
    for layer in range(8):
        base = f"transformer.layers.{layer}."
        found |= {f"{base}mlp.{name}.weight" for name in ("router", "shared_expert_gate")}
        for name in ("norm", "down", "up", "inject"):
            found |= {f"{base}{module}.{name}.weight" for module in gated}
        if layer % 4 == 3:
            names = ("q_layernorm", "k_layernorm", "indexer.qk")
            names += ("indexer.q_layernorm", "indexer.k_layernorm")
            found |= {f"{base}attention.{name}.weight" for name in names}
        else:
            names = ("in_proj_a.weight", "in_proj_b.weight", "conv1d.weight", "norm.weight")
            found |= {f"{base}linear_attention.{n}" for n in (*names, "A_log", "dt_bias")}
    names = ("norm_key", "norm_query", "norm_conv", "conv1d", "ngram_embedding")
    return found | {f"transformer.layers.1.ple.{name}.weight" for name in names}


def modules(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {name.rpartition(".")[0] for name in tensors if name.endswith("weights_scaling_factor")}


def test_experts_are_quantised_as_by_model_optimizer(
    source: Path, plain: dict[str, torch.Tensor], tmp_path: Path
):
    convert(source, tmp_path / "ckpt", quantize="nvfp4")
    stored = load_file(tmp_path / "ckpt" / WEIGHTS_FILE)
    assert modules(stored) == {
        f"transformer.layers.{layer}.mlp.experts.{name}"
        for layer in range(8)
        for name in ("gate_up", "down")
    }
    for module in modules(stored):
        for expert, values in enumerate(plain[f"{module}.weight"]):
            # Gate and up share their global scale, as in an exported checkpoint.
            scale = nvfp4.global_scale(values.abs().max())
            packed, scales = nvfp4.quantize(values, scale)
            assert torch.equal(stored[f"{module}.weight"][expert], packed)
            found = stored[f"{module}.weights_scaling_factor"][expert]
            assert torch.equal(found.view(torch.uint8), scales.view(torch.uint8))
            second = stored[f"{module}.weights_scaling_factor_2"][expert]
            assert bool((second == scale).all())
    unchanged = {name for name in plain if name.rpartition(".")[0] not in modules(stored)}
    assert all(torch.equal(stored[name], plain[name]) for name in unchanged)
    config = read_checkpoint_config(tmp_path / "ckpt").quantization
    assert (config.quant_algo, config.group_size) == ("NVFP4", 16)


@pytest.mark.parametrize("algorithm", ["nvfp4", "fp8", "fp8-block"])
def test_scopes_contain_each_other_and_spare_what_must_stay_precise(
    source: Path, plain: dict[str, torch.Tensor], tmp_path: Path, algorithm: str
):
    found = []
    for only in ("experts", "mlp", "all"):
        directory = tmp_path / only
        convert(source, directory, quantize=algorithm, only=only)
        stored = load_file(directory / WEIGHTS_FILE)
        found.append(modules(stored))
        scales = ("weights_scaling_factor", "weights_scaling_factor_2")
        written = {f"{m}.{n}" for m in found[-1] for n in scales[: 1 + (algorithm == "nvfp4")]}
        assert stored.keys() == plain.keys() | written
        restored = restored_weights(directory)
        for name, values in plain.items():
            wide = values.float()
            if name.rpartition(".")[0] in found[-1]:
                error = (restored[name] - wide).abs().max() / wide.abs().max()
                assert 0 < float(error) < (0.2 if algorithm == "nvfp4" else 0.04), name
            else:
                assert torch.equal(restored[name], wide), name
        assert found[-1] == expected_modules(only)
    assert found[0] < found[1] < found[2]
    drafts = {name for name in plain if name.startswith("mtp.")}
    assert plain.keys() == {f"{m}.weight" for m in found[2]} | kept() | drafts
    assert not [name for name in found[2] if any(word in name for word in PRECISE)]


def test_block_scales_do_not_straddle_gate_and_up(
    source: Path, plain: dict[str, torch.Tensor], tmp_path: Path
):
    convert(source, tmp_path / "ckpt", quantize="fp8-block")
    stored = load_file(tmp_path / "ckpt" / WEIGHTS_FILE)
    module = "transformer.layers.2.mlp.experts.gate_up"
    scales = stored[f"{module}.weights_scaling_factor"]
    assert scales.shape == (16, 4, 1)
    for expert, values in enumerate(plain[f"{module}.weight"]):
        gate, up = values.chunk(2)
        expected = torch.cat([fp8.block_scales(gate), fp8.block_scales(up)])
        assert torch.equal(scales[expert], expected)


@pytest.mark.parametrize("algorithm", ["nvfp4", "fp8", "fp8-block"])
def test_layout_workers_and_buffers_do_not_change_a_byte(
    source: Path, tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
):
    options = {"quantize": algorithm, "only": "all"}
    convert(source, tmp_path / "a", **options)
    expected = (tmp_path / "a" / WEIGHTS_FILE).read_bytes()
    stacked = write_deterministic(tmp_path / "stacked", dtype=torch.bfloat16, vision=False, **SIZES)
    # So small that every matrix is read twice, in several strips.
    monkeypatch.setattr("converters.quantization.operations.CHUNK_BYTES", 4096)
    monkeypatch.setattr(write, "CHUNK_BYTES", 4096)
    convert(stacked, tmp_path / "b", workers=1, **options)
    assert (tmp_path / "b" / WEIGHTS_FILE).read_bytes() == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float):
    from tests.converters.qwen38.conftest import Bend

    bend = Bend(write_deterministic(tmp_path / "hf", files=1, mtp=False, vision=False))

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.language_model.layers.4.mlp.experts.down_proj"][3, :2, 5] = value
        tensors["model.language_model.layers.4.mlp.experts.down_proj"][9, 1, 1] = value

    bend.tensors(spoil)
    for algorithm in ("nvfp4", "fp8", "fp8-block"):
        # The count is that of the whole tensor, not of the piece where the first one shows.
        with pytest.raises(InputError, match="3 values are NaN or infinite") as caught:
            convert(bend.directory, tmp_path / "ckpt", quantize=algorithm)
        nan = 3 if math.isnan(value) else 0
        assert f"{nan} NaN and {3 - nan} infinite among 32768" in (caught.value.found or "")
        assert "layers.4.mlp.experts.down_proj" in (caught.value.where or "")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_widths_that_blocks_do_not_divide(tmp_path: Path):
    source = write_deterministic(tmp_path / "hf", mtp=False, vision=False, moe_intermediate_size=40)
    with pytest.raises(InputError) as caught:
        convert(source, tmp_path / "ckpt", quantize="nvfp4")
    assert "expected columns divisible by 16 to quantise them, found 40 columns" in str(
        caught.value
    )
    convert(source, tmp_path / "ckpt", quantize="fp8-block")


def test_wrong_words(source: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="unknown quantisation"):
        convert(source, tmp_path / "ckpt", quantize="int4")
    with pytest.raises(UsageError, match="unknown choice of weights"):
        convert(source, tmp_path / "ckpt", quantize="fp8", only="attention")


def test_declarations_speak_of_the_source_only(tmp_path: Path):
    """Quantising more of a checkpoint that declares one algorithm contradicts nothing."""
    source = fixture.radixark().write(tmp_path / "hf")
    report = convert(source, tmp_path / "ckpt", quantize="fp8", only="all")
    # What is quantised already stays, and that is all there is to say.
    notes = [line for line in report.lines() if line.startswith("note")]
    kept = "note: NVFP4 already and kept: 8 × layers.*.mlp.experts.*."
    assert [note.split(" (")[0] for note in notes] == [f"{kept}down_proj", f"{kept}gate_proj"]
    layers = json.loads((tmp_path / "ckpt" / QUANT_FILE).read_text())["quantized_layers"]
    assert layers["transformer.layers.3.mlp.experts.down"]["quant_algo"] == "NVFP4"
    assert layers["transformer.layers.3.attention.q"]["quant_algo"] == "FP8"
    # Of a plain source nothing is declared, and nothing needs to be.
    plain = fixture.plain().write(tmp_path / "plain")
    report = convert(plain, tmp_path / "again", quantize="fp8")
    assert not [line for line in report.lines() if line.startswith("note")]


def test_products_that_are_joined_share_their_largest_value(tmp_path: Path):
    """Also where one of them alone is not finite."""
    from tests.converters.qwen38.conftest import Bend

    bend = Bend(write_deterministic(tmp_path / "hf", files=1, mtp=False, vision=False))
    key = "model.language_model.layers.3.self_attn.k_proj.weight"

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key] *= 5

    bend.tensors(enlarge)
    convert(bend.directory, tmp_path / "ckpt", quantize="nvfp4", only="all")
    tensors = load_file(tmp_path / "ckpt" / WEIGHTS_FILE)
    plain = load_file(bend.directory / "model.safetensors")
    expected = nvfp4.global_scale(plain[key].abs().max())
    query = plain[key.replace("k_proj", "q_proj")]
    assert float(query.abs().max()) < 0.5 * float(plain[key].abs().max())
    packed, scales = nvfp4.quantize(query, expected)
    attention = "transformer.layers.3.attention."
    for name in ("q", "k", "v"):
        assert tensors[f"{attention}{name}.weights_scaling_factor_2"].tolist() == [expected]
    assert torch.equal(tensors[f"{attention}q.weight"], packed)
    found = tensors[f"{attention}q.weights_scaling_factor"]
    assert torch.equal(found.view(torch.uint8), scales.view(torch.uint8))

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key][0, 0] = math.nan

    bend.tensors(spoil)
    with pytest.raises(InputError, match="1 values are NaN or infinite") as caught:
        convert(bend.directory, tmp_path / "again", quantize="nvfp4", only="all", workers=1)
    assert key in (caught.value.where or "")


def test_blocks_that_vanish_are_counted(tmp_path: Path):
    from tests.converters.qwen38.conftest import Bend

    bend = Bend(write_deterministic(tmp_path / "hf", files=1, mtp=False, vision=False))

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        matrix = tensors["model.language_model.layers.2.mlp.experts.down_proj"][1]
        matrix[0, :16] *= 1e-9
        matrix[5, 16:32] *= 1e-9
        matrix[6, :16] = 0.0

    bend.tensors(shrink)
    report = convert(bend.directory, tmp_path / "ckpt", quantize="nvfp4")
    assert report.zeroed_values == {"transformer.layers.2.mlp.experts.down.weight": 32}
    assert any("32 values in 1 tensors became zero" in line for line in report.outcome())


def test_what_is_quantised_already_is_told(tmp_path: Path):
    source = fixture.radixark().write(tmp_path / "hf")
    with pytest.raises(InputError, match="nothing to quantise") as caught:
        convert(source, tmp_path / "ckpt", quantize="fp8")
    assert caught.value.found == "NVFP4 already"
    assert not (tmp_path / "ckpt").exists()
    # What is declared speaks of the source, not of what is made of it.
    report = convert(source, tmp_path / "ckpt", quantize="fp8-block", only="mlp")
    notes = [line for line in report.lines() if line.startswith("note: NVFP4 already and kept: ")]
    assert [note.split(": ")[2][:3] for note in notes] == ["8 ×", "8 ×"]
    quantization = read_checkpoint_config(tmp_path / "ckpt").quantization
    assert quantization.quant_algo == "MIXED_PRECISION"
    # The list of what stays plain is whole, as TensorRT-LLM needs it.
    assert {"lm_head", "transformer.layers.*.mlp.router"} <= set(quantization.exclude_modules)
