"""NaN among FP8 codes and bad scales are refused wherever they stand, in whatever way they go."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.checkpoint import copying, write
from converters.checkpoint.config import WEIGHTS_FILE
from converters.checkpoint.convert import convert
from converters.checkpoint.export_hf import export_hf
from plugins.support.errors import InputError
from tests.converters.qwen38.test_conversion import KILLED_RUN
from tests.fixtures import qwen38_quantized as fixture
from tests.fixtures.dots3_fp8 import write_fp8
from tests.fixtures.qwen38_quantized import BASE, LAYOUTS, TABLE, Quantized

EXPERT = f"{BASE}layers.2.mlp.experts.5.up_proj"
SHARED = f"{BASE}layers.0.mlp.shared_expert.up_proj"
QUERY = f"{BASE}layers.3.self_attn.q_proj"
# Layout and tensor: block FP8, one scale per matrix, Model Optimizer's blocks, the n-gram table.
CODES = [
    ("official fp8", f"{EXPERT}.weight"),
    ("mixed dense", f"{SHARED}.weight"),
    ("mixed dense", f"{QUERY}.weight"),
    ("radixark", f"{TABLE}.shard_3.weight"),
]
SCALES = [
    ("radixark", f"{EXPERT}.weight_scale"),
    ("nvfp4 table", f"{TABLE}.shard_3.weight_scale"),
]


def put(tensor: torch.Tensor, *codes: int) -> torch.Tensor:
    """The e4m3 tensor with these bytes at places that are spread over it, the last one included."""
    changed = tensor.contiguous().clone()
    places = torch.linspace(tensor.numel() // 2, tensor.numel() - 1, len(codes)).long()
    changed.view(torch.uint8).view(-1)[places] = torch.tensor(codes, dtype=torch.uint8)
    return changed


def spoilt(layout: str, name: str, *codes: int) -> Quantized:
    checkpoint = LAYOUTS[layout]()
    assert checkpoint.tensors[name].dtype == torch.float8_e4m3fn
    checkpoint.tensors[name] = put(checkpoint.tensors[name], *codes)
    return checkpoint


@pytest.fixture(params=["whole", "pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are copied at once, or in so many pieces that one is cut."""
    if request.param == "pieces":
        monkeypatch.setattr(copying, "_ELEMENTS", 48)
        monkeypatch.setattr(copying, "CHUNK_BYTES", 400)
        monkeypatch.setattr(write, "CHUNK_BYTES", 1000)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(("layout", "name"), CODES)
