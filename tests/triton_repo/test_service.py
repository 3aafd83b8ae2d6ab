"""The generation service: one last event per sequence, whatever happens."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plugins.support.errors import CapabilityError, UsageError
from triton_repo.answers import AnswerOptions, TextAnswer
from triton_repo.frontend.output import TextOptions
from triton_repo.frontend.pipeline import MediaSpan
from triton_repo.frontend.sampling import Sampling
from triton_repo.frontend.tokenizer import ByteTokenizer
from triton_repo.generation.base import Deliver, GenerationCall, GenerationEvent
from triton_repo.generation.channel import ChannelClient, ChannelServer
from triton_repo.generation.echo import EchoGenerator
from triton_repo.generation.metrics import Metrics
from triton_repo.generation.service import GenerationService
from triton_repo.replies import Reply


class Collected:
    """Events of one sequence."""

    def __init__(self) -> None:
        self.events: list[GenerationEvent] = []
        self._done = threading.Event()

    def __call__(self, event: GenerationEvent) -> None:
        assert not self._done.is_set(), "an event after the last one"
        self.events.append(event)
        if event.last:
            self._done.set()

    def wait(self) -> GenerationEvent:
        assert self._done.wait(5), "no last event"
        return self.events[-1]

    @property
    def ids(self) -> list[int]:
        return [i for event in self.events for i in event.token_ids]


def call(ids: list[int], delay_ms: int = 0, **more: Any) -> GenerationCall:
    echo = {"echo_output_ids": ids, "echo_delay_ms": delay_ms}
    return GenerationCall(**({"prompt_ids": [1], "max_tokens": 1000, "echo": echo} | more))


@pytest.fixture
def service() -> Any:
    made = GenerationService(EchoGenerator(261), ByteTokenizer(), Metrics(None, "test"))
    yield made
    made.close()


def test_stop_strings_end_generation_in_the_middle(service: GenerationService) -> None:
    collected = Collected()
    ids = list(b"abcSTOPdef")
    service.submit(call(ids, 5, text=TextOptions(("STOP",))), collected)
    assert collected.wait().finish_reason == "stop"
    assert collected.ids == list(b"abcSTOP")
    assert service.running == 0


def test_requests_with_one_id_are_separate(service: GenerationService) -> None:
    first, second, other = Collected(), Collected(), Collected()
    number = service.submit(call([1] * 500, 5), first, "same")
    service.submit(call([2] * 500, 5), second, "same")
    service.submit(call([3] * 500, 5), other, "other")
    service.cancel(number)
    assert first.wait().finish_reason == "cancelled"
    assert service.running == 2
    assert service.cancel_request("same") == 1
    assert service.cancel_request("") == 0
    assert second.wait().finish_reason == "cancelled"
    assert set(second.ids) <= {2}
    assert service.cancel_request("other") == 1
    other.wait()


def test_drain_refuses_and_ends(service: GenerationService) -> None:
    long, short, late = Collected(), Collected(), Collected()
    service.submit(call([1] * 500, 20), long)
    service.submit(call([1] * 3, 20), short)
    service.drain(0.3)
    assert short.wait().finish_reason == "stop"
    assert long.wait().finish_reason == "cancelled"
    service.submit(call([1]), late)
    assert late.wait().error == ("unavailable", "the server is shutting down")


class Failing:
    """A generator that refuses, breaks, or answers before submit returns."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def submit(self, call: GenerationCall, deliver: Deliver) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        deliver(GenerationEvent([1], [0.0], "length"))
        deliver(GenerationEvent([2], [0.0], "length"))
        return lambda: None

    def gauges(self) -> dict[str, float]:
        return {"active": 0, "waiting": 0}

    def close(self) -> None:
        pass


class Leaping(Failing):
    """Several tokens in one step, as with guesses that were right."""

    def submit(self, call: GenerationCall, deliver: Deliver) -> Callable[[], None]:
        def run() -> None:
            for part in (b"abc", b"STOPdeEND", b"more"):
                deliver(GenerationEvent(list(part), [-float(i) for i in part]))
            deliver(GenerationEvent(finish_reason="stop"))

        threading.Timer(0.05, run).start()
        return lambda: None


@pytest.mark.parametrize("stops", [("STOP", "END"), ("END", "STOP")])
def test_a5_9_two_stop_strings_in_one_step(stops: tuple[str, ...]) -> None:
    # A5.9: the first to complete wins; ids and log-probabilities behind it are dropped.
    service = GenerationService(Leaping(None), ByteTokenizer(), Metrics(None, "test"))
    collected = Collected()
    service.submit(call([1], text=TextOptions(stops)), collected)
    assert collected.wait().finish_reason == "stop"
    assert collected.ids == list(b"abcSTOP")
    assert [p for e in collected.events for p in e.log_probs] == [-float(i) for i in b"abcSTOP"]
    # Who makes the text of these events comes to the same end.
    reply = Recorded()
    options = AnswerOptions(False, True, True, False, True, False)
    answer = TextAnswer(reply, options, [call([1], text=TextOptions(stops))], ByteTokenizer())
    (sequence,) = answer.sequences
    for part in (b"abc", b"STOPdeEND"):
        event = GenerationEvent(list(part), [-float(i) for i in part])
        answer.on_event(sequence, event)
    assert len(reply.sent) == 1
    sent = reply.sent[0]
    assert sent["text_output"].item() == b"abc" and sent["stop_reason"].item() == b"STOP"
    assert sent["output_ids"].tolist() == [[list(b"abcSTOP")]]
    assert sent["output_log_probs"].tolist() == [[[-float(i) for i in b"abcSTOP"]]]
    assert sent["num_output_tokens"].tolist() == [[7]]


