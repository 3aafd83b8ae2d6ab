"""Audio of `run`: files on the command line, or a request file that names them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from build_scripts.sounds import Sounds
from plugins.support.errors import InputError, UsageError
from runtime.audio import AudioEncoder
from runtime.audio_rows import AudioRows
from runtime.engine import Engine
from triton_repo.frontend.audio.frontend import AudioFrontEnd, Heard


def hear(
    engine: Engine, tokenizer_dir: Path | None, ids: Sequence[int] | None, sounds: Sounds
) -> tuple[list[int], AudioRows | None]:
    """Prompt ids and the rows of the audio engine.

    Args:
        engine: opened.
        tokenizer_dir: with the tekken file.
        ids: given ids with their placeholders; None to take the request.
        sounds: files and request.

    Raises UsageError for an engine that hears nothing and for requests that do not fit it,
    InputError for files.
    """
    encoder = AudioEncoder(engine)
    if tokenizer_dir is None:
        raise InputError(
            "audio needs the model's tekken tokenizer and the engine directory has none",
            fix="give --tokenizer DIR",
        )
    front_end = AudioFrontEnd(engine.config.pretrained_config, tokenizer_dir)
    if ids is not None:
        heard = front_end.from_ids(ids, [_samples(front_end, path) for path in sounds.files])
    else:
        assert sounds.request is not None
        heard = _from_request(front_end, sounds.request, sounds.files)
    if heard.features is None:
        return heard.ids, None
    return heard.ids, encoder.rows(torch.from_numpy(heard.features))


def _samples(front_end: AudioFrontEnd, path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            "the audio file cannot be read",
            where=str(path),
            found=error.strerror or str(error),
        ) from error
    return front_end.decode(data, str(path))


def _from_request(front_end: AudioFrontEnd, path: Path, files: Sequence[Path]) -> Heard:
    content = _read(path)
    base = path.parent
    if isinstance(content, dict) and content.get("task") == "transcribe":
        unknown = sorted(content.keys() - {"task", "language", "audio", "delay_ms"})
        if unknown:
            raise InputError(
                "unknown keys in the request",
                where=str(path),
                expected="task, language, audio, delay_ms",
                found=", ".join(unknown),
            )
        _check_kinds(content, {"audio": str, "language": str, "delay_ms": int}, path)
        named = content.get("audio")
        if named is None and len(files) != 1:
            raise InputError(
                "the task names no audio", where=f"{path}: audio", fix="give one --audio FILE"
            )
        audio = _samples(front_end, base / named if named is not None else files[0])
        return front_end.transcribe(audio, content.get("language"), content.get("delay_ms"))
    messages = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InputError(
            "not a request",
            where=str(path),
            expected='{"messages": [...]}, a list of messages, or {"task": "transcribe", ...}',
            found=type(content).__name__,
        )
    waiting = list(files)
    paths: list[Path] = []
    rendered = []
    for message in messages:
        parts = message.get("content")
        if isinstance(parts, list):
            parts = [_indexed(part, base, waiting, paths, path) for part in parts]
        rendered.append({**message, "content": parts})
    if waiting:
        raise UsageError(
            "more --audio files than audio parts without one",
            found=", ".join(map(str, waiting)),
        )
    return front_end.chat(rendered, [_samples(front_end, each) for each in paths])


def _indexed(part: Any, base: Path, waiting: list[Path], paths: list[Path], where: Path) -> Any:
    """Replace the file of an audio part by its number; a part without one takes an `--audio`."""
    if not isinstance(part, dict) or part.get("type") != "audio":
        return part
    _check_kinds(part, {"audio": str}, where)
    named = part.get("audio")
    if named is None and not waiting:
        raise InputError(
            "an audio part names no file",
            where=str(where),
            fix='write {"type": "audio", "audio": "A.wav"}, or give --audio FILE',
        )
    paths.append(base / named if named is not None else waiting.pop(0))
    return {"type": "audio", "index": len(paths) - 1}


def _check_kinds(values: Mapping[str, Any], kinds: Mapping[str, type], where: Path) -> None:
    for name, kind in kinds.items():
        value = values.get(name)
        if value is not None and type(value) is not kind:
            raise InputError(
                "a value of the request is of the wrong kind",
                where=f"{where}: {name}",
                expected={str: "a string", int: "a whole number"}[kind],
                found=json.dumps(value)[:80],
            )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InputError(
            "the request cannot be read", where=str(path), found=error.strerror or str(error)
        ) from error
    except ValueError as error:
        raise InputError("the request is not JSON", where=str(path), found=str(error)) from error
