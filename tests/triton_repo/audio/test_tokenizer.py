"""A tokenizer that is not the engine's is refused by the fact that differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plugins.support.errors import InputError
from tests.fixtures.tekken import write_tekken
from triton_repo.frontend.audio.frontend import AudioFrontEnd

CHUNKS = {
    "num_mel_bins": 128, "mel_ceiling": None, "max_source_positions": 1500,
    "tokens_per_chunk": 375, "downsample_factor": 4,
}  # fmt: skip
STREAM = CHUNKS | {"mel_ceiling": 1.5, "max_source_positions": None, "tokens_per_chunk": None}


def engine(realtime: bool) -> dict[str, Any]:
    return {
        "voxtral": {
            "realtime": realtime,
            "audio_token_id": None if realtime else 24,
            "default_num_delay_tokens": 6 if realtime else None,
            "audio": STREAM if realtime else CHUNKS,
        }
    }


@pytest.mark.parametrize("realtime", [False, True])
def test_the_right_one_is_taken(tmp_path: Path, realtime: bool) -> None:
    write_tekken(tmp_path, realtime=realtime)
    assert AudioFrontEnd(engine(realtime), tmp_path).streaming == realtime


def put(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(audio: dict[str, Any]) -> None:
        for key in path[:-1]:
            audio = audio[key]
        audio[path[-1]] = value

    return change


ENCODING = "audio_encoding_config"
CASES: list[tuple[bool, Callable[[dict[str, Any]], None], str, str]] = [
    (False, put("sampling_rate", value=8000), "sampling_rate 8000", "sampling_rate 16000"),
    (False, put("frame_rate", value=25.0), "frame_rate 25.0", "frame_rate 12.5"),
    (False, put("chunk_length_s", value=60.0), "chunk_length_s 60.0", "chunk_length_s 30.0"),
    (False, put(ENCODING, "num_mel_bins", value=80), "num_mel_bins 80", "num_mel_bins 128"),
    (False, put(ENCODING, "hop_length", value=320), "hop_length 320", "hop_length 160"),
    (False, put(ENCODING, "window_size", value=512), "window_size 512", "window_size 400"),
    (True, put("transcription_delay_ms", value=960), "delay in tokens 12", "delay in tokens 6"),
]


@pytest.mark.parametrize(("realtime", "change", "found", "expected"), CASES)
def test_another_one_is_refused(
    tmp_path: Path,
    realtime: bool,
    change: Callable[[dict[str, Any]], None],
    found: str,
    expected: str,
) -> None:
    path = write_tekken(tmp_path, realtime=realtime)
    document = json.loads(path.read_text())
    change(document["audio"])
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="not that of the engine") as caught:
        AudioFrontEnd(engine(realtime), tmp_path)
    assert caught.value.where == str(path)
    assert found in str(caught.value.found).split(", ")
    assert expected in str(caught.value.expected).split(", ")


@pytest.mark.parametrize("realtime", [False, True])
def test_realtime_and_instruct_are_told_apart(tmp_path: Path, realtime: bool) -> None:
    write_tekken(tmp_path, realtime=not realtime)
    with pytest.raises(InputError, match="not that of the engine") as caught:
        AudioFrontEnd(engine(realtime), tmp_path)
    assert f"streaming {not realtime}" in str(caught.value.found)


def test_another_placeholder_is_refused(tmp_path: Path) -> None:
    path = write_tekken(tmp_path)
    document = json.loads(path.read_text())
    specials = document["special_tokens"]
    specials[24]["token_str"], specials[26]["token_str"] = "<SPECIAL_24>", "[AUDIO]"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="not that of the engine") as caught:
        AudioFrontEnd(engine(False), tmp_path)
    assert caught.value.found == "id of [AUDIO] 26"
