"""Every kind of request with the vocabulary of the released tokenizers, against mistral-common.

The vocabulary is in mistral-common's own package; special tokens and audio block are added as the
released files have them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mistral_common
import pytest
from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.transcription.request import StreamingMode, TranscriptionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from plugins.support.errors import UsageError
from tests.fixtures.tekken import audio_block, special_tokens
from triton_repo.frontend.audio.decode import decode_audio
from triton_repo.frontend.audio.prompts import AudioPrompts
from triton_repo.frontend.tekken import TekkenTokenizer

AUDIO = Path(__file__).parents[2] / "fixtures" / "data" / "audio"
WAV = (AUDIO / "austen-0880.wav").read_bytes()
SAMPLES = decode_audio(WAV)
VOCABULARY = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
ONE = [25] + [24] * 375


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    document = json.loads(VOCABULARY.read_text())
    count = document["config"]["default_num_special_tokens"]
    document["config"]["version"] = "v7"
    document["special_tokens"] = special_tokens(count)
    document["audio"] = audio_block(realtime=False)
    document["type"], document["version"] = "Tekken", 1
    # An image block would make it a tokenizer for another model.
    document.pop("image", None)
    path = tmp_path_factory.mktemp("released") / "tekken.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def prompts(tekken: Path) -> AudioPrompts:
    return AudioPrompts(tekken)


@pytest.fixture(scope="module")
def library(tekken: Path) -> MistralTokenizer:
    return MistralTokenizer.from_file(tekken)


def test_it_is_the_vocabulary(tekken: Path, prompts: AudioPrompts) -> None:
    assert prompts.vocab_size == 131072
    assert TekkenTokenizer(tekken).decode([32000], True) == " Capital"


# The three ids of "lang:xx", of which Dutch has others: it is one string for the tokenizer.
LANGUAGES = {
    "en": [9909, 1058, 1262],
    "fr": [9909, 1058, 7064],
    "de": [9909, 1058, 1558],
    "es": [9909, 1058, 1264],
    "it": [9909, 1058, 1276],
    "pt": [9909, 1058, 1515],
    "hi": [9909, 1058, 8101],
    "ar": [9909, 1058, 1277],
    "nl": [9909, 24082, 1108],
}


@pytest.mark.parametrize("language", [None, *LANGUAGES, "EN"])
def test_transcriptions(
    prompts: AudioPrompts, library: MistralTokenizer, language: str | None
) -> None:
    got = prompts.transcribe(SAMPLES, language).ids
    tail = LANGUAGES[language.lower()] if language else []
    assert got == [1, 3, *ONE, 4, *tail, 34]
    assert len(got) == (383 if language else 380)
    data = base64.b64encode(WAV).decode()
    folded = language.lower() if language else None
    request = TranscriptionRequest(audio=data, language=folded, temperature=0.0)
    assert got == list(library.encode_transcription(request).tokens)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


HEAR = {"type": "audio"}
ASSISTANT = {"role": "assistant", "content": "He was not."}
SYSTEM = {"role": "system", "content": "Answer briefly."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "audio and text": [user(HEAR, text("What is said?"))],
    "text before audio": [user(text("What is said?"), HEAR)],
    "audio alone": [user(HEAR)],
    "two audios": [user(HEAR, HEAR, text("Which is longer?"))],
    "text between audios": [user(HEAR, text("or"), HEAR)],
    "texts in a row": [user(text("One."), text("Two."), HEAR, text("Three."), text("Four."))],
    "several turns": [user(HEAR), ASSISTANT, user(text("And then?"), HEAR)],
    "users in a row": [user(text("One.")), user(text("Two."), HEAR)],
    "users in a row, both with audio": [user(HEAR), user(HEAR, text("Three."))],
    "text alone": [user(text("Who are you?"))],
    "text as a string": [{"role": "user", "content": "Wer bist du? – über „Zitate“ 🦢"}],
    "system prompt": [SYSTEM, user(text("Who are you?"))],
    "system prompt and turns": [SYSTEM, user(text("a")), ASSISTANT, user(text("b"))],
    "control tokens as text": [user(HEAR, text("[AUDIO]<s>[TRANSCRIBE][/INST]</s>"))],
    "assistants in a row": [user(text("a")), ASSISTANT, ASSISTANT, user(text("b"))],
}


def numbered(messages: Sequence[dict[str, Any]], part: Any) -> tuple[list[dict[str, Any]], int]:
    """Messages whose audio parts are made by `part(number)`, and how many there are."""
    count = 0
    made = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            parts = []
            for item in content:
                if item is HEAR:
                    item, count = part(count), count + 1
                parts.append(item)
            content = parts
        made.append({**message, "content": content})
    return made, count


def as_library(_number: int) -> dict[str, Any]:
    data = base64.b64encode(WAV).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


@pytest.mark.parametrize("kind", CHATS)
def test_chats(prompts: AudioPrompts, library: MistralTokenizer, kind: str) -> None:
    theirs, _ = numbered(CHATS[kind], as_library)
    mine, count = numbered(CHATS[kind], lambda n: {"type": "audio", "index": n})
    request: ChatCompletionRequest[Any] = ChatCompletionRequest.from_openai(theirs)
    want = list(library.encode_chat_completion(request).tokens)
    got = prompts.chat(mine, [SAMPLES] * count).ids
    assert got == want
    assert got.count(24) == 375 * count and got.count(25) == count


def test_a_last_message_of_the_assistant_is_gone_on_with(
    prompts: AudioPrompts, library: MistralTokenizer
) -> None:
    mine = [user(text("Who?")), {"role": "assistant", "content": "He was", "prefix": True}]
    request: ChatCompletionRequest[Any] = ChatCompletionRequest(
        messages=[UserMessage(content="Who?"), AssistantMessage(content="He was", prefix=True)]
    )
    got = prompts.chat(mine, []).ids
    assert got == list(library.encode_chat_completion(request).tokens)
    assert got[-1] != 2 and mine[-1]["prefix"] is True
    with pytest.raises(UsageError, match="refused"):
        prompts.chat([mine[0], {"role": "assistant", "content": "He was"}], [])


REFUSED: list[list[dict[str, Any]]] = [
    [],
    [SYSTEM, user(HEAR)],
    [user(text("a")), SYSTEM, user(HEAR)],
    [ASSISTANT],
    [{"role": "tool", "content": "x"}],
    [{"role": "nobody", "content": "x"}],
]


@pytest.mark.parametrize("messages", REFUSED)
def test_what_the_library_refuses_is_refused(
    prompts: AudioPrompts, library: MistralTokenizer, messages: list[dict[str, Any]]
) -> None:
    theirs, _ = numbered(messages, as_library)
    with pytest.raises(Exception):  # noqa: B017
        request: ChatCompletionRequest[Any] = ChatCompletionRequest.from_openai(theirs)
        library.encode_chat_completion(request)
    mine, count = numbered(messages, lambda n: {"type": "audio", "index": n})
    with pytest.raises(UsageError, match="refused") as caught:
        prompts.chat(mine, [SAMPLES] * count)
    assert caught.value.found


@pytest.mark.parametrize("language", ["zz", "english", "", "e", "EN-GB"])
def test_languages_the_library_refuses(prompts: AudioPrompts, language: str) -> None:
    with pytest.raises(UsageError, match="refused"):
        prompts.transcribe(SAMPLES, language)


def test_streams_and_instructions_are_not_mixed_up(library: MistralTokenizer) -> None:
    """What the library refuses is what this front end never asks of it."""
    data = base64.b64encode(WAV).decode()
    request = TranscriptionRequest(audio=data, streaming=StreamingMode.ONLINE)
    with pytest.raises(Exception):  # noqa: B017
        library.encode_transcription(request)
