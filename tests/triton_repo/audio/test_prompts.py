"""Prompt ids of audio requests: the recorded sequences, and mistral-common's own route."""

from __future__ import annotations

import base64
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.transcription.request import StreamingMode, TranscriptionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from plugins.support.errors import InputError, UsageError
from tests.fixtures.tekken import SPECIALS, write_tekken
from triton_repo.frontend.audio.decode import decode_audio
from triton_repo.frontend.audio.prompts import AudioPrompts, find_tekken

AUDIO = Path(__file__).parents[2] / "fixtures" / "data" / "audio"
WAV = (AUDIO / "austen-0880.wav").read_bytes()
ONE = [25] + [24] * 375


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tekken(tmp_path_factory.mktemp("tekken"))


@pytest.fixture(scope="module")
def prompts(tekken: Path) -> AudioPrompts:
    return AudioPrompts(tekken)


@pytest.fixture(scope="module")
def realtime(tmp_path_factory: pytest.TempPathFactory) -> AudioPrompts:
    return AudioPrompts(write_tekken(tmp_path_factory.mktemp("realtime"), realtime=True))


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def audio(index: int) -> dict[str, Any]:
    return {"type": "audio", "index": index}


def letters(value: str) -> list[int]:
    return [SPECIALS + b for b in value.encode()]


def test_recorded_audio_and_text(prompts: AudioPrompts) -> None:
    samples = decode_audio(WAV)
    got = prompts.chat([user(audio(0), text("the end"))], [samples])
    assert got.ids == [1, 3, *ONE, 156, 144, 141, 72, 298, 140, 4]
    assert [len(a) for a in got.audios] == [480000]
    assert np.array_equal(got.audios[0][: len(samples)], samples)
    assert not got.audios[0][len(samples) :].any()


def test_order_of_parts_turns_and_system(prompts: AudioPrompts) -> None:
    a, b = np.ones(10, np.float32), np.ones(480001, np.float32)
    two = [25] + [24] * 750
    got = prompts.chat([user(text("x"), audio(1), audio(0))], [a, b])
    assert got.ids == [1, 3, *letters("x"), *two, *ONE, 4]
    assert [len(s) for s in got.audios] == [960000, 480000]
    turns = [user(audio(0)), {"role": "assistant", "content": "ok"}, user(text("y"))]
    assert prompts.chat(turns, [a]).ids == [1, 3, *ONE, 4, *letters("ok"), 2, 3, *letters("y"), 4]
    merged = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    assert prompts.chat(merged, []).ids == [1, 3, *letters("x\n\ny"), 4]
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert prompts.chat(system, []).ids == [1, 17, *letters("s"), 18, 3, *letters("u"), 4]
    with pytest.raises(UsageError, match="refused") as caught:
        prompts.chat([system[0], user(audio(0))], [a])
    assert "version 13" in str(caught.value.found)


def test_control_tokens_in_text_stay_text(prompts: AudioPrompts) -> None:
    got = prompts.chat([{"role": "user", "content": "[AUDIO]<s>[TRANSCRIBE]"}], [])
    assert got.ids == [1, 3, *letters("[AUDIO]<s>[TRANSCRIBE]"), 4]


def test_transcription(prompts: AudioPrompts) -> None:
    samples = decode_audio(WAV)
    assert prompts.transcribe(samples).ids == [1, 3, *ONE, 4, 34]
    # "la" and "ng" are merged, the rest are bytes.
    tail = [296, 297, *letters(":"), 298]
    assert prompts.transcribe(samples, "en").ids == [1, 3, *ONE, 4, *tail, 34]
    assert prompts.transcribe(samples, "EN").ids == prompts.transcribe(samples, "en").ids
    for wrong in ("zz", "english", ""):
        with pytest.raises(UsageError, match="refused"):
            prompts.transcribe(samples, wrong)


@pytest.mark.parametrize(
    ("samples", "rows"),
    [(1, 375), (479999, 375), (480000, 375), (480001, 750), (960000, 750), (960001, 1125)],
)
def test_rows_of_an_audio(prompts: AudioPrompts, samples: int, rows: int) -> None:
    got = prompts.transcribe(np.full(samples, 0.1, np.float32))
    assert got.ids.count(24) == rows
    assert len(got.audios[0]) == rows // 375 * 480000


