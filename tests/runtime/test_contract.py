"""The engine directory is refused with both facts whenever it is not what was built."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from plugins.support.errors import InputError
from runtime.contract import CONFIG_FILE, check_files, read_config
from runtime.identity import read_header
from tests.runtime.engines import TABLE, write_engine


@pytest.fixture
def engine_dir(tmp_path: Path) -> Path:
    write_engine(tmp_path / "engine")
    return tmp_path / "engine"


def _edit(engine_dir: Path, change: Any) -> None:
    path = engine_dir / CONFIG_FILE
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def _weights(engine_dir: Path) -> dict[str, torch.Tensor]:
    with safe_open(engine_dir / "rank0.safetensors", "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def test_what_was_written_is_read_and_accepted(engine_dir: Path) -> None:
    config = read_config(engine_dir)
    check_files(config, engine_dir)
    assert config.chunk_tokens == 64
    assert config.max_logits_rows == 64
    assert config.step_tokens == 1
    assert config.cache_plan.cache_rows == 256 + 64


def test_missing_directory_names_the_build_command(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not an engine directory") as caught:
        read_config(tmp_path / "nothing")
    assert "build-engine build" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda raw: raw.update(format_version=2), "another format"),
        (lambda raw: raw.update(surprise=1), "surprise"),
        (lambda raw: raw.pop("weights"), "weights"),
        (lambda raw: raw["engines"].pop("generation"), "no entry for generation"),
        (lambda raw: raw["build_config"].update(max_batch_size=0), "max_batch_size"),
        (lambda raw: raw["host_inputs"].clear(), "ple_embeddings.1"),
        (lambda raw: raw["engines"]["context"]["profile"].pop("input_ids"), "input_ids"),
        (
            lambda raw: raw["engines"]["generation"]["inputs"][-2].update(dtype="float16"),
            "recurrent_state.1 differs",
        ),
        (
            lambda raw: raw["engines"]["generation"]["inputs"][0].update(dtype="int31"),
            "unknown dtype int31",
        ),
    ],
)
def test_wrong_configuration_is_named(engine_dir: Path, change: Any, expected: str) -> None:
    _edit(engine_dir, change)
    with pytest.raises(InputError) as caught:
        read_config(engine_dir)
    assert expected in str(caught.value)
    assert "build-engine build" in str(caught.value)


def test_broken_json_is_named(engine_dir: Path) -> None:
    for text in ("{", '{"a":' * 5000 + "1" + "}" * 5000):
        (engine_dir / CONFIG_FILE).write_text(text)
        with pytest.raises(InputError, match="not readable JSON"):
            read_config(engine_dir)


@pytest.mark.parametrize(
    "name", ["rank0.context.engine", "rank0.generation.program", "rank0.safetensors"]
)
def test_missing_and_cut_files_are_named(engine_dir: Path, name: str) -> None:
    config = read_config(engine_dir)
    path = engine_dir / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="not the one that was built") as caught:
        check_files(config, engine_dir)
    assert name in str(caught.value)
    path.unlink()
    with pytest.raises(InputError, match="missing") as caught:
        check_files(config, engine_dir)
    assert name in str(caught.value)


def test_other_weights_of_the_same_size_are_refused(engine_dir: Path) -> None:
    config = read_config(engine_dir)
    tensors = _weights(engine_dir)
    tensors["transformer.vocab_embedding.weight"][0, 0] += 1
    save_file(tensors, engine_dir / "rank0.safetensors")
    with pytest.raises(InputError, match=r"vocab_embedding\.weight has other values"):
        check_files(config, engine_dir)


def test_renamed_tensor_of_the_same_size_is_refused(engine_dir: Path) -> None:
    config = read_config(engine_dir)
    tensors = _weights(engine_dir)
    other = TABLE.replace("layers.1", "layers.2")
    tensors[other] = tensors.pop(TABLE)
    save_file(tensors, engine_dir / "rank0.safetensors")
    with pytest.raises(InputError, match="other tensors"):
        check_files(config, engine_dir)


def test_bound_weight_that_is_not_in_the_file_is_named(engine_dir: Path) -> None:
    _edit(engine_dir, lambda raw: raw["engines"]["context"]["inputs"][-1].update(shape=[50, 5]))
    config = read_config(engine_dir)
    with pytest.raises(InputError, match="binds a weight") as caught:
        check_files(config, engine_dir)
    assert caught.value.expected == "float32 [50, 5]"
    assert caught.value.found == "float32 [50, 4]"


def test_table_with_too_few_rows_is_named(engine_dir: Path) -> None:
    _edit(engine_dir, lambda raw: raw["host_inputs"][0]["offsets"].__setitem__(3, 10_000))
    config = read_config(engine_dir)
    with pytest.raises(InputError, match=r"table of ple_embeddings\.1"):
        check_files(config, engine_dir)


def test_garbage_instead_of_weights_is_named(engine_dir: Path) -> None:
    config = read_config(engine_dir)
    path = engine_dir / "rank0.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(InputError, match="not a readable safetensors file"):
        check_files(config, engine_dir)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
        b"{" * 5000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
    ],
)
def test_a_header_of_another_form_is_named(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rank0.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(InputError, match="not a readable safetensors file"):
        read_header(path)
