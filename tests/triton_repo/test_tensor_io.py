"""Tensors to values and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plugins.support.errors import UsageError
from triton_repo.answers import id_tensor
from triton_repo.tensor_io import array_of, batch_of, check_parameters, read_rows
from triton_repo.tensors import REQUEST, Field, Tensor

FIELDS = {f.name: f for f in REQUEST}


def test_rows() -> None:
    rows = read_rows(
        {
            "text_input": np.array([["ä".encode()], [b""]], dtype=np.object_),
            "top_p": np.array([[0.9], [0.1]], dtype=np.float32),
            "input_ids": np.array([[1, 2], [3, 4]], dtype=np.int32),
            "stop_words": np.zeros((2, 0), dtype=np.object_),
        },
        FIELDS,
    )
    assert rows == [
        {"text_input": "ä", "top_p": 0.9, "input_ids": [1, 2], "stop_words": []},
        {"text_input": "", "top_p": 0.1, "input_ids": [3, 4], "stop_words": []},
    ]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("text_input", np.array([[b"\xff\xfe"]], dtype=np.object_)),
        ("text_input", np.array([[b"a", b"b"]], dtype=np.object_)),
        ("max_tokens", np.zeros((1, 0), dtype=np.int32)),
        ("max_tokens", np.array(3, dtype=np.int32)),
        ("temperature", np.array([[np.nan]], dtype=np.float32)),
        ("temperature", np.array([[np.inf]], dtype=np.float32)),
    ],
)
def test_values_that_are_refused(name: str, array: Any) -> None:
    with pytest.raises(UsageError) as caught:
        read_rows({name: array}, FIELDS)
    assert caught.value.where == name


def test_batches_must_agree() -> None:
    with pytest.raises(UsageError):
        read_rows(
            {
                "max_tokens": np.zeros((2, 1), dtype=np.int32),
                "top_k": np.zeros((1, 1), dtype=np.int32),
            },
            FIELDS,
        )


def test_a5_23_mistyped_fields() -> None:
    names = [f.name for f in REQUEST]
    check_parameters("{}", names)
    check_parameters('{"sequence_id": 1, "triton_x": 2, "id": "a"}', names)
    with pytest.raises(UsageError, match="not known") as caught:
        check_parameters('{"max_token": 1}', names)
    assert caught.value.where == "max_token"
    assert "max_tokens" in (caught.value.expected or "")


def test_arrays() -> None:
    offsets = Tensor("o", "INT32", (-1, 2))
    assert array_of(offsets, []).shape == (0, 2)
    assert batch_of(offsets, [[(0, 1)], [(0, 1), (1, 2)]]).shape == (2, 2, 2)
    assert array_of(Tensor("s", "UINT64"), [2**64 - 1]).tolist() == [2**64 - 1]
    text = array_of(Tensor("t", "STRING", (-1,)), ["a\0", "é"])
    assert text.dtype == np.object_ and text.tolist() == [b"a\0", "é".encode()]
    filled = batch_of(Tensor("i", "INT32", (-1,)), [[1], [2, 3]], fill=9)
    assert filled.tolist() == [[1, 9], [2, 3]]


def test_id_tensor() -> None:
    assert id_tensor([[[1], [2, 3]], [[4]]]).tolist() == [[[1, -1], [2, 3]], [[4, -1], [-1, -1]]]
    assert id_tensor([[[]]]).shape == (1, 1, 0)


def test_no_name_is_used_twice() -> None:
    names = [f.name for f in REQUEST]
    assert len(set(names)) == len(names)
    assert all(isinstance(f, Field) for f in REQUEST)