def test_equals_the_library_on_its_own_route(tekken: Path, prompts: AudioPrompts) -> None:
    library = MistralTokenizer.from_file(tekken)
    data = base64.b64encode(WAV).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    conversations: list[list[Any]] = [
        [user(text("a"), part, text("b"))],
        [user(part, part)],
        [user(part), {"role": "assistant", "content": "yes"}, user(text("and"), part)],
    ]
    samples = decode_audio(WAV)
    for conversation in conversations:
        count = 0
        mine = []
        for message in conversation:
            content = message["content"]
            if isinstance(content, list):
                parts = []
                for item in content:
                    if item["type"] == "input_audio":
                        item, count = audio(count), count + 1
                    parts.append(item)
                content = parts
            mine.append({**message, "content": content})
        request: ChatCompletionRequest[Any] = ChatCompletionRequest.from_openai(conversation)
        want = library.encode_chat_completion(request)
        got = prompts.chat(mine, [samples] * count)
        assert got.ids == want.tokens
        assert len(got.audios) == len(want.audios)
        for ours, theirs in zip(got.audios, want.audios, strict=True):
            assert np.array_equal(ours, theirs.audio_array.astype(np.float32))
    for language in (None, "fr", "nl"):
        request = TranscriptionRequest(audio=data, language=language, temperature=0.0)
        want = library.encode_transcription(request)
        assert prompts.transcribe(samples, language).ids == want.tokens


@pytest.mark.parametrize(
    ("delay", "length", "padded"),
    [(80, 34, 72960), (480, 39, 79360), (1200, 48, 90880), (2400, 63, 110080)],
)
def test_realtime_schedule(realtime: AudioPrompts, delay: int, length: int, padded: int) -> None:
    got = realtime.transcribe(np.full(16000, 0.1, np.float32), delay_ms=delay)
    assert got.ids == [1] + [32] * (length - 1)
    assert len(got.audios[0]) == padded
    assert got.streaming


def test_realtime_equals_the_library_on_its_own_route(
    realtime: AudioPrompts, tmp_path: Path
) -> None:
    library = MistralTokenizer.from_file(write_tekken(tmp_path, realtime=True))
    request = TranscriptionRequest(
        audio=base64.b64encode(WAV).decode(), streaming=StreamingMode.OFFLINE
    )
    want = library.encode_transcription(request)
    got = realtime.transcribe(decode_audio(WAV))
    assert got.ids == want.tokens
    assert np.array_equal(got.audios[0], want.audios[0].audio_array.astype(np.float32))


@pytest.mark.parametrize("delay", [0, -80, 40, 100, 1280, 4800])
def test_a_delay_between_tokens_is_refused(realtime: AudioPrompts, delay: int) -> None:
    with pytest.raises(UsageError, match="delay"):
        realtime.transcribe(np.ones(16000, np.float32), delay_ms=delay)


def test_realtime_and_instruct_are_not_mixed_up(
    prompts: AudioPrompts, realtime: AudioPrompts
) -> None:
    sound = np.ones(16000, np.float32)
    with pytest.raises(UsageError, match="without delay"):
        prompts.transcribe(sound, delay_ms=480)
    with pytest.raises(UsageError, match="language"):
        realtime.transcribe(sound, "en")


def test_wrong_parts_are_named(prompts: AudioPrompts) -> None:
    sound = np.ones(16000, np.float32)
    with pytest.raises(UsageError, match="do not match"):
        prompts.chat([user(text("x"))], [sound])
    with pytest.raises(UsageError, match="no audio"):
        prompts.chat([user(audio(1))], [sound])
    with pytest.raises(UsageError, match="unknown content part"):
        prompts.chat([user({"type": "video"})], [])


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "text", "id", "function", "name"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"])},
        optional={
            name: _VALUES
            for name in ("content", "prefix", "tool_calls", "tool_call_id", "name", "extra")
        },
    ),
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(messages=_MESSAGES)
def test_any_messages_are_a_prompt_or_refused(
    prompts: AudioPrompts, messages: list[dict[str, Any]]
) -> None:
    before = copy.deepcopy(messages)
    try:
        ids = prompts.chat(messages, []).ids
    except UsageError as error:
        assert error.found
    else:
        assert ids[0] == 1
    assert messages == before


def test_a_tool_message_without_its_call_is_named(prompts: AudioPrompts) -> None:
    with pytest.raises(UsageError, match="refused") as caught:
        prompts.chat([{"role": "tool", "content": "x"}], [])
    assert caught.value.found == "'tool_call_id' is missing"


def test_tekken_file_is_found_or_named(tekken: Path, tmp_path: Path) -> None:
    assert find_tekken(tekken.parent) == tekken
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError) as caught:
        find_tekken(tmp_path)
    assert caught.value.found == "tokenizer.json"
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be loaded"):
        AudioPrompts(tmp_path / "tekken.json")
