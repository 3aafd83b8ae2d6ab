"""Decoding: containers, rates, channels, and twenty kinds of bad audio."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.support.errors import InputError
from triton_repo.frontend.audio.decode import AudioLimits, decode_audio

AUDIO = Path(__file__).parents[2] / "fixtures" / "data" / "audio"
WAV = (AUDIO / "austen-0880.wav").read_bytes()


def encode(samples: np.ndarray, rate: int, container: str, subtype: str | None = None) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=container, subtype=subtype)
    return out.getvalue()


def tone(seconds: float = 1.0, rate: int = 16000, hz: float = 440.0) -> np.ndarray:
    return (0.4 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)).astype("f4")


def test_16_bit_mono_at_the_model_rate_is_exact() -> None:
    samples = decode_audio(WAV)
    raw = np.frombuffer(WAV[44:], "<i2")
    assert samples.dtype == np.float32
    assert len(samples) == 47840
    assert np.array_equal(samples, raw[: len(samples)].astype(np.float32) / 32768)


@pytest.mark.parametrize(
    ("container", "subtype", "tolerance"),
    [
        ("WAV", "PCM_16", 3.1e-5),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "FLOAT", 0.0),
        ("FLAC", "PCM_16", 3.1e-5),
        ("OGG", "VORBIS", 0.05),
        ("MP3", "MPEG_LAYER_III", 0.05),
    ],
)
def test_containers(container: str, subtype: str, tolerance: float) -> None:
    want = tone()
    got = decode_audio(encode(want, 16000, container, subtype))
    # MP3 pads to whole frames.
    assert abs(len(got) - len(want)) <= (2304 if container == "MP3" else 0)
    middle = slice(4000, 12000)
    assert np.abs(got[middle] - want[middle]).max() <= tolerance


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_rates_are_resampled_once(rate: int) -> None:
    got = decode_audio(encode(tone(rate=rate), rate, "WAV", "FLOAT"))
    want = tone()
    assert abs(len(got) - len(want)) <= 1
    middle = slice(4000, 12000)
    assert np.abs(got[middle] - want[middle]).max() < 2e-3
    # The negative control: taken as 16 kHz without resampling, the tone is another one.
    wrong = tone(rate=rate)[4000 : 4000 + 2000]
    assert np.abs(wrong - want[4000:6000]).max() > 0.1


def test_channels_are_averaged() -> None:
    left, right = tone(hz=440.0), tone(hz=660.0)
    got = decode_audio(encode(np.stack([left, right], axis=1), 16000, "WAV", "FLOAT"))
    assert np.abs(got - (left + right) / 2).max() < 1e-6


def _header(rate: int = 16000, channels: int = 1, data_bytes: int = 8) -> bytes:
    block = channels * 2
    fmt = struct.pack("<HHIIHH", 1, channels, rate, rate * block, block, 16)
    body = b"WAVEfmt " + struct.pack("<I", 16) + fmt + b"data" + struct.pack("<I", data_bytes)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _with(value: float, subtype: str = "FLOAT") -> bytes:
    samples = tone()
    samples[100] = value
    return encode(samples, 16000, "WAV", subtype)


BAD: dict[str, Callable[[], bytes]] = {
    "no bytes": lambda: b"",
    "one byte": lambda: b"R",
    "text file": lambda: b"this is a text file\n" * 50,
    "json": lambda: b'{"audio": "A.wav"}',
    "png": lambda: b"\x89PNG\r\n\x1a\n" + bytes(64),
    "html error page": lambda: b"<html><body>404</body></html>",
    "riff without wave": lambda: b"RIFF\x04\x00\x00\x00AVI ",
    "header only": lambda: _header(data_bytes=0),
    "truncated wav": lambda: WAV[: len(WAV) // 2],
    "truncated header": lambda: WAV[:20],
    "truncated flac": lambda: encode(tone(), 16000, "FLAC")[:2000],
    "truncated ogg": lambda: encode(tone(), 16000, "OGG")[:60],
    "0 Hz": lambda: _header(rate=0) + bytes(8),
    "1 Hz": lambda: _header(rate=1) + bytes(8),
    "2 GHz": lambda: _header(rate=2_000_000_000) + bytes(8),
    "200 channels": lambda: _header(channels=200, data_bytes=4000) + bytes(4000),
    "0 channels": lambda: _header(channels=0) + bytes(8),
    "NaN": lambda: _with(float("nan")),
    "infinite": lambda: _with(float("inf")),
    "silence": lambda: encode(np.zeros(16000, "f4"), 16000, "WAV"),
    "constant": lambda: encode(np.full(16000, 0.5, "f4"), 16000, "WAV"),
    "too long": lambda: encode(tone(11.0), 16000, "FLAC"),
    "flac bomb": lambda: encode(np.zeros(16000 * 600, "f4"), 16000, "FLAC"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_audio_is_refused_by_name(kind: str) -> None:
    data = BAD[kind]()
    with pytest.raises(InputError) as caught:
        decode_audio(data, where="audio_bytes", limits=AudioLimits(max_seconds=10.0))
    error = caught.value
    assert error.where == "audio_bytes"
    assert error.expected
    assert error.found


def test_a_small_file_that_expands_is_stopped_at_the_limit() -> None:
    bomb = BAD["flac bomb"]()
    assert len(bomb) < 100_000
    with pytest.raises(InputError, match="too long"):
        decode_audio(bomb, limits=AudioLimits(max_seconds=10.0))


def test_good_audio_passes_the_same_limits() -> None:
    assert len(decode_audio(WAV, limits=AudioLimits(max_seconds=10.0))) == 47840
    silent = encode(np.zeros(16000, "f4"), 16000, "WAV")
    assert len(decode_audio(silent, limits=AudioLimits(refuse_silence=False))) == 16000


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_files_raise_only_our_error(data: st.DataObject) -> None:
    base = data.draw(
        st.sampled_from(
            [WAV[:4000], encode(tone(0.1), 16000, "FLAC"), encode(tone(0.1), 16000, "OGG")]
        )
    )
    damaged = bytearray(base)
    for _ in range(data.draw(st.integers(1, 20))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        samples = decode_audio(bytes(damaged))
    except InputError:
        return
    assert samples.dtype == np.float32
    assert np.isfinite(samples).all()
