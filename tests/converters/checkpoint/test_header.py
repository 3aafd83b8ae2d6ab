"""Headers of safetensors files: what the format's own library writes is read, the rest refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file

from converters.checkpoint.header import MAX_HEADER_BYTES, build_header, read_header
from plugins.support.dtypes import BY_NAME
from plugins.support.errors import InputError


def file_of(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_the_library_writes(tmp_path: Path):
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.tensor([1.5], dtype=torch.bfloat16),
        "c": torch.zeros(2, 0, dtype=torch.int64),
        "d": torch.tensor(7, dtype=torch.uint8),
        "e": torch.ones(3).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    entries = read_header(tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = entries[name]
        assert (found.dtype.torch, found.shape) == (tensor.dtype, tuple(tensor.shape))
        stored = data[found.offset : found.offset + found.nbytes]
        assert stored == bytes(tensor.flatten().view(torch.uint8).numpy())


def test_the_library_reads_what_is_written():
    tensors = [("x", BY_NAME["float32"], (2, 2)), ("é", BY_NAME["uint8"], (3,))]
    header, offsets = build_header(tensors)
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    loaded = load(header + values.numpy().tobytes() + bytes([7, 8, 9]))
    assert torch.equal(loaded["x"], values)
    assert loaded["é"].tolist() == [7, 8, 9]
    assert offsets[1] - offsets[0] == 16
    assert offsets[0] % 8 == 0


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry("F99")}, b"\0" * 4, "element type"),
        ({"a": entry(shape=[-1])}, b"\0" * 4, "no proper shape"),
        ({"a": entry(shape=[True])}, b"\0" * 4, "no proper shape"),
        ({"a": entry(shape="x")}, b"\0" * 4, "no proper shape"),
        ({"a": entry(offsets=[0])}, b"\0" * 4, "no proper shape"),
        ({"a": entry(offsets=[4, 0])}, b"\0" * 4, "bytes do not fit"),
        ({"a": entry(shape=[10**30])}, b"\0" * 4, "bytes do not fit"),
        ({"a": entry(offsets=[4, 8])}, b"\0" * 8, "leave a hole"),
        ({"a": entry(), "b": entry()}, b"\0" * 4, "overlap"),
        ({"a": entry(), "b": entry(offsets=[2, 6])}, b"\0" * 6, "overlap"),
        ({"a": entry()}, b"\0" * 3, "another size"),
        ({"a": entry()}, b"\0" * 5, "another size"),
        ({"a": 1}, b"", "not an object"),
        (b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', b"", "name"),
        ([1], b"", "not a JSON object"),
        (b'{"a": 1, "a": 2}', b"", "occurs twice"),
        (b"{", b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
    ],
)
def test_wrong_headers_are_refused(tmp_path: Path, header: object, data: bytes, message: str):
    path = file_of(tmp_path / "x.safetensors", header, data)
    with pytest.raises(InputError, match=message) as caught:
        read_header(path)
    assert str(path) in (caught.value.where or "")


@pytest.mark.parametrize("length", [9, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_header_length_is_not_trusted(tmp_path: Path, length: int):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}      ")
    with pytest.raises(InputError, match="longer than"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 7])
def test_short_files_are_refused(tmp_path: Path, content: bytes):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="too short"):
        read_header(tmp_path / "x.safetensors")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**65) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)
headers = st.dictionaries(
    st.text(max_size=4),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "U8", "I64"]) | json_values,
            "shape": st.lists(st.integers(0, 3), max_size=3) | json_values,
            "data_offsets": st.tuples(st.integers(0, 12), st.integers(0, 12)).map(list)
            | json_values,
        }
    )
    | json_values,
    max_size=3,
).map(lambda header: json.dumps(header).encode())


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(header=headers | st.binary(max_size=64), data=st.binary(max_size=16))
def test_any_bytes_are_read_as_the_library_reads_them_or_refused(
    tmp_path: Path, header: bytes, data: bytes
):
    path = file_of(tmp_path / "fuzz.safetensors", header, data)
    try:
        entries = read_header(path)
    except InputError:
        return
    # What this reader accepts is inside the file and means the same to the format's own library.
    for found in entries.values():
        assert found.offset + found.nbytes <= path.stat().st_size
    try:
        with safe_open(path, "pt") as library:
            assert set(library.keys()) == set(entries)
    except SafetensorError:
        # The library is stricter about metadata, which is not used here.
        assert b"__metadata__" in header or not entries
