"""Wrong inputs: one clear message, the documented exit code, and nothing half written."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime import contract
from tests.build_scripts.conftest import Command, Done
from tests.fixtures.qwen38_deterministic import write_deterministic
from tests.fixtures.voxtral_deterministic import write_huggingface

GATE = "model.language_model.layers.0.mlp.gate.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def one_file_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The deterministic checkpoint in a single file, easy to damage."""
    return write_deterministic(tmp_path_factory.mktemp("hf") / "one-file", files=1)


@pytest.fixture
def damaged(one_file_checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the checkpoint with changed tensors or a changed config."""

    def copy(
        tensors: Callable[[Tensors], object] | None = None,
        config: Callable[[dict[str, Any]], object] | None = None,
    ) -> Path:
        target = tmp_path / "hf"
        shutil.copytree(one_file_checkpoint, target)
        if tensors is not None:
            path = next(target.glob("*.safetensors"))
            loaded = load_file(path)
            tensors(loaded)
            save_file({n: t.contiguous() for n, t in loaded.items()}, path, {"format": "pt"})
        if config is not None:
            path = target / "config.json"
            content = json.loads(path.read_text())
            config(content)
            path.write_text(json.dumps(content))
        return target

    return copy


def refused(done: Done, code: int, out: Path, *words: str) -> None:
    """One message with every word, the exit code, and no trace of `out`, not even a partial one."""
    assert done.code == code, done.err + done.out
    assert done.err.count("error: ") == 1
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    leftovers = [p.name for p in out.parent.iterdir() if out.name in p.name]
    assert leftovers == []


def _shard(tensors: Tensors) -> str:
    return next(name for name in tensors if "shard_7." in name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(GATE), ["layers.0.mlp.gate.weight"]),
        (lambda t: t.pop(_shard(t)), ["shard_7"]),
        (lambda t: t.update(surprise=torch.zeros(3)), ["surprise"]),
        (lambda t: t.update({GATE: t[GATE].to(torch.int32)}), ["mlp.gate.weight", "int32"]),
        (lambda t: t.update({GATE: t[GATE][:-1]}), ["mlp.gate.weight", "15"]),
        (
            lambda t: t.update({"lm_head.weight_scale": torch.ones(1)}),
            ["lm_head.weight_scale"],
        ),
    ],
    ids=["missing", "shard missing", "unknown", "wrong dtype", "wrong shape", "quantised"],
)
def test_convert_refuses_tensors(
    change: Callable[[Tensors], object],
    words: list[str],
    damaged: Callable[..., Path],
    command: Command,
    tmp_path: Path,
) -> None:
    out = tmp_path / "checkpoint"
    refused(command("convert", damaged(tensors=change), out), 3, out, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["text_config"].update(new_feature=1), ["new_feature"]),
        (lambda c: c["text_config"].pop("indexer_budget"), ["indexer_budget"]),
        (lambda c: c.update(model_type="llama"), ["llama", "qwen4_exp"]),
        (lambda c: c["text_config"].update(hidden_act="gelu"), ["hidden_act", "gelu"]),
        (lambda c: c["text_config"].update(num_experts=15), ["15"]),
        (lambda c: c["text_config"].update(seed=4321), ["multipliers"]),
    ],
    ids=["unknown key", "missing key", "model type", "precondition", "count", "hash constants"],
)
def test_convert_refuses_configs(
    change: Callable[[dict[str, Any]], object],
    words: list[str],
    damaged: Callable[..., Path],
    command: Command,
    tmp_path: Path,
) -> None:
    out = tmp_path / "checkpoint"
    refused(command("convert", damaged(config=change), out), 3, out, *words)


def test_convert_refuses_files(
    damaged: Callable[..., Path], command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "checkpoint"
    refused(command("convert", tmp_path / "nowhere", out), 3, out, "nowhere")
    source = damaged()
    weights = next(source.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused(command("convert", source, out), 3, out, weights.name)
    weights.unlink()
    refused(command("convert", source, out), 3, out, str(source))
    (source / "config.json").write_text("{not json")
    refused(command("convert", source, out), 3, out, "config.json")


def test_no_verb_writes_over_what_exists(
    command: Command, deterministic_checkpoint: Path, deterministic_engine: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    precious = taken / "precious.txt"
    precious.write_text("keep me")
    checkpoint = deterministic_engine.with_name(f"{deterministic_engine.name}-checkpoint")
    for arguments in (
        ("convert", deterministic_checkpoint, taken),
        ("build", checkpoint, taken),
        ("repo", deterministic_engine, taken, "--tokenizer", "bytes"),
        ("convert", deterministic_checkpoint, deterministic_checkpoint),
        ("build", checkpoint, checkpoint),
    ):
        done = command(*arguments)
        assert done.code == 2, done.err
        assert "exist" in done.err or "same directory" in done.err
        assert [p.name for p in taken.iterdir()] == ["precious.txt"]
        assert precious.read_text() == "keep me"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--max-seq-len", "5000"], 2, ["5000", "4096"]),
        (["--max-seq-len", "128", "--max-input-len", "200"], 2, ["--max-input-len", "128"]),
        (["--chunk-size", "100"], 2, ["--chunk-size", "128"]),
        (["--target", "9.0"], 2, ["9.0"]),
        (["--target", "eight"], 2, ["eight"]),
        (["--target", ""], 2, ["--target"]),
        (["--max-draft-len", "64", "--chunk-size", "64"], 2, ["--max-draft-len"]),
        (["--max-batch-size", str(2**31)], 2, ["--max-batch-size", str(2**31 - 1)]),
        (["--max-num-tokens", str(2**63)], 2, ["--max-num-tokens", str(2**31 - 1)]),
    ],
)
def test_build_refuses_limits_and_targets_before_it_builds(
    options: list[str],
    code: int,
    words: list[str],
    command: Command,
    deterministic_engine: Path,
    tmp_path: Path,
) -> None:
    checkpoint = deterministic_engine.with_name(f"{deterministic_engine.name}-checkpoint")
    out = tmp_path / "engine"
    refused(command("build", checkpoint, out, "--flavor", "tensorrt_rtx", *options), code, out)
    done = command("build", checkpoint, out, "--flavor", "tensorrt_rtx", *options)
    assert all(word in done.err for word in words), done.err


def test_build_refuses_a_target_without_the_element_type(
    command: Command, trained_engine: Path, tmp_path: Path
) -> None:
    checkpoint = trained_engine.with_name(f"{trained_engine.name}-checkpoint")
    out = tmp_path / "engine"
    done = command("build", checkpoint, out, "--flavor", "tensorrt_rtx", "--target", "7.5,8.9")
    refused(done, 4, out, "7.5", "bfloat16")


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt") is not None, reason="full TensorRT is installed"
)
def test_build_says_which_library_is_missing(
    command: Command, deterministic_engine: Path, tmp_path: Path
) -> None:
    checkpoint = deterministic_engine.with_name(f"{deterministic_engine.name}-checkpoint")
    out = tmp_path / "engine"
    refused(command("build", checkpoint, out, "--flavor", "tensorrt"), 4, out, "tensorrt", "pip")


def test_build_refuses_a_damaged_checkpoint(
    command: Command, deterministic_engine: Path, tmp_path: Path
) -> None:
    checkpoint = deterministic_engine.with_name(f"{deterministic_engine.name}-checkpoint")
    out = tmp_path / "engine"
    refused(command("build", tmp_path / "nowhere", out), 3, out, "nowhere")
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    weights = copy / contract.weights_file()
    name = "transformer.layers.2.mlp.router.weight"
    tensors = load_file(weights)
    router = tensors.pop(name)
    save_file(tensors, weights)
    refused(command("build", copy, out), 3, out, name)
    save_file(tensors | {name: router.to(torch.float16)}, weights)
    refused(command("build", copy, out), 3, out, name, "float16")
    (copy / "config.json").write_text('{"format_version": 99}')
    refused(command("build", copy, out), 3, out, "config.json")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ([], 2, ["--prompt", "--ids"]),
        (["--prompt", "a", "--ids", "1"], 2, ["exactly one"]),
        (["--prompt", "a"], 3, ["tokenizer", "--tokenizer"]),
        (["--ids", "1,two"], 3, ["two"]),
        (["--ids", ""], 2, ["empty"]),
        (["--ids", "1,512"], 2, ["512", "511"]),
        (["--ids-file", "/nowhere/ids.txt"], 3, ["/nowhere/ids.txt"]),
        (["--ids", ",".join(["7"] * 300)], 2, ["300", "255"]),
        (["--ids", "1", "--max-new-tokens", "256"], 2, ["256", "max_new_tokens"]),
        (["--ids", "1", "--top-p", "1.5"], 2, ["top_p", "1.5"]),
        (["--ids", "1", "--temperature", "-1"], 2, ["temperature", "-1"]),
        (["--ids", "1", "--executor", "tensorrt"], 4, ["GPU"]),
        (["--ids", "1", "--logits", "/nowhere/logits.npy"], 3, ["/nowhere/logits.npy"]),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the executor is another one")
def test_run_refuses_what_the_engine_cannot_serve(
    options: list[str], code: int, words: list[str], command: Command, deterministic_engine: Path
) -> None:
    done = command("run", deterministic_engine, *options)
    assert done.code == code, done.err
    assert done.err.count("error: ") == 1
    assert all(word in done.err for word in words), done.err
    assert done.out == ""


def test_run_and_verify_refuse_a_changed_engine_directory(
    command: Command, deterministic_engine: Path, deterministic_checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "engine"
    shutil.copytree(deterministic_engine, copy)
    weights = copy / contract.weights_file()
    tensors = load_file(weights)
    first = next(iter(tensors))
    tensors[first] = tensors[first] + 1
    weights.unlink()
    save_file(tensors, weights)
    for arguments in (
        ("run", copy, "--ids", "1"),
        ("verify", copy, "--against", deterministic_checkpoint),
    ):
        done = command(*arguments)
        assert done.code == 3, done.err
        assert contract.weights_file() in done.err
    (copy / contract.program_file("generation")).unlink()
    done = command("run", copy, "--ids", "1")
    assert done.code == 3
    assert contract.program_file("generation") in done.err
    assert command("run", tmp_path / "nowhere", "--ids", "1").code == 3


def test_verify_refuses_a_checkpoint_of_another_family(
    command: Command, deterministic_engine: Path, tmp_path: Path
) -> None:
    done = command("verify", deterministic_engine, "--against", write_huggingface(tmp_path / "hf"))
    assert done.code == 3, done.err
    for words in ("another model", "model_type", "qwen4_exp", "voxtral"):
        assert words in done.err


def test_verify_names_the_keys_that_another_version_wrote(
    command: Command, deterministic_engine: Path, deterministic_checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "engine"
    shutil.copytree(deterministic_engine, copy)
    path = copy / contract.CONFIG_FILE
    content = json.loads(path.read_text())
    del content["pretrained_config"]["qwen38"]["hc_count"]
    path.write_text(json.dumps(content))
    done = command("verify", copy, "--against", deterministic_checkpoint)
    assert done.code == 3, done.err
    assert "qwen38.hc_count" in done.err


def test_repo_asks_for_a_tokenizer(
    command: Command, deterministic_engine: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model_repository"
    refused(command("repo", deterministic_engine, out), 2, out, "tokenizer", "--tokenizer")
    refused(command("repo", tmp_path / "nowhere", out), 3, out, "nowhere")


def test_serve_refuses_a_port_in_use_and_a_missing_repository(
    command: Command, tmp_path: Path
) -> None:
    assert command("serve", tmp_path / "nowhere").code == 3
    repository = tmp_path / "repository"
    assert command("repo", repository, "--generation", "echo", "--tokenizer", "bytes").code == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = command(
            "serve", repository, "--http-port", port, "--grpc-port", 0, "--metrics-port", 0
        )
    assert done.code == 2, done.err
    assert str(port) in done.err
    assert "--http-port" in done.err


def test_inspect_refuses_what_is_no_artefact(command: Command, tmp_path: Path) -> None:
    assert command("inspect", tmp_path).code == 3
    assert command("inspect", tmp_path / "nowhere").code == 3
    (tmp_path / "config.json").write_text('{"something": 1}')
    done = command("inspect", tmp_path, "--json")
    assert done.code == 3
    assert "something" in done.json["error"]["found"]
    for text in ("[]", "{", '{"a":' * 5000 + "1" + "}" * 5000, '{"a": 1, "a": 2}'):
        (tmp_path / "config.json").write_text(text)
        done = command("inspect", tmp_path, "--json")
        assert done.code == 3, text[:20]
        assert done.json["error"]["what"].startswith("the configuration is not")


def test_an_interrupted_build_leaves_nothing(
    command: Command,
    deterministic_engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = deterministic_engine.with_name(f"{deterministic_engine.name}-checkpoint")
    out = tmp_path / "engine"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("build_scripts.engines.build_serialized", interrupted)
    assert command("build", checkpoint, out, "--max-seq-len", 128).code == 130
    assert not list(tmp_path.iterdir())


def test_a_scope_of_nothing_is_refused(
    one_file_checkpoint: Path, command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "checkpoint"
    refused(command("convert", one_file_checkpoint, out, "--only", "mlp"), 2, out, "--quantize")


def test_a_conversion_is_announced_before_it_starts(
    damaged: Callable[..., Path], command: Command, tmp_path: Path
) -> None:
    """Also one that fails while it reads values."""

    def spoil(tensors: Tensors) -> None:
        name = next(n for n in tensors if n.endswith("layers.2.mlp.experts.down_proj"))
        tensors[name][1, 2, 3] = float("nan")

    out = tmp_path / "checkpoint"
    done = command("convert", damaged(tensors=spoil), out, "--quantize", "nvfp4")
    refused(done, 3, out, "memory: at most", "1 NaN and 0 infinite", "layers.2.mlp.experts")
    assert done.err.index("memory: at most") < done.err.index("error: ")
