"""Checkpoint directories: complete ones open, incomplete and hostile ones are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from converters.checkpoint.source import INDEX_FILE, SourceCheckpoint
from plugins.support.errors import InputError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two files with an index, one tensor each."""
    directory = tmp_path / "hf"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "x"}')
    weight_map = {}
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        name = f"layers.{number}.weight"
        save_file({name: torch.full((4,), float(number))}, directory / file)
        weight_map[name] = file
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def edit_index(directory: Path, **changes: str) -> None:
    index = json.loads((directory / INDEX_FILE).read_text())
    index["weight_map"] |= changes
    (directory / INDEX_FILE).write_text(json.dumps(index))


def test_opens_and_reads(checkpoint: Path):
    source = SourceCheckpoint.open(checkpoint)
    assert sorted(source.tensors) == ["layers.1.weight", "layers.2.weight"]
    assert source.read("layers.2.weight").tolist() == [2.0] * 4
    assert [path.name[:11] for path in source.files] == ["model-00001", "model-00002"]


def test_numbered_files_need_no_index(checkpoint: Path):
    (checkpoint / INDEX_FILE).unlink()
    assert len(SourceCheckpoint.open(checkpoint).tensors) == 2
    (checkpoint / "model-00001-of-00002.safetensors").rename(checkpoint / "other.safetensors")
    with pytest.raises(InputError, match="no index"):
        SourceCheckpoint.open(checkpoint)


def test_missing_file_is_named(checkpoint: Path):
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match="1 of 2 weight files are missing") as caught:
        SourceCheckpoint.open(checkpoint)
    assert "model-00002-of-00002.safetensors" in (caught.value.found or "")


def test_truncated_file_is_refused(checkpoint: Path):
    path = checkpoint / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="another size"):
        SourceCheckpoint.open(checkpoint)


def test_index_and_files_must_agree(checkpoint: Path):
    edit_index(checkpoint, extra="model-00001-of-00002.safetensors")
    with pytest.raises(InputError, match="not in the file it names") as caught:
        SourceCheckpoint.open(checkpoint)
    assert caught.value.found == "extra"


def test_tensor_outside_the_index_is_refused(checkpoint: Path):
    index = json.loads((checkpoint / INDEX_FILE).read_text())
    save_file(
        {"layers.1.weight": torch.ones(1), "stray": torch.ones(1)},
        checkpoint / "model-00001-of-00002.safetensors",
    )
    (checkpoint / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(InputError, match="not in the index"):
        SourceCheckpoint.open(checkpoint)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_index_cannot_lead_out_of_the_directory(checkpoint: Path, file: str):
    edit_index(checkpoint, stray=file)
    with pytest.raises(InputError, match="outside the checkpoint"):
        SourceCheckpoint.open(checkpoint)


@pytest.mark.parametrize("weight_map", [None, 3, {"a": 3}])
def test_index_without_a_map_is_refused(checkpoint: Path, weight_map: object):
    (checkpoint / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match="weight_map"):
        SourceCheckpoint.open(checkpoint)


def test_directories_that_are_none(tmp_path: Path, checkpoint: Path):
    with pytest.raises(InputError, match="does not exist"):
        SourceCheckpoint.open(tmp_path / "nowhere")
    (checkpoint / "config.json").write_text("[]")
    with pytest.raises(InputError, match="not a JSON object"):
        SourceCheckpoint.open(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        SourceCheckpoint.open(checkpoint)


def test_pickled_weights_are_not_accepted(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match="no safetensors files") as caught:
        SourceCheckpoint.open(tmp_path)
    assert "pytorch_model.bin" in (caught.value.found or "")


def test_identity_follows_the_content_and_not_the_place(checkpoint: Path, tmp_path: Path):
    identity = SourceCheckpoint.open(checkpoint).identity()
    copied = tmp_path / "copy"
    shutil.copytree(checkpoint, copied)
    assert SourceCheckpoint.open(copied).identity() == identity
    path = copied / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert SourceCheckpoint.open(copied).identity() != identity
