"""Quantised checkpoints keep their exact codes and scales, and every broken one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from converters.checkpoint.config import QUANT_FILE, WEIGHTS_FILE
from converters.checkpoint.convert import ConversionReport, convert, plan_conversion
from converters.quantization.restore import restored_weights
from converters.registry import read_checkpoint_config
from plugins.support.errors import InputError
from tests.converters.qwen38.test_conversion import RENAMES
from tests.fixtures import qwen38_quantized as fixture
from tests.fixtures.qwen38_quantized import BASE, LAYOUTS, TABLE, Quantized


def target_name(name: str) -> str:
    for old, new in RENAMES:
        name = name.replace(old, new)
    return name


def run(checkpoint: Quantized, directory: Path) -> tuple[ConversionReport, Path]:
    source = checkpoint.write(directory / "hf")
    return convert(source, directory / "ckpt"), directory / "ckpt"


def wrong_tensors(checkpoint: Quantized, ckpt: Path) -> list[str]:
    """Targets whose meaning is not exactly the source's."""
    restored = restored_weights(ckpt)
    expected = {target_name(name): tensor for name, tensor in checkpoint.dequantised.items()}
    assert restored.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(restored[name], tensor)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_dequantised_values_are_exactly_equal(name: str, tmp_path: Path):
    checkpoint = LAYOUTS[name]()
    _, ckpt = run(checkpoint, tmp_path)
    assert wrong_tensors(checkpoint, ckpt) == []


def test_codes_and_scales_are_the_very_bytes(tmp_path: Path):
    checkpoint = fixture.radixark()
    _, ckpt = run(checkpoint, tmp_path)
    stored = load_file(ckpt / WEIGHTS_FILE)
    down = "transformer.layers.5.mlp.experts.down"
    source = f"{BASE}layers.5.mlp.experts.7.down_proj"
    for suffix, origin in (
        ("weight", "weight"),
        ("weights_scaling_factor", "weight_scale"),
        ("weights_scaling_factor_2", "weight_scale_2"),
        ("activation_scaling_factor", "input_scale"),
    ):
        found, expected = stored[f"{down}.{suffix}"][7], checkpoint.tensors[f"{source}.{origin}"]
        assert found.dtype == expected.dtype
        assert torch.equal(found.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))
    assert stored[f"{down}.weights_scaling_factor_2"].shape == (16, 1)
    gate_up = stored["transformer.layers.5.mlp.experts.gate_up.weights_scaling_factor_2"]
    assert gate_up.shape == (16, 2)
    assert bool((gate_up[:, 1] > 2 * gate_up[:, 0]).all())


def test_swapped_halves_and_scales_would_be_seen(tmp_path: Path):
    """The comparison above is able to fail."""
    checkpoint = fixture.radixark()
    _, ckpt = run(checkpoint, tmp_path)
    name = "transformer.layers.0.mlp.experts.gate_up.weight"
    tensors = load_file(ckpt / WEIGHTS_FILE)
    from safetensors.torch import save_file

    codes = tensors[name]
    save_file(tensors | {name: (codes >> 4) | (codes << 4)}, ckpt / WEIGHTS_FILE)
    assert wrong_tensors(checkpoint, ckpt) == [name]
    scales = f"{name}s_scaling_factor_2"
    gate_only = tensors[scales][:, :1].expand(-1, 2).contiguous()
    save_file(tensors | {scales: gate_only}, ckpt / WEIGHTS_FILE)
    assert wrong_tensors(checkpoint, ckpt) == [name]


