"""Log-mel numbers against recorded values, transformers and mistral-common."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.audio import mel_filter_bank
from transformers import WhisperFeatureExtractor

from plugins.support.errors import InputError
from triton_repo.frontend.audio.mel import (
    MelSpec,
    StreamingMel,
    log_mel,
    log_mel_chunks,
    mel_filters,
)

AUDIO = Path(__file__).parents[2] / "fixtures" / "data" / "audio"
CHUNK = 480000
TOLERANCE = 1e-4


def speech(name: str) -> np.ndarray:
    samples, rate = soundfile.read(AUDIO / f"austen-{name}.wav", dtype="float32")
    assert rate == 16000
    return samples


def reference(samples: np.ndarray) -> np.ndarray:
    """transformers, over the whole padded audio, [n_mels, frames]."""
    chunks = -(-len(samples) // CHUNK)
    extractor = WhisperFeatureExtractor(feature_size=128)
    padded = np.pad(samples, (0, chunks * CHUNK - len(samples)))
    return extractor._torch_extract_fbank_features(padded)


def test_filter_bank_facts() -> None:
    bank = mel_filters(MelSpec())
    assert bank.shape == (201, 128)
    assert float(bank.sum()) == pytest.approx(3.190985529, abs=1e-6)
    assert float(bank[:, 0].sum()) == pytest.approx(0.012373986, abs=1e-8)
    assert float(bank[:, 127].sum()) == pytest.approx(0.024936044, abs=1e-8)
    assert float(bank.max()) == pytest.approx(0.041681749, abs=1e-8)
    assert int((bank != 0).sum()) == 394
    assert np.flatnonzero(bank[:, 0]).tolist() == [1]
    other = mel_filter_bank(201, 128, 0.0, 8000.0, 16000)
    assert np.abs(bank - other).max() < 1e-8


# name, sum, mean, min, max
RECORDED = [
    ("0880", -324476.49, -0.84499, -0.92649, 1.07351),
    ("0930", -271891.70, -0.708051, -0.790651, 1.209349),
]


@pytest.mark.parametrize(("name", "total", "mean", "low", "high"), RECORDED)
def test_recorded_speech(name: str, total: float, mean: float, low: float, high: float) -> None:
    mel = log_mel_chunks(speech(name), CHUNK)
    assert mel.shape == (1, 128, 3000)
    assert float(mel.sum(dtype=np.float64)) == pytest.approx(total, abs=0.5)
    assert float(mel.mean()) == pytest.approx(mean, abs=1e-5)
    assert float(mel.min()) == pytest.approx(low, abs=1e-5)
    assert float(mel.max()) == pytest.approx(high, abs=1e-5)


def test_recorded_cells_of_speech_and_of_a_tone() -> None:
    mel = log_mel_chunks(speech("0880"), CHUNK)[0]
    cells = {
        (5, 50): 0.1731,
        (20, 50): 0.1314,
        (40, 100): -0.4374,
        (60, 150): -0.5087,
        (100, 200): 0.0390,
        (127, 2999): -0.9265,
    }
    for (row, column), value in cells.items():
        assert float(mel[row, column]) == pytest.approx(value, abs=2e-4)
    n = np.arange(48000)
    tone = 0.5 * np.sin(2 * np.pi * 440 * n / 16000) + 0.25 * np.sin(2 * np.pi * 1000 * n / 16000)
    mel = log_mel_chunks(tone.astype(np.float32), CHUNK)[0]
    assert float(mel.sum(dtype=np.float64)) == pytest.approx(-191838.89, abs=0.5)
    cells = {
        (0, 0): 0.94976,
        (10, 0): 1.01778,
        (17, 100): 1.33749,
        (18, 100): 1.48535,
        (40, 100): 1.19999,
        (41, 100): 1.20730,
        (17, 299): 1.33668,
        (17, 300): 1.21123,
        (17, 301): 0.30008,
        (0, 2999): -0.51465,
    }
    for (row, column), value in cells.items():
        assert float(mel[row, column]) == pytest.approx(value, abs=2e-4)


def test_silence_is_exactly_minus_one_and_a_half() -> None:
    mel = log_mel_chunks(np.zeros(1000, np.float32), CHUNK)
    assert np.unique(mel).tolist() == [-1.5]


def test_two_chunks_share_one_maximum_and_real_neighbours() -> None:
    loud = speech("0870")
    quiet = np.zeros(45 * 16000, np.float32)
    quiet[: len(loud)] = loud
    quiet[30 * 16000 : 30 * 16000 + len(loud)] = 0.01 * loud
    mel = log_mel_chunks(quiet, CHUNK)
    joined = np.concatenate(list(mel), axis=1)
    assert np.abs(joined - reference(quiet)).max() <= TOLERANCE
    alone = log_mel_chunks(quiet[CHUNK:], CHUNK)
    # The negative control: a spectrogram per chunk is far outside the tolerance.
    assert np.abs(alone[0] - mel[1]).max() > 0.5


@settings(max_examples=15, deadline=None)
@given(
    length=st.integers(1, 2 * CHUNK),
    tail=st.sampled_from(["short", "end"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_transformers_for_any_length(length: int, tail: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sound = rng.standard_normal(min(length, 30000)).astype(np.float32) * 0.1
    samples = np.zeros(length, np.float32)
    if tail == "short":
        samples[: len(sound)] = sound
    else:
        samples[length - len(sound) :] = sound
    mel = np.concatenate(list(log_mel_chunks(samples, CHUNK)), axis=1)
    assert np.abs(mel - reference(samples)).max() <= TOLERANCE


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=12))
def test_stream_equals_whole(pieces: list[int]) -> None:
    spec = MelSpec(ceiling=1.5)
    pieces = [*pieces, 800]
    total = -(-sum(pieces) // 160) * 160
    samples = np.random.default_rng(7).standard_normal(total).astype(np.float32) * 0.05
    stream = StreamingMel(spec)
    parts, start = [], 0
    for piece in [*pieces, total - sum(pieces)]:
        parts.append(stream.push(samples[start : start + piece]))
        start += piece
    got = np.concatenate(parts, axis=1)
    whole = log_mel(samples, spec)
    # The last frame needs samples that never came.
    assert got.shape[1] >= whole.shape[1] - 1
    assert np.abs(got - whole[:, : got.shape[1]]).max() <= 1e-6


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(InputError, match="no samples"):
        log_mel_chunks(np.zeros(0, np.float32), CHUNK)
    with pytest.raises(InputError, match="not padded"):
        log_mel(np.zeros(801, np.float32))
    with pytest.raises(InputError, match="constant ceiling"):
        StreamingMel(MelSpec())
