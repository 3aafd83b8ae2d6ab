"""Every wrong input gives one clear error and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.checkpoint.convert import convert
from plugins.support.errors import EXIT_BAD_INPUT, EXIT_USAGE, InputError, ToolchainError
from tests.converters.qwen38.conftest import Bend

BASE = "model.language_model."
TABLE = f"{BASE}layers.1.ple.ple_embedding."


def refused(source: Path, code: int = EXIT_BAD_INPUT, **options: Any) -> str:
    """The message of the refusal; checks that nothing was left."""
    target = source.parent / "ckpt"
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(ToolchainError) as caught:
        convert(source, target, **options)
    assert caught.value.exit_code == code
    assert sorted(source.parent.rglob("*")) == before
    return str(caught.value)


def test_missing_tensors_come_grouped(bend: Bend):
    def remove(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        for layer in (0, 4, 6):
            del tensors[f"{BASE}layers.{layer}.linear_attn.A_log"]

    message = refused(bend.tensors(remove))
    assert "4 tensors of the checkpoint are not as the model needs them" in message
    assert "missing: lm_head.weight" in message
    assert (
        "missing: 3 × layers.*.linear_attn.A_log (layers.0.linear_attn.A_log, "
        "layers.4.linear_attn.A_log, layers.6.linear_attn.A_log)" in message
    )


def test_missing_table_shard(bend: Bend):
    message = refused(bend.tensors(lambda t: t.pop(f"{TABLE}ngram_embedding.shard_7.weight")))
    assert "missing: layers.1.ple.ple_embedding.ngram_embedding.shard_7.weight" in message


def test_unexpected_tensors(bend: Bend):
    def add(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(8):
            tensors[f"{BASE}layers.{layer}.self_attn.sinks"] = torch.zeros(6)

    message = refused(bend.tensors(add))
    assert f"unexpected: 8 × {BASE}layers.*.self_attn.sinks" in message


def test_wrong_shape(bend: Bend):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(64, 512)

    assert "expected shape [512, 64], found [64, 512]: lm_head.weight" in refused(
        bend.tensors(change)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.float64, torch.uint8])
def test_wrong_dtype(bend: Bend, dtype: torch.dtype):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(dtype)

    message = refused(bend.tensors(change))
    name = str(dtype).removeprefix("torch.")
    assert f"expected float32, found {name}: lm_head.weight" in message


def test_declared_and_stored_dtype_contradict(bend: Bend):
    message = refused(bend.config(lambda config: config.update(dtype="bfloat16")))
    assert "float32, as most weights are" in message
    assert "dtype bfloat16" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_sise": 64}, "hidden_sise: unknown key, did you mean 'hidden_size'?"),
        ({"attn_scale": 2}, "attn_scale: unknown key"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: expected a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
        ({"attention_bias": True}, "attention_bias: expected False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: expected False"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads: expected 1"),
        ({"indexer_budget": 18}, "18 is not divisible by indexer_compress_ratio = 4"),
        ({"indexer_head_dim": 4}, "smaller than the 8 rotated dimensions"),
        ({"num_key_value_heads": 4}, "6 is not divisible by num_key_value_heads = 4"),
        ({"linear_num_value_heads": 5}, "5 is not divisible by linear_num_key_heads = 2"),
        ({"hc_count": 1}, "hc_count: must be at least 2 residual streams"),
        ({"num_experts_per_tok": 17}, "more than num_experts"),
        ({"output_gate_type": "tanh"}, "output_gate_type: expected sigmoid or silu"),
        ({"layer_types": ["linear_attention"] * 7}, "7 entries for num_hidden_layers = 8"),
        ({"layer_types": ["sliding_attention"] * 8}, "unknown kinds ['sliding_attention']"),
        ({"ple_layer_ids": [4]}, "layer 4 (counted from 1) is not a linear attention layer"),
        ({"ple_layer_ids": [9]}, "layer 9 (counted from 1) is not a linear attention layer"),
        ({"ple_embed_dim": 66}, "66 is not divisible by 4 hash heads"),
        ({"mtp_num_hidden_layers": 2}, "2 draft layers"),
        ({"eos_token_id": None}, "eos_token_id: expected a token id"),
        ({"eos_token_id": 512}, "end token ids lie outside the vocabulary"),
    ],
)
def test_wrong_configuration(bend: Bend, changes: dict[str, Any], message: str):
    assert message in refused(bend.text(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "yarn"}, "rope_type: expected 'default'"),
        ({"mrope_interleaved": False}, "mrope_interleaved: expected True"),
        ({"partial_rotary_factor": 0.1}, "rotates 3 of 32 dimensions"),
        ({"partial_rotary_factor": 2.0}, "rotates 64 of 32 dimensions"),
        ({"mrope_section": [4]}, "does not add up to half of the 8 rotated dimensions"),
        ({"mrope_section": [2, 2, 2]}, "does not add up to half of the 8 rotated dimensions"),
        ({"rope_scaling": 2}, "rope_scaling: unknown key"),
    ],
)
def test_wrong_position_encoding(bend: Bend, changes: dict[str, Any], message: str):
    def change(config: dict[str, Any]) -> None:
        config["text_config"]["rope_parameters"] |= changes

    assert message in refused(bend.config(change))


@pytest.mark.parametrize("key", ["hidden_size", "rope_parameters", "norm_topk_prob", "ngram_size"])
def test_no_default_is_assumed(bend: Bend, key: str):
    source = bend.config(lambda config: config["text_config"].pop(key))
    assert f"{key}: missing, and no default is safe" in refused(source)


def test_absent_seed_means_the_released_one(bend: Bend, tmp_path: Path):
    convert(bend.config(lambda config: config["text_config"].pop("seed")), tmp_path / "ckpt")


@pytest.mark.parametrize(
    "changes", [{"seed": 0}, {"ngram_vocab_size_base": 1010}, {"heads_per_ngram": 1}]
)
def test_hash_constants_are_recomputed(bend: Bend, changes: dict[str, int]):
    message = refused(bend.text(**changes))
    assert "a hash constant of the n-gram table is not the one" in message


@pytest.mark.parametrize(
    "name", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"]
)
def test_stored_hash_constants_are_checked(bend: Bend, name: str):
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[TABLE + name][0] += 1

    message = refused(bend.tensors(spoil))
    assert "every looked-up row would be wrong" in message
    assert name in message
    assert "a hash constant of the n-gram table is missing" in refused(
        bend.tensors(lambda tensors: tensors.pop(TABLE + name))
    )


@pytest.mark.parametrize("model_type", ["llama", None, 3])
def test_unknown_model_type(bend: Bend, model_type: object):
    message = refused(bend.config(lambda config: config.update(model_type=model_type)))
    assert "no converter for this model type" in message
    assert "qwen4_exp" in message


def test_two_names_for_one_tensor(bend: Bend):
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = tensors[f"{BASE}embed_tokens.weight"].clone()

    assert "two tensors of the checkpoint mean the same one" in refused(bend.tensors(add))


def test_statistics_and_the_last_injection_are_ignored(bend: Bend, tmp_path: Path):
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{TABLE}hashstats_unique"] = torch.zeros(4)
        tensors[f"{TABLE}token_lookup"] = torch.zeros(4, dtype=torch.int64)
        tensors[f"{BASE}hyper_connection_mixer.block_inject_weight.weight"] = torch.zeros(4, 256)

    report = convert(bend.tensors(add), tmp_path / "ckpt")
    text = "\n".join(report.lines())
    assert "left out: 2 tensors (statistics of the n-gram table" in text
    assert "left out: 1 tensors (the last mixer of a model injects nothing)" in text


def test_existing_output(bend: Bend):
    target = bend.directory.parent / "ckpt"
    target.mkdir()
    (target / "keep").write_text("precious")
    assert "already exists" in refused(bend.directory, EXIT_USAGE)
    assert (target / "keep").read_text() == "precious"


def test_output_over_input(bend: Bend):
    with pytest.raises(ToolchainError, match="same directory") as caught:
        convert(bend.directory, bend.directory.parent / "." / "hf")
    assert caught.value.exit_code == EXIT_USAGE


def test_wrong_arguments(bend: Bend):
    assert "unknown dtype" in refused(bend.directory, EXIT_USAGE, dtype="int8")
    assert "at least one worker" in refused(bend.directory, EXIT_USAGE, workers=0)


def test_full_disk_is_noticed_before(bend: Bend, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "not enough disk space" in refused(bend.directory)


def spoil_json(path: Path) -> None:
    path.write_text(path.read_text()[:-10])


def too_many_tokens(path: Path) -> None:
    content = json.loads(path.read_text())
    content["added_tokens"].append(
        {
            "id": 512,
            "content": "<|extra|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    )
    # Ids follow the vocabulary's size, so fill it up to the model's.
    for number in range(504, 512):
        content["added_tokens"].insert(
            -1, content["added_tokens"][-1] | {"id": number, "content": f"<|filler{number}|>"}
        )
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("tokenizer.json", spoil_json, "tokenizer.json is not valid JSON"),
        ("tokenizer.json", lambda path: path.write_text("{}"), "tokenizer cannot be loaded"),
        ("tokenizer.json", too_many_tokens, "ids that the model has no embedding for"),
        ("generation_config.json", spoil_json, "generation_config.json is not valid JSON"),
        (
            "generation_config.json",
            lambda path: path.write_text('{"eos_token_id": "</s>"}'),
            "eos_token_id must be a token id",
        ),
    ],
)
def test_wrong_tokenizer_files(
    trained_checkpoint: Path,
    tmp_path: Path,
    file: str,
    spoil: Callable[[Path], object],
    message: str,
):
    source = tmp_path / "hf"
    shutil.copytree(trained_checkpoint, source)
    spoil(source / file)
    assert message in refused(source)


def test_errors_survive_pickling(bend: Bend):
    import pickle

    with pytest.raises(InputError) as caught:
        convert(bend.text(hidden_act="gelu"), bend.directory.parent / "ckpt")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
