"""From audio files and messages to what the engines of a Voxtral take: ids and spectrograms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plugins.support.errors import InputError, UsageError
from triton_repo.frontend.audio.decode import AudioLimits, check_samples, decode_audio
from triton_repo.frontend.audio.live import LiveAudio
from triton_repo.frontend.audio.mel import MelSpec, log_mel, log_mel_chunks
from triton_repo.frontend.audio.prompts import AudioPrompt, AudioPrompts, find_tekken

Array = npt.NDArray[np.float32]

# Spectrogram frames per position of the encoder: its second convolution has stride 2.
FRAMES_PER_POSITION = 2


@dataclass(frozen=True)
class Heard:
    """A request with audio, ready for the engines.

    Attributes:
        ids: prompt ids.
        features: float32 [chunks, mels, frames] of all audios in order, [mels, frames] of a stream,
            None without audio.
    """

    ids: list[int]
    features: Array | None


class AudioFrontEnd:
    """The audio side of one engine directory.

    Args:
        pretrained_config: of the engine's configuration.
        tokenizer_dir: holds the tekken file.
        limits: what a request may bring.

    Raises InputError when the tokenizer has no audio or is another one than the engine's.
    """

    def __init__(
        self,
        pretrained_config: Mapping[str, Any],
        tokenizer_dir: Path,
        limits: AudioLimits | None = None,
    ) -> None:
        block = pretrained_config["voxtral"]
        audio = block["audio"]
        tekken = find_tekken(tokenizer_dir)
        self.prompts = AudioPrompts(tekken)
        self.streaming: bool = block["realtime"]
        self.placeholder_id: int | None = block["audio_token_id"]
        self.spec = MelSpec(n_mels=audio["num_mel_bins"], ceiling=audio["mel_ceiling"])
        positions = audio["max_source_positions"]
        frames = 0 if self.streaming else positions * FRAMES_PER_POSITION
        self._chunk_samples = frames * self.spec.hop
        self._chunk_tokens: int | None = audio["tokens_per_chunk"]
        self._row_samples = round(self.spec.sampling_rate / self.prompts.config.frame_rate)
        self._limits = limits or AudioLimits()
        self._delay_tokens: int | None = block["default_num_delay_tokens"]
        self._check_tokenizer(str(tekken), audio["downsample_factor"])
        # The tokenizer's audio side is swapped while it encodes.
        self._tokenizer = threading.Lock()

    def _check_tokenizer(self, where: str, downsample_factor: int) -> None:
        """Compare what tokenizer and engine both say about audio."""
        found, spec = self.prompts.config, self.spec
        row_samples = spec.hop * FRAMES_PER_POSITION * downsample_factor
        facts: dict[str, tuple[object, object]] = {
            "sampling_rate": (found.sampling_rate, spec.sampling_rate),
            "num_mel_bins": (found.encoding_config.num_mel_bins, spec.n_mels),
            "hop_length": (found.encoding_config.hop_length, spec.hop),
            "window_size": (found.encoding_config.window_size, spec.n_fft),
            "frame_rate": (found.frame_rate, spec.sampling_rate / row_samples),
            "streaming": (found.is_streaming, self.streaming),
        }
        if self.streaming and found.is_streaming:
            facts["delay in tokens"] = (found.get_num_delay_tokens(), self._delay_tokens)
        elif not self.streaming:
            chunk_s = self._chunk_samples / spec.sampling_rate
            facts["chunk_length_s"] = (found.chunk_length_s, chunk_s)
            facts["id of [AUDIO]"] = (self.prompts.placeholder_id, self.placeholder_id)
        wrong = {name: pair for name, pair in facts.items() if pair[0] != pair[1]}
        if wrong:
            raise InputError(
                "the tokenizer's audio is not that of the engine",
                where=where,
                expected=", ".join(f"{name} {pair[1]}" for name, pair in wrong.items()),
                found=", ".join(f"{name} {pair[0]}" for name, pair in wrong.items()),
                fix="use the tokenizer that belongs to the model",
            )

    def _delay(self, delay_ms: int | None) -> int | None:
        """The delay of a stream, which the engine is built for."""
        if not self.streaming:
            return delay_ms
        assert self._delay_tokens is not None
        self.prompts.check_delay(delay_ms)
        built = self._delay_tokens * round(1000 / self.prompts.config.frame_rate)
        if delay_ms is not None and delay_ms != built:
            raise UsageError(
                "the engine is built for another delay of the text",
                where="delay_ms",
                expected=str(built),
                found=str(delay_ms),
                fix="change default_num_delay_tokens of the checkpoint and the tokenizer's "
                "transcription_delay_ms, then convert and build again",
            )
        return built

    def decode(self, data: bytes, where: str) -> Array:
        """Mono samples at the model's rate; raises InputError naming `where`."""
        return decode_audio(data, self.spec.sampling_rate, where, self._limits)

    def check(self, samples: Array, where: str) -> Array:
        """Samples that are already decoded; raises InputError as `decode` does."""
        check_samples(samples, where, self._limits)
        return samples

    def tokens(self, samples: Array) -> int:
        """Rows of one audio: placeholders of whole chunks, or positions of a stream less those of
        the silence around it.
        """
        if self._chunk_tokens is None:
            return -(-len(samples) // self._row_samples)
        return -(-len(samples) // self._chunk_samples) * self._chunk_tokens

    def live(self, delay_ms: int | None = None) -> tuple[list[int], LiveAudio]:
        """A stream that is heard while it is spoken: prompt ids, and what takes its samples.

        Raises UsageError for a model that hears whole chunks, and for a delay it cannot have.
        """
        if not self.streaming:
            raise UsageError("this model hears whole files, no stream", where="audio_samples")
        sound = np.ones(self._row_samples, dtype=np.float32)
        delay = self._delay(delay_ms)
        prompt = self._locked(lambda: self.prompts.transcribe(sound, None, delay))
        before = int(np.flatnonzero(prompt.audios[0])[0])
        after = len(prompt.audios[0]) - before - len(sound)
        return prompt.ids, LiveAudio(self.spec, self._row_samples, (before, after))

    def chat(self, messages: Sequence[Mapping[str, Any]], audios: Sequence[Array]) -> Heard:
        """A conversation; parts are those of `AudioPrompts.chat`."""
        self._only_chunks("a conversation")
        return self._heard(self._locked(lambda: self.prompts.chat(messages, audios)))

    def transcribe(
        self, audio: Array, language: str | None = None, delay_ms: int | None = None
    ) -> Heard:
        """A transcription; see `AudioPrompts.transcribe`."""
        delay = self._delay(delay_ms)
        return self._heard(self._locked(lambda: self.prompts.transcribe(audio, language, delay)))

    def from_ids(self, ids: Sequence[int], audios: Sequence[Array]) -> Heard:
        """Ids that already hold their placeholders, and the audios they stand for."""
        if self.streaming:
            if len(audios) != 1:
                raise UsageError(
                    "a realtime model hears one stream", expected="1 audio", found=str(len(audios))
                )
            return Heard(
                list(ids),
                self._features(self.prompts.transcribe(audios[0], None, self._delay(None)).audios),
            )
        return Heard(list(ids), self._features(audios))

    def _locked(self, make: Callable[[], AudioPrompt]) -> AudioPrompt:
        with self._tokenizer:
            return make()

    def _only_chunks(self, what: str) -> None:
        if self.streaming:
            raise UsageError(
                f"a realtime model takes no {what.removeprefix('a ')}",
                expected='{"task": "transcribe", "audio": ...}',
            )

    def _heard(self, prompt: AudioPrompt) -> Heard:
        return Heard(prompt.ids, self._features(prompt.audios))

    def _features(self, audios: Sequence[Array]) -> Array | None:
        if not audios:
            return None
        if self.streaming:
            return log_mel(audios[0], self.spec)
        return np.concatenate([log_mel_chunks(a, self._chunk_samples, self.spec) for a in audios])
