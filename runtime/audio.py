"""The audio engine of an engine directory: spectrogram in, rows for the text engines out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from plugins.support.dtypes import BY_NAME
from plugins.support.errors import UsageError
from runtime.audio_rows import AudioRows
from runtime.contract import AudioEmbedding, TensorSpec
from runtime.engine import Engine
from runtime.executors import HEARING

Encode = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]

_FEATURES, _PAST, _ROWS = "input_features", "past_frames", "audio_rows"


class AudioEncoder:
    """Runs the audio engine beside the text engines; safe to use from any thread.

    Args:
        engine: opened.

    Raises UsageError when the engine directory has no audio engine, CapabilityError for an executor
    that cannot run one.
    """

    def __init__(self, engine: Engine) -> None:
        entry = engine.config.engines.get("audio")
        spec = next((h for h in engine.config.host_inputs if isinstance(h, AudioEmbedding)), None)
        if entry is None or spec is None:
            raise UsageError(
                "this engine hears nothing",
                where=str(engine.path or "engine"),
                expected="an audio engine, as Voxtral has",
                found=", ".join(engine.config.engines),
            )
        self._executor = HEARING.require(engine.executor)
        self._states = entry.of_kind("state")
        rows = next(tensor for tensor in entry.outputs if tensor.name == _ROWS)
        self._width, self._dtype = rows.shape[-1], BY_NAME[rows.dtype].torch
        features = entry.input(_FEATURES)
        assert features is not None
        self._features = features
        self._most = entry.profile[_FEATURES].max[0]
        self._most_frames = entry.profile[_FEATURES].max[2]
        self.placeholder_id = spec.placeholder_id

    @property
    def streaming(self) -> bool:
        """Whether it hears a stream (realtime) instead of whole chunks."""
        return self.placeholder_id is None

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        """Rows of whole chunks, in time.

        Args:
            features: float32 [chunks, mels, frames].

        Returns:
            [chunks * rows, H] in the engine's dtype.

        Raises UsageError for features of another shape or for a streaming engine.
        """
        if self.streaming:
            raise UsageError("this engine hears a stream", fix="use stream()")
        self._check(features)
        parts = []
        for start in range(0, len(features), self._most):
            piece = features[start : start + self._most]
            parts.append(self._executor.encode({_FEATURES: piece})[_ROWS].flatten(0, 1))
        return torch.cat(parts).cpu()

    def stream(self) -> EncoderStream:
        """A new stream. Raises UsageError for an engine that hears chunks."""
        if not self.streaming:
            raise UsageError("this engine hears whole chunks", fix="use encode()")
        return EncoderStream(self._executor.encode, self._states, self._most_frames)

    def open_rows(self) -> AudioRows:
        """Rows of a stream that has not begun, for a request that will hear it."""
        return AudioRows(torch.zeros(0, self._width, dtype=self._dtype), None, ended=False)

    def rows(self, features: torch.Tensor) -> AudioRows:
        """Whole audio as what a request takes, from chunks or from a stream heard at once.

        Args:
            features: float32 [chunks, mels, frames], or [mels, frames] for a stream.
        """
        if self.streaming:
            if features.dim() != 2 or features.shape[0] != self._features.shape[1]:
                raise self._misfit(features, f"[{self._features.shape[1]}, frames]")
            return AudioRows(self.stream().push(features), None)
        return AudioRows(self.encode(features), self.placeholder_id)

    def _check(self, features: torch.Tensor) -> None:
        expected = self._features.shape
        fits = features.dim() == 3 and tuple(features.shape[1:]) == tuple(expected[1:])
        if not fits or len(features) == 0:
            raise self._misfit(features, str(list(expected)))

    @staticmethod
    def _misfit(features: torch.Tensor, expected: str) -> UsageError:
        return UsageError(
            "the audio features do not fit the engine",
            where=_FEATURES,
            expected=expected,
            found=str(list(features.shape)),
        )


class EncoderStream:
    """One stream through the audio engine: its states, and the frames it has heard."""

    def __init__(self, encode: Encode, states: list[TensorSpec], most_frames: int) -> None:
        self._encode = encode
        self._most = most_frames
        self._past = 0
        self._states = {
            spec.name: torch.zeros(1, *spec.shape[1:], dtype=BY_NAME[spec.dtype].torch)
            for spec in states
        }

    def push(self, features: torch.Tensor) -> torch.Tensor:
        """Hear the next frames.

        Args:
            features: float32 [mels, F], F a multiple of the frames of a row.

        Returns:
            [F / frames per row, H] in the engine's dtype.
        """
        return torch.cat([self._push(piece) for piece in features.split(self._most, dim=1)])

    def _push(self, features: torch.Tensor) -> torch.Tensor:
        past = torch.tensor([self._past], dtype=torch.int32)
        outputs = self._encode({_FEATURES: features[None], _PAST: past, **self._states})
        rows = outputs[_ROWS][0]
        for name in self._states:
            self._states[name] = outputs[f"{name}.next"]
        # Two mel frames make an encoder frame.
        self._past += features.shape[1] // 2
        return rows.cpu()
