"""The tensors that `preprocessing` answers with; Triton's side of it is a stand-in here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from triton_repo.frontend.tokenizer import ByteTokenizer
from triton_repo.generate import RepositoryOptions, write_repository
from triton_repo.models.preprocessing import Preprocessing
from triton_repo.tensor_io import NUMPY, Array
from triton_repo.tensors import PREPROCESSED

TYPES = {tensor.name: NUMPY[tensor.dtype] for tensor, _ in PREPROCESSED}
# What a request without wishes gets besides its ids.
USUAL = {"REQUEST_OUTPUT_LEN": [[4]], "OUT_END_ID": [[256]], "OUT_PAD_ID": [[257]]}
CONTEXT = 32


@dataclass(eq=False)
class Tensor:
    """As `pb_utils.Tensor`."""

    label: str
    array: Array

    def name(self) -> str:
        return self.label

    def as_numpy(self) -> Array:
        return self.array


@dataclass
class InferenceResponse:
    """As `pb_utils.InferenceResponse`."""

    output_tensors: tuple[Tensor, ...] | list[Tensor] = ()
    error: Any = None


class TritonError:
    """As `pb_utils.TritonError`."""

    INVALID_ARG, UNAVAILABLE, UNSUPPORTED, INTERNAL = range(4)

    def __init__(self, message: str, code: int) -> None:
        self.message, self.code = message, code


class PbUtils:
    """As Triton's module."""

    Tensor, InferenceResponse, TritonError = Tensor, InferenceResponse, TritonError
    TritonModelException = RuntimeError


class Request:
    """A request of Triton's for as many rows as each tensor has."""

    def __init__(self, **rows: list[Any]) -> None:
        kinds = {"QUERY": np.object_, "messages": np.object_, "input_ids": np.int32}
        self._inputs = []
        for name, values in rows.items():
            values = [v.encode() if isinstance(v, str) else v for v in values]
            array = np.array(values, dtype=kinds.get(name, np.int32))
            shape = (len(values), -1) if name == "input_ids" else (len(values), 1)
            self._inputs.append(Tensor(name, array.reshape(shape)))

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return "{}"

    def correlation_id(self) -> int:
        return 0


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Preprocessing]:
    # A model decides about the threads of its process, which this one is not.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    repository = write_repository(
        None,
        tmp_path / "repository",
        tokenizer="bytes",
        generation="echo",
        options=RepositoryOptions(max_context=CONTEXT),
    )
    directory = repository / "preprocessing"
    config = text_format.Parse(
        (directory / "config.pbtxt").read_text(), model_config_pb2.ModelConfig()
    )
    values = {name: {"string_value": v.string_value} for name, v in config.parameters.items()}
    arguments = {
        "model_config": json.dumps({"name": config.name, "parameters": values}),
        "model_repository": str(directory),
        "model_version": "1",
    }
    made = Preprocessing(PbUtils, arguments)
    yield made
    made.close()


def answer(model: Preprocessing, request: Request) -> dict[str, Any]:
    """The answer's tensors as lists; their types are those of the configuration."""
    (response,) = model.execute([request])
    assert response.error is None, response.error.message
    tensors = {t.name(): t.as_numpy() for t in response.output_tensors}
    assert len(tensors) == len(response.output_tensors), "a tensor came twice"
    assert {n: a.dtype for n, a in tensors.items()} == {n: TYPES[n] for n in tensors}
    return {name: array.tolist() for name, array in tensors.items()}


def test_a_row_gets_its_own_ids_and_what_it_shares_with_others(model: Preprocessing) -> None:
    for text in ("abc", "d", "efgh", "ijk", "abc"):
        got = answer(model, Request(QUERY=[text], REQUEST_OUTPUT_LEN=[4]))
        own = {"INPUT_ID": [list(text.encode())], "REQUEST_INPUT_LEN": [[len(text)]]}
        assert got == USUAL | own
    # Of other options nothing is shared.
    got = answer(model, Request(QUERY=["abc"], REQUEST_OUTPUT_LEN=[5], END_ID=[7]))
    assert (got["REQUEST_OUTPUT_LEN"], got["OUT_END_ID"]) == ([[5]], [[7]])


def test_rows_get_the_same_alone_and_together(model: Preprocessing) -> None:
    texts = ["abc", "d", "efgh"]
    alone = [answer(model, Request(QUERY=[t], REQUEST_OUTPUT_LEN=[4])) for t in texts]
    together = answer(model, Request(QUERY=texts, REQUEST_OUTPUT_LEN=[4] * 3))
    assert together["REQUEST_INPUT_LEN"] == [[3], [1], [4]]
    pad = ByteTokenizer.PAD
    assert together["INPUT_ID"] == [[97, 98, 99, pad], [100, pad, pad, pad], [101, 102, 103, 104]]
    for name in USUAL:
        assert together[name] == [row[name][0] for row in alone]


def test_chats_and_ids_take_the_same_way(model: Preprocessing) -> None:
    chat = json.dumps([{"role": "user", "content": "x"}])
    rendered = list(b"user: x\nassistant: ")
    got = answer(model, Request(messages=[chat], REQUEST_OUTPUT_LEN=[4]))
    assert got == USUAL | {"INPUT_ID": [rendered], "REQUEST_INPUT_LEN": [[len(rendered)]]}
    ids = answer(model, Request(input_ids=[[5, 6]], REQUEST_OUTPUT_LEN=[4]))
    assert ids == USUAL | {"INPUT_ID": [[5, 6]], "REQUEST_INPUT_LEN": [[2]]}


def test_an_answer_that_does_not_fit_is_cut_for_that_row_alone(model: Preprocessing) -> None:
    room = CONTEXT - 4
    fits = answer(model, Request(QUERY=["x" * room], REQUEST_OUTPUT_LEN=[4]))
    cut = answer(model, Request(QUERY=["x" * (room + 1)], REQUEST_OUTPUT_LEN=[4]))
    again = answer(model, Request(QUERY=["y" * room], REQUEST_OUTPUT_LEN=[4]))
    found = [got["REQUEST_OUTPUT_LEN"] for got in (fits, cut, again)]
    assert found == [[[4]], [[3]], [[4]]]
    assert [len(got["INPUT_ID"][0]) for got in (fits, cut, again)] == [room, room + 1, room]


def test_a_mistake_is_the_answer_of_its_own_request(model: Preprocessing) -> None:
    good = Request(QUERY=["abc"], REQUEST_OUTPUT_LEN=[4])
    bad = Request(QUERY=["x" * CONTEXT], REQUEST_OUTPUT_LEN=[4])
    first, second, third = model.execute([good, bad, good])
    assert first.error is None and third.error is None
    assert second.error.message.startswith("text_input: the prompt fills the context")
    assert second.error.code == TritonError.INVALID_ARG
