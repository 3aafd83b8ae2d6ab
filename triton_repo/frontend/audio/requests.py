"""Request fields of a model that hears: which audio, in which prompt, and the ids they become."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plugins.support.errors import InputError, UsageError
from triton_repo.frontend import chat
from triton_repo.frontend.audio.frontend import AudioFrontEnd, Heard
from triton_repo.frontend.audio.settings import transcribes
from triton_repo.frontend.chat import MediaReference
from triton_repo.frontend.fetch import RequestFetches
from triton_repo.frontend.media import MediaPolicy, admit, media_key
from triton_repo.frontend.problems import problem

Array = npt.NDArray[np.float32]

AUDIO_FIELDS = ("audio_bytes", "audio_url", "audio_samples")
_PROMPTS = ("text_input", "input_ids", "messages", "content_parts")


@dataclass(frozen=True)
class Hearing:
    """A request with audio, before truncation and limits.

    Attributes:
        heard: ids and features; features [chunks, mels, frames], or [1, mels, frames] of a stream.
        spans: (offset, length, content key) of every audio in the ids; none for a stream.
    """

    heard: Heard
    spans: list[tuple[int, int, int]]


@dataclass(frozen=True)
class _Audio:
    samples: Array
    key: int


def hear(
    row: Mapping[str, Any],
    front_end: AudioFrontEnd,
    policy: MediaPolicy,
    most_tokens: int | None,
    check_characters: Callable[[int], object],
) -> Hearing | None:
    """The prompt of a request that has audio or messages; None for one of text or ids alone.

    Args:
        row: request fields by public name.
        front_end: of the model.
        policy: what may be fetched, and how many items.
        most_tokens: longest prompt (of a stream: longest sequence); None for no limit.
        check_characters: raises UsageError for a text of so many that it cannot fit.

    Raises UsageError naming the field: audio that cannot be heard, too long, or in a prompt that
    has no place for it.
    """
    references = _in_tensors(row)
    given = [name for name in _PROMPTS if row.get(name) is not None]
    if transcribes(row, front_end.streaming):
        if given:
            raise problem(given[0], "a transcription takes audio only", found=given[0])
        if len(references) != 1:
            raise problem(
                "audio_bytes", "a transcription needs one audio",
                expected=f"one of {', '.join(AUDIO_FIELDS)}", found=len(references),
            )  # fmt: skip
        audio = _load(references, front_end, policy, most_tokens)[0]
        with _refusals("language"):
            heard = front_end.transcribe(audio.samples, row.get("language"), row.get("delay_ms"))
        return _placed(heard, [audio], front_end)
    for name in ("language", "delay_ms"):
        if row.get(name) is not None:
            raise problem(name, 'belongs to task "transcribe"')
    if row.get("messages") is not None:
        messages, in_parts = _messages(row["messages"], len(references))
        if not any(m["role"] == "user" for m in messages) and references:
            raise problem("messages", "hold no user message for the audio")
        audios = _load([*references, *in_parts], front_end, policy, most_tokens)
    elif not references:
        return None
    else:
        audios = _load(references, front_end, policy, most_tokens)
        if row.get("input_ids") is not None:
            with _refusals("input_ids"):
                heard = front_end.from_ids(row["input_ids"], [a.samples for a in audios])
            return _placed(heard, audios, front_end)
        if row.get("text_input") is None:
            raise problem(
                references[0].named, "needs a prompt beside it",
                expected='text_input, messages, input_ids or task "transcribe"',
                found=", ".join(given) or "none",
            )  # fmt: skip
        messages = [{"role": "user", "content": [{"type": "text", "text": row["text_input"]}]}]
    check_characters(_characters(messages))
    _put_in_front(messages, len(references))
    with _refusals("messages"):
        heard = front_end.chat(messages, [a.samples for a in audios])
    return _placed(heard, audios, front_end)


@contextmanager
def _refusals(parameter: str) -> Iterator[None]:
    """Turn what is wrong with a file or a conversation into a refusal of the request.

    `parameter` is named where the error itself names none.
    """
    try:
        yield
    except InputError as error:
        raise UsageError(
            error.what, where=error.where, expected=error.expected, found=error.found
        ) from None
    except UsageError as error:
        if error.where in (None, "request"):
            error.where = parameter
        raise


def _in_tensors(row: Mapping[str, Any]) -> list[MediaReference]:
    """Audio beside the prompt, in the order of the fields."""
    found = []
    if row.get("audio_bytes") is not None:
        found.append(MediaReference("audio", data=row["audio_bytes"], parameter="audio_bytes"))
    for url in row.get("audio_url") or ():
        found.append(MediaReference("audio", url, parameter="audio_url"))
    if row.get("audio_samples") is not None:
        data = np.asarray(row["audio_samples"], dtype=np.float32).tobytes()
        found.append(MediaReference("audio", data=data, parameter="audio_samples"))
    return found


def _load(
    references: Sequence[MediaReference],
    front_end: AudioFrontEnd,
    policy: MediaPolicy,
    most_tokens: int | None,
) -> list[_Audio]:
    """Fetch and decode; what cannot fit the engine is refused before its spectrogram is made."""
    others = [r for r in references if r.modality != "audio"]
    if others:
        raise problem(others[0].named, f"this model takes no {others[0].modality}")
    admit(references, policy)
    fetches = RequestFetches(policy.fetch)
    audios = []
    total = 0
    for reference in references:
        if reference.options:
            raise problem(
                reference.named, "audio has no processor options", found=min(reference.options)
            )
        given = reference.named in AUDIO_FIELDS and not reference.url
        content = reference.data
        if not given:
            content = fetches.fetch(reference.url, reference.named)
        with _refusals(reference.named):
            if reference.named == "audio_samples":
                samples = front_end.check(np.frombuffer(content, np.float32), reference.named)
            else:
                samples = front_end.decode(content, reference.named)
        total += front_end.tokens(samples)
        if most_tokens is not None and total > most_tokens:
            raise problem(
                reference.named, "the audio is too long for this engine",
                expected=f"at most {most_tokens} tokens of audio", found=f"{total} tokens",
            )  # fmt: skip
        audios.append(_Audio(samples, media_key("audio", content, {})))
    return audios


def _messages(text: str, first: int) -> tuple[list[dict[str, Any]], list[MediaReference]]:
    """Messages whose audio parts are numbered from `first`, and the audio of these parts."""
    # Roles, shapes and URLs are checked where all families have them checked.
    media = chat.parse_messages(text).media
    messages: list[dict[str, Any]] = json.loads(text)
    number = first
    for message in messages:
        if not isinstance(message.get("content"), list):
            continue
        parts: list[dict[str, Any]] = []
        for part in message["content"]:
            if isinstance(part, str) or part["type"] in ("text", "input_text"):
                text = part if isinstance(part, str) else part["text"]
                parts.append({"type": "text", "text": text})
            else:
                parts.append({"type": "audio", "index": number})
                number += 1
        message["content"] = parts
    return messages, media


def _characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters of all texts of a conversation."""
    count = 0
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, str):
            count += len(content)
        else:
            count += sum(len(part.get("text", "")) for part in content)
    return count


def _put_in_front(messages: list[dict[str, Any]], count: int) -> None:
    """Audio beside the messages stands before the first words of the user."""
    if count == 0:
        return
    message = next(m for m in messages if m["role"] == "user")
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    message["content"] = [{"type": "audio", "index": i} for i in range(count)] + content


def _placed(heard: Heard, audios: Sequence[_Audio], front_end: AudioFrontEnd) -> Hearing:
    features = heard.features
    if front_end.streaming:
        assert features is not None
        return Hearing(Heard(heard.ids, features[None]), [])
    positions = np.flatnonzero(np.asarray(heard.ids) == front_end.placeholder_id)
    spans = []
    start = 0
    for audio in audios:
        count = front_end.tokens(audio.samples)
        if start + count > len(positions):
            break
        spans.append((int(positions[start]), count, audio.key))
        start += count
    if start != len(positions):
        raise problem(
            "input_ids", "placeholders and audio do not match",
            expected=f"{sum(front_end.tokens(a.samples) for a in audios)} ids "
            f"{front_end.placeholder_id}",
            found=len(positions),
        )  # fmt: skip
    return Hearing(heard, spans)
