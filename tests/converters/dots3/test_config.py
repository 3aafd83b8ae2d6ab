"""The configuration: three layouts, no silent default, and everything that is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from converters.checkpoint.source import SourceCheckpoint
from converters.dots3.config import Dots3CheckpointConfig, plan_config
from plugins.support.errors import InputError
from tests.converters.dots3.conftest import Bend
from tests.fixtures.dots3_random import CONFIG


def planned(directory: Path) -> Dots3CheckpointConfig:
    return plan_config(SourceCheckpoint.open(directory), "float32")


def refused(directory: Path) -> str:
    with pytest.raises(InputError) as caught:
        planned(directory)
    return str(caught.value)


def test_the_released_layout(bend: Bend) -> None:
    config = planned(bend.directory)
    block = config.dots3
    assert (block.full.heads, block.full.kv_rank, block.full.nope) == (4, 32, 16)
    assert (block.sliding.heads, block.sliding.kv_rank, block.sliding.nope) == (2, 56, 24)
    assert (block.full.rotary_base, block.sliding.rotary_base) == (8e7, 5e4)
    assert block.sliding_window == 9
    assert (block.dense_layers, block.draft_layers) == (1, 1)
    assert block.index_rope == "leading"
    # generation_config.json decides, not the model configuration's 2.
    assert config.eos_token_id == [2, 3]


@pytest.mark.parametrize("wrapped", [True, False])
def test_what_transformers_writes_means_the_same(bend: Bend, wrapped: bool) -> None:
    """Its own spellings, nested beside leftovers of the flat layout or at the top."""
    from transformers import Dots3NoteConfig

    flat = planned(bend.directory)
    whole = Dots3NoteConfig(**CONFIG)
    path = bend.directory / "config.json"
    written = whole if wrapped else whole.text_config
    written.save_pretrained(bend.directory)
    assert ("text_config" in json.loads(path.read_text())) == wrapped
    other = planned(bend.directory)
    assert other.dots3 == flat.dots3
    assert other.model_dump(exclude={"source"}) == flat.model_dump(exclude={"source"})


# Stated defaults, keys without influence, and keys that other keys repeat.
OPTIONAL = {
    "architectures",
    "attention_bias",
    "attention_dropout",
    "audio_config",
    "audio_token_id",
    "bos_token_id",
    "eos_token_id",
    "image_token_id",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "pad_token_id",
    "rope_scaling",
    "swa_head_dim",
    "tie_word_embeddings",
    "use_dsa",
    "video_token_id",
    "vision_config",
}


@pytest.mark.parametrize("key", sorted(CONFIG.keys() - OPTIONAL - {"model_type"}))
def test_no_default_is_assumed(bend: Bend, key: str) -> None:
    """Above all not a window of 512, a theta of 1e4 or 8 expert groups."""
    assert f"{key}: missing, and no default is safe" in refused(bend.without(key))


@pytest.mark.parametrize("key", sorted(OPTIONAL - {"bos_token_id", "pad_token_id"}))
def test_keys_that_may_be_absent(bend: Bend, key: str) -> None:
    whole = planned(bend.directory).model_dump(exclude={"source"})
    assert planned(bend.without(key)).model_dump(exclude={"source"}) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Values that other models have and this one would take without a word.
        ({"n_group": 8}, "n_group: expected 1"),
        ({"topk_group": 4}, "topk_group: expected 1"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave: expected True"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: expected 1"),
        ({"mtp_layer_types": ["full_attention"]}, "mtp_layer_types: expected"),
        # In some implementations, but in no release.
        ({"attention_gate_type": "elementwise"}, "attention_gate_type: expected 'headwise'"),
        ({"swa_attention_gate_type": None}, "swa_attention_gate_type: expected 'headwise'"),
        ({"mtp_use_moe": True}, "mtp_use_moe: expected False"),
        ({"use_dsa": False}, "use_dsa: expected True"),
        ({"use_sliding_window": False}, "use_sliding_window: expected True"),
        ({"apply_mla_qkv_lora_rescale": False}, "apply_mla_qkv_lora_rescale: expected True"),
        ({"k_rope_only_layernorm": False}, "k_rope_only_layernorm: expected True"),
        ({"qk_layernorm": False}, "qk_layernorm: expected True"),
        ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method: expected 'noaux_tc'"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: expected None"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: expected False"),
        ({"attention_bias": True}, "attention_bias: expected False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: expected 1"),
        ({"moe_layer_freq": [0, 1, 1, 1, 1, 1]}, "moe_layer_freq: expected 1"),
        # Contradictions.
        ({"num_key_value_heads": 2}, "num_key_value_heads: expected 4"),
        ({"swa_num_key_value_heads": 1}, "swa_num_key_value_heads: expected 2"),
        ({"swa_head_dim": 24}, "swa_head_dim: expected 32"),
        ({"layer_types": ["full_attention"] * 6}, "both kinds must occur"),
        ({"layer_types": ["full_attention"]}, "1 entries for num_hidden_layers = 6"),
        ({"layer_types": ["linear_attention"] * 6}, "unknown kinds ['linear_attention']"),
        ({"num_experts_per_tok": 9}, "more than n_routed_experts"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim: 7 is odd"),
        ({"swa_qk_rope_head_dim": 7, "swa_head_dim": None}, "swa_qk_rope_head_dim: 7 is odd"),
        ({"v_head_dim": 512}, "values are wider than keys"),
        ({"swa_v_head_dim": 512}, "values are wider than keys"),
        ({"index_head_dim": 4}, "smaller than the 8 rotated lanes"),
        # Wrong types and misspelt keys.
        ({"sliding_window_size": "9"}, "sliding_window_size: expected an integer"),
        ({"rope_theta": "8e7"}, "rope_theta: expected a positive number"),
        ({"sliding_windw_size": 9}, "did you mean 'sliding_window_size'?"),
        ({"vocab_size": 3}, "eos_token_id must be token ids of the vocabulary"),
    ],
    ids=str,
)
def test_refused_by_name(bend: Bend, changes: dict[str, Any], message: str) -> None:
    assert message in refused(bend.config(**changes))


@pytest.mark.parametrize(
    ("tower", "change", "message"),
    [
        ("audio_config", {"use_causal": True}, "audio_config.use_causal: expected False"),
        ("audio_config", {"use_conv2d_stem": False}, "audio_config.use_conv2d_stem: expected True"),
        (
            "vision_config",
            {"adapter_type": "pixel_shuffle_mlp"},
            "vision_config.adapter_type: expected 'patch_merger'",
        ),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_towers_that_were_never_released_are_refused_by_name(
    bend: Bend, tower: str, change: dict[str, Any], message: str, nested: bool
) -> None:
    """They stay out of the engines, but such a checkpoint is another model."""
    if nested:
        from transformers import Dots3NoteConfig

        Dots3NoteConfig(**CONFIG).save_pretrained(bend.directory)
    assert message in refused(bend.edit(lambda config: config[tower].update(change)))


def test_a_wrapped_layout_is_not_read_at_the_top(bend: Bend) -> None:
    """Flat keys inside `text_config` under the flat name are the flat layout, wherever they lie;
    a wrapper around nothing has no keys at all.
    """
    message = refused(bend.edit(lambda config: config.update(text_config={})))
    assert "text_config.hidden_size: missing, and no default is safe" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 3}, "the sliding layers differ among themselves"),
        (None, "a full layer has a geometry of its own"),
    ],
)
def test_uneven_layers_are_refused(bend: Bend, change: dict[str, Any] | None, message: str) -> None:
    from transformers import Dots3NoteConfig

    Dots3NoteConfig(**CONFIG).text_config.save_pretrained(bend.directory)

    def edit(config: dict[str, Any]) -> None:
        layers = config["per_layer_config"]
        if change is None:
            layers["0"] = dict(layers["2"])
        else:
            layers["3"] |= change

    assert message in refused(bend.edit(edit))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"indexer_rope_layout": "leading", "indexer_rope_converted_from": "tail"}, "leading"),
        ({"indexer_rope_layout": "leading"}, "leading"),
        ({"indexer_rope_layout": "tail"}, "tail"),
        ({}, "tail"),
    ],
    ids=str,
)
def test_layout_of_the_index_heads(bend: Bend, metadata: dict[str, str], expected: str) -> None:
    assert planned(bend.metadata(**metadata)).dots3.index_rope == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"indexer_rope_layout": "middle"}, "unknown layout of the index heads"),
        ({"indexer_rope_converted_from": "tail"}, "it is not said to which layout"),
    ],
)
def test_unknown_layouts_are_refused(bend: Bend, metadata: dict[str, str], message: str) -> None:
    assert message in refused(bend.metadata(**metadata))


def test_end_ids_of_the_model_configuration_are_the_last_resort(bend: Bend) -> None:
    (bend.directory / "generation_config.json").unlink()
    assert planned(bend.directory).eos_token_id == [2]