def test_the_queue_is_a_metric() -> None:
    class Kept(Metrics):
        def __init__(self) -> None:
            super().__init__(None, "test")
            self.values: dict[str, float] = {}

        def set(self, **values: float) -> None:
            self.values |= values

    class Busy(Leaping):
        def gauges(self) -> dict[str, float]:
            return {"active": 3, "waiting": 2}

    kept = Kept()
    service = GenerationService(Busy(None), ByteTokenizer(), kept)
    service.submit(call([1]), Collected())
    assert kept.values == {"requests_active": 3, "requests_waiting": 2}


class Recorded(Reply):
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, tensors: Any, final: bool) -> None:
        self.sent.append(tensors)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (UsageError("is bad", where="seed"), "invalid", "seed: is bad"),
        (CapabilityError("not here"), "unsupported", "not here"),
        (RuntimeError("/secret/path"), "internal", "internal error"),
    ],
)
def test_failures_become_one_event(error: Exception, kind: str, message: str) -> None:
    service = GenerationService(Failing(error), None, Metrics(None, "test"))
    collected = Collected()
    service.submit(call([1]), collected)
    assert collected.wait().error == (kind, message)
    assert service.running == 0


def test_events_before_submit_returns() -> None:
    service = GenerationService(Failing(None), None, Metrics(None, "test"))
    collected = Collected()
    service.submit(call([1]), collected)
    assert collected.ids == [1]
    assert service.running == 0


def test_many_threads(service: GenerationService) -> None:
    made = random.Random(3)
    jobs = [([made.randrange(256) for _ in range(made.randrange(1, 30))], made.random() < 0.3)
            for _ in range(200)]  # fmt: skip
    collected = [Collected() for _ in jobs]

    def run(index: int) -> None:
        ids, cancel = jobs[index]
        number = service.submit(call(ids, index % 3), collected[index], "x")
        if cancel:
            time.sleep(0.002)
            service.cancel(number)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for (ids, cancel), seen in zip(jobs, collected, strict=True):
        last = seen.wait()
        assert seen.ids == ids[: len(seen.ids)]
        assert cancel or seen.ids == ids
        assert last.finish_reason in ("stop", "length", "cancelled")
    assert service.running == 0


def test_calls_survive_the_channel() -> None:
    full = GenerationCall(
        [1, 2], 5, Sampling(temperature=0.5, seed=2**64 - 1), (7, 8), [[1], [2, 3]], [[4]],
        TextOptions(("é",), True, False, (7,), '[{"name": "f"}]', "open"), 2**63 + 1, "embed", 16,
        [MediaSpan("image", 0, 1, 2**64 - 1)], {"echo_output_ids": [1]},
    )  # fmt: skip
    import json

    assert GenerationCall.from_json(json.loads(json.dumps(full.to_json()))) == full


@pytest.fixture
def channel(service: GenerationService, tmp_path: Path) -> Any:
    server = ChannelServer(tmp_path / "s", service)
    client = ChannelClient(tmp_path / "s")
    yield server, client, service
    client.close()
    server.close()


def test_channel(channel: Any) -> None:
    _, client, service = channel
    texts = {i: list(f"text {i}".encode()) for i in range(20)}
    collected = {i: Collected() for i in texts}
    for i, ids in texts.items():
        client.submit(call(ids, i % 3), collected[i], "id")
    for i, ids in texts.items():
        collected[i].wait()
        assert collected[i].ids == ids
    long = Collected()
    key = client.submit(call([1] * 1000, 20), long, "id")
    client.cancel(key)
    assert long.wait().finish_reason == "cancelled"
    stopped = Collected()
    client.submit(call([1] * 1000, 20), stopped, "to-stop")
    client.stop("to-stop")
    assert stopped.wait().finish_reason == "cancelled"
    assert service.running == 0


def test_a_lost_client_leaves_nothing_running(channel: Any) -> None:
    _, client, service = channel
    collected = Collected()
    client.submit(call([1] * 1000, 20), collected, "")
    client.close()
    assert collected.wait().error == ("unavailable", "the generation model has stopped")
    deadline = time.monotonic() + 3
    while service.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.running == 0
    # The next call connects anew.
    again = Collected()
    client.submit(call([5]), again, "")
    assert again.wait().finish_reason == "stop"


def test_no_server_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError):
        ChannelClient(tmp_path / "nothing").submit(call([1]), Collected(), "")


def test_sequences_have_their_own_seeds() -> None:
    several = replace(call([1]), sampling=Sampling(seed=2**64 - 1, num_return_sequences=3))
    assert [s.sampling.seed for s in several.sequences()] == [2**64 - 1, 0, 1]
    unseeded = replace(call([1]), sampling=Sampling(num_return_sequences=2))
    assert [s.sampling.seed for s in unseeded.sequences()] == [None, None]
