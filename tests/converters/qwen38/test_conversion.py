"""The converted tensors are the source's, under the right names, in every layout and type."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.checkpoint.config import TOKENIZER_DIR, WEIGHTS_FILE
from converters.checkpoint.convert import convert, execute, plan_conversion
from converters.qwen38.config import Qwen38CheckpointConfig
from converters.registry import read_checkpoint_config
from plugins.support.errors import InputError
from tests.converters.qwen38.conftest import Bend
from tests.fixtures import qwen38_layout as layout
from tests.fixtures.qwen38_deterministic import (
    deterministic_tensor,
    deterministic_weights,
    write_deterministic,
)

# (part of a source name, part of the target name), applied in order; written independently of the
# converter, from in-memory source names.
RENAMES = [
    ("model.language_model.embed_tokens", "transformer.vocab_embedding"),
    ("model.language_model.", "transformer."),
    ("attn_hyper_connection", "attention_hyper_connection"),
    ("hc_norm", "norm"),
    ("input_mix_weight_", ""),
    ("block_inject_weight", "inject"),
    ("linear_attn.", "linear_attention."),
    ("self_attn.", "attention."),
    ("attention.q_norm", "attention.q_layernorm"),
    ("attention.k_norm", "attention.k_layernorm"),
    ("attention.q_proj", "attention.q"),
    ("attention.k_proj", "attention.k"),
    ("attention.v_proj", "attention.v"),
    ("attention.o_proj", "attention.dense"),
    ("indexer.index_qk_proj", "indexer.qk"),
    ("mlp.gate.", "mlp.router."),
    ("experts.gate_up_proj", "experts.gate_up.weight"),
    ("experts.down_proj", "experts.down.weight"),
    ("gate_proj", "gate"),
    ("up_proj", "up"),
    ("down_proj", "down"),
    ("key_proj", "key"),
    ("value_proj", "value"),
    ("ple_embedding.ngram_embedding", "ngram_embedding"),
]


def expected_tensors(**options: bool) -> dict[str, torch.Tensor]:
    result = {}
    weights = deterministic_weights(layout.TEXT_CONFIG, vision=False, **options)
    for name, tensor in weights.items():
        for old, new in RENAMES:
            name = name.replace(old, new)
        result[name] = tensor
    return result


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_every_tensor_arrives_under_its_name(deterministic_checkpoint: Path, tmp_path: Path):
    report = convert(deterministic_checkpoint, tmp_path / "ckpt")
    assert_same(load_file(tmp_path / "ckpt" / WEIGHTS_FILE), expected_tensors())
    text = "\n".join(report.lines())
    assert "33 tensors (vision tower" in text
    assert "no tokenizer files" in text
    assert report.as_dict()["tensors"] == 235
    assert not (tmp_path / "ckpt" / TOKENIZER_DIR).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def converted(source: Path, target: Path, dtype: str | None = None, workers: int = 2) -> bytes:
    convert(source, target, dtype, workers=workers)
    return (target / WEIGHTS_FILE).read_bytes()


PREFIXES = {
    "text class": lambda name: name.replace("model.language_model.", "model."),
    "no prefix": lambda name: name.replace("model.language_model.", ""),
    "outer draft prefix": lambda name: name.replace("mtp.", "model.mtp."),
}


def test_layouts_and_prefixes_give_the_same_bytes(tmp_path: Path):
    stacked = converted(
        write_deterministic(tmp_path / "stacked", files=1), tmp_path / "out", workers=1
    )
    others = {
        "expert by expert": write_deterministic(tmp_path / "single", stacked_experts=False),
        "many files": write_deterministic(tmp_path / "many", files=7),
    }
    for name, rule in PREFIXES.items():
        others[name] = Bend(write_deterministic(tmp_path / f"hf {name}", files=1)).rename(rule)
    for name, source in others.items():
        assert converted(source, tmp_path / f"out {name}") == stacked, name


def test_draft_experts_may_lie_in_another_layout(tmp_path: Path):
    source = write_deterministic(tmp_path / "hf", files=1, vision=False)
    other = load_file(
        write_deterministic(tmp_path / "single", files=1, vision=False, stacked_experts=False)
        / "model.safetensors"
    )
    tensors = load_file(source / "model.safetensors")
    main = {n: t for n, t in other.items() if "experts." in n and not n.startswith("mtp.")}
    drafts = {n: t for n, t in tensors.items() if "experts." not in n or n.startswith("mtp.")}
    save_file(main | drafts, source / "model.safetensors")
    convert(source, tmp_path / "ckpt")
    assert_same(load_file(tmp_path / "ckpt" / WEIGHTS_FILE), expected_tensors())


def test_table_shards_join_in_numeric_order(bend: Bend, tmp_path: Path):
    convert(bend.directory, tmp_path / "ckpt")
    name = "transformer.layers.1.ple.ngram_embedding.weight"
    table = load_file(tmp_path / "ckpt" / WEIGHTS_FILE)[name]
    source = load_file(bend.directory / "model.safetensors")
    shards = {int(n.split("shard_")[1].split(".")[0]): n for n in source if "shard_" in n}
    numeric = torch.cat([source[shards[number]] for number in sorted(shards)])
    textual = torch.cat([source[shards[number]] for number in sorted(shards, key=str)])
    assert torch.equal(table, numeric)
    assert not torch.equal(table, textual)


def test_saved_by_transformers(bend: Bend, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen4ExpForCausalLM.from_pretrained(bend.directory)
    # Loaded from stacked experts it saves stacked ones; a flat text configuration in any case.
    model.save_pretrained(tmp_path / "saved")
    assert "text_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert converted(tmp_path / "saved", tmp_path / "a") == converted(
        bend.directory, tmp_path / "b"
    )
    block = read_checkpoint_config(tmp_path / "a")
    assert isinstance(block, Qwen38CheckpointConfig)
    assert set(block.qwen38.layer_types) == {"linear_attention", "full_attention"}

    fresh = transformers.Qwen4ExpForCausalLM(model.config)
    fresh.load_state_dict(model.state_dict())
    fresh.save_pretrained(tmp_path / "fresh")
    names = load_file(tmp_path / "fresh" / "model.safetensors").keys()
    assert any(".experts.3.gate_proj.weight" in name for name in names)
    assert converted(tmp_path / "fresh", tmp_path / "c") == converted(
        tmp_path / "saved", tmp_path / "d"
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_casts_are_those_of_torch(bend: Bend, tmp_path: Path, dtype: str):
    convert(bend.directory, tmp_path / "ckpt", dtype)
    target = getattr(torch, dtype)
    expected = {
        name: tensor if name.endswith(("A_log", "dt_bias")) else tensor.to(target)
        for name, tensor in expected_tensors(mtp=False).items()
    }
    assert_same(load_file(tmp_path / "ckpt" / WEIGHTS_FILE), expected)
    assert read_checkpoint_config(tmp_path / "ckpt").dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_checkpoints_keep_their_type(tmp_path: Path, dtype: torch.dtype):
    source = write_deterministic(tmp_path / "hf", dtype=dtype, mtp=False, vision=False)
    convert(source, tmp_path / "ckpt")
    expected = {name: t.to(dtype) for name, t in expected_tensors(mtp=False).items()}
    assert_same(load_file(tmp_path / "ckpt" / WEIGHTS_FILE), expected)
    # Back to float32 nothing is lost.
    convert(source, tmp_path / "wide", "float32")
    wide = {name: t.float() for name, t in expected.items()}
    assert_same(load_file(tmp_path / "wide" / WEIGHTS_FILE), wide)


def test_float32_scalars_and_norms_among_narrow_weights(tmp_path: Path):
    bend = Bend(
        write_deterministic(tmp_path / "hf", files=1, dtype=torch.bfloat16, mtp=False, vision=False)
    )

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight")):
                short = name.removeprefix("model.language_model.")
                tensors[name] = deterministic_tensor(short, tuple(tensors[name].shape))

    convert(bend.tensors(widen), tmp_path / "ckpt")
    found = load_file(tmp_path / "ckpt" / WEIGHTS_FILE)
    expected = {
        name: tensor if name.endswith(("A_log", "dt_bias")) else tensor.bfloat16()
        for name, tensor in expected_tensors(mtp=False).items()
    }
    assert_same(found, expected)


def test_values_that_overflow_stop_the_conversion(bend: Bend, tmp_path: Path):
    def grow(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][3, :2] = 1e5

    with pytest.raises(InputError, match="2 values do not fit into float16") as caught:
        convert(bend.tensors(grow), tmp_path / "ckpt", "float16")
    assert "lm_head.weight" in (caught.value.where or "")
    assert not (tmp_path / "ckpt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_values_that_vanish_are_counted(bend: Bend, tmp_path: Path):
    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][3, :5] = 1e-6

    report = convert(bend.tensors(shrink), tmp_path / "ckpt", "float16")
    assert report.small_values["lm_head.weight"] >= 5
    assert "subnormal or zero" in report.lines()[-1]


def test_sizes_that_could_hide_a_transposition(tmp_path: Path):
    changes = {"linear_value_head_dim": 24, "ple_layer_ids": [2, 3]}
    source = write_deterministic(tmp_path / "hf", vision=False, mtp=False, **changes)
    convert(source, tmp_path / "ckpt")
    config = read_checkpoint_config(tmp_path / "ckpt")
    assert isinstance(config, Qwen38CheckpointConfig)
    assert [layer.rows for layer in config.qwen38.ple_layers] == [4064, 4152]
    found = load_file(tmp_path / "ckpt" / WEIGHTS_FILE)
    assert found["transformer.layers.2.ple.ngram_embedding.weight"].shape == (4152, 16)
    assert found["transformer.layers.0.linear_attention.out_proj.weight"].shape == (64, 144)


def test_configuration_in_the_target_vocabulary(trained_checkpoint: Path, tmp_path: Path):
    convert(trained_checkpoint, tmp_path / "ckpt")
    config = read_checkpoint_config(tmp_path / "ckpt")
    assert isinstance(config, Qwen38CheckpointConfig)
    assert (config.dtype, config.vocab_size, config.head_size) == ("bfloat16", 512, 32)
    assert (config.rotary_embedding_dim, config.rotary_base) == (8, 10000.0)
    # Generation ends at the chat's end of turn; n-grams end at the text model's own end id.
    assert config.eos_token_id == [4, 2]
    assert config.qwen38.ngram_eos_token_id == 2
    (ple,) = config.qwen38.ple_layers
    assert (ple.layer, ple.rows) == (1, 4064)
    assert ple.multipliers == [4295158889763781, 17440218147737327, 1270917961434445]
    tokenizer = tmp_path / "ckpt" / TOKENIZER_DIR
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tokenizer / name).read_bytes() == (trained_checkpoint / name).read_bytes()


def test_a_damaged_result_is_not_read(deterministic_checkpoint: Path, tmp_path: Path):
    convert(deterministic_checkpoint, tmp_path / "ckpt")
    path = tmp_path / "ckpt" / "config.json"
    content = json.loads(path.read_text())
    for change, message in (
        ({"format_version": 2}, "another format version"),
        ({"model_type": "llama"}, "no converter for this model type"),
        ({"hidden_sise": 64}, "not as it must be"),
        ({"hidden_size": "64"}, "not as it must be"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(InputError, match=message):
            read_checkpoint_config(tmp_path / "ckpt")


def test_interrupted_conversion_ends_with_the_same_bytes(
    deterministic_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = converted(deterministic_checkpoint, tmp_path / "whole")
    plan = plan_conversion(deterministic_checkpoint, tmp_path / "ckpt", workers=1)
    from converters.checkpoint import partial
    from converters.quantization.operations import OPERATIONS

    copied: list[str] = []
    real_copy, real_mark = OPERATIONS["copy"], partial.Partial.mark

    def copy(task, *rest):
        copied.append(task.segments[0].entry.name)
        real_copy(task, *rest)

    def mark(self, task):
        if len(copied) == 100:
            raise KeyboardInterrupt
        real_mark(self, task)

    monkeypatch.setitem(OPERATIONS, "copy", copy)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(partial.Partial, "mark", mark)
        execute(plan, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()
    first = copied.copy()
    copied.clear()
    assert converted(deterministic_checkpoint, tmp_path / "ckpt", workers=2) == whole
    # The piece whose mark was lost is the only one that is done twice.
    assert set(first) & set(copied) == {first[-1]}


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from converters.checkpoint import partial
from converters.checkpoint.convert import convert

real, marks = partial.Partial.mark, []

def mark(self, task):
    real(self, task)
    marks.append(task)
    if len(marks) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

partial.Partial.mark = mark
convert(Path(sys.argv[1]), Path(sys.argv[2]), "bfloat16", quantize="nvfp4")
"""


