"""Audio that comes in pieces: the frames that a realtime model hears, as soon as they are final."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plugins.support.errors import UsageError
from triton_repo.frontend.audio.decode import AudioLimits, check_samples
from triton_repo.frontend.audio.mel import MelSpec, StreamingMel

Array = npt.NDArray[np.float32]


class LiveAudio:
    """One stream on its way into the encoder.

    All frames together equal the spectrogram of the whole audio with the model's silence around it.

    Args:
        spec: with a constant ceiling.
        row_samples: samples that become one row (one token).
        silence: samples of silence before the first sample, and after the last whole row.
    """

    def __init__(self, spec: MelSpec, row_samples: int, silence: tuple[int, int]) -> None:
        before, self._after = silence
        self._spec, self._row_samples = spec, row_samples
        self._mel = StreamingMel(spec)
        self._frames = self._mel.push(np.zeros(before, dtype=np.float32))
        self._limits = AudioLimits(refuse_silence=False)
        self._heard = 0
        self.ended = False

    def push(self, samples: Array, *, last: bool = False) -> Array:
        """Hear the next samples.

        Args:
            samples: float32 [n], mono, at the model's rate; n may be 0.
            last: no more will come.

        Returns:
            float32 [mels, F]: the frames of the rows that are complete now; F may be 0.

        Raises UsageError after the end, InputError for values that are not finite.
        """
        if self.ended:
            raise UsageError("the stream has ended", where="audio_samples")
        if len(samples):
            check_samples(samples, "audio_samples", self._limits)
        self._heard += len(samples)
        if last:
            self.ended = True
            align = -self._heard % self._row_samples
            # The last frame looks beyond the end, at the silence mirrored there.
            beyond = self._spec.n_fft // 2 - self._spec.hop
            samples = np.concatenate(
                [samples, np.zeros(align + self._after + beyond, dtype=np.float32)]
            )
        frames = np.concatenate([self._frames, self._mel.push(samples)], axis=1)
        per_row = self._row_samples // self._spec.hop
        whole = frames.shape[1] // per_row * per_row
        self._frames = frames[:, whole:]
        return np.ascontiguousarray(frames[:, :whole])
