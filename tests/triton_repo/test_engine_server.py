"""A real engine behind a real tritonserver: the trained model says what it knows, word for word."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
import tritonclient.grpc as grpcclient

from converters.qwen38.oracle import Oracle
from tests.fixtures.qwen38_checkpoint import Known, known_continuations
from tests.triton_repo.clients import (
    Stream,
    generate_stream,
    grpc_stream,
    metric,
    ok,
    refused,
    text_of,
    wait_for,
)
from triton_repo.frontend.tokenizer import load_tokenizer
from triton_repo.generate import write_repository
from triton_repo.selftest import self_test
from triton_repo.server import TritonServer, probe, running

MODELS = ("tensorrt_llm_bls", "ensemble")
both = pytest.mark.parametrize("model", MODELS)
KNOWN = known_continuations()
# Tokens that the engine takes at once.
WINDOW = 256


@pytest.fixture(scope="module")
def server(
    trained_engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("engine") / "model_repository"
    write_repository(trained_engine, repository)
    with running(repository, probe=probe) as server:
        yield server


def request_for(known: Known) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": 200, "exclude_input_in_output": True}
    if known.kind == "chat":
        return body | {"messages": json.dumps([{"role": "user", "content": known.prompt}])}
    return body | {"text_input": known.prompt}


@both
@pytest.mark.parametrize("known", KNOWN[:2] + KNOWN[-1:], ids=lambda k: k.kind)
def test_known_continuations(server: TritonServer, model: str, known: Known) -> None:
    answer = ok(server, request_for(known), model)
    assert answer["text_output"] == known.continuation
    assert answer["finish_reason"] == "stop"
    events = list(generate_stream(server, request_for(known), model))
    assert "".join(e["text_output"] for e in events) == known.continuation
    assert events[-1]["finish_reason"] == "stop"
    assert all("\ufffd" not in e["text_output"] for e in events)


@both
def test_more_clients_than_slots(server: TritonServer, model: str) -> None:
    seen: dict[int, str] = {}

    def client(index: int) -> None:
        body = request_for(KNOWN[index % len(KNOWN)]) | {"stream": True}
        with grpc_stream(server, body, model) as stream:
            seen[index] = text_of(stream.collect())

    threads = [threading.Thread(target=client, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [seen.get(i) for i in range(12)] == [
        KNOWN[i % len(KNOWN)].continuation for i in range(12)
    ]


def test_a_cancelled_request_frees_its_slot(server: TritonServer) -> None:
    before = metric(server, "requests_cancelled")
    body = request_for(KNOWN[0]) | {"stream": True, "end_id": -1}
    for _ in range(9):
        with grpc_stream(server, body, cancel=True) as stream:
            stream.next()
    assert wait_for(lambda: metric(server, "requests_cancelled") == before + 9, 2.0)
    assert ok(server, request_for(KNOWN[0]))["text_output"] == KNOWN[0].continuation


@both
def test_stop_words_end_generation(server: TritonServer, model: str) -> None:
    known = KNOWN[0]
    word = known.continuation.split()[3]
    body = request_for(known) | {"stop_words": [word], "return_num_output_tokens": True}
    answer = ok(server, body, model)
    assert answer["text_output"] == known.continuation[: known.continuation.index(word)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", word)


def test_bad_words_never_appear(server: TritonServer) -> None:
    known = KNOWN[0]
    word = known.continuation.split()[1]
    answer = ok(server, request_for(known) | {"bad_words": [word], "max_tokens": 20})
    assert f" {word}" not in answer["text_output"]


def test_seeds(server: TritonServer) -> None:
    body = request_for(KNOWN[0]) | {
        "temperature": 5.0, "max_tokens": 12, "num_return_sequences": 2, "seed": 11,
    }  # fmt: skip
    first, again = ok(server, body), ok(server, body)
    assert first["text_output"] == again["text_output"]
    assert first["text_output"][0] != first["text_output"][1]
    assert ok(server, body | {"seed": 12})["text_output"] != first["text_output"]


def test_log_probs_and_usage(server: TritonServer) -> None:
    body = request_for(KNOWN[0]) | {
        "return_log_probs": True, "return_num_input_tokens": True,
        "return_num_output_tokens": True, "return_perf_metrics": True,
    }  # fmt: skip
    answer = ok(server, body)
    assert len(answer["output_log_probs"]) == answer["num_output_tokens"]
    assert sum(answer["output_log_probs"]) == pytest.approx(answer["cum_log_probs"], abs=1e-4)
    assert max(answer["output_log_probs"]) <= 0
    assert (
        answer["arrival_time_ns"] <= answer["first_token_time_ns"] <= answer["last_token_time_ns"]
    )


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"text_input": "x" * 100_000}, "text_input"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"text_input": "hello", "max_tokens": 10**6}, "max_tokens"),
        ({"text_input": "hello", "length_penalty": 1.0}, "length_penalty"),
        ({"text_input": "hello", "echo_delay_ms": 1}, "echo_delay_ms"),
    ],
)
def test_what_an_engine_refuses(server: TritonServer, body: dict[str, Any], name: str) -> None:
    assert refused(server, body).startswith(f"{name}: ")


def _tokens(server: TritonServer, text: str) -> list[int]:
    """The prompt that the server makes of a text, told by its own preprocessing."""
    url = f"{server.http_url}/v2/models/preprocessing/generate"
    answer = requests.post(url, json={"QUERY": text, "REQUEST_OUTPUT_LEN": 1}, timeout=20).json()
    return list(answer["INPUT_ID"])


@both
def test_an_embedding_is_made_of_the_tokens_that_are_no_padding(
    server: TritonServer, trained_checkpoint: Path, model: str
) -> None:
    oracle = Oracle(trained_checkpoint, "bfloat16")
    pad = load_tokenizer(trained_checkpoint).pad_id
    assert pad is not None

    def similarity(found: list[float], ids: list[int]) -> float:
        # Over the tokens in order, and over the neighbours that a wrong order of steps would leave.
        mean = oracle.run(ids)["final_hidden"].mean(0)
        return float(torch.cosine_similarity(torch.tensor(found), mean, dim=0))

    text = KNOWN[0].prompt
    ids = _tokens(server, text)
    body = {"text_input": text, "task": "embed", "return_num_input_tokens": True}
    cut = {"truncate_prompt_tokens": 5, "truncation_side": "left", "padding": "max_length"}
    for fields, kept in (
        ({}, ids),
        (cut, ids[-5:]),
        (cut | {"max_length": 12}, ids[-5:]),
        (cut | {"padding": "false", "truncation": "false"}, ids),
    ):
        answer = ok(server, body | fields, model)
        vector = answer["embedding"]
        assert answer["num_input_tokens"] == len(kept)
        assert answer["text_output"] == ""
        assert math.sqrt(sum(v * v for v in vector)) == pytest.approx(1.0, abs=1e-5)
        # bfloat16 on the server, float32 in the reference.
        assert similarity(vector, kept) > 0.999
        # Padding that took part would show.
        assert similarity(vector, [*kept, *[pad] * (12 - len(kept) % 12)]) < 0.995
    assert similarity(ok(server, body, model)["embedding"], ids[-5:]) < 0.995


@both
def test_embeddings_come_in_batches_and_on_streams(server: TritonServer, model: str) -> None:
    texts = ["one", "a much longer text that is another row"]
    alone = [ok(server, {"text_input": t, "task": "embed"}, model)["embedding"] for t in texts]
    with grpc_stream(server, {"text_input": texts[1], "task": "embed", "stream": True}, model) as s:
        (result,) = s.collect()
    assert result.as_numpy("embedding").dtype == np.float32
    assert result.as_numpy("embedding")[0] == pytest.approx(alone[1], abs=1e-3)
    inputs = []
    for name, rows, dtype, kind in (
        ("text_input", [[t.encode()] for t in texts], np.object_, "BYTES"),
        ("task", [[b"embed"], [b"embed"]], np.object_, "BYTES"),
    ):
        tensor = grpcclient.InferInput(name, [2, 1], kind)
        tensor.set_data_from_numpy(np.array(rows, dtype=dtype))
        inputs.append(tensor)
    stream = Stream()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: stream.events.put((result, error)))
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        (result,) = stream.collect()
        client.stop_stream()
    both_rows = result.as_numpy("embedding")
    assert both_rows.shape == (2, len(alone[0]))
    for row, vector in zip(both_rows, alone, strict=True):
        assert row == pytest.approx(vector, abs=1e-3)


def test_a_text_longer_than_the_engine_is_embedded_in_chunks(
    server: TritonServer, trained_checkpoint: Path
) -> None:
    oracle = Oracle(trained_checkpoint, "bfloat16")
    text = " ".join(known.prompt + known.continuation for known in KNOWN)
    ids = load_tokenizer(trained_checkpoint).encode(text, False, False).ids[: 2 * WINDOW + 50]
    body = {"input_ids": ids, "task": "embed", "enable_chunked_processing": True}
    without = {"input_ids": ids, "task": "embed"}
    assert refused(server, without).startswith("text_input: ")
    answer = ok(server, body | {"return_num_input_tokens": True})
    assert answer["num_input_tokens"] == len(ids)
    parts = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    assert [len(part) for part in parts] == [WINDOW, WINDOW, 50]
    means = [oracle.run(part)["final_hidden"].mean(0) for part in parts]
    units = torch.stack([mean / mean.norm() for mean in means])
    weights = torch.tensor([float(len(part)) for part in parts])
    want = (units * weights[:, None]).sum(0)
    found = torch.tensor(answer["embedding"])
    assert float(found.norm()) == pytest.approx(1.0, abs=1e-5)
    assert float(torch.cosine_similarity(found, want, dim=0)) > 0.999
    assert float(torch.cosine_similarity(found, means[-1], dim=0)) < 0.999


def test_self_test(server: TritonServer) -> None:
    results = self_test(server.http_url, server.grpc_url)
    assert results
    assert [r.problem for r in results] == [None] * len(results)
