"""Audio bytes of any common container to mono float32 samples at the model's rate.

One decode and one resampling, both in float32: re-encoding in between would add a rounding to
16 bits and, for lossy containers, another generation of loss.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from plugins.support.errors import InputError

Array = npt.NDArray[np.float32]

_READ_FRAMES = 1 << 16
_LITTLE_U32 = struct.Struct("<I")


@dataclass(frozen=True)
class AudioLimits:
    """What a request may bring. Seconds are of audio, after decoding.

    Attributes:
        max_bytes: size of the container.
        max_seconds: longest audio.
        max_channels: most channels, mixed down by their mean.
        min_rate: lowest sampling rate in Hz that is accepted.
        max_rate: highest sampling rate in Hz that is accepted.
        refuse_silence: refuse audio whose samples are all equal.
    """

    max_bytes: int = 256 << 20
    max_seconds: float = 2400.0
    max_channels: int = 16
    min_rate: int = 4000
    max_rate: int = 384000
    refuse_silence: bool = True


def _refuse(what: str, where: str, expected: str, found: str) -> InputError:
    return InputError(what, where=where, expected=expected, found=found)


def _open(data: bytes, where: str) -> soundfile.SoundFile:
    if not data:
        raise _refuse("the audio is empty", where, "a WAV, FLAC, OGG or MP3 file", "0 bytes")
    try:
        return soundfile.SoundFile(io.BytesIO(data))
    except (soundfile.LibsndfileError, ValueError, TypeError, RuntimeError) as error:
        raise _refuse(
            "the audio cannot be decoded",
            where,
            "a WAV, FLAC, OGG or MP3 file",
            f"{len(data)} bytes that start with {data[:4]!r}",
        ) from error


def _check_wave_length(data: bytes, where: str) -> None:
    """Refuse a WAV whose data chunk is longer than the file; libsndfile would just cut it."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    position = 12
    while position + 8 <= len(data):
        name, size = data[position : position + 4], _LITTLE_U32.unpack_from(data, position + 4)[0]
        position += 8
        if name == b"data":
            present = len(data) - position
            # A recorder that streams does not know the length and writes all ones.
            if size != 0xFFFFFFFF and size > present:
                raise _refuse(
                    "the audio breaks off",
                    where,
                    f"{size} bytes of samples as the header says",
                    f"{present}",
                )
            return
        position += size + (size & 1)


def _check_header(file: soundfile.SoundFile, where: str, limits: AudioLimits) -> None:
    if not limits.min_rate <= file.samplerate <= limits.max_rate:
        raise _refuse(
            "the sampling rate is out of range",
            where,
            f"{limits.min_rate} to {limits.max_rate} Hz",
            f"{file.samplerate} Hz",
        )
    if not 1 <= file.channels <= limits.max_channels:
        raise _refuse(
            "too many channels",
            where,
            f"1 to {limits.max_channels}",
            f"{file.channels}",
        )


def _read_mono(file: soundfile.SoundFile, where: str, limits: AudioLimits) -> Array:
    """Decode block by block, so that a small file cannot expand beyond the limit first."""
    allowed = int(limits.max_seconds * file.samplerate)
    blocks: list[Array] = []
    total = 0
    try:
        while True:
            block = file.read(_READ_FRAMES, dtype="float32", always_2d=True)
            if len(block) == 0:
                break
            total += len(block)
            if total > allowed:
                raise _refuse(
                    "the audio is too long",
                    where,
                    f"at most {limits.max_seconds:g} s",
                    f"more than {limits.max_seconds:g} s",
                )
            blocks.append(block.mean(axis=1, dtype=np.float32))
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise _refuse(
            "the audio breaks off", where, "a complete file", f"an error after {total} samples"
        ) from error
    return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32)


def check_samples(samples: Array, where: str, limits: AudioLimits) -> None:
    """Refuse samples no model can hear: none, not finite, or one value only.

    Raises:
        InputError: naming `where` and what was found.
    """
    if len(samples) == 0:
        raise _refuse("the audio holds no samples", where, "at least 1", "0")
    finite = np.isfinite(samples)
    if not finite.all():
        raise _refuse(
            "the audio holds values that are not finite",
            where,
            "numbers in [-1, 1]",
            f"{int((~finite).sum())} of {len(samples)} samples are NaN or infinite",
        )
    if limits.refuse_silence and samples.min() == samples.max():
        raise _refuse("the audio is silent", where, "sound", f"{len(samples)} samples of one value")


def decode_audio(
    data: bytes, rate: int = 16000, where: str = "audio", limits: AudioLimits | None = None
) -> Array:
    """Decode, mix down and resample.

    Args:
        data: a whole file (WAV, FLAC, OGG, MP3 and what else libsndfile reads).
        rate: sampling rate wanted, Hz.
        where: name of the request field, for messages.
        limits: caps; the defaults fit Voxtral's longest understanding task (40 minutes).

    Returns:
        float32 [n], mono, at `rate`. A 16-bit mono file at `rate` gives exactly value / 32768.

    Raises:
        InputError: empty, not audio, truncated, too long, too many channels, a rate out of
            range, not finite, or silent.
    """
    limits = limits or AudioLimits()
    if len(data) > limits.max_bytes:
        raise _refuse(
            "the audio file is too large",
            where,
            f"at most {limits.max_bytes} bytes",
            f"{len(data)} bytes",
        )
    _check_wave_length(data, where)
    with _open(data, where) as file:
        _check_header(file, where, limits)
        declared, source_rate = file.frames, file.samplerate
        samples = _read_mono(file, where, limits)
    if declared > len(samples) and declared < 1 << 62:
        raise _refuse(
            "the audio breaks off",
            where,
            f"{declared} samples as the header says",
            f"{len(samples)}",
        )
    check_samples(samples, where, limits)
    if source_rate != rate:
        samples = soxr.resample(samples, source_rate, rate, quality="HQ").astype(np.float32)
        check_samples(samples, where, limits)
    return samples