def test_codes_that_are_nan(layout: str, name: str, tmp_path: Path):
    checkpoint = spoilt(layout, name, 0x7F, 0xFF, 0x7F)
    with pytest.raises(InputError, match="3 FP8 values are NaN") as caught:
        convert(checkpoint.write(tmp_path / "hf"), tmp_path / "ckpt")
    assert (caught.value.where or "").endswith(f"safetensors: {name}")
    assert caught.value.found == f"3 among {checkpoint.tensors[name].numel()}"
    assert "0x7F or 0xFF" in (caught.value.expected or "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(("layout", "name"), CODES)
def test_the_largest_codes_are_kept(layout: str, name: str, tmp_path: Path):
    checkpoint = spoilt(layout, name, 0x7E, 0xFE, 0x00, 0x80, 0xFE)
    convert(checkpoint.write(tmp_path / "hf"), tmp_path / "ckpt")
    expected = checkpoint.tensors[name].view(torch.uint8).numpy().tobytes()
    assert expected[-1] == 0xFE
    assert expected in (tmp_path / "ckpt" / WEIGHTS_FILE).read_bytes()


def test_every_code():
    """One bad value among good ones is seen, and every good one is let through."""
    for code in range(256):
        values = torch.full((33,), 0x38, dtype=torch.uint8)
        values[17] = code
        coded = values.view(torch.float8_e4m3fn)
        value = float(coded[17])
        assert copying._are_codes(coded) == (value == value)
        assert copying._are_scales(coded) == (value > 0)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(("layout", "name"), SCALES)
def test_block_scales_that_are_none(layout: str, name: str, tmp_path: Path):
    """NaN, zero, and below zero; the count is that of the whole tensor."""
    checkpoint = spoilt(layout, name, 0x7F, 0xFF, 0x00, 0x80, 0x81)
    with pytest.raises(InputError, match="5 scales are zero, negative or not finite") as caught:
        convert(checkpoint.write(tmp_path / "hf"), tmp_path / "ckpt")
    assert (caught.value.where or "").endswith(f"safetensors: {name}")
    assert caught.value.found == f"5 among {checkpoint.tensors[name].numel()}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(("layout", "name"), SCALES)
def test_the_smallest_and_the_largest_block_scale_are_kept(layout: str, name: str, tmp_path: Path):
    checkpoint = spoilt(layout, name, 0x01, 0x7E)
    convert(checkpoint.write(tmp_path / "hf"), tmp_path / "ckpt")
    expected = checkpoint.tensors[name].view(torch.uint8).numpy().tobytes()
    assert expected in (tmp_path / "ckpt" / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize(
    ("suffix", "value"),
    [("weight_scale_2", torch.nan), ("weight_scale_2", -1.0), ("input_scale", torch.inf)],
)
def test_one_scale_among_those_of_many_experts(suffix: str, value: float, tmp_path: Path):
    """They are read together; the one that is wrong is named."""
    checkpoint = fixture.radixark()
    name = f"{EXPERT}.{suffix}"
    checkpoint.tensors[name] = torch.full_like(checkpoint.tensors[name], value)
    with pytest.raises(InputError, match="1 scales are zero, negative or not finite") as caught:
        convert(checkpoint.write(tmp_path / "hf"), tmp_path / "ckpt")
    assert (caught.value.where or "").endswith(f"safetensors: {name}")


@pytest.mark.parametrize("value", [0.0, torch.nan, 1e-40])
def test_one_reciprocal_among_those_of_many_experts(value: float, tmp_path: Path):
    checkpoint = fixture.nvfp4_table()
    name = f"{EXPERT}.weight_global_scale"
    checkpoint.tensors[name] = torch.full_like(checkpoint.tensors[name], value)
    with pytest.raises(InputError, match="a reciprocal scale is zero, negative or not") as caught:
        convert(checkpoint.write(tmp_path / "hf"), tmp_path / "ckpt")
    assert (caught.value.where or "").endswith(f"safetensors: {name}")


@pytest.mark.parametrize(
    "name",
    [
        # In wider rows, with rows behind it, and as it is.
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
    ],
)
def test_padded_matrices(name: str, tmp_path: Path):
    source, _ = write_fp8(tmp_path / "hf")
    (path,) = (p for p in source.glob("*.safetensors") if name in load_file(p))
    tensors = load_file(path)
    save_file(tensors | {name: put(tensors[name], 0xFF, 0x7F)}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match="2 FP8 values are NaN") as caught:
        convert(source, tmp_path / "ckpt")
    assert (caught.value.where or "").endswith(f"{path.name}: {name}")
    assert caught.value.found == f"2 among {tensors[name].numel()}"
    assert not (tmp_path / "ckpt").exists()


def test_exports_look_at_codes_too(tmp_path: Path):
    convert(fixture.official_fp8().write(tmp_path / "hf"), tmp_path / "ckpt")
    path = tmp_path / "ckpt" / WEIGHTS_FILE
    name = "transformer.layers.5.mlp.experts.down.weight"
    tensors = load_file(path)
    save_file(tensors | {name: put(tensors[name], 0x7F)}, path)
    with pytest.raises(InputError, match="1 FP8 values are NaN") as caught:
        export_hf(tmp_path / "ckpt", tmp_path / "out")
    assert (caught.value.where or "").endswith(f"{WEIGHTS_FILE}: {name}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_and_file_systems_do_not_change_a_byte(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever lies together, and where the kernel cannot copy from one file to the other."""
    source = LAYOUTS[name]().write(tmp_path / "hf")
    convert(source, tmp_path / "expected")
    expected = (tmp_path / "expected" / WEIGHTS_FILE).read_bytes()
    calls = []

    def refuse(*_: int) -> int:
        calls.append(1)
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(copying, "_ELEMENTS", 48)
    monkeypatch.setattr(copying, "CHUNK_BYTES", 400)
    monkeypatch.setattr(write, "CHUNK_BYTES", 1000)
    convert(source, tmp_path / "ckpt", workers=1)
    assert (tmp_path / "ckpt" / WEIGHTS_FILE).read_bytes() == expected
    assert calls


def test_work_that_is_divided_otherwise_is_not_continued(tmp_path: Path):
    """The journal holds numbers of tasks: those of smaller tasks would leave holes."""
    source = fixture.nvidia().write(tmp_path / "hf")
    script = "from converters.checkpoint import write\nwrite.CHUNK_BYTES = 1000\n"
    script += KILLED_RUN.partition("convert(Path(")[0]
    script += "convert(Path(sys.argv[1]), Path(sys.argv[2]), workers=1)"
    command = [sys.executable, "-c", script, source, tmp_path / "ckpt", "100"]
    run = subprocess.run(command, capture_output=True, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    assert len((tmp_path / ".ckpt.partial" / "journal").read_text().splitlines()) == 101
    convert(source, tmp_path / "ckpt")
    convert(source, tmp_path / "expected")
    expected = (tmp_path / "expected" / WEIGHTS_FILE).read_bytes()
    assert (tmp_path / "ckpt" / WEIGHTS_FILE).read_bytes() == expected
