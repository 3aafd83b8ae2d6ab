"""`build-engine run` with audio: chats, transcriptions, streams, ids, and every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from tests.build_scripts.conftest import Command, Done
from tests.fixtures.tekken import SPECIALS
from tests.fixtures.voxtral_checkpoint import QUESTION, recordings
from triton_repo.frontend.audio.mel import log_mel_chunks

KNOWN = recordings()
# What the recomputable realtime model makes of the second recording.
HEARD = [217, 79, *[27] * 21, 12, 193, 78, *[27] * 8]
HEARD += [129, 118, 210, 210, 140, 15, 39, 182, 129, 210, 140, 15, 39, 182]


def written(directory: Path, content: Any) -> Path:
    path = directory / "request.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def text_of(done: Done) -> str:
    assert done.code == 0, done.err
    return str(done.json["text"])


@pytest.mark.parametrize("known", KNOWN, ids=lambda r: r.path.stem)
def test_every_recording(
    command: Command, voxtral_engine: Path, tmp_path: Path, known: Any
) -> None:
    request = written(tmp_path, {"task": "transcribe", "audio": str(known.path)})
    done = command("run", voxtral_engine, "--request", request, "--max-new-tokens", 200, "--json")
    assert text_of(done) == known.words
    assert done.json["finish_reason"] == "stop"
    assert done.json["prompt_ids"].count(24) == 375


def test_a_language_and_a_file_from_the_command_line(
    command: Command, voxtral_engine: Path, tmp_path: Path
) -> None:
    request = written(tmp_path, {"task": "transcribe", "language": "en"})
    done = command(
        "run", voxtral_engine, "--audio", KNOWN[1].path, "--request", request,
        "--max-new-tokens", 200, "--json",
    )  # fmt: skip
    assert text_of(done) == KNOWN[1].words
    # [TRANSCRIBE] after the language, as mistral-common writes it.
    assert done.json["prompt_ids"][-1] == 34
    assert done.json["prompt_ids"][378] == 4 and len(done.json["prompt_ids"]) > 380


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize("shape", ["list", "object"])
def test_chats(command: Command, voxtral_engine: Path, tmp_path: Path, shape: str) -> None:
    messages = chat({"type": "audio"}, {"type": "text", "text": QUESTION})
    request = written(tmp_path, messages if shape == "list" else {"messages": messages})
    done = command(
        "run", voxtral_engine, "--audio", KNOWN[4].path, "--request", request,
        "--max-new-tokens", 200, "--json",
    )  # fmt: skip
    assert text_of(done) == KNOWN[4].words


def test_audio_named_in_the_request_lies_beside_it(
    command: Command, voxtral_engine: Path, tmp_path: Path
) -> None:
    (tmp_path / "A.wav").write_bytes(KNOWN[1].path.read_bytes())
    parts = ({"type": "audio", "audio": "A.wav"}, {"type": "text", "text": QUESTION})
    request = written(tmp_path, chat(*parts))
    done = command("run", voxtral_engine, "--request", request, "--max-new-tokens", 200, "--json")
    assert text_of(done) == KNOWN[1].words


def test_given_ids(command: Command, voxtral_engine: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    ids.write_text(" ".join(map(str, [1, 3, 25, *[24] * 375, 4, 34])))
    arguments = ("--audio", KNOWN[3].path, "--ids-file", ids, "--max-new-tokens", 200, "--json")
    assert text_of(command("run", voxtral_engine, *arguments)) == KNOWN[3].words


def test_text_without_audio(command: Command, voxtral_engine: Path) -> None:
    done = command("run", voxtral_engine, "--ids", "1,3,4", "--max-new-tokens", 3, "--json")
    assert len(done.json["output_ids"]) <= 3 and done.code == 0


def test_a_stream(command: Command, realtime_engine: Path, tmp_path: Path) -> None:
    request = written(tmp_path, {"task": "transcribe", "audio": str(KNOWN[1].path)})
    arguments = ("run", realtime_engine, "--request", request, "--json", "--max-new-tokens")
    done = command(*arguments, 300)
    assert (done.json["output_ids"], done.json["finish_reason"]) == (HEARD, "stop")
    assert command(*arguments, 5).json["output_ids"] == HEARD[:5]
    task = {"task": "transcribe", "audio": str(KNOWN[1].path)}
    same = written(tmp_path, task | {"delay_ms": 480})
    done = command("run", realtime_engine, "--request", same, "--json")
    assert done.json["output_ids"] == HEARD[:32]
    # The text is there no later than all of it, and not before its first id.
    times = done.json["timings"]
    assert times["first_token_s"] <= times["first_text_s"] <= times["audio_s"] + times["generate_s"]
    other = written(tmp_path, task | {"delay_ms": 80})
    refused = command("run", realtime_engine, "--request", other)
    assert refused.code == 2 and "built for another delay" in refused.err
    ids = tmp_path / "ids"
    ids.write_text(" ".join(map(str, [1, *[32] * 38])))
    arguments = ("--audio", KNOWN[1].path, "--ids-file", ids, "--max-new-tokens", 300, "--json")
    assert command("run", realtime_engine, *arguments).json["output_ids"] == HEARD


AUDIO = ("--audio", KNOWN[1].path)
TRANSCRIBE: dict[str, Any] = {"task": "transcribe"}
SYSTEM = [{"role": "system", "content": "x"}, *chat({"type": "audio"})]


@pytest.mark.parametrize(
    ("request_file", "arguments", "message"),
    [
        ("{", AUDIO, "the request is not JSON"),
        (None, AUDIO, "the request cannot be read"),
        (3, AUDIO, "not a request"),
        ({"messages": "x"}, AUDIO, "not a request"),
        (TRANSCRIBE, (), "the task names no audio"),
        (TRANSCRIBE, AUDIO * 2, "the task names no audio"),
        (TRANSCRIBE | {"audio": "absent.wav"}, (), "the audio file cannot be read"),
        (TRANSCRIBE | {"audio": "request.json"}, (), "the audio cannot be decoded"),
        (TRANSCRIBE | {"temperature": 1}, AUDIO, "unknown keys in the request"),
        (TRANSCRIBE | {"language": "zz"}, AUDIO, "language"),
        (TRANSCRIBE | {"delay_ms": 480}, AUDIO, "without delay"),
        (chat({"type": "audio"}), (), "an audio part names no file"),
        (chat({"type": "text", "text": "x"}), AUDIO, "more --audio files than audio parts"),
        (chat({"type": "image"}), (), "unknown content part"),
        ([{"role": "user", "content": False}], (), "neither text nor parts"),
        ([{"role": "tool", "content": "x"}], (), "'tool_call_id' is missing"),
        ([{"content": "x"}], (), "the request is refused"),
        ([], (), "the request is refused"),
        (TRANSCRIBE | {"audio": 5}, (), "audio\n  expected: a string\n  found:    5"),
        (TRANSCRIBE | {"language": ["en"]}, AUDIO, "expected: a string"),
        (TRANSCRIBE | {"delay_ms": "480"}, AUDIO, "expected: a whole number"),
        (TRANSCRIBE | {"delay_ms": True}, AUDIO, "expected: a whole number"),
        (chat({"type": "audio", "audio": {}}), (), "expected: a string"),
        (SYSTEM, AUDIO, "not allowed prior to"),
        (TRANSCRIBE, (*AUDIO, "--prompt", "x"), "give exactly one prompt"),
    ],
)
def test_requests_that_are_refused(
    command: Command,
    voxtral_engine: Path,
    tmp_path: Path,
    request_file: Any,
    arguments: tuple[Any, ...],
    message: str,
) -> None:
    path = tmp_path / "absent.json"
    if request_file is not None:
        path = written(tmp_path, request_file)
    done = command("run", voxtral_engine, "--request", path, *arguments)
    assert done.code in (2, 3)
    assert done.err.splitlines()[-1] and message in done.err
    assert "Traceback" not in done.err


def test_arguments_that_do_not_fit(
    command: Command, voxtral_engine: Path, realtime_engine: Path, deterministic_engine: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    cases: list[tuple[Path, tuple[Any, ...], str]] = [
        (voxtral_engine, (*AUDIO, "--prompt", "x"), "a plain text has no place for audio"),
        (voxtral_engine, (*AUDIO, "--ids", "1,24,4"), "placeholders and audio rows do not match"),
        (voxtral_engine, ("--ids", "1,24,4"), "a placeholder has no audio"),
        (voxtral_engine, AUDIO, "give exactly one prompt"),
        (realtime_engine, ("--ids", "1,32"), "the model listens to a stream"),
        (realtime_engine, (*AUDIO, *AUDIO, "--ids", "1,32"), "hears one stream"),
        (deterministic_engine, (*AUDIO, "--ids", "1"), "this engine hears nothing"),
    ]
    for engine, arguments, message in cases:
        done = command("run", engine, *arguments)
        assert done.code in (2, 3) and message in done.err, (message, done.err)
    request = written(tmp_path, chat({"type": "audio"}))
    done = command("run", realtime_engine, *AUDIO, "--request", request)
    assert done.code == 2 and "takes no conversation" in done.err
    late = written(tmp_path, {"task": "transcribe", "delay_ms": 100})
    done = command("run", realtime_engine, *AUDIO, "--request", late)
    assert done.code == 2 and "delay_ms" in done.err


@pytest.fixture(scope="module")
def long_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chunks of speech, the second one quiet."""
    first, second = (soundfile.read(KNOWN[i].path, dtype="float32")[0] for i in (0, 2))
    samples = np.concatenate([np.resize(first, 30 * 16000), 0.05 * second[:16000]])
    path = tmp_path_factory.mktemp("long") / "long.flac"
    soundfile.write(path, samples, 16000)
    return path


