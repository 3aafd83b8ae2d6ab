"""Requests that listen to a stream: waiting, ending, cancelling, draining, sharing the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from plugins.support.errors import UsageError
from runtime.audio import AudioEncoder
from runtime.audio_rows import AudioRows
from runtime.engine import Engine
from runtime.requests import GenerationRequest
from runtime.session import GenerationHandle, Session

PROMPT = [1, *[32] * 38]
FRAMES = 8 * 60


@pytest.fixture(scope="module")
def engine(realtime_engine: Path) -> Iterator[Engine]:
    engine = Engine.load(realtime_engine, executor="interpreter", device="cpu")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def features() -> torch.Tensor:
    return torch.randn(128, FRAMES, generator=torch.Generator().manual_seed(3)) * 0.3


@pytest.fixture(scope="module")
def whole(engine: Engine, features: torch.Tensor) -> list[int]:
    with Session(engine) as session:
        rows = AudioEncoder(engine).rows(features)
        ids, last = session.submit(GenerationRequest(PROMPT, 400, audio=rows)).result()
    assert last.finish_reason == "stop"
    # One token for every row after the prompt's, and one for the last of those.
    assert len(ids) == FRAMES // 8 - len(PROMPT)
    return ids


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def opened(engine: Engine, session: Session) -> tuple[AudioRows, GenerationHandle]:
    rows = AudioEncoder(engine).open_rows()
    return rows, session.submit(GenerationRequest(PROMPT, 400, audio=rows))


@pytest.mark.parametrize("frames", [8, 40, 104, FRAMES])
def test_pieces_of_any_size_give_the_same_tokens(
    engine: Engine, features: torch.Tensor, whole: list[int], frames: int
) -> None:
    stream = AudioEncoder(engine).stream()
    with Session(engine) as session:
        rows, handle = opened(engine, session)
        for start in range(0, FRAMES, frames):
            piece = features[:, start : start + frames]
            rows.append(stream.push(piece), last=start + frames >= FRAMES)
        assert handle.result()[0] == whole


def test_encoder_rows_do_not_depend_on_the_pieces(engine: Engine, features: torch.Tensor) -> None:
    encoder = AudioEncoder(engine)
    at_once = encoder.rows(features).all()
    stream = encoder.stream()
    pieces = torch.cat([stream.push(p) for p in features.split(24, dim=1)])
    assert (pieces - at_once).abs().max() < 1e-5
    # The negative control: a stream that forgot what it heard before gives other rows.
    forgetful = torch.cat([encoder.stream().push(p) for p in features.split(24, dim=1)])
    assert (forgetful - at_once).abs().max() > 0.1


def test_a_request_waits_for_its_rows(
    engine: Engine, features: torch.Tensor, whole: list[int]
) -> None:
    heard = AudioEncoder(engine).rows(features).all()
    with Session(engine) as session:
        rows, handle = opened(engine, session)
        assert handle.next_event(timeout=0.2) is None
        rows.append(heard[: len(PROMPT) - 1])
        # One row of the prompt is still missing.
        assert handle.next_event(timeout=0.2) is None
        rows.append(heard[len(PROMPT) - 1 : len(PROMPT) + 2])
        seen = [handle.next_event(timeout=5.0) for _ in range(3)]
        assert [e.token_id for e in seen if e is not None] == whole[:3]
        assert handle.next_event(timeout=0.2) is None
        # Others go on meanwhile, and neither disturbs the other.
        other = session.submit(GenerationRequest(PROMPT, 400, audio=AudioRows(heard, None)))
        assert other.result()[0] == whole
        rows.append(heard[len(PROMPT) + 2 :], last=True)
        assert [*whole[:3], *handle.result()[0]] == whole


def test_a_waiting_stream_uses_no_processor(engine: Engine) -> None:
    with Session(engine) as session:
        _, handle = opened(engine, session)
        until(lambda: session.stats().active == 1)
        before = time.process_time()
        assert handle.next_event(timeout=0.5) is None
        assert session.stats().totals.context_calls == 0
        assert time.process_time() - before < 0.4
        handle.cancel()


def test_a_waiting_stream_can_be_cancelled(engine: Engine, features: torch.Tensor) -> None:
    with Session(engine) as session:
        rows, handle = opened(engine, session)
        until(lambda: session.stats().active == 1)
        handle.cancel()
        assert handle.result()[1].finish_reason == "cancelled"
        until(lambda: session.stats().active == 0)
        # Rows that come too late hurt nobody.
        rows.append(torch.zeros(3, 48), last=True)
        assert session.stats().totals.finished["error"] == 0


def test_more_streams_than_slots(engine: Engine, features: torch.Tensor, whole: list[int]) -> None:
    heard = AudioEncoder(engine).rows(features).all()
    with Session(engine) as session:
        streams = [opened(engine, session) for _ in range(engine.slots + 2)]
        for start in range(0, len(heard), 7):
            for rows, _ in streams:
                rows.append(heard[start : start + 7], last=start + 7 >= len(heard))
        assert [handle.result()[0] for _, handle in streams] == [whole] * len(streams)


@pytest.mark.parametrize("drain", [False, True])
def test_closing_ends_streams_that_nobody_speaks_into(engine: Engine, drain: bool) -> None:
    session = Session(engine)
    _, handle = opened(engine, session)
    until(lambda: session.stats().active == 1)
    started = time.monotonic()
    session.close(drain=drain, timeout=0.5)
    assert time.monotonic() - started < 10
    assert handle.result()[1].finish_reason == "cancelled"


def test_a_stream_shorter_than_the_prompt_ends(engine: Engine) -> None:
    with Session(engine) as session:
        rows, handle = opened(engine, session)
        rows.append(torch.zeros(5, 48), last=True)
        ids, last = handle.result()
        assert (ids, last.finish_reason) == ([], "stop")


def test_the_longest_sequence_ends_a_stream_cleanly(
    engine: Engine, features: torch.Tensor, whole: list[int]
) -> None:
    with Session(engine) as session:
        rows = AudioEncoder(engine).rows(features)
        ids, last = session.submit(GenerationRequest(PROMPT, 7, audio=rows)).result()
        assert (ids, last.finish_reason) == (whole[:7], "length")


def test_what_an_encoder_refuses(engine: Engine, voxtral_engine: Path) -> None:
    encoder = AudioEncoder(engine)
    with pytest.raises(UsageError, match="hears a stream"):
        encoder.encode(torch.zeros(1, 128, 3000))
    for shape in ((1, 128, 80), (80, 80)):
        with pytest.raises(UsageError, match="do not fit"):
            encoder.rows(torch.zeros(shape))
    chunks = Engine.load(voxtral_engine, executor="interpreter", device="cpu")
    try:
        whole = AudioEncoder(chunks)
        with pytest.raises(UsageError, match="whole chunks"):
            whole.stream()
        for shape in ((0, 128, 3000), (1, 80, 3000), (1, 128, 2999), (128, 3000)):
            with pytest.raises(UsageError, match="do not fit"):
                whole.rows(torch.zeros(shape))
        assert whole.rows(torch.zeros(9, 128, 3000)).count == 9 * 375
    finally:
        chunks.close()
