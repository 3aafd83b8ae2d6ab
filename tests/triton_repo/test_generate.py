"""Generated repositories: complete, consistent, whole or absent."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from plugins.support.errors import InputError, UsageError
from triton_repo.frontend.tokenizer import load_tokenizer, open_with_transformers
from triton_repo.generate import MODELS, RepositoryOptions, parse_options, write_repository
from triton_repo.parameters import REPOSITORY_FORMAT, GenerationParameters, parse_parameters
from triton_repo.tensors import REQUEST, RESPONSE
from triton_repo.validate import validate_repository


def write(path: Path, **more: Any) -> Path:
    return write_repository(None, path, **({"tokenizer": "bytes", "generation": "echo"} | more))


def config(repository: Path, model: str) -> Any:
    text = (repository / model / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_every_config_is_complete(tmp_path: Path) -> None:
    repository = write(tmp_path / "repository")
    assert sorted(p.name for p in repository.iterdir() if p.is_dir()) == sorted(MODELS)
    for model in MODELS:
        assert "${" not in (repository / model / "config.pbtxt").read_text()
        assert config(repository, model).name == model
    for model in ("tensorrt_llm", "tensorrt_llm_bls"):
        assert config(repository, model).model_transaction_policy.decoupled
    assert [g.count for g in config(repository, "postprocessing").instance_group] == [1]
    summary = validate_repository(repository)
    assert (summary.generation, summary.decoupled) == ("echo", True)


@pytest.mark.parametrize(
    ("cores", "instances", "threads"), [(1, 1, 1), (2, 1, 1), (16, 4, 8), (64, 16, 32)]
)
def test_counts_follow_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, instances: int, threads: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    repository = write(tmp_path / "repository")
    counts = {m: [g.count for g in config(repository, m).instance_group] for m in MODELS}
    assert counts == {
        "preprocessing": [instances], "tensorrt_llm": [1], "postprocessing": [1],
        "tensorrt_llm_bls": [1], "ensemble": [],
    }  # fmt: skip
    found = {m: config(repository, m).parameters["threads"].string_value for m in MODELS[:3]}
    assert found == {
        "preprocessing": "1", "tensorrt_llm": str(threads), "postprocessing": "1",
    }  # fmt: skip


def test_public_names_are_on_ensemble_and_bls(tmp_path: Path) -> None:
    repository = write(tmp_path / "repository")
    for model in ("ensemble", "tensorrt_llm_bls"):
        written = config(repository, model)
        assert [t.name for t in written.input] == [f.name for f in REQUEST]
        assert [t.name for t in written.output] == [t.name for t in RESPONSE]
    classic = {"text_input", "max_tokens", "bad_words", "stop_words", "end_id", "pad_id", "top_k",
               "top_p", "temperature", "length_penalty", "repetition_penalty", "min_tokens",
               "presence_penalty", "frequency_penalty", "seed", "random_seed", "return_log_probs",
               "beam_width", "stream", "num_return_sequences"}  # fmt: skip
    assert classic <= {f.name for f in REQUEST}


def test_an_engine_repository_has_no_echo_tensors(trained_engine: Path, tmp_path: Path) -> None:
    repository = write_repository(trained_engine, tmp_path / "repository")
    for model in MODELS:
        assert "echo" not in (repository / model / "config.pbtxt").read_text().lower()
    summary = validate_repository(repository)
    assert (summary.generation, summary.max_batch_size) == ("engine", 8)


def test_engine_and_repository_can_be_moved_together(trained_engine: Path, tmp_path: Path) -> None:
    place = tmp_path / "here"
    place.mkdir()
    shutil.copytree(trained_engine, place / "engine", copy_function=_link)
    write_repository(place / "engine", place / "model_repository")
    place.rename(tmp_path / "there")
    validate_repository(tmp_path / "there" / "model_repository")


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"tokenizer": None}, UsageError),
        ({"tokenizer": "nowhere"}, InputError),
        ({"generation": "engine"}, UsageError),
        ({"generation": "poem"}, UsageError),
    ],
)
def test_nothing_is_left_after_a_refusal(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        write(tmp_path / "repository", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError, match="already exists"):
        write(tmp_path)


BREAK: dict[str, Callable[[Path], None]] = {
    "decoupled differs": lambda r: _edit(r, "tensorrt_llm_bls", "decoupled: true", ""),
    "exactly one instance": lambda r: _edit(r, "postprocessing", "count: 1", "count: 4"),
    "place-holder": lambda r: _edit(r, "preprocessing", '"32768"', '"${max_context}"', 1),
    "max_context": lambda r: _edit(r, "preprocessing", '"32768"', '"-1"', 1),
    "repository_format": lambda r: _edit(
        r, "postprocessing", 'key: "repository_format"', 'key: "other"'
    ),
    "another version": lambda r: _edit_all(r, f'"{REPOSITORY_FORMAT}"', '"77"'),
    "cannot be parsed": lambda r: _edit(r, "ensemble", "platform", "plattform"),
    "config.pbtxt: cannot be read": lambda r: (r / "ensemble" / "config.pbtxt").unlink(),
    "model.py is missing": lambda r: (r / "preprocessing" / "1" / "model.py").unlink(),
    "does not fit": lambda r: _edit(
        r, "tensorrt_llm",
        'name: "runtime_top_k"\n  data_type: TYPE_INT32',
        'name: "runtime_top_k"\n  data_type: TYPE_FP32',
    ),
    "nothing makes": lambda r: _edit(r, "ensemble", 'value: "_INPUT_ID"', 'value: "_LOST"', 1),
    "different times": lambda r: _swap_id(r),
}  # fmt: skip


def _edit(repository: Path, model: str, old: str, new: str, count: int = -1) -> None:
    path = repository / model / "config.pbtxt"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))


def _edit_all(repository: Path, old: str, new: str) -> None:
    for model in ("preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls"):
        _edit(repository, model, old, new)


def _swap_id(repository: Path) -> None:
    written = json.loads((repository / "repository.json").read_text())["repository_id"]
    _edit(repository, "postprocessing", written, "0" * 16)


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"max_token": 3}, "max_token is no field of a request"),
        ({"text_input": "x"}, "text_input cannot have a default"),
        ({"stop": True}, "stop cannot have a default"),
        ({"echo_delay_ms": 1}, "echo_delay_ms is no field of a request"),
        ({"temperature": "hot"}, "temperature must be FP32, not 'hot'"),
        ({"max_tokens": True}, "max_tokens must be INT32, not True"),
        ({"stop_words": "x"}, "stop_words must be a list"),
        ({"stop_words": [1]}, "stop_words must be STRING, not 1"),
    ],
)
def test_defaults_that_are_none(tmp_path: Path, defaults: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options([f"request_defaults={json.dumps(defaults)}"])
    assert (caught.value.where, caught.value.expected) == ("request_defaults", message)
    # A repository that somebody has edited says so when its models start.
    with pytest.raises(InputError, match=re.escape(message)):
        parse_parameters(GenerationParameters, "m", {"request_defaults": json.dumps(defaults)})


@pytest.mark.parametrize("message", BREAK)
def test_damage_is_found(tmp_path: Path, message: str) -> None:
    repository = write(tmp_path / "repository")
    BREAK[message](repository)
    with pytest.raises(InputError) as caught:
        validate_repository(repository)
    assert message in (caught.value.found or "")


def test_the_command_writes_an_echo(tmp_path: Path) -> None:
    from build_scripts.cli import execute

    path = tmp_path / "echo"
    command = ["repo", "--generation", "echo", "--tokenizer", "bytes", str(path)]
    settings = [
        'allowed_media_hosts=["cdn.example.org"]', "allow_private_media=true",
        "trust_request_mm_kwargs=false", "decoupled=false",
    ]  # fmt: skip
    for setting in settings:
        command += ["--set", setting]
    assert execute(command) == 0
    assert not validate_repository(path).decoupled
    assert "cdn.example.org" in (path / "preprocessing" / "config.pbtxt").read_text()
    # An engine needs both directories.
    assert execute(["repo", str(path)]) == 2


def test_settings() -> None:
    options = parse_options(
        ["decoupled=false", 'placeholders={"image": "<i>"}', "device=cuda:0", "max_queue=5"]
    )
    assert options == RepositoryOptions(
        decoupled=False, placeholders={"image": "<i>"}, device="cuda:0", max_queue=5
    )
    for bad in ("decoupled", "bogus=1", "max_queue=0", "max_queue=x", "device=3", "executor=fast"):
        with pytest.raises(UsageError):
            parse_options([bad])


@pytest.mark.parametrize("which", ["characters", "trained"])
def test_the_compiled_tokenizer_is_the_same(
    which: str, character_tokenizer: Path, trained_checkpoint: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    source = character_tokenizer if which == "characters" else trained_checkpoint
    original = AutoTokenizer.from_pretrained(str(source))
    repository = write(tmp_path / "repository", tokenizer=source)
    compiled = load_tokenizer(repository / "preprocessing" / "1" / "tokenizer")
    for text in ("abc", "The harbour wakes. <|im_start|>", "é€😀\n\n x", ""):
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special)
            assert compiled.encode(text, special, True).ids == ids
            assert list(compiled.encode(text, special, False).ids) == ids
            for skip in (True, False):
                want = original.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
                assert compiled.decode(ids, skip) == want
    assert compiled.eos_ids == open_with_transformers(source).eos_ids
    assert compiled.chat_template == (original.chat_template or None)


def test_a_compiled_tokenizer_needs_no_torch(tmp_path: Path, character_tokenizer: Path) -> None:
    repository = write(tmp_path / "repository", tokenizer=character_tokenizer)
    code = (
        "import sys; from triton_repo.models import preprocessing, bls, postprocessing\n"
        "from triton_repo.frontend.tokenizer import load_tokenizer\n"
        f"load_tokenizer({str(repository / 'preprocessing' / '1' / 'tokenizer')!r})\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_tokenizer_with_more_ids_than_the_model(
    trained_engine: Path, tmp_path: Path, character_tokenizer: Path
) -> None:
    config_path = tmp_path / "engine" / "config.json"
    shutil.copytree(trained_engine, tmp_path / "engine", copy_function=_link)
    written = json.loads(config_path.read_text())
    written["pretrained_config"]["vocab_size"] = 5
    config_path.unlink()
    config_path.write_text(json.dumps(written))
    with pytest.raises(InputError, match="more ids"):
        write_repository(tmp_path / "engine", tmp_path / "r", tokenizer=character_tokenizer)


def test_what_is_no_repository_is_one_problem(tmp_path: Path) -> None:
    for path, found in ((tmp_path, "a directory without any of them"), (tmp_path / "x", "no such")):
        with pytest.raises(InputError, match="there is no model repository") as caught:
            validate_repository(path)
        assert (caught.value.found or "").startswith(found)