def test_stacked_and_single_experts_give_the_same_bytes(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, single = run(fixture.radixark(), tmp_path / "a")
    _, stacked = run(fixture.stacked_nvfp4(), tmp_path / "b")
    assert (single / WEIGHTS_FILE).read_bytes() == (stacked / WEIGHTS_FILE).read_bytes()


def test_a_missing_scale_of_stacked_experts_is_named_as_the_others_are(tmp_path: Path):
    checkpoint = fixture.stacked_nvfp4()
    name = f"{BASE}layers.2.mlp.experts.gate_up_proj_weight_scale_2"
    del checkpoint.tensors[name]
    with pytest.raises(InputError) as caught:
        run(checkpoint, tmp_path)
    assert f"missing: {name.removeprefix(BASE)}\n" in str(caught.value)


def test_one_scale_per_stacked_expert_counts_for_gate_and_up(tmp_path: Path):
    checkpoint = fixture.stacked_nvfp4()
    name = f"{BASE}layers.0.mlp.experts.gate_up_proj_weight_scale_2"
    checkpoint.tensors[name] = checkpoint.tensors[name][:, 0]
    _, ckpt = run(checkpoint, tmp_path)
    stored = load_file(ckpt / WEIGHTS_FILE)
    found = stored["transformer.layers.0.mlp.experts.gate_up.weights_scaling_factor_2"]
    assert torch.equal(found, checkpoint.tensors[name][:, None].expand(-1, 2))


def test_one_algorithm_is_named_and_the_rest_excluded(tmp_path: Path):
    checkpoint = fixture.plain()
    checkpoint.experts(BASE, fixture.as_nvfp4)
    report, ckpt = run(checkpoint, tmp_path)
    block = read_checkpoint_config(ckpt).quantization
    assert (block.quant_algo, block.group_size) == ("NVFP4", 16)
    assert "transformer.layers.*.attention.q" in block.exclude_modules
    assert "mtp.layers.*.mlp.experts.down" in block.exclude_modules
    assert not any(
        name.startswith("transformer") and "mlp.experts" in name for name in block.exclude_modules
    )
    assert not (ckpt / QUANT_FILE).exists()
    assert any("declared nowhere" in line for line in report.lines())


def test_mixed_precision_writes_a_table_of_modules(tmp_path: Path):
    _, ckpt = run(fixture.nvidia(), tmp_path)
    assert read_checkpoint_config(ckpt).quantization.quant_algo == "MIXED_PRECISION"
    layers = json.loads((ckpt / QUANT_FILE).read_text())["quantized_layers"]
    assert layers["transformer.layers.3.mlp.experts.gate_up"] == {
        "quant_algo": "NVFP4",
        "group_size": 16,
    }
    assert layers["transformer.layers.1.ple.ngram_embedding"]["quant_algo"] == "FP8"
    assert layers["mtp.layers.0.mlp.experts.down"]["quant_algo"] == "FP8_BLOCK_SCALES"
    assert "transformer.layers.3.attention.q" not in layers


def test_declarations_are_understood_in_every_spelling(tmp_path: Path):
    checkpoint = fixture.nvidia()
    inline = checkpoint.config.pop("quantization_config")
    layers = inline["quantized_layers"]
    # The draft layer as the one after the last, the older name of its algorithm, another prefix.
    layers["model.layers.8.mlp.experts"] = layers.pop("mtp.layers.0.mlp.experts") | {
        "quant_algo": "FP8_BLOCK_SCALES"
    }
    source = checkpoint.write(tmp_path / "hf")
    (source / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": inline})
    )
    report = convert(source, tmp_path / "ckpt")
    assert not [line for line in report.lines() if line.startswith("note")]


def test_harmless_disagreements_are_reported(tmp_path: Path):
    checkpoint = fixture.radixark()
    quantization = checkpoint.config["quantization_config"]
    quantization["ignore"] += ["*.block_sparse_moe.*", "*.mlp.experts.*"]
    report, _ = run(checkpoint, tmp_path)
    notes = [line for line in report.lines() if line.startswith("note")]
    assert any("'*.block_sparse_moe.*' matches nothing" in note for note in notes)
    assert any("excluded but quantised: 8 × layers.*.mlp.experts" in note for note in notes)
    assert len([note for note in notes if "ple" in note]) == 0


def test_patterns_may_number_the_draft_layer_and_name_any_prefix(tmp_path: Path):
    checkpoint = fixture.radixark()
    checkpoint.config["quantization_config"]["ignore"] += [
        "model.layers.8.mlp.experts",
        "language_model.model.layers.3.self_attn.q_proj",
        "language_model.lm_head",
        "layers.2.mlp.shared_expert",
        "model.language_model.layers.5.mlp.experts.7.up_proj.weight",
    ]
    report, _ = run(checkpoint, tmp_path)
    assert not [line for line in report.lines() if "matches nothing" in line]


def test_plain_weights_under_one_declared_algorithm_are_reported(tmp_path: Path):
    checkpoint = fixture.radixark()
    checkpoint.config["quantization_config"]["ignore"].remove("*.self_attn.*")
    report, _ = run(checkpoint, tmp_path)
    notes = [line for line in report.lines() if "declared NVFP4 but plain" in line]
    assert len(notes) == 4
    assert "2 × layers.*.self_attn.q_proj (layers.3.self_attn.q_proj" in " ".join(notes)


def test_missing_activation_scales_are_reported(tmp_path: Path):
    """A layer without any is weight-only, whatever one name for the whole model says."""
    checkpoint = fixture.radixark()
    for name in [n for n in checkpoint.tensors if "layers.6.mlp" in n and "input_scale" in n]:
        del checkpoint.tensors[name]
    report, ckpt = run(checkpoint, tmp_path)
    notes = [line for line in report.lines() if "without scales of activations" in line]
    assert len(notes) == 2
    assert "layers.6.mlp.experts.0.gate_proj" in notes[1]
    stored = load_file(ckpt / WEIGHTS_FILE)
    assert "transformer.layers.6.mlp.experts.down.activation_scaling_factor" not in stored
    assert "transformer.layers.5.mlp.experts.down.activation_scaling_factor" in stored


@pytest.mark.parametrize("flat", [False, True])
def test_separate_declaration_in_both_forms(tmp_path: Path, flat: bool):
    checkpoint = fixture.nvidia()
    inline = checkpoint.config.pop("quantization_config")
    source = checkpoint.write(tmp_path / "hf")
    content = {"producer": {"name": "modelopt"}}
    content |= inline if flat else {"quantization": inline}
    (source / "hf_quant_config.json").write_text(json.dumps(content))
    report = convert(source, tmp_path / "ckpt")
    assert not [line for line in report.lines() if line.startswith("note")]


def test_a_declaration_that_names_nothing(tmp_path: Path):
    checkpoint = fixture.nvidia()
    checkpoint.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": None}
    report, _ = run(checkpoint, tmp_path)
    assert any("declared nowhere" in line for line in report.lines())


def test_a_declaration_of_the_table_says_nothing_of_the_rest(tmp_path: Path):
    checkpoint = fixture.radixark()
    del checkpoint.config["quantization_config"]
    report, _ = run(checkpoint, tmp_path)
    assert [line for line in report.lines() if line.startswith("note")] == [
        "note: quantised as NVFP4, declared nowhere"
    ]


def test_separate_and_inline_declaration_contradict(tmp_path: Path):
    """Whichever of two declarations the tensors contradict is named."""
    source = fixture.radixark().write(tmp_path / "hf")
    wrong = {"quant_algo": "FP8", "exclude_modules": [], "kv_cache_quant_algo": None}
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": wrong}))
    with pytest.raises(InputError, match="contradict each other") as caught:
        convert(source, tmp_path / "ckpt")
    assert "hf_quant_config.json" in (caught.value.where or "")
    assert caught.value.expected == "FP8, as declared"
    assert (caught.value.found or "").startswith("NVFP4 in groups of 16, by element types")


def test_named_layers_that_match_nothing(tmp_path: Path):
    checkpoint = fixture.nvidia()
    layers = checkpoint.config["quantization_config"]["quantized_layers"]
    layers["layers.48.mlp.experts"] = {"quant_algo": "NVFP4"}
    report, _ = run(checkpoint, tmp_path)
    (note,) = [line for line in report.lines() if line.startswith("note")]
    assert "quantised layer 'layers.48.mlp.experts' matches nothing" in note


def test_table_that_is_said_to_be_converted_but_is_not(tmp_path: Path):
    checkpoint = fixture.plain()
    checkpoint.experts(BASE, fixture.as_fp8_blocks)
    checkpoint.config["quantization_config"] = fixture.official_fp8().config["quantization_config"]
    with pytest.raises(InputError, match="contradict each other") as caught:
        run(checkpoint, tmp_path)
    assert "ngram_embedding" in (caught.value.where or "")
    assert (caught.value.found or "").startswith("plain weights")


def test_released_number_of_patterns_is_matched_quickly():
    """Hundreds of patterns, hundreds of thousands of tensors: one expert stands for all."""
    from converters.quantization.declared import _Spellings

    names = [
        f"model.language_model.layers.{layer}.mlp.experts.{expert}.up_proj.{suffix}"
        for layer in range(3)
        for expert in range(512)
        for suffix in ("weight", "weight_scale")
    ]
    spellings = _Spellings(names, lambda name: name.removeprefix("model.language_model."))
    assert len(spellings._all) < 100
    assert spellings.match("layers.2.mlp.experts.511.up_proj")
    assert spellings.match("model.layers.0.mlp.experts.*")
    assert spellings.match("*.up_proj")
    assert not spellings.match("layers.3.mlp")
    assert not spellings.match("*.down_proj")


Change = Callable[[Quantized], Any]


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Change:
    def apply(checkpoint: Quantized) -> None:
        value = checkpoint.tensors.pop(name)
        if change is not None:
            checkpoint.tensors[name] = change(value)

    return apply


def declare(**changes: Any) -> Change:
    return lambda checkpoint: checkpoint.config["quantization_config"].update(changes)


EXPERT = f"{BASE}layers.2.mlp.experts.5.up_proj"


def plain_expert(checkpoint: Quantized) -> None:
    """As exporters leave what they did not calibrate."""
    for name in [n for n in checkpoint.tensors if n.startswith(EXPERT)]:
        del checkpoint.tensors[name]
    checkpoint.tensors[f"{EXPERT}.weight"] = torch.zeros(48, 64).bfloat16()


# Layout, what is wrong with it, and part of the message.
BROKEN: list[tuple[str, Change, str]] = [
    ("radixark", tensor(f"{EXPERT}.weight", None), "missing: layers.2.mlp.experts.5.up_proj"),
    ("radixark", tensor(f"{EXPERT}.weight_scale", None), "up_proj.weight_scale"),
    ("radixark", tensor(f"{EXPERT}.weight_scale_2", None), "up_proj.weight_scale_2"),
    ("radixark", tensor(f"{EXPERT}.input_scale", None), "missing: layers.2.mlp.experts.5"),
    ("official fp8", tensor(f"{EXPERT}.weight_scale_inv", None), "up_proj"),
    ("radixark", tensor(f"{TABLE}.weight_scale", None), "ngram_embedding.weight_scale"),
    ("nvfp4 table", tensor(f"{TABLE}.weight_scale_2", None), "ngram_embedding.weight_scale_2"),
    ("nvfp4 table", tensor(f"{TABLE}.shard_3.weight_scale", None), "shard_3.weight_scale"),
    ("radixark", tensor(f"{TABLE}.shard_3.weight", lambda t: t.bfloat16()), "shard_3"),
    ("radixark", tensor(f"{TABLE}.shard_3.weight", None), "ngram_embedding.shard_3.weight"),
    ("radixark", plain_expert, "found a plain weight: layers.2.mlp.experts.5.up_proj.weight"),
    ("radixark", tensor(f"{EXPERT}.weight_scale_2", lambda t: t * 0), "zero, negative"),
    ("radixark", tensor(f"{EXPERT}.weight_scale_2", lambda t: t * torch.nan), "not finite"),
    ("radixark", tensor(f"{EXPERT}.weight_scale_2", lambda t: -t), "negative"),
    ("nvfp4 table", tensor(f"{EXPERT}.weight_global_scale", lambda t: t * 0), "zero"),
    (
        "radixark",
        tensor(f"{EXPERT}.weight_scale", lambda t: (t.float() * 0).to(t.dtype)),
        "scales are zero",
    ),
    ("radixark", tensor(f"{TABLE}.weight_scale", lambda t: t * 0), "1 scales are zero"),
    (
        "radixark",
        tensor(f"{EXPERT}.weight_scale", lambda t: t[:, :-1]),
        "expected shape [48, 4]",
    ),
    ("radixark", tensor(f"{EXPERT}.weight", lambda t: t[:, :-1]), "expected shape [48, 32]"),
    (
        "radixark",
        tensor(f"{EXPERT}.weight_scale", lambda t: t.float()),
        "expected float8_e4m3fn",
    ),
    (
        "radixark",
        tensor(f"{EXPERT}.weight", lambda t: torch.zeros(48, 64).bfloat16()),
        "a plain",
    ),
    ("radixark", declare(quant_algo="FP8"), "contradict each other"),
    ("radixark", declare(quant_algo="W4A8_AWQ"), "unsupported quantisation algorithm"),
    ("radixark", declare(quant_method="gptq"), "unsupported quantisation method"),
    ("official fp8", declare(weight_block_size=[64, 64]), "unsupported FP8 block size"),
    ("nvfp4 table", declare(ignore=["lm_head", "re:(.*"]), "no regular expression"),
    ("nvfp4 table", declare(ignore=["lm_head", 5]), "not a list of names"),
    ("nvfp4 table", declare(config_groups=None), "not an object"),
    ("nvidia", declare(quantized_layers=["layers.0"]), "not an object"),
    ("nvidia", declare(kv_cache_scheme=8), "not an object"),
]


@pytest.mark.parametrize(("name", "change", "message"), BROKEN)
def test_broken_checkpoints_are_refused(name: str, change: Change, message: str, tmp_path: Path):
    checkpoint = LAYOUTS[name]()
    change(checkpoint)
    with pytest.raises(InputError) as caught:
        run(checkpoint, tmp_path)
    assert message in str(caught.value)
    # Where, and what to do; what was expected or found.
    assert {"where", "fix"} < caught.value.details().keys()
    assert not (tmp_path / "ckpt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_scales_beside_a_plain_weight(tmp_path: Path):
    checkpoint = fixture.plain()
    checkpoint.tensors[f"{BASE}layers.3.self_attn.q_proj.weight_scale"] = torch.ones(())
    with pytest.raises(InputError, match="plain weight has scales beside it"):
        run(checkpoint, tmp_path)


def test_declared_but_plain(tmp_path: Path):
    checkpoint = fixture.plain()
    checkpoint.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    with pytest.raises(InputError, match="declares quantised weights, but all weights are plain"):
        run(checkpoint, tmp_path)


def test_contradictions_name_both_sides(tmp_path: Path):
    checkpoint = fixture.nvidia()
    layers = checkpoint.config["quantization_config"]["quantized_layers"]
    layers["mtp.layers.0.mlp.experts"]["quant_algo"] = "NVFP4"
    with pytest.raises(InputError) as caught:
        run(checkpoint, tmp_path)
    assert "mtp.layers.0.mlp.experts" in (caught.value.where or "")
    assert caught.value.expected == "NVFP4 in groups of 128, as declared"
    assert (caught.value.found or "").startswith("FP8_BLOCK_SCALES")


@pytest.mark.parametrize("declared", ["nvfp4", "int8"])
def test_the_table_is_what_its_bytes_are(declared: str, tmp_path: Path):
    checkpoint = fixture.radixark()
    checkpoint.config["text_config"]["ple_embedding_dtype"] = declared
    with pytest.raises(InputError, match=r"contradict|unsupported type of the n-gram table"):
        run(checkpoint, tmp_path)


@pytest.mark.parametrize("scales", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8_is_refused_by_name(scales: torch.dtype, tmp_path: Path):
    checkpoint = fixture.plain()
    name = f"{BASE}layers.3.self_attn.q_proj"
    weight = checkpoint.tensors.pop(f"{name}.weight")
    checkpoint.tensors[f"{name}.weight"] = weight.to(torch.float8_e4m3fn)
    ones = torch.full((weight.shape[0], weight.shape[1] // 32), 127, dtype=torch.uint8)
    checkpoint.tensors[f"{name}.weight_scale"] = ones.view(scales)
    with pytest.raises(InputError, match="MXFP8 weights are not supported"):
        run(checkpoint, tmp_path)


def test_what_must_stay_precise_is_refused_in_fp8(tmp_path: Path):
    checkpoint = fixture.plain()
    checkpoint.linears([f"{BASE}layers.3.mlp.gate"], fixture.as_fp8)
    with pytest.raises(InputError) as caught:
        run(checkpoint, tmp_path)
    assert "expected bfloat16, found float8_e4m3fn" in str(caught.value)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8_is_refused_in_every_spelling(tmp_path: Path, suffix: str, dtype: torch.dtype):
    checkpoint = fixture.plain()
    name = f"{BASE}layers.3.self_attn.q_proj"
    weight = checkpoint.tensors[f"{name}.weight"]
    checkpoint.tensors[f"{name}.weight"] = weight.to(torch.float8_e4m3fn)
    scales = torch.full((weight.shape[0], weight.shape[1] // 32), 127, dtype=torch.uint8)
    checkpoint.tensors[f"{name}.{suffix}"] = scales.view(dtype)
    with pytest.raises(InputError, match="MXFP8 weights are not supported") as caught:
        run(checkpoint, tmp_path)
    assert "layers.3.self_attn.q_proj" in (caught.value.where or "")


def test_unsupported_methods_are_told_before_their_tensors(tmp_path: Path):
    """Not as hundreds of missing and unexpected tensors."""
    checkpoint = fixture.plain()
    name = f"{BASE}layers.3.self_attn.q_proj"
    checkpoint.tensors[f"{name}.qweight"] = checkpoint.tensors.pop(f"{name}.weight").int()
    layers = {"layers.3.self_attn.q_proj": {"quant_algo": "MXFP8"}}
    for declared, message in (
        ({"quant_method": "awq"}, "unsupported quantisation method"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers},
            "unsupported quantisation algorithm",
        ),
    ):
        checkpoint.config["quantization_config"] = declared
        with pytest.raises(InputError, match=message) as caught:
            convert(checkpoint.write(tmp_path / message), tmp_path / "ckpt")
        assert caught.value.found in ("awq", "MXFP8")


def test_one_scale_per_row_is_refused_by_name(tmp_path: Path):
    checkpoint = fixture.plain()
    name = f"{BASE}layers.3.self_attn.q_proj"
    weight = checkpoint.tensors[f"{name}.weight"]
    checkpoint.tensors[f"{name}.weight"] = weight.to(torch.float8_e4m3fn)
    checkpoint.tensors[f"{name}.weight_scale"] = torch.ones(weight.shape[0], 1)
    with pytest.raises(InputError, match="one scale per row are not supported"):
        run(checkpoint, tmp_path)


def test_a_missing_scale_is_named_in_the_format_of_the_rest(tmp_path: Path):
    checkpoint = fixture.official_fp8()
    del checkpoint.tensors[f"{EXPERT}.weight_scale_inv"]
    with pytest.raises(InputError) as caught:
        run(checkpoint, tmp_path)
    found = caught.value.found or ""
    assert "missing: layers.2.mlp.experts.5.up_proj.weight_scale_inv" in found
    assert caught.value.what.startswith("1 tensors")


def test_a_whole_missing_expert(tmp_path: Path):
    checkpoint = fixture.nvidia()
    for name in [n for n in checkpoint.tensors if "layers.2.mlp.experts.5." in n]:
        del checkpoint.tensors[name]
    with pytest.raises(InputError) as caught:
        run(checkpoint, tmp_path)
    for projection in ("gate_proj", "up_proj", "down_proj"):
        assert f"layers.2.mlp.experts.5.{projection}.weight" in (caught.value.found or "")


def test_group_sizes_are_compared(tmp_path: Path):
    checkpoint = fixture.radixark()
    declare(group_size=32)(checkpoint)
    with pytest.raises(InputError, match="contradict each other") as caught:
        run(checkpoint, tmp_path)
    assert caught.value.expected == "NVFP4 in groups of 32, as declared"
    assert (caught.value.found or "").startswith("NVFP4 in groups of 16")


@pytest.mark.parametrize("value", ["16", 0, True])
def test_group_sizes_are_numbers(tmp_path: Path, value: Any):
    checkpoint = fixture.radixark()
    declare(group_size=value)(checkpoint)
    with pytest.raises(InputError, match="not a number of columns"):
        run(checkpoint, tmp_path)


def test_what_a_mixed_declaration_does_not_list_is_reported(tmp_path: Path):
    checkpoint = fixture.nvidia()
    layers = checkpoint.config["quantization_config"]["quantized_layers"]
    del layers[f"{BASE}layers.4.mlp.experts"]
    report, _ = run(checkpoint, tmp_path)
    notes = [line for line in report.lines() if "quantised but not listed" in line]
    assert len(notes) == 2
    assert all("layers.4.mlp.experts.0." in note for note in notes)
    layers.clear()
    plan = plan_conversion(checkpoint.write(tmp_path / "none"), tmp_path / "again")
    notes = [note for note in plan.notes if "quantised but not listed" in note]
    assert [note.split(": ")[1].split(" (")[0] for note in notes] == [
        "8 × layers.*.mlp.experts.*.down_proj",
        "8 × layers.*.mlp.experts.*.gate_proj",
        "mtp.layers.0.mlp.experts.0.down_proj",
        "mtp.layers.0.mlp.experts.0.gate_proj",
    ]


def test_two_declarations_that_differ_are_told(tmp_path: Path):
    checkpoint = fixture.radixark()
    source = checkpoint.write(tmp_path / "hf")
    inline = checkpoint.config["quantization_config"]
    excluded = [*inline["ignore"][:-1], "*.norm*"]
    separate = {"quant_algo": "NVFP4", "exclude_modules": excluded}
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": separate}))
    report = convert(source, tmp_path / "ckpt")
    notes = [line for line in report.lines() if line.startswith("note: only")]
    assert len(notes) == 2
    assert "config.json: quantization_config excludes: lm_head" in notes[0]
    assert "hf_quant_config.json: quantization excludes: *.norm*" in notes[1]


@pytest.mark.parametrize("on_disk", ["model.language_model.", "model.", "language_model.model."])
@pytest.mark.parametrize("declared", ["model.language_model.", "model.", ""])
def test_prefixes_of_tensors_and_declarations_are_independent(
    tmp_path: Path, on_disk: str, declared: str
):
    checkpoint = fixture.nvidia()
    checkpoint.tensors = {
        name.replace(BASE, on_disk): tensor for name, tensor in checkpoint.tensors.items()
    }
    block = checkpoint.config["quantization_config"]
    block["quantized_layers"] = {
        name if name.startswith("mtp.") else declared + name.removeprefix(BASE): entry
        for name, entry in block["quantized_layers"].items()
    }
    block["ignore"] = [f"{declared}layers.3.self_attn.q_proj", f"{declared}layers.8.mlp.gate"]
    plan = plan_conversion(checkpoint.write(tmp_path / "hf"), tmp_path / "ckpt")
    assert not plan.notes
    wrong = block["quantized_layers"][f"{declared}layers.2.mlp.experts"]
    wrong["quant_algo"] = "FP8"
    wrong["group_size"] = None
    with pytest.raises(InputError, match="contradict each other"):
        plan_conversion(checkpoint.write(tmp_path / "hf2"), tmp_path / "ckpt")


def test_a_declared_table_that_is_plain(tmp_path: Path):
    checkpoint = fixture.plain()
    checkpoint.experts(BASE, fixture.as_fp8_blocks)
    checkpoint.config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_convert": ["ple.ple_embedding.ngram_embedding"],
    }
    with pytest.raises(InputError, match="contradict each other") as caught:
        run(checkpoint, tmp_path)
    assert "ngram_embedding" in (caught.value.where or "")
    assert (caught.value.found or "").startswith("plain weights")


def test_mxfp8_with_other_formats_is_refused_by_name(tmp_path: Path):
    """The layout that no engine here decodes; its recurrence's gates are MXFP8 too."""
    checkpoint = fixture.community_b()
    with pytest.raises(InputError, match="MXFP8 weights are not supported"):
        run(checkpoint, tmp_path)
    layers = {"layers.3.self_attn.q_proj": {"quant_algo": "MXFP8", "group_size": 32}}
    checkpoint.config["quantization_config"] = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    with pytest.raises(InputError, match="unsupported quantisation algorithm") as caught:
        convert(checkpoint.write(tmp_path / "declared"), tmp_path / "ckpt")
    assert caught.value.found == "MXFP8"


def test_the_older_form_inline(tmp_path: Path):
    checkpoint = fixture.radixark()
    inner = checkpoint.config["quantization_config"]
    inner["exclude_modules"] = inner.pop("ignore")
    inner.pop("quant_method")
    checkpoint.config["quantization_config"] = {
        "producer": {"name": "modelopt"},
        "quant_method": "modelopt",
        "quantization": inner,
    }
    report, _ = run(checkpoint, tmp_path)
    assert not report.plan.notes
    inner["quant_algo"] = "FP8"
    with pytest.raises(InputError, match="contradict each other"):
        plan_conversion(checkpoint.write(tmp_path / "wrong"), tmp_path / "again")


@pytest.mark.parametrize("name", ["FP8_PB_WO", "fp8_pb_wo", "FP8_PB", "FP8_BLOCK_SCALES"])
@pytest.mark.parametrize("make", [fixture.as_fp8_pb_wo, fixture.as_fp8_blocks_modelopt])
def test_one_block_is_a_block(name: str, make: Any, tmp_path: Path):
    """A matrix of one block has one scale, and is no matrix with one scale."""
    checkpoint = fixture.plain()
    module = f"{BASE}layers.2.mlp.shared_expert.down_proj"
    assert max(checkpoint.tensors[f"{module}.weight"].shape) <= 128
    checkpoint.linears([module], make)
    checkpoint.config["quantization_config"] = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {module: {"quant_algo": name, "group_size": 128}},
    }
    report, ckpt = run(checkpoint, tmp_path)
    assert not report.plan.notes
    assert wrong_tensors(checkpoint, ckpt) == []
    assert read_checkpoint_config(ckpt).quantization.quant_algo == "FP8_BLOCK_SCALES"


def test_names_of_fp8_checkpoints_are_suffixes_too(tmp_path: Path):
    """As transformers reads them."""
    checkpoint = fixture.official_fp8()
    names = checkpoint.config["quantization_config"]["modules_to_not_convert"]
    names += ["mlp.gate", "linear_attn.in_proj_a", "gate_proj", "no_such_proj"]
    report, _ = run(checkpoint, tmp_path)
    place = f"({tmp_path / 'hf' / 'config.json'}: quantization_config)"
    assert report.plan.notes[0] == f"exclusion 'no_such_proj' matches nothing {place}"
    rest = [note.split(": ")[1].split(" (")[0] for note in report.plan.notes[1:]]
    assert "8 × layers.*.mlp.experts.*.gate_proj" in rest
    assert all(note.startswith("excluded but quantised") for note in report.plan.notes[1:3])


def test_draft_tensors_below_the_model(tmp_path: Path):
    checkpoint = fixture.nvidia()
    expected = fixture.nvidia().write(tmp_path / "plain")
    checkpoint.tensors = {
        f"model.{name}" if name.startswith("mtp.") else name: tensor
        for name, tensor in checkpoint.tensors.items()
    }
    layers = checkpoint.config["quantization_config"]["quantized_layers"]
    layers["model.mtp.layers.0.mlp.experts"] = layers.pop("mtp.layers.0.mlp.experts")
    report, ckpt = run(checkpoint, tmp_path)
    assert not report.plan.notes
    convert(expected, tmp_path / "expected")
    assert (ckpt / WEIGHTS_FILE).read_bytes() == (tmp_path / "expected" / WEIGHTS_FILE).read_bytes()


def test_scales_of_activations_are_reciprocals_too(tmp_path: Path):
    """In compressed-tensors' form; engines divide by what is written."""
    checkpoint = fixture.nvfp4_table()
    modules = [n.removesuffix(".weight_packed") for n in checkpoint.tensors if "_packed" in n]
    for number, module in enumerate(modules):
        scale = torch.tensor([1.0 / (0.001 + 0.0001 * number)])
        checkpoint.tensors[f"{module}.input_global_scale"] = scale
    _, ckpt = run(checkpoint, tmp_path)
    stored = load_file(ckpt / WEIGHTS_FILE)
    found = stored["transformer.layers.2.mlp.experts.gate_up.activation_scaling_factor"]
    up = checkpoint.tensors[f"{EXPERT}.input_global_scale"]
    assert found.shape == (16, 2)
    assert float(found[5, 1]) == float(1.0 / up)
    del checkpoint.tensors[f"{EXPERT}.input_global_scale"]
    with pytest.raises(InputError, match=r"missing: layers\.2\.mlp\.experts\.5\.up_proj\.input"):
        plan_conversion(checkpoint.write(tmp_path / "missing"), tmp_path / "again")


def test_several_groups_of_compressed_tensors(tmp_path: Path):
    """NVFP4 experts, block FP8 and per-tensor FP8 linears: each layer is held to its own group."""

    def group(targets: str, bits: int, strategy: str, size: int | None = None) -> Any:
        weights = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": size}
        return {"targets": [targets], "weights": weights}

    checkpoint = fixture.plain()
    checkpoint.experts(BASE, fixture.as_packed_nvfp4)
    attention = f"{BASE}layers.3.self_attn."
    checkpoint.linears([f"{attention}q_proj", f"{attention}o_proj"], fixture.as_fp8_blocks_modelopt)
    checkpoint.linears([f"{attention}v_proj"], fixture.as_fp8)
    groups = {
        "group_0": group("re:.*experts.*", 4, "tensor_group", 16),
        "group_1": group("re:.*(q|o)_proj", 8, "block"),
        "group_2": group("re:.*v_proj", 8, "tensor"),
    }
    checkpoint.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    report, ckpt = run(checkpoint, tmp_path)
    assert not report.plan.notes
    assert wrong_tensors(checkpoint, ckpt) == []
    layers = json.loads((ckpt / QUANT_FILE).read_text())["quantized_layers"]
    assert layers["transformer.layers.3.attention.q"]["quant_algo"] == "FP8_BLOCK_SCALES"
    assert layers["transformer.layers.3.attention.v"]["quant_algo"] == "FP8"
    for wrong, message in (
        (group("Linear", 8, "channel"), "unsupported compressed-tensors weights"),
        (group("Linear", 8, "block"), "contradict each other"),
    ):
        checkpoint.config["quantization_config"]["config_groups"] = {"group_0": wrong}
        with pytest.raises(InputError, match=message):
            plan_conversion(checkpoint.write(tmp_path / message), tmp_path / "again")
    block = checkpoint.config["quantization_config"]
    # A name counts before the class; what no group names is told.
    block["config_groups"] = {
        "group_0": group("Linear", 4, "tensor_group", 16),
        "group_1": group("re:.*(q|o)_proj", 8, "block"),
        "group_2": group("re:.*none", 8, "tensor"),
    }
    with pytest.raises(InputError, match="contradict each other") as caught:
        plan_conversion(checkpoint.write(tmp_path / "linear"), tmp_path / "again")
    assert "layers.3.self_attn.v_proj" in (caught.value.where or "")
    assert caught.value.expected == "NVFP4 in groups of 16, as declared"
    block["ignore"] += ["re:.*v_proj"]
    notes = plan_conversion(checkpoint.write(tmp_path / "ignored"), tmp_path / "again").notes
    assert [note.split(" (")[0] for note in notes] == [
        "target 're:.*none' matches nothing",
        "excluded but quantised: layers.3.self_attn.v_proj",
    ]
    mxfp8 = group("Linear", 8, "group", 32)
    checkpoint.config["quantization_config"] |= {
        "format": "mxfp8-quantized",
        "config_groups": {"group_0": mxfp8},
    }
    with pytest.raises(InputError, match="unsupported compressed-tensors weights") as caught:
        plan_conversion(checkpoint.write(tmp_path / "mxfp8"), tmp_path / "again")
    assert "format mxfp8-quantized" in (caught.value.found or "")


def test_every_layer_in_another_format(tmp_path: Path):
    """What holds of the first layer holds of no other; the draft layer is NVFP4 for once."""
    checkpoint = fixture.plain()
    makes = {
        1: fixture.as_nvfp4,
        2: fixture.as_fp8,
        3: fixture.as_fp8_blocks,
        4: fixture.as_fp8_blocks_modelopt,
        5: fixture.as_fp8_pb_wo,
        6: fixture.as_packed_nvfp4,
    }
    for layer, make in makes.items():
        checkpoint.experts(f"{BASE}layers.{layer}.", make)
    checkpoint.experts("mtp.", fixture.as_nvfp4)
    _, ckpt = run(checkpoint, tmp_path)
    assert wrong_tensors(checkpoint, ckpt) == []
    layers = json.loads((ckpt / QUANT_FILE).read_text())["quantized_layers"]
    found = {name: entry["quant_algo"] for name, entry in layers.items() if "gate_up" in name}
    blocks = "FP8_BLOCK_SCALES"
    kinds = {1: "NVFP4", 2: "FP8", 3: blocks, 4: blocks, 5: blocks, 6: "NVFP4"}
    assert found == {
        **{
            f"transformer.layers.{layer}.mlp.experts.gate_up": kind for layer, kind in kinds.items()
        },
        "mtp.layers.0.mlp.experts.gate_up": "NVFP4",
    }


def test_the_table_of_layers_beside_is_held_to_the_tensors_too(tmp_path: Path):
    checkpoint = fixture.nvidia()
    source = checkpoint.write(tmp_path / "hf")
    layers = checkpoint.config["quantization_config"]["quantized_layers"]
    (source / QUANT_FILE).write_text(json.dumps({"quantized_layers": layers}))
    assert not convert(source, tmp_path / "ckpt").plan.notes
    layers[f"{BASE}layers.2.mlp.experts"]["quant_algo"] = "FP8"
    (source / QUANT_FILE).write_text(json.dumps({"quantized_layers": layers}))
    with pytest.raises(InputError, match="contradict each other") as caught:
        convert(source, tmp_path / "again")
    assert QUANT_FILE in (caught.value.where or "")


def test_one_part_in_another_format_is_told_once(tmp_path: Path):
    """Not by every scale that it lacks or has too many."""
    checkpoint = fixture.radixark()
    plain_expert(checkpoint)
    with pytest.raises(InputError) as caught:
        run(checkpoint, tmp_path)
    target = "transformer.layers.2.mlp.experts.gate_up.weight"
    name = "layers.2.mlp.experts.5.up_proj.weight"
    assert (caught.value.found or "").split("\n")[1:] == [
        f"    expected NVFP4 like the rest of {target}, found a plain weight: {name}"
    ]
    checkpoint = fixture.plain()
    checkpoint.experts(BASE, lambda module, x: ({f"{module}.weight": x.bfloat16()}, x))
    del checkpoint.tensors[f"{EXPERT}.weight"]
    weight = checkpoint.dequantised[f"{BASE}layers.2.mlp.experts.gate_up_proj"][5, 48:]
    checkpoint.tensors |= fixture.as_nvfp4(EXPERT, weight)[0]
    with pytest.raises(InputError) as caught:
        convert(checkpoint.write(tmp_path / "other"), tmp_path / "ckpt")
    assert (caught.value.found or "").split("\n")[1:] == [
        f"    expected a plain weight like the rest of {target}, found NVFP4: {name}"
    ]


def test_what_must_stay_precise_is_told_once(tmp_path: Path):
    checkpoint = fixture.plain()
    checkpoint.linears(["lm_head", f"{BASE}layers.3.mlp.gate"], fixture.as_nvfp4)
    with pytest.raises(InputError) as caught:
        run(checkpoint, tmp_path)
    name = f"{BASE}layers.3.mlp.gate.weight"
    assert (caught.value.found or "").split("\n")[1:] == [
        f"    expected bfloat16, found uint8 with scales: {each}"
        for each in ("lm_head.weight", name)
    ]


def test_one_scale_as_transformers_spells_it(tmp_path: Path):
    """The same bytes as in Model Optimizer's spelling; a grid of blocks it is not."""
    module = f"{BASE}layers.3.self_attn.q_proj"
    made = []
    for name, make in (("a", fixture.as_fp8_transformers), ("b", fixture.as_fp8)):
        checkpoint = fixture.plain()
        checkpoint.experts(BASE, make)
        checkpoint.linears([module], make)
        checkpoint.config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "modules_to_not_convert": ["lm_head"],
        }
        (tmp_path / name).mkdir()
        report, ckpt = run(checkpoint, tmp_path / name)
        assert not [n for n in report.plan.notes if "but plain" not in n]
        assert wrong_tensors(checkpoint, ckpt) == []
        made.append((ckpt / WEIGHTS_FILE).read_bytes())
        assert read_checkpoint_config(ckpt).quantization.quant_algo == "FP8"
    assert made[0] == made[1]
    checkpoint = fixture.plain()
    checkpoint.linears([module], fixture.as_fp8_transformers)
    scale = checkpoint.tensors[f"{module}.weight_scale_inv"]
    del checkpoint.tensors[f"{module}.activation_scale"]
    checkpoint.tensors[f"{module}.weight_scale_inv"] = scale.reshape(1, 1)
    with pytest.raises(InputError, match=r"expected shape \[3, 1\], found \[1, 1\]"):
        plan_conversion(checkpoint.write(tmp_path / "grid"), tmp_path / "again")


def test_entries_of_single_experts_speak_of_stacked_ones(tmp_path: Path):
    checkpoint = fixture.stacked_nvfp4()
    layers = {
        f"{BASE}layers.{layer}.mlp.experts.{expert}.{name}_proj": {"quant_algo": "NVFP4"}
        for layer in range(8)
        for expert in range(16)
        for name in ("gate", "up", "down")
    }
    layers[TABLE] = {"quant_algo": "FP8"}
    block = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    checkpoint.config["quantization_config"] = block
    assert not plan_conversion(checkpoint.write(tmp_path / "hf"), tmp_path / "ckpt").notes
    layers[EXPERT] = {"quant_algo": "FP8"}
    with pytest.raises(InputError, match="contradict each other") as caught:
        plan_conversion(checkpoint.write(tmp_path / "wrong"), tmp_path / "ckpt")
    assert "layers.2.mlp.experts" in (caught.value.where or "")
