"""Which source tensors make which target tensors, and what happens when some are missing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from converters.checkpoint.config import WEIGHTS_FILE
from converters.checkpoint.convert import convert
from converters.checkpoint.source import SourceCheckpoint
from converters.definition import EngineLimits
from converters.dots3 import FAMILY
from converters.dots3.config import plan_config
from converters.dots3.weights import wanted_tensors
from converters.quantization.formats import FP8_BLOCK
from converters.registry import read_checkpoint_config
from plugins.support.errors import BuildError, InputError, UsageError
from tests.converters.dots3.conftest import Bend
from tests.converters.dots3.tiny import tiny
from tests.fixtures.dots3_random import CONFIG, draft_shapes

DRAFT_TENSORS = sorted(draft_shapes(CONFIG))


def converted(bend: Bend) -> dict[str, torch.Tensor]:
    target = bend.directory.parent / "checkpoint"
    convert(bend.directory, target)
    return load_file(target / WEIGHTS_FILE)


def refused(bend: Bend) -> str:
    target = bend.directory.parent / "checkpoint"
    with pytest.raises(InputError) as caught:
        convert(bend.directory, target)
    assert not target.exists()
    return str(caught.value)


def _same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_every_tensor_comes_from_where_it_should(bend: Bend) -> None:
    source = load_file(bend.directory / "model.safetensors")
    target = converted(bend)
    attention = {
        "q_a": "q_a_proj",
        "q_b": "q_b_proj",
        "kv_a": "kv_a_proj_with_mqa",
        "kv_b": "kv_b_proj",
        "gate": "g_proj",
        "dense": "o_proj",
        "q_a_layernorm": "q_a_layernorm",
        "kv_a_layernorm": "kv_a_layernorm",
        "k_rope_layernorm": "k_rope_only_layernorm",
    }
    layers = [(f"transformer.layers.{i}", f"model.layers.{i}") for i in range(6)]
    used = 0
    for ours, theirs in [*layers, ("mtp.layers.0", "model.layers.6")]:
        for name, other in attention.items():
            found = target[f"{ours}.attention.{name}.weight"]
            assert torch.equal(found, source[f"{theirs}.self_attn.{other}.weight"])
            used += 1
    assert used == 63
    # Gate rows lie above up rows, expert by expert.
    experts = target["transformer.layers.3.mlp.experts.gate_up.weight"]
    for expert in (0, 7):
        base = f"model.layers.3.mlp.experts.{expert}."
        joined = torch.cat([source[f"{base}gate_proj.weight"], source[f"{base}up_proj.weight"]])
        assert torch.equal(experts[expert], joined)
    bias = target["transformer.layers.3.mlp.router.bias"]
    assert torch.equal(bias, source["model.layers.3.mlp.gate.e_score_correction_bias"])
    assert torch.equal(
        target["mtp.vocab_embedding.weight"], source["model.mtp.embed_tokens.weight"]
    )
    assert not torch.equal(
        target["mtp.vocab_embedding.weight"], target["transformer.vocab_embedding.weight"]
    )
    # Nothing of the source is left over: as many numbers come out as go in.
    assert sum(t.numel() for t in target.values()) == sum(t.numel() for t in source.values())


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_other_prefixes(bend: Bend, tmp_path: Path, prefix: str) -> None:
    convert(bend.directory, tmp_path / "plain")
    bend.rename(lambda name: name.replace("model.", prefix, 1) if "lm_head" not in name else name)
    _same(converted(bend), load_file(tmp_path / "plain" / WEIGHTS_FILE))


def test_stacked_experts(bend: Bend, tmp_path: Path) -> None:
    """As transformers holds them in memory: one tensor per layer, gate rows first."""
    convert(bend.directory, tmp_path / "plain")

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(1, 6):
            base = f"model.layers.{layer}.mlp.experts."
            gates, ups, downs = (
                torch.stack([tensors.pop(f"{base}{e}.{part}_proj.weight") for e in range(8)])
                for part in ("gate", "up", "down")
            )
            tensors[f"{base}gate_up_proj"] = torch.cat([gates, ups], dim=1)
            tensors[f"{base}down_proj"] = downs

    bend.tensors(stack)
    _same(converted(bend), load_file(tmp_path / "plain" / WEIGHTS_FILE))


def test_the_draft_layer_has_nineteen_tensors() -> None:
    assert len(DRAFT_TENSORS) == 19


def test_a_checkpoint_without_draft_layer(bend: Bend) -> None:
    with_drafts = converted(bend)
    text = {name for name in with_drafts if not name.startswith("mtp.")}
    assert len(with_drafts) - len(text) == 18  # gate and up are one tensor here
    bend.tensors(lambda tensors: [tensors.pop(name) for name in DRAFT_TENSORS])
    other = Bend(bend.directory.rename(bend.directory.parent / "text"))
    target = bend.directory.parent / "text-checkpoint"
    convert(other.directory, target)
    assert load_file(target / WEIGHTS_FILE).keys() == text
    config = read_checkpoint_config(target)
    assert FAMILY.phases(config, 0) == ("context", "generation")
    with pytest.raises(UsageError, match="no draft layer"):
        FAMILY.phases(config, 2)


def test_phases_with_draft_layer(bend: Bend) -> None:
    converted(bend)
    config = read_checkpoint_config(bend.directory.parent / "checkpoint")
    assert FAMILY.phases(config, 0) == ("context", "generation")
    assert FAMILY.phases(config, 1) == ("context", "generation", "draft")


@pytest.mark.parametrize("missing", DRAFT_TENSORS)
def test_part_of_a_draft_layer_is_refused(bend: Bend, missing: str) -> None:
    message = refused(Bend(bend.tensors(lambda tensors: tensors.pop(missing))))
    assert "1 tensors of the checkpoint are not as the model needs them" in message
    assert f"missing: {missing.removeprefix('model.')}" in message


def test_a_draft_layer_of_full_geometry_is_refused(bend: Bend) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.6.self_attn.q_b_proj.weight"
        tensors[name] = torch.zeros(96, 48)

    bend.tensors(change)
    assert "expected shape [64, 40], found [96, 48]" in refused(bend)


def test_towers_are_left_out_and_said(bend: Bend) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["vision_encoder.blocks.0.attn.qkv.weight"] = torch.zeros(8, 8)
        tensors["audio_encoder.dots_encoder.speech_encoder.layers.6.fc1.weight"] = torch.zeros(8, 8)

    bend.tensors(add)
    report = convert(bend.directory, bend.directory.parent / "checkpoint")
    text = "\n".join(report.lines())
    assert "left out: 1 tensors (vision tower" in text
    assert "left out: 1 tensors (audio tower" in text


def test_an_audio_layer_is_no_draft_layer(bend: Bend) -> None:
    """A tower has a layer of the same number."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in DRAFT_TENSORS:
            del tensors[name]
        tensors["audio_encoder.dots_encoder.speech_encoder.layers.6.fc1.weight"] = torch.zeros(8, 8)

    bend.tensors(change)
    assert not any(name.startswith("mtp.") for name in converted(bend))


