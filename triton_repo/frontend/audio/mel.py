"""Log-mel spectrogram of the Whisper family, as the Voxtral audio encoders were trained on it.

Definition (one whole padded audio at a time, float32):

1. short-time Fourier transform: 400-point DFT, hop 160, periodic Hann window, frames centred on
   their sample with 200 samples of reflect padding at both ends; the last frame is dropped;
2. power, then a bank of triangular Slaney filters (Slaney scale and area normalisation, 0 to
   half the sampling rate);
3. log10 with a floor of 1e-10, raised to `ceiling - 8`, where the ceiling is the largest value
   of the whole audio (or a constant, which makes frames independent of the future), then
   (x + 4) / 4.

The samples after the last non-zero one cost nothing: their frames are the floor by definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import fft

from plugins.support.errors import InputError

Array = npt.NDArray[np.float32]

_POWER_FLOOR = 1e-10
_LOG_FLOOR = -10.0
# Frames transformed together: their spectra stay in the second-level cache.
_BLOCK_FRAMES = 256
# Neighbouring filters that are applied with one product.
_BAND_FILTERS = 16
# Samples looked at first in the search for the last sound.
_SILENCE_BLOCK = 1 << 10
_DYNAMIC_RANGE = 8.0
# Slaney's scale: linear up to 1 kHz, then 27 steps per factor of 6.4.
_LINEAR_HZ_PER_MEL = 200.0 / 3.0
_BREAK_HZ = 1000.0
_BREAK_MEL = _BREAK_HZ / _LINEAR_HZ_PER_MEL
_LOG_STEP = np.log(6.4) / 27.0


@dataclass(frozen=True)
class MelSpec:
    """Geometry of the spectrogram.

    Attributes:
        sampling_rate: Hz.
        n_mels: filters.
        n_fft: DFT length and window length in samples.
        hop: samples between frames.
        ceiling: log10 value that limits the dynamic range; None = the maximum of the audio.
    """

    sampling_rate: int = 16000
    n_mels: int = 128
    n_fft: int = 400
    hop: int = 160
    ceiling: float | None = None


def _hz_to_mel(hz: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    logarithmic = _BREAK_MEL + np.log(np.maximum(hz, _BREAK_HZ) / _BREAK_HZ) / _LOG_STEP
    return np.where(hz < _BREAK_HZ, hz / _LINEAR_HZ_PER_MEL, logarithmic)


def _mel_to_hz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    logarithmic = _BREAK_HZ * np.exp(_LOG_STEP * (np.maximum(mel, _BREAK_MEL) - _BREAK_MEL))
    return np.where(mel < _BREAK_MEL, mel * _LINEAR_HZ_PER_MEL, logarithmic)


@lru_cache(maxsize=8)
def mel_filters(spec: MelSpec) -> Array:
    """Slaney filter bank, float32 [n_fft // 2 + 1, n_mels]."""
    bins = np.linspace(0.0, spec.sampling_rate / 2, spec.n_fft // 2 + 1)
    top = _hz_to_mel(np.array([spec.sampling_rate / 2]))[0]
    edges = _mel_to_hz(np.linspace(0.0, top, spec.n_mels + 2))
    widths = np.diff(edges)
    distance = edges[None, :] - bins[:, None]
    rising = -distance[:, :-2] / widths[:-1]
    falling = distance[:, 2:] / widths[1:]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return (triangles * (2.0 / (edges[2:] - edges[:-2]))).astype(np.float32)


@lru_cache(maxsize=8)
def _window(n_fft: int) -> Array:
    k = np.arange(n_fft)
    return (0.5 - 0.5 * np.cos(2.0 * np.pi * k / n_fft)).astype(np.float32)


@lru_cache(maxsize=8)
def _bands(spec: MelSpec) -> tuple[tuple[slice, slice, Array], ...]:
    """The filter bank in bands of neighbouring filters: (bins, filters, [filters, bins]).

    A filter covers few bins: the products of all bands have a fraction of the multiplications.
    """
    filters = mel_filters(spec)
    bands = []
    for first in range(0, spec.n_mels, _BAND_FILTERS):
        band = slice(first, min(first + _BAND_FILTERS, spec.n_mels))
        used = np.flatnonzero(filters[:, band].any(axis=1))
        # A bank with more filters than bins has filters without any.
        bins = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 1)
        bands.append((bins, band, np.ascontiguousarray(filters[bins, band].T)))
    return tuple(bands)


def _write_frames(framed: Array, spec: MelSpec, out: Array) -> None:
    """log10 mel power of samples already padded for their frames.

    Args:
        framed: float32 [(frames - 1) * hop + n_fft].
        spec: geometry.
        out: [n_mels, frames]; at the floor it may be below the floor by a rounding.
    """
    frames = np.lib.stride_tricks.sliding_window_view(framed, spec.n_fft)[:: spec.hop]
    window, bands = _window(spec.n_fft), _bands(spec)
    windowed = np.empty((min(_BLOCK_FRAMES, len(frames)), spec.n_fft), dtype=np.float32)
    power = np.empty((len(windowed), spec.n_fft // 2 + 1), dtype=np.float32)
    mel = np.empty((spec.n_mels, len(windowed)), dtype=np.float32)
    for start in range(0, len(frames), _BLOCK_FRAMES):
        count = min(_BLOCK_FRAMES, len(frames) - start)
        np.multiply(frames[start : start + count], window, out=windowed[:count])
        # Real and imaginary parts lie side by side.
        parts = fft.rfft(windowed[:count], axis=-1).view(np.float32)
        np.square(parts, out=parts)
        np.add(parts[:, ::2], parts[:, 1::2], out=power[:count])
        block = mel[:, :count]
        for bins, rows, filters in bands:
            np.matmul(filters, power[:count, bins].T, out=block[rows])
        np.maximum(block, np.float32(_POWER_FLOOR), out=block)
        np.log10(block, out=out[:, start : start + count])


def _finish(mel: Array, ceiling: float) -> None:
    """The last step of the definition, in place."""
    # The second bound undoes the rounding of the logarithm at the floor: silence is exactly -10.
    np.maximum(mel, np.float32(max(ceiling - _DYNAMIC_RANGE, _LOG_FLOOR)), out=mel)
    mel += np.float32(4.0)
    mel *= np.float32(0.25)


def _heard(samples: Array) -> int:
    """Samples up to the last one that is not zero."""
    end, size = len(samples), _SILENCE_BLOCK
    while end > 0:
        start = max(0, end - size)
        nonzero = np.flatnonzero(samples[start:end])
        if len(nonzero):
            return start + int(nonzero[-1]) + 1
        end, size = start, 2 * size
    return 0


def log_mel(samples: Array, spec: MelSpec | None = None) -> Array:
    """Spectrogram of one whole audio.

    Args:
        samples: float32 [n], mono, in [-1, 1], already padded to the length the model wants
            (n a multiple of the hop, at least `n_fft`).
        spec: geometry, Voxtral's by default.

    Returns:
        float32 [n_mels, n / hop].

    Raises:
        InputError: the length is not a multiple of the hop or below `n_fft`.
    """
    spec = spec or MelSpec()
    total = len(samples)
    if total % spec.hop or total < spec.n_fft:
        raise InputError(
            "the audio is not padded for the spectrogram",
            where="samples",
            expected=f"a multiple of {spec.hop} and at least {spec.n_fft} samples",
            found=f"{total} samples",
        )
    half = spec.n_fft // 2
    frames = total // spec.hop
    heard = _heard(samples)
    # A frame whose window starts after the last sound is exactly silent, except where the
    # reflection at the end brings sound back.
    sounding = frames if heard > total - spec.n_fft else min(frames, (heard + half) // spec.hop + 1)
    out = np.empty((spec.n_mels, frames), dtype=np.float32)
    loud = out[:, :sounding]
    _write_sounding(samples, spec, loud)
    ceiling = spec.ceiling
    if ceiling is None:
        ceiling = float(loud.max())
    out[:, sounding:] = _LOG_FLOOR
    _finish(out, ceiling)
    return out


def _write_sounding(samples: Array, spec: MelSpec, out: Array) -> None:
    """The first frames of an audio; only those that reach beyond an end copy samples."""
    half, count = spec.n_fft // 2, out.shape[1]
    first = min(count, -(-half // spec.hop))
    last = max(first, min(count, (len(samples) - half) // spec.hop + 1))
    edges = ((0, first), (last, count))
    for start, stop in edges:
        if start < stop:
            reach = np.arange(start * spec.hop - half, (stop - 1) * spec.hop + half)
            # Reflected without repeating the sample at the end.
            reach = np.abs(reach)
            reach = np.minimum(reach, 2 * (len(samples) - 1) - reach)
            _write_frames(samples[reach], spec, out[:, start:stop])
    if first < last:
        inside = samples[first * spec.hop - half : (last - 1) * spec.hop + half]
        _write_frames(np.ascontiguousarray(inside, np.float32), spec, out[:, first:last])


def log_mel_chunks(samples: Array, chunk_samples: int, spec: MelSpec | None = None) -> Array:
    """Spectrogram cut into the encoder's chunks.

    Args:
        samples: float32 [n], mono, any n > 0; padded with zeros to whole chunks here.
        chunk_samples: samples of one chunk (480000 for Voxtral).
        spec: geometry.

    Returns:
        float32 [chunks, n_mels, chunk_samples / hop]; the range is that of the whole audio.

    Raises:
        InputError: no samples, or a chunk that is no multiple of the hop.
    """
    spec = spec or MelSpec()
    if len(samples) == 0:
        raise InputError("the audio holds no samples", where="samples", expected="at least 1")
    chunks = -(-len(samples) // chunk_samples)
    missing = chunks * chunk_samples - len(samples)
    mel = log_mel(np.pad(samples, (0, missing)) if missing else samples, spec)
    per_chunk = chunk_samples // spec.hop
    return np.ascontiguousarray(mel.reshape(spec.n_mels, chunks, per_chunk).swapaxes(0, 1))


class StreamingMel:
    """The same spectrogram for audio that arrives in pieces (needs a constant ceiling).

    `push` returns the frames that have become final, equal to those of `log_mel` over the whole
    stream. A frame is final once the samples up to `n_fft / 2` after its centre are there.
    """

    def __init__(self, spec: MelSpec) -> None:
        if spec.ceiling is None:
            raise InputError(
                "a stream needs a constant ceiling",
                where="MelSpec.ceiling",
                expected="a number (1.5 for Voxtral realtime)",
                found="None: the maximum of an audio that has not ended is unknown",
            )
        self._spec = spec
        self._ceiling = spec.ceiling
        self._buffer = np.zeros(0, dtype=np.float32)
        self._started = False

    def push(self, samples: Array) -> Array:
        """Add samples, float32 [n]; return float32 [n_mels, frames that became final]."""
        spec = self._spec
        half = spec.n_fft // 2
        self._buffer = np.concatenate([self._buffer, samples])
        if not self._started:
            if len(self._buffer) <= half:
                return np.zeros((spec.n_mels, 0), dtype=np.float32)
            self._buffer = np.concatenate([self._buffer[1 : half + 1][::-1], self._buffer])
            self._started = True
        frames = max(0, (len(self._buffer) - spec.n_fft) // spec.hop + 1)
        if frames == 0:
            return np.zeros((spec.n_mels, 0), dtype=np.float32)
        used = (frames - 1) * spec.hop + spec.n_fft
        mel = np.empty((spec.n_mels, frames), dtype=np.float32)
        _write_frames(self._buffer[:used], spec, mel)
        _finish(mel, self._ceiling)
        self._buffer = self._buffer[frames * spec.hop :]
        return mel
