"""A real engine behind a real tritonserver: the trained model says what it knows, word for word."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.qwen38_checkpoint import Known, known_continuations
from tests.triton_repo.clients import (
    generate_stream,
    grpc_stream,
    metric,
    ok,
    refused,
    text_of,
    wait_for,
)
from triton_repo.generate import write_repository
from triton_repo.selftest import self_test
from triton_repo.server import TritonServer, probe, running

MODELS = ("tensorrt_llm_bls", "ensemble")
both = pytest.mark.parametrize("model", MODELS)
KNOWN = known_continuations()


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
        ({"text_input": "hello", "task": "embed"}, "task"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"text_input": "hello", "max_tokens": 10**6}, "max_tokens"),
        ({"text_input": "hello", "length_penalty": 1.0}, "length_penalty"),
        ({"text_input": "hello", "echo_delay_ms": 1}, "echo_delay_ms"),
    ],
)
def test_what_an_engine_refuses(server: TritonServer, body: dict[str, Any], name: str) -> None:
    assert refused(server, body).startswith(f"{name}: ")


def test_self_test(server: TritonServer) -> None:
    results = self_test(server.http_url, server.grpc_url)
    assert results
    assert [r.problem for r in results] == [None] * len(results)
