"""Models that hear, behind a real tritonserver: files, chats, bad audio, and speech in pieces."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.fixtures.voxtral_checkpoint import QUESTION, Recording, recordings
from tests.triton_repo.audio.test_decode import BAD, encode, tone
from tests.triton_repo.clients import (
    Stream,
    generate_stream,
    grpc_stream,
    inputs_of,
    metric,
    ok,
    refused,
    text_of,
    wait_for,
)
from triton_repo.examples import speech
from triton_repo.generate import write_repository
from triton_repo.selftest import self_test
from triton_repo.server import TritonServer, probe, running

MODELS = ("tensorrt_llm_bls", "ensemble")
both = pytest.mark.parametrize("model", MODELS)
KNOWN = recordings()
# What the recomputable realtime model makes of the second recording.
HEARD = [
    217, 79, *[27] * 21, 12, 193, 78, *[27] * 8, 129, 118, 210, 210, 140, 15, 39, 182, 129, 210,
    140, 15, 39, 182,
]  # fmt: skip


@pytest.fixture(scope="module")
def server(
    voxtral_engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("voxtral") / "model_repository"
    write_repository(voxtral_engine, repository)
    with running(repository, probe=probe) as server:
        yield server


@pytest.fixture(scope="module")
def realtime(
    realtime_engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("realtime") / "model_repository"
    write_repository(realtime_engine, repository)
    with running(repository, probe=probe) as server:
        yield server


def uri(recording: Recording) -> str:
    return "data:audio/wav;base64," + base64.b64encode(recording.path.read_bytes()).decode()


def file(recording: Recording) -> dict[str, Any]:
    return {"audio_bytes": list(recording.path.read_bytes())}


def samples_of(recording: Recording) -> np.ndarray:
    return soundfile.read(recording.path, dtype="float32")[0]


@both
@pytest.mark.parametrize("known", KNOWN, ids=lambda r: r.path.stem)
def test_transcriptions(server: TritonServer, model: str, known: Recording) -> None:
    body = {"task": "transcribe", "audio_url": [uri(known)]}
    answer = ok(server, body | {"max_tokens": 200}, model)
    assert (answer["text_output"], answer["finish_reason"]) == (known.words, "stop")
    events = list(generate_stream(server, body | {"language": "EN", "max_tokens": 200}, model))
    assert "".join(e["text_output"] for e in events) == known.words
    assert events[-1]["finish_reason"] == "stop"


@both
def test_every_way_to_bring_audio(server: TritonServer, model: str) -> None:
    known = KNOWN[1]
    part = {"type": "audio_url", "audio_url": {"url": uri(known)}}
    data = base64.b64encode(known.path.read_bytes()).decode()
    question = {"type": "text", "text": QUESTION}
    typed = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    samples = [float(s) for s in samples_of(known)]
    only_text = json.dumps([{"role": "user", "content": QUESTION}])
    bodies = [
        {"text_input": QUESTION, "audio_url": [uri(known)]},
        {"text_input": QUESTION, "audio_samples": samples},
        {"messages": json.dumps([{"role": "user", "content": [part, question]}])},
        {"messages": json.dumps([{"role": "user", "content": [typed, question]}])},
        {"messages": only_text, "audio_url": [uri(known)]},
    ]
    for body in bodies:
        answer = ok(server, body | {"max_tokens": 100, "exclude_input_in_output": True}, model)
        assert answer["text_output"] == known.words
    # The prompt of a conversation is text that an answer begins with, as everywhere.
    whole = ok(server, bodies[0] | {"max_tokens": 100}, model)
    assert whole["text_output"] == QUESTION + known.words


@both
def test_the_length_of_a_transcription_need_not_be_given(server: TritonServer, model: str) -> None:
    body = file(KNOWN[4]) | {"task": "transcribe", "stream": True}
    with grpc_stream(server, body, model) as stream:
        assert text_of(stream.collect()) == KNOWN[4].words


@both
def test_more_clients_than_slots(server: TritonServer, model: str) -> None:
    seen: dict[int, str] = {}

    def client(index: int) -> None:
        body = file(KNOWN[index % 5]) | {"task": "transcribe", "stream": True, "max_tokens": 200}
        with grpc_stream(server, body, model) as stream:
            seen[index] = text_of(stream.collect())

    threads = [threading.Thread(target=client, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert [seen.get(i) for i in range(10)] == [KNOWN[i % 5].words for i in range(10)]


@both
def test_bad_audio_fails_that_request_only(server: TritonServer, model: str) -> None:
    kinds = {k: make() for k, make in BAD.items() if k != "too long"}
    # Three chunks of 375 tokens are more than the engine's 1024.
    kinds["too long"] = encode(tone(61.0), 16000, "FLAC")
    assert len(kinds) > 20
    good = file(KNOWN[0]) | {"task": "transcribe", "stream": True, "max_tokens": 200}
    with grpc_stream(server, good, model) as stream:
        for kind, data in kinds.items():
            body = {"task": "transcribe", "audio_bytes": list(data)}
            with grpc_stream(server, body, model) as bad:
                with pytest.raises(InferenceServerException, match=r"audio_bytes: ") as caught:
                    bad.next()
                assert ".py" not in str(caught.value), kind
        assert text_of(stream.collect()) == KNOWN[0].words


CHAT = {"text_input": QUESTION}
SYSTEM = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]


@both
@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"task": "transcribe"}, "audio_bytes"),
        ({"task": "transcribe", "text_input": "x"}, "text_input"),
        ({"task": "transcribe", "audio_url": ["A", "A"]}, "audio_bytes"),
        ({"task": "transcribe", "audio_url": ["A"], "language": "english"}, "language"),
        ({"task": "transcribe", "audio_url": ["A"], "delay_ms": 480}, "delay_ms"),
        ({"task": "sing", "audio_url": ["A"]}, "task"),
        ({"task": "embed", "text_input": "x"}, "task"),
        ({"audio_url": ["A"]}, "audio_url"),
        (CHAT | {"language": "en"}, "language"),
        (CHAT | {"audio_url": ["A"] * 17}, "audio_url"),
        (CHAT | {"audio_url": ["A"] * 3}, "audio_url"),
        (CHAT | {"audio_url": ["http://127.0.0.1:9/a.wav"]}, "audio_url"),
        (CHAT | {"audio_url": ["file:///etc/passwd"]}, "audio_url"),
        (CHAT | {"audio_url": ["data:audio/wav;base64,!"]}, "audio_url"),
        (CHAT | {"audio_url": ["A"], "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        (CHAT | {"image_url_input": ["A"]}, "image_url"),
        ({"messages": json.dumps(SYSTEM), "audio_url": ["A"]}, "messages"),
        ({"messages": json.dumps([{"role": "user", "content": [{"type": "x"}]}])}, "messages"),
        ({"input_ids": [1, 3, 25, 24, 4], "audio_url": ["A"]}, "input_ids"),
        ({"input_ids": [1, 24, 4]}, "input_ids"),
        (CHAT | {"audio_samples": [0.0, 0.0]}, "audio_samples"),
        (CHAT | {"mm_processor_kwargs": '{"sampling_rate": 8000}'}, "mm_processor_kwargs"),
        (
            {
                "messages": json.dumps(
                    [
                        {
                            "role": "user",
                            "content": [
                                {
                                    "type": "audio_url",
                                    "audio_url": {"url": uri(KNOWN[1]), "sampling_rate": 8000},
                                }
                            ],
                        }
                    ]
                )
            },
            "messages[0].content[0].audio_url: audio has no processor options",
        ),
        # More than the context can hold, before it is tokenised.
        (
            {"messages": json.dumps([{"role": "user", "content": ["x" * 60000] * 2}])},
            "text_input: is longer than the context can hold; expected at most ",
        ),
    ],
)
def test_what_is_refused(server: TritonServer, model: str, body: dict[str, Any], name: str) -> None:
    if "audio_url" in body:
        urls = [uri(KNOWN[1]) if u == "A" else u for u in body["audio_url"]]
        body = body | {"audio_url": urls}
    assert refused(server, body, model).startswith(name)


def test_a_cancelled_transcription_frees_its_slot(server: TritonServer) -> None:
    before = metric(server, "requests_cancelled")
    body = file(KNOWN[0]) | {"task": "transcribe", "stream": True, "max_tokens": 500, "end_id": -1}
    for _ in range(3):
        with grpc_stream(server, body, cancel=True) as stream:
            stream.next()
    assert wait_for(lambda: metric(server, "requests_cancelled") == before + 3, 5.0)


def test_self_test(server: TritonServer) -> None:
    results = self_test(server.http_url, server.grpc_url)
    assert [r.problem for r in results] == [None] * len(results)


def test_the_example(
    server: TritonServer, realtime: TritonServer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = KNOWN[1].path
    assert speech.main([str(path), "--url", server.grpc_url]) == 0
    assert capsys.readouterr().out == f"{KNOWN[1].words}\n"
    assert speech.main([str(path), "--url", server.grpc_url, "--live", "--pace", "0"]) == 1
    assert "sequence_id: this model hears no streams" in capsys.readouterr().err
    assert speech.main([str(path), "--url", realtime.grpc_url]) == 0
    whole = capsys.readouterr().out
    assert speech.main([str(path), "--url", realtime.grpc_url, "--live", "--pace", "0"]) == 0
    assert capsys.readouterr().out == whole


class Speaker:
    """A client that speaks: one gRPC stream, one sequence."""

    def __init__(self, server: TritonServer, number: int | str, model: str = MODELS[0]) -> None:
        self.stream = Stream()
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        self._client.start_stream(lambda result, error: self.stream.events.put((result, error)))
        self._number, self._model = number, model
        self._started = False

    def say(self, samples: Any, last: bool = False, start: bool = False, **more: Any) -> None:
        self._client.async_stream_infer(
            self._model,
            inputs_of({"audio_samples": [float(s) for s in samples]} | more),
            request_id="piece" if self._started and not start else "text",
            sequence_id=self._number,
            sequence_start=start or not self._started,
            sequence_end=last,
            enable_empty_final_response=True,
        )
        self._started = True

    def heard(self, timeout: float = 20.0) -> tuple[list[int], bool, bool]:
        """The next ids, whether they are of the opening request, and whether that has ended."""
        result, error = self.stream.events.get(timeout=timeout)
        if error is not None:
            raise error
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        ids = result.as_numpy("output_ids").reshape(-1).tolist() if response.outputs else []
        return ids, response.id == "text", final

    def all(self) -> list[int]:
        ids: list[int] = []
        while True:
            more, text, final = self.heard()
            ids += more
            if text and final:
                return ids

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


@both
def test_a_whole_file_through_the_realtime_model(realtime: TritonServer, model: str) -> None:
    answer = ok(realtime, {"audio_url": [uri(KNOWN[1])], "max_tokens": 200}, model)
    assert (answer["output_ids"], answer["finish_reason"]) == (HEARD, "stop")
    assert (
        ok(realtime, {"audio_url": [uri(KNOWN[1])], "max_tokens": 5}, model)["output_ids"]
        == HEARD[:5]
    )
    for body, name in (
        ({"text_input": "x"}, "text_input"),
        ({"audio_url": [uri(KNOWN[1])], "language": "en"}, "language"),
        ({"audio_url": [uri(KNOWN[1])], "delay_ms": 100}, "delay_ms"),
        ({}, "audio_bytes"),
    ):
        assert refused(realtime, body, model).startswith(name)


@pytest.mark.parametrize("size", [1280, 701, 20000, 100000])
def test_pieces_give_what_the_whole_gives(realtime: TritonServer, size: int) -> None:
    samples = samples_of(KNOWN[1])
    speaker = Speaker(realtime, 7)
    for start in range(0, len(samples), size):
        speaker.say(samples[start : start + size], last=start + size >= len(samples))
    assert speaker.all() == HEARD
    speaker.close()


def test_text_comes_before_the_audio_ends(realtime: TritonServer) -> None:
    samples = samples_of(KNOWN[1])
    speaker = Speaker(realtime, "a name as id")
    speaker.say(samples[:24000])
    early: list[int] = []
    # Ids without text wait for the next text, so that not all twelve are here yet.
    while not early:
        early += speaker.heard()[0]
    assert early == HEARD[: len(early)]
    speaker.say(samples[24000:], last=True)
    assert early + speaker.all() == HEARD
    speaker.close()


def test_more_speakers_than_slots(realtime: TritonServer) -> None:
    samples = samples_of(KNOWN[1])
    speakers = [Speaker(realtime, 100 + i) for i in range(10)]
    for start in range(0, len(samples), 8000):
        for speaker in speakers:
            speaker.say(samples[start : start + 8000], last=start + 8000 >= len(samples))
    for speaker in speakers:
        assert speaker.all() == HEARD
        speaker.close()


def test_a_speaker_who_leaves_frees_the_slot(realtime: TritonServer) -> None:
    before = metric(realtime, "requests_cancelled")
    for index in range(9):
        speaker = Speaker(realtime, 200 + index)
        speaker.say(samples_of(KNOWN[1])[:16000])
        assert speaker.heard()[0]
        speaker.close(cancel=True)
        assert wait_for(
            lambda n=index + 1: metric(realtime, "requests_cancelled") == before + n, 5.0
        )


def test_max_tokens_ends_a_stream_cleanly(realtime: TritonServer) -> None:
    speaker = Speaker(realtime, 300)
    speaker.say(samples_of(KNOWN[1]), max_tokens=4)
    assert speaker.all() == HEARD[:4]
    speaker.say([0.1])
    with pytest.raises(InferenceServerException, match="sequence_id: no stream"):
        while True:
            speaker.heard()
    speaker.close()


@pytest.mark.parametrize(
    ("number", "pieces", "message"),
    [
        (401, [{"samples": [0.1], "text_input": "x"}], "text_input: has no place"),
        (402, [{"samples": [0.1], "delay_ms": 100}], "delay_ms: the delay"),
        (403, [{"samples": [float("nan")]}], "audio_samples: "),
        (404, [{"samples": [0.1]}, {"samples": [0.1], "start": True}], "sequence_id: a stream"),
        (405, [{"samples": [0.1]}, {"samples": [0.1], "max_tokens": 3}], "max_tokens: belongs"),
        (
            406,
            [{"samples": [0.1], "last": True}, {"samples": [0.1]}],
            r"audio_samples: the stream has ended|sequence_id: no stream",
        ),
    ],
)
def test_what_a_stream_refuses(
    realtime: TritonServer, number: int, pieces: list[dict[str, Any]], message: str
) -> None:
    speaker = Speaker(realtime, number)
    for piece in pieces:
        speaker.say(**piece)
    with pytest.raises(InferenceServerException, match=message):
        while True:
            speaker.heard(5.0)
    speaker.close(cancel=True)
    assert ok(realtime, {"audio_url": [uri(KNOWN[1])], "max_tokens": 5})["output_ids"] == HEARD[:5]


def test_the_ensemble_hears_no_pieces(realtime: TritonServer) -> None:
    speaker = Speaker(realtime, 500, "ensemble")
    speaker.say([0.1])
    with pytest.raises(InferenceServerException, match="sequence_id: audio in pieces"):
        speaker.heard()
    speaker.close()
