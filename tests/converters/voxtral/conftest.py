"""Both tiny Voxtrals in both layouts, and what they listen to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.converters.voxtral.driver import Driver, converted
from tests.fixtures.tekken import write_tekken
from tests.fixtures.voxtral_deterministic import write_huggingface, write_mistral
from triton_repo.frontend.audio.decode import decode_audio
from triton_repo.frontend.audio.mel import MelSpec, log_mel, log_mel_chunks
from triton_repo.frontend.audio.prompts import AudioPrompt, AudioPrompts

AUDIO = Path(__file__).parents[2] / "fixtures" / "data" / "audio"
SPEECH = AUDIO / "austen-0880.wav"
LAYOUTS = ("huggingface", "mistral")


def _directories(base: Path, realtime: bool) -> dict[str, Path]:
    huggingface = write_huggingface(base / "huggingface", realtime=realtime)
    return {
        "huggingface": huggingface,
        "mistral": write_mistral(huggingface, base / "mistral", realtime=realtime),
    }


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("voxtral")


@pytest.fixture(scope="session")
def sources(work: Path) -> dict[str, Path]:
    return _directories(work, False)


@pytest.fixture(scope="session")
def drivers(sources: dict[str, Path], work: Path) -> dict[str, Driver]:
    return {layout: Driver(*converted(path, work)) for layout, path in sources.items()}


@pytest.fixture(scope="session")
def realtime_sources(work: Path) -> dict[str, Path]:
    return _directories(work / "realtime", True)


@pytest.fixture(scope="session")
def realtime_drivers(realtime_sources: dict[str, Path], work: Path) -> dict[str, Driver]:
    return {
        layout: Driver(*converted(path, work / "realtime"))
        for layout, path in realtime_sources.items()
    }


@pytest.fixture(scope="session")
def chat(work: Path) -> AudioPrompt:
    message = {
        "role": "user",
        "content": [{"type": "audio", "index": 0}, {"type": "text", "text": "the end"}],
    }
    prompts = AudioPrompts(write_tekken(work))
    return prompts.chat([message], [decode_audio(SPEECH.read_bytes())])


@pytest.fixture(scope="session")
def mel(chat: AudioPrompt) -> Tensor:
    return torch.from_numpy(log_mel_chunks(chat.audios[0], 480000))


@pytest.fixture(scope="session")
def stream(work: Path) -> AudioPrompt:
    directory = work / "tekken"
    directory.mkdir()
    prompts = AudioPrompts(write_tekken(directory, realtime=True))
    return prompts.transcribe(decode_audio(SPEECH.read_bytes()))


@pytest.fixture(scope="session")
def stream_mel(stream: AudioPrompt) -> Tensor:
    return torch.from_numpy(log_mel(stream.audios[0], MelSpec(ceiling=1.5)))[None]