def test_killed_conversion_resumes_to_the_same_bytes(bend: Bend, tmp_path: Path):
    convert(bend.directory, tmp_path / "whole", "bfloat16", quantize="nvfp4")
    expected = (tmp_path / "whole" / WEIGHTS_FILE).read_bytes()
    target = tmp_path / "ckpt"
    for marks in (1, 60, 90):
        command = [sys.executable, "-c", KILLED_RUN, bend.directory, target, str(marks)]
        run = subprocess.run(command, capture_output=True, check=False)
        assert run.returncode == -signal.SIGKILL, run.stderr.decode()
        assert not target.exists()
    journal = (tmp_path / ".ckpt.partial" / "journal").read_text().splitlines()
    # A head line, and no task twice: each run went on where the one before was killed.
    assert len(journal) >= 152
    assert len(set(journal)) == len(journal)
    convert(bend.directory, target, "bfloat16", quantize="nvfp4")
    assert (target / WEIGHTS_FILE).read_bytes() == expected
    assert not (tmp_path / ".ckpt.partial").exists()


def test_source_that_changes_meanwhile_is_noticed(bend: Bend, tmp_path: Path):
    plan = plan_conversion(bend.directory, tmp_path / "ckpt")

    path = bend.directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="changed while it was converted"):
        execute(plan, tmp_path / "ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
