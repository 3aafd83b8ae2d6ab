"""Audio in pieces gives the spectrogram of the whole, whatever the pieces are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.support.errors import InputError, UsageError
from tests.fixtures.tekken import write_tekken
from triton_repo.frontend.audio.frontend import AudioFrontEnd
from triton_repo.frontend.audio.settings import audio_settings

AUDIO = {
    "num_mel_bins": 128, "mel_ceiling": 1.5, "max_source_positions": None,
    "tokens_per_chunk": None, "downsample_factor": 4,
}  # fmt: skip
DELAYS_MS = (80, 480, 2400)


def opened(directory: Path, delay_ms: int) -> AudioFrontEnd:
    """The front end of an engine with that delay."""
    block = {
        "realtime": True,
        "audio_token_id": None,
        "default_num_delay_tokens": delay_ms // 80,
        "audio": AUDIO,
    }
    write_tekken(directory, realtime=True, delay_ms=delay_ms)
    return AudioFrontEnd(audio_settings({"voxtral": block}), directory)


@pytest.fixture(scope="module")
def front_ends(tmp_path_factory: pytest.TempPathFactory) -> dict[int, AudioFrontEnd]:
    return {ms: opened(tmp_path_factory.mktemp("tekken"), ms) for ms in DELAYS_MS}


@pytest.fixture(scope="module")
def front_end(front_ends: dict[int, AudioFrontEnd]) -> AudioFrontEnd:
    return front_ends[480]


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(count).uniform(-0.3, 0.3, count).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    delay=st.sampled_from(DELAYS_MS),
    given_delay=st.booleans(),
)
def test_any_pieces(
    front_ends: dict[int, AudioFrontEnd], cuts: list[int], delay: int, given_delay: bool
) -> None:
    samples, front_end = noise(sum(cuts) + 1), front_ends[delay]
    whole = front_end.transcribe(samples, delay_ms=delay if given_delay else None)
    ids, live = front_end.live(None if given_delay else delay)
    assert ids == [1] + [32] * (32 + delay // 80)
    assert ids == whole.ids
    pieces = np.split(samples, np.cumsum(cuts))
    frames = [live.push(p, last=i == len(pieces) - 1) for i, p in enumerate(pieces)]
    assert all(f.shape[1] % 8 == 0 for f in frames)
    joined = np.concatenate(frames, axis=1)
    assert whole.features is not None
    assert joined.shape == whole.features.shape
    assert np.abs(joined - whole.features).max() < 1e-6


def test_the_silence_around_matters(front_end: AudioFrontEnd) -> None:
    """The negative control: without the silence in front, frames and their number differ."""
    samples = noise(5000)
    whole = front_end.transcribe(samples).features
    from triton_repo.frontend.audio.live import LiveAudio

    bare = LiveAudio(front_end.spec, 1280, (0, 17 * 1280)).push(samples, last=True)
    assert whole is not None and bare.shape != whole.shape


def test_what_a_stream_refuses(front_end: AudioFrontEnd) -> None:
    _, live = front_end.live()
    with pytest.raises(InputError, match="not finite"):
        live.push(np.array([np.nan], dtype=np.float32))
    live.push(noise(10), last=True)
    with pytest.raises(UsageError, match="ended"):
        live.push(noise(10))
    with pytest.raises(UsageError, match="not one the model knows"):
        front_end.live(100)
    # The network is conditioned on one delay; a prompt for another would be silently wrong.
    with pytest.raises(UsageError, match="another delay") as caught:
        front_end.live(80)
    assert (caught.value.where, caught.value.expected) == ("delay_ms", "480")
    with pytest.raises(UsageError, match="another delay"):
        front_end.transcribe(noise(100), delay_ms=2400)
