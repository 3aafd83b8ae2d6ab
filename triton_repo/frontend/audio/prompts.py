"""Chat and transcription requests with audio to token ids, through mistral-common.

Ids, their order, the rules for system prompts and languages are mistral-common's. Only its audio
decoding is replaced: samples are decoded once here, and the number of placeholder tokens follows
from their count, so that a request is neither decoded twice nor re-encoded in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.chunk import AudioChunk, AudioURLChunk
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.transcription.request import TranscriptionRequest
from mistral_common.tokens.tokenizers.audio import Audio, AudioEncoder, AudioEncoding
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from pydantic import ValidationError

from plugins.support.errors import InputError, UsageError
from triton_repo.frontend.tekken import tekken_files

Array = npt.NDArray[np.float32]

# What the library raises for messages that it has no place for; it looks into them unchecked.
_REFUSALS = (
    MistralCommonException,
    ValidationError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
)
# What stands for audio number i inside a request on its way through mistral-common.
_REFERENCE = "audio:{}"


@dataclass(frozen=True)
class AudioPrompt:
    """A request as the engines take it.

    Attributes:
        ids: token ids with one placeholder per audio row.
        audios: mono float32 samples, in the order of their placeholders, padded as the model
            wants them (whole chunks, or the stream's left and right silence).
        streaming: whether the audio rows are added at every position (realtime) or replace
            placeholders.
    """

    ids: list[int]
    audios: list[Array]
    streaming: bool


class _ReferencedAudio(AudioEncoder):
    """mistral-common's encoder over samples that are already decoded."""

    def __init__(self, base: AudioEncoder, samples: Sequence[Array]) -> None:
        super().__init__(base.audio_config, base.special_ids)
        self._samples = samples

    def __call__(self, content: AudioChunk | AudioURLChunk) -> AudioEncoding:
        if not isinstance(content, AudioChunk) or not isinstance(content.input_audio, str):
            raise UsageError("an audio part is not a reference", where="messages")
        samples = self._samples[int(content.input_audio.removeprefix("audio:"))]
        return self.encode_audio(Audio(samples, self.audio_config.sampling_rate, "wav"))


def find_tekken(directory: Path) -> Path:
    """The tekken file of a tokenizer directory.

    Raises:
        InputError: none, or more than one; the message lists what is there.
    """
    found = tekken_files(directory)
    if len(found) != 1:
        present = ", ".join(sorted(p.name for p in directory.iterdir())) or "nothing"
        raise InputError(
            "the tokenizer directory needs one tekken file",
            where=str(directory),
            expected="tekken.json",
            found=present,
        )
    return found[0]


class AudioPrompts:
    """Builds prompts with one tekken tokenizer that knows audio."""

    def __init__(self, tekken: Path) -> None:
        try:
            self._tokenizer = MistralTokenizer.from_file(tekken)
        except (MistralCommonException, AssertionError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                "the tekken tokenizer cannot be loaded", where=str(tekken), found=str(error)
            ) from error
        encoder = self._tokenizer.instruct_tokenizer.audio_encoder
        if encoder is None:
            raise InputError(
                "the tokenizer knows no audio",
                where=str(tekken),
                expected="an `audio` block with sampling rate, frame rate and mel geometry",
            )
        self._encoder: AudioEncoder = encoder
        self.config = encoder.audio_config
        self.vocab_size: int = self._tokenizer.instruct_tokenizer.tokenizer.n_words
        self.placeholder_id: int = encoder.special_ids.audio

    @property
    def streaming(self) -> bool:
        """Whether the tokenizer is one of the realtime model."""
        return self.config.is_streaming

    def chat(self, messages: Sequence[Mapping[str, Any]], audios: Sequence[Array]) -> AudioPrompt:
        """Prompt of a conversation.

        Args:
            messages: OpenAI-style messages; a content part `{"type": "audio", "index": i}`
                stands for `audios[i]`, text parts are `{"type": "text", "text": ...}`. A last
                message of the assistant with `"prefix": true` is the beginning of the answer.
            audios: mono float32 samples at the model's rate.

        Raises:
            UsageError: a part of unknown type, an audio without part or the other way round, or
                a conversation mistral-common refuses (its reason is in the message).
        """
        order: list[int] = []
        rendered = [_render(message, len(audios), order) for message in messages]
        if sorted(order) != list(range(len(audios))):
            raise UsageError(
                "audio parts and audios do not match",
                where="messages",
                expected=f"each of {len(audios)} audios once",
                found=f"parts for {order}",
            )

        going_on = rendered[-1].pop("prefix", False) if rendered else False

        def encode() -> list[int]:
            request: ChatCompletionRequest[Any] = ChatCompletionRequest.from_openai(
                rendered, continue_final_message=going_on
            )
            return list(self._tokenizer.encode_chat_completion(request).tokens)

        ids = self._with_audio(audios, encode)
        return AudioPrompt(ids, [self._pad(audios[i]) for i in order], streaming=False)

    def transcribe(
        self, audio: Array, language: str | None = None, delay_ms: int | None = None
    ) -> AudioPrompt:
        """Prompt of a transcription.

        Args:
            audio: mono float32 samples at the model's rate.
            language: ISO 639-1 code, or None to let the model find out.
            delay_ms: realtime models only: delay of the text, a multiple of one token.

        Raises:
            UsageError: an unknown language, or a delay the model cannot have.
        """
        if self.streaming:
            return self._transcribe_stream(audio, language, delay_ms)
        if delay_ms is not None:
            raise UsageError(
                "this model transcribes without delay", where="delay_ms", found=str(delay_ms)
            )

        def encode() -> list[int]:
            request = TranscriptionRequest(
                audio=_REFERENCE.format(0), language=_language(language), temperature=0.0
            )
            return list(self._tokenizer.encode_transcription(request).tokens)

        return AudioPrompt(self._with_audio([audio], encode), [self._pad(audio)], streaming=False)

    def _transcribe_stream(
        self, audio: Array, language: str | None, delay_ms: int | None
    ) -> AudioPrompt:
        if language is not None:
            raise UsageError(
                "a realtime model finds the language itself", where="language", found=language
            )
        self.check_delay(delay_ms)

        start = self._tokenizer.instruct_tokenizer.start()
        ids = [*start, *self._encoder.encode_streaming_tokens(delay_ms)]
        padded = self._encoder.pad(audio, self.config.sampling_rate, delay_ms)
        return AudioPrompt(ids, [padded.astype(np.float32)], streaming=True)

    def check_delay(self, delay_ms: int | None) -> None:
        """Refuse a delay that is no whole number of tokens; None takes the model's own.

        Raises:
            UsageError: mistral-common itself would round it silently.
        """
        if delay_ms is None:
            return
        step = round(1000 / self.config.frame_rate)
        if delay_ms < step or delay_ms % step or (delay_ms > 1200 and delay_ms != 2400):
            raise UsageError(
                "the delay is not one the model knows",
                where="delay_ms",
                expected=f"a multiple of {step} from {step} to 1200, or 2400",
                found=str(delay_ms),
            )

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without anything around it."""
        return list(self._tokenizer.instruct_tokenizer.tokenizer.encode(text, bos=False, eos=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`."""
        policy = SpecialTokenPolicy.IGNORE if skip_special_tokens else SpecialTokenPolicy.KEEP
        return self._tokenizer.decode(list(ids), special_token_policy=policy)

    def _pad(self, samples: Array) -> Array:
        return self._encoder.pad(samples, self.config.sampling_rate).astype(np.float32)

    def _with_audio(self, audios: Sequence[Array], encode: Callable[[], list[int]]) -> list[int]:
        instruct = self._tokenizer.instruct_tokenizer
        previous = instruct.audio_encoder
        instruct.audio_encoder = _ReferencedAudio(self._encoder, audios)
        try:
            return encode()
        except _REFUSALS as error:
            raise UsageError(
                "the request is refused", where="request", found=_reason(error)
            ) from error
        finally:
            instruct.audio_encoder = previous


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors()
        )
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return " ".join(str(error).split()) or type(error).__name__


def _language(code: str | None) -> Any:
    return code.lower() if code is not None else None


def _render(message: Mapping[str, Any], count: int, order: list[int]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return dict(message)
    if not isinstance(content, list):
        raise UsageError(
            "the content of a message is neither text nor parts",
            where="messages",
            expected="a string or a list",
            found=repr(content)[:80],
        )
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            parts.append(dict(part))
        elif kind == "audio":
            index = part.get("index")
            if not isinstance(index, int) or not 0 <= index < count:
                raise UsageError(
                    "an audio part names no audio",
                    where="messages",
                    expected=f"an index from 0 to {count - 1}",
                    found=repr(index),
                )
            order.append(index)
            reference = {"data": _REFERENCE.format(index), "format": "wav"}
            parts.append({"type": "input_audio", "input_audio": reference})
        else:
            raise UsageError(
                "unknown content part", where="messages", expected="text, audio", found=repr(kind)
            )
    return {**message, "content": parts}