def test_unexpected_and_doubled_tensors(bend: Bend) -> None:
    def unexpected(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.self_attn.indexer.wk.weight"] = torch.zeros(16, 96)

    bend.tensors(unexpected)
    assert "unexpected: model.layers.2.self_attn.indexer.wk.weight" in refused(bend)

    def doubled(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"].clone()

    bend.tensors(doubled)
    assert "two tensors of the checkpoint mean the same one" in refused(bend)


RELEASED = {
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "moe_intermediate_size": 1536,
    "moe_shared_expert_intermediate_size": 1536,
    "num_hidden_layers": 46,
    "layer_types": [
        "full_attention" if layer in (0, *range(1, 46, 4)) else "sliding_attention"
        for layer in range(46)
    ],
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1024,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 64,
    "swa_q_lora_rank": 1024,
    "swa_kv_lora_rank": 1024,
    "swa_head_dim": 256,
    "swa_qk_nope_head_dim": 192,
    "swa_qk_rope_head_dim": 64,
    "swa_v_head_dim": 128,
    "sliding_window_size": 513,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 524288,
}
# Keys that the released file leaves out.
ABSENT = ("rope_scaling", "audio_config", "vision_config")


def test_the_released_size(bend: Bend) -> None:
    """Every tensor and every parameter of the published language model and its draft layer."""
    bend.without(*ABSENT)
    source = SourceCheckpoint.open(bend.config(**RELEASED))
    config = plan_config(source, "bfloat16")
    assert config.dots3.layer_types.count("full_attention") == 13
    wanted = wanted_tensors(config)
    parts = {part.name: part.shape for item in wanted for part in item.parts}
    draft = {name for name in parts if name.startswith(("mtp.", "layers.46."))}
    assert (len(parts) - len(draft), len(draft)) == (35_362, 19)

    def count(names: Iterable[str]) -> int:
        return sum(math.prod(parts[name]) for name in names)

    assert count(parts.keys() - draft) == 279_551_729_536
    assert count(draft) == 1_134_193_728
    # What is left of the published file size are the towers.
    biases = sum(name.endswith("e_score_correction_bias") for name in parts)
    assert biases == 45
    towers = 6_871_277_920 + 886_199_680
    vision_biases = sum((4, 8, 12, *range(16, 61, 4), 64, 64))
    assert 2 * (count(parts) + towers) + 2 * (biases * 256 + vision_biases) == 576_886_825_984
    grids = {
        "layers.0.self_attn.kv_a_proj_with_mqa": (5, 40),
        "layers.2.self_attn.kv_a_proj_with_mqa": (9, 40),
        "layers.2.self_attn.kv_b_proj": (160, 8),
        "layers.2.self_attn.g_proj": (1, 40),
        "layers.1.self_attn.indexer.weights_proj": (1, 40),
        "layers.1.mlp.experts.255.down_proj": (40, 12),
        "layers.0.mlp.gate_proj": (108, 40),
        "layers.46.eh_proj": (40, 80),
    }
    for name, grid in grids.items():
        assert FP8_BLOCK.scales[0].shape(*parts[f"{name}.weight"]) == grid, name


def test_text_engines_leave_the_draft_layer_alone() -> None:
    """Its 19 tensors are skipped without drafts and needed with them."""
    limits = EngineLimits(1, 128, chunk_size=64)
    driver = tiny().driver(limits)
    used = {key for phase in driver.programs.values() for key in phase.weights.values()}
    assert used and not any(key.startswith("mtp.") for key in used)
    drafting = tiny().driver(dataclasses.replace(limits, max_draft_len=1), phases=("draft",))
    needed = {key for key in drafting.programs["draft"].weights.values() if key.startswith("mtp.")}
    # Gate and up are one tensor here.
    assert len(needed) == 18
    for key in sorted(needed):
        weights = {name: tensor for name, tensor in tiny().weights.items() if name != key}
        with pytest.raises(BuildError, match="no such tensor"):
            dataclasses.replace(tiny(), weights=weights).driver(limits, phases=("draft",))
