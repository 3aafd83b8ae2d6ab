"""The golden values of both tiny Voxtrals, from both layouts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from converters.voxtral.network import sinusoids
from plugins.support.progress import Silent
from plugins.trt.builder import build_serialized
from tests.converters.voxtral.conftest import LAYOUTS, SPEECH
from tests.converters.voxtral.driver import Driver
from triton_repo.frontend.audio.decode import decode_audio
from triton_repo.frontend.audio.mel import log_mel_chunks
from triton_repo.frontend.audio.prompts import AudioPrompt

# Float32 against the reference's float32, through two encoders' worth of sums.
TOLERANCE = 1e-3

# Last row of the logits, columns 0 to 5, of the chat prompt.
LOGITS = (-2.52405, -5.91218, -2.81932, 3.64278, 0.94411, 3.35032)
GREEDY = (134, 174, 166, 74, 114, 253, 3, 257, 147, 16, 134, 174)
REALTIME_LOGITS = (-0.61275, -4.28075, 7.33761, 1.15896, 2.81373)
REALTIME_IDS = [217, 79, *[27] * 21, 12, 193, 78, *[27] * 8]
REALTIME_IDS += [129, 118, 210, 210, 140, 15, 39, 182, 129, 210, 140, 15, 39, 182]


def close(got: Tensor, want: tuple[float, ...], tolerance: float = TOLERANCE) -> bool:
    return bool((got - torch.tensor(want)).abs().max() <= tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_encoder_rows(drivers: dict[str, Driver], mel: Tensor, layout: str) -> None:
    heard = drivers[layout].hear(mel)
    encoded, rows = heard["audio.encoded"], heard["audio_rows"]
    assert encoded.shape == (1, 1500, 32)
    assert rows.shape == (1, 375, 48)
    assert close(encoded[0, 0, :4], (-1.46421, 0.63577, -0.30739, -1.84977))
    assert close(encoded[0, 749, :4], (-0.56706, -0.68382, -0.84699, -0.05884))
    assert float(encoded.sum(dtype=torch.float64)) == pytest.approx(-490.587, abs=0.01)
    assert close(rows[0, 0, :4], (0.66532, -0.59439, -0.32510, -1.31100))
    assert close(rows[0, 374, :4], (0.95626, -1.42582, 0.21834, -0.93320))
    assert float(rows.sum(dtype=torch.float64)) == pytest.approx(-1482.71, abs=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chat_logits_and_continuation(
    drivers: dict[str, Driver], mel: Tensor, chat: AudioPrompt, layout: str
) -> None:
    driver = drivers[layout]
    driver.reset()
    rows = driver.hear(mel)["audio_rows"][0]
    logits = driver.read(chat.ids, rows)["logits"]
    assert close(logits[-1, :6], LOGITS)
    best = logits[-1].topk(2)
    assert best.indices.tolist() == [134, 156]
    assert close(best.values, (10.703, 10.682))
    ids = [int(best.indices[0])]
    while len(ids) < 12:
        nothing = torch.zeros(1, 48)[: int(ids[-1] == 24)]
        ids.append(int(driver.read(ids[-1:], nothing, "generation")["logits"][-1].argmax()))
    assert tuple(ids) == GREEDY


def test_pieces_equal_one_pass(drivers: dict[str, Driver], mel: Tensor, chat: AudioPrompt) -> None:
    driver = drivers["huggingface"]
    driver.reset()
    rows = driver.hear(mel)["audio_rows"][0]
    whole = driver.read(chat.ids, rows)["logits"]
    driver.reset()
    parts, used = [], 0
    for start in range(0, len(chat.ids), 100):
        piece = chat.ids[start : start + 100]
        count = piece.count(24)
        parts.append(driver.read(piece, rows[used : used + count])["logits"])
        used += count
    assert (torch.cat(parts) - whole).abs().max() <= 2e-5


def test_text_only(drivers: dict[str, Driver]) -> None:
    driver = drivers["huggingface"]
    driver.reset()
    logits = driver.read([1, 3, 156, 144, 141, 72, 298, 140, 4], torch.zeros(0, 48))["logits"]
    assert int(logits[-1].argmax()) == 159


def test_hidden_states_are_what_the_head_reads(drivers: dict[str, Driver]) -> None:
    driver = drivers["huggingface"]
    driver.reset()
    read = driver.read([1, 3, 156, 144, 141, 72, 298, 140, 4], torch.zeros(0, 48))
    logits, hidden = read["logits"], read["hidden_states"]
    head = driver.weights["lm_head.weight"].float()
    assert hidden.shape == (9, 48)
    assert (hidden @ head.T - logits).abs().max() <= 1e-5
    assert (hidden.roll(1, 0) @ head.T - logits).abs().max() > 0.1


def test_chunks_are_heard_apart(drivers: dict[str, Driver]) -> None:
    """Two chunks in one call equal one call each; chunk order matters."""
    samples = decode_audio((SPEECH.parent / "austen-0870.wav").read_bytes())
    long = torch.from_numpy(samples).repeat(6).numpy()
    mel = torch.from_numpy(log_mel_chunks(long, 480000))
    assert mel.shape[0] == 2
    driver = drivers["huggingface"]
    both = driver.hear(mel)["audio_rows"]
    apart = torch.cat([driver.hear(mel[i : i + 1])["audio_rows"] for i in range(2)])
    assert (both - apart).abs().max() <= 1e-5
    assert (both - apart.flip(0)).abs().max() > 0.1


def test_generated_position_table() -> None:
    table = sinusoids(1500, 32)
    rates = torch.exp(-torch.arange(16, dtype=torch.float64) * 9.210340371976184 / 15)
    angles = torch.arange(1500, dtype=torch.float64)[:, None] * rates[None]
    want = torch.cat([angles.sin(), angles.cos()], 1).float()
    assert (table - want).abs().max() <= 2e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_realtime_rows_and_ids(
    realtime_drivers: dict[str, Driver], stream: AudioPrompt, stream_mel: Tensor, layout: str
) -> None:
    assert stream_mel.shape == (1, 128, 696)
    assert float(stream_mel.sum(dtype=torch.float64)) == pytest.approx(-34762.50, abs=0.05)
    driver = realtime_drivers[layout]
    driver.reset()
    heard = driver.hear(stream_mel)
    encoded, rows = heard["audio.encoded"], heard["audio_rows"]
    assert encoded.shape == (1, 348, 32)
    assert float(encoded.sum(dtype=torch.float64)) == pytest.approx(539.885, abs=0.01)
    assert close(encoded[0, 0, :4], (-0.01727, -0.12471, 0.52982, -0.44894))
    assert close(rows[0, 0, :4], (0.85210, 0.05641, -1.06944, 0.22439))
    assert close(rows[0, 86, :4], (0.37274, 0.61113, -0.58133, 0.04886))
    logits = driver.read(stream.ids, rows[0, :39])["logits"]
    assert close(logits[-1, :5], REALTIME_LOGITS)
    ids = [int(logits[-1].argmax())]
    while len(ids) < 48:
        position = 39 + len(ids) - 1
        row = rows[0, position : position + 1]
        ids.append(int(driver.read(ids[-1:], row, "generation")["logits"][-1].argmax()))
    assert ids == REALTIME_IDS


@pytest.mark.parametrize("first", [8, 312, 688])
def test_realtime_pieces_equal_the_whole(
    realtime_drivers: dict[str, Driver], stream_mel: Tensor, first: int
) -> None:
    driver = realtime_drivers["huggingface"]
    driver.reset()
    whole = driver.hear(stream_mel)["audio_rows"]
    driver.reset()
    cuts = [0, *range(first, 697, 8)]
    parts = [driver.hear(stream_mel[:, :, a:b])["audio_rows"] for a, b in itertools.pairwise(cuts)]
    assert (torch.cat(parts, 1) - whole).abs().max() <= 5e-6


def test_realtime_does_not_hear_the_future(
    realtime_drivers: dict[str, Driver], stream_mel: Tensor
) -> None:
    driver = realtime_drivers["huggingface"]
    driver.reset()
    whole = driver.hear(stream_mel)["audio.encoded"]
    changed = stream_mel.clone()
    changed[:, :, 400:] += 0.5
    driver.reset()
    other = driver.hear(changed)["audio.encoded"]
    assert torch.equal(whole[:, :200], other[:, :200])
    assert not torch.equal(whole[:, 200:], other[:, 200:])


@pytest.mark.parametrize("realtime", [False, True])
def test_engines_are_built(
    drivers: dict[str, Driver],
    realtime_drivers: dict[str, Driver],
    tmp_path: Path,
    realtime: bool,
) -> None:
    driver = (realtime_drivers if realtime else drivers)["huggingface"]
    for phase, net in driver.networks.items():
        path = tmp_path / f"{phase}.engine"
        plan = build_serialized(net, driver.definitions[phase].profile, path, Silent())
        assert path.stat().st_size == plan.nbytes > 1000
        if phase != "audio":
            assert len(plan.report.cache_updates()) == 4