def test_several_audios_and_chunks_in_the_order_of_the_request(
    command: Command,
    voxtral_engine: Path,
    voxtral_checkpoint: Path,
    long_recording: Path,
    tmp_path: Path,
) -> None:
    """Logits of whole prompts against transformers, with the audios in this and another order."""
    from transformers import VoxtralForConditionalGeneration

    parts = (
        {"type": "audio", "audio": str(long_recording)},
        {"type": "text", "text": "x"},
        {"type": "audio"},
    )
    request, logits = written(tmp_path, chat(*parts)), tmp_path / "logits.npy"
    short = tmp_path / "short.wav"
    # Of three chunks only the second half of the last one is left for text.
    samples = soundfile.read(KNOWN[1].path, dtype="float32")[0]
    soundfile.write(short, samples[:8000], 16000)
    done = command("run", voxtral_engine, "--audio", short, "--request", request,
                   "--max-new-tokens", 0, "--logits", logits, "--json")  # fmt: skip
    # 1125 placeholders do not fit 1024 tokens.
    assert done.code == 2 and "max_input_len" in done.err + done.out
    request = written(tmp_path, chat(*parts[1:], {"type": "text", "text": "y"}, *parts[1:]))
    files = ("--audio", KNOWN[1].path, "--audio", KNOWN[3].path, "--request", request)
    wanted = ("--max-new-tokens", 0, "--logits", logits, "--json")
    done = command("run", voxtral_engine, *files, *wanted)
    one = [25] + [24] * 375
    x, y = ([SPECIALS + ord(letter)] for letter in "xy")
    # Texts that follow each other are joined by an empty line.
    ids = [1, 3, *x, *one, *y, *[SPECIALS + ord("\n")] * 2, *x, *one, 4]
    assert done.json["prompt_ids"] == ids
    found = torch.from_numpy(np.load(logits))
    model = VoxtralForConditionalGeneration.from_pretrained(voxtral_checkpoint, dtype=torch.float32)
    mels = [
        torch.from_numpy(log_mel_chunks(soundfile.read(KNOWN[i].path, dtype="float32")[0], 480000))
        for i in (1, 3)
    ]

    def reference(features: list[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            heard = {"input_features": torch.cat(features)}
            return model(input_ids=torch.tensor([ids]), **heard).logits[0]

    right, turned = reference(mels), reference(mels[::-1])
    # The engine computes in bfloat16.
    near = float((found - right).abs().mean())
    assert near < 0.2 * float((found - turned).abs().mean())

    long = written(tmp_path, chat(parts[0], {"type": "text", "text": "x"}))
    done = command("run", voxtral_engine, "--request", long, *wanted)
    ids = [1, 3, 25, *[24] * 750, *x, 4]
    assert done.json["prompt_ids"] == ids
    samples = soundfile.read(long_recording, dtype="float32")[0]
    whole = torch.from_numpy(log_mel_chunks(samples, 480000))
    found = torch.from_numpy(np.load(logits))
    near = float((found - reference([whole])).abs().mean())
    # The negative control: the second chunk first.
    assert near < 0.2 * float((found - reference([whole.flip(0)])).abs().mean())
