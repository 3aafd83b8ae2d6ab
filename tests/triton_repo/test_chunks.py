"""Embeddings in chunks: what the chunks are, what becomes of their vectors, and of a failed one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from plugins.support.errors import InputError, UsageError
from tests.triton_repo.test_pipeline import front_end, refused, run
from tests.triton_repo.test_service import Collected
from triton_repo.frontend.limits import MAX_CHUNKS
from triton_repo.frontend.tokenizer import ByteTokenizer
from triton_repo.generation.base import Deliver, GenerationCall, GenerationEvent
from triton_repo.generation.metrics import Metrics
from triton_repo.generation.service import GenerationService

VECTORS = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


class Recorder:
    """A generator that keeps its calls; the test sends their events."""

    def __init__(self, refuse: int | None = None) -> None:
        self.calls: list[GenerationCall] = []
        self.deliver: list[Deliver] = []
        self.cancelled: list[int] = []
        self._refuse = refuse

    def submit(self, call: GenerationCall, deliver: Deliver) -> Callable[[], None]:
        index = len(self.calls)
        if index == self._refuse:
            raise InputError("the queue is full")
        self.calls.append(call)
        self.deliver.append(deliver)
        return lambda: self.cancelled.append(index)

    def answer(self, index: int, **more: Any) -> None:
        extra = {"embedding": VECTORS[index % 3], **more}
        self.deliver[index](GenerationEvent(finish_reason="stop", extra=extra))

    def gauges(self) -> dict[str, float]:
        return {"active": 0.0, "waiting": 0.0}

    def close(self) -> None:
        pass


def start(size: int, generator: Recorder, window: int | None = 8) -> tuple[Collected, Any]:
    service = GenerationService(generator, ByteTokenizer(), Metrics(None, "test"))
    collected = Collected()
    call = GenerationCall(list(range(size)), 0, task="embed", cache_salt_id=7, window=window)
    number = service.submit(call, collected)
    return collected, lambda: service.cancel(number)


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_chunks_are_weighted_by_their_tokens(order: tuple[int, ...]) -> None:
    generator = Recorder()
    collected, _ = start(20, generator)
    assert [call.prompt_ids for call in generator.calls] == [
        list(range(8)), list(range(8, 16)), list(range(16, 20)),
    ]  # fmt: skip
    # Each carries the salt of the whole.
    assert [call.cache_salt_id for call in generator.calls] == [7, 7, 7]
    for index in order:
        generator.answer(
            index, kv_cache_reused_blocks=index, arrival_time_ns=index, last_token_time_ns=index
        )
    extra = collected.wait().extra
    weights = np.array([8.0, 8.0, 4.0])
    assert extra["embedding"] == pytest.approx((weights / np.linalg.norm(weights)).tolist())
    # Negative control: chunks that count alike give something else.
    assert extra["embedding"] != pytest.approx([3**-0.5] * 3, abs=1e-3)
    assert extra["kv_cache_reused_blocks"] == 3
    assert (extra["arrival_time_ns"], extra["last_token_time_ns"]) == (0, 2)
    assert len(collected.events) == 1


def test_one_that_fails_ends_the_others() -> None:
    generator = Recorder()
    collected, _ = start(20, generator)
    generator.answer(0)
    generator.deliver[1](GenerationEvent(error=("internal", "it broke")))
    assert collected.wait().error == ("internal", "it broke")
    assert set(generator.cancelled) >= {2}
    generator.answer(2)
    assert len(collected.events) == 1


def test_a_refused_chunk_refuses_the_whole() -> None:
    generator = Recorder(refuse=2)
    collected, _ = start(20, generator)
    assert collected.wait().error == ("unavailable", "the queue is full")
    assert generator.cancelled == [0, 1]


def test_cancelling_ends_every_chunk() -> None:
    generator = Recorder()
    collected, cancel = start(20, generator)
    cancel()
    assert generator.cancelled == [0, 1, 2]
    generator.deliver[0](GenerationEvent(finish_reason="cancelled"))
    assert collected.wait().finish_reason == "cancelled"


def test_vectors_that_cancel_each_other_are_no_embedding() -> None:
    generator = Recorder()
    collected, _ = start(16, generator)
    for index, sign in ((0, 1.0), (1, -1.0)):
        event = GenerationEvent(finish_reason="stop", extra={"embedding": [sign, 0.0]})
        generator.deliver[index](event)
    assert collected.wait().error == ("internal", "the chunks of this text cancel each other")


def test_too_many_chunks() -> None:
    collected, _ = start(MAX_CHUNKS + 1, Recorder(), window=1)
    kind, message = collected.wait().error or ("", "")
    assert kind == "invalid" and message.startswith("input_ids: ")


EMBED = {"task": "embed", "enable_chunked_processing": True}


def test_a_longer_prompt_is_taken_on_request_only() -> None:
    server = front_end(100, max_prompt=8)
    row = {"text_input": "x" * 20, "task": "embed"}
    assert refused(row, server).where == "text_input"
    prepared = run(row | EMBED, server)
    assert (prepared.window, len(prepared.real_ids), prepared.max_tokens) == (8, 20, 0)
    assert run(row | EMBED | {"text_input": "x" * 8}, server).window is None
    most = 8 * MAX_CHUNKS
    assert run(row | EMBED | {"text_input": "x" * most}, server).window == 8
    error = refused(row | EMBED | {"text_input": "x" * (most + 1)}, server)
    assert isinstance(error, UsageError) and error.where == "text_input"


def test_padding_stays_within_the_context() -> None:
    # Padding to all chunks together would leave chunks of nothing but padding.
    server = front_end(8)
    short = run(EMBED | {"text_input": "abc", "padding": "max_length"}, server)
    assert short.prompt.ids == [97, 98, 99] + [257] * 5
    assert (short.real_ids, short.window) == ([97, 98, 99], None)
    long = run(EMBED | {"text_input": "a" * 20, "padding": "max_length"}, server)
    assert (long.prompt.ids, long.window) == ([97] * 20, 8)
    assert refused(EMBED | {"text_input": "abc", "padding": "9"}, server).where == "text_input"


def test_truncation_comes_before_chunks() -> None:
    row = EMBED | {"text_input": "x" * 20, "truncate_prompt_tokens": -1}
    assert run(row, front_end(8)).window is None


@pytest.mark.parametrize(
    "row",
    [
        {"text_input": "x", "enable_chunked_processing": True},
        EMBED
        | {
            "input_ids": [258] * 20,
            "mm_features": '[{"modality": "image", "offset": 0, "length": 20, "key": 1}]',
        },
    ],
)
def test_what_has_no_chunks(row: dict[str, Any]) -> None:
    assert refused(row, front_end(8)).where == "enable_chunked_processing"
