"""`make demo`: the whole product in one go, on a small checkpoint that is made on the spot.

Every step is the command that a person would type. The last step talks to the running server with
tritonclient: one streaming request, then eight at the same time, each compared with what the model
was taught: the continuation of its prompt, or the words of its recording.
"""

from __future__ import annotations

import argparse
import importlib
import json
import queue
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

from build_scripts import output

CLIENTS = 8
READY_TIMEOUT_S = 120
# What a family's engines are built with beyond the limits.
OPTIONS = {
    "qwen38": "--max-seq-len 512",
    "dots3": "--max-seq-len 512 --max-draft-len 3",
    "voxtral": "--max-seq-len 1024",
}
# Text to continue, or a recording to transcribe.
Prompt = str | Path


@dataclass(frozen=True)
class Answer:
    """One finished request: its text and when its pieces arrived (seconds after sending)."""

    text: str
    pieces: int
    first_s: float
    total_s: float


def ask(url: str, prompt: Prompt, max_tokens: int, stream: bool, model: str = "ensemble") -> Answer:
    """Send one request over a gRPC stream and collect the answer.

    Raises RuntimeError with the server's message when the server answers with an error.
    """
    values: dict[str, tuple[Any, str, type]] = {
        "max_tokens": (max_tokens, "INT32", np.int32),
        "stream": (stream, "BOOL", np.bool_),
        "exclude_input_in_output": (True, "BOOL", np.bool_),
    }
    inputs = []
    if isinstance(prompt, Path):
        values["task"] = (b"transcribe", "BYTES", np.object_)
        recording = np.frombuffer(prompt.read_bytes(), np.uint8)[None]
        tensor = grpc.InferInput("audio_bytes", list(recording.shape), "UINT8")
        tensor.set_data_from_numpy(recording)
        inputs.append(tensor)
    else:
        values["text_input"] = (prompt.encode(), "BYTES", np.object_)
    for name, (value, dtype, numpy_type) in values.items():
        tensor = grpc.InferInput(name, [1, 1], dtype)
        tensor.set_data_from_numpy(np.array([[value]], dtype=numpy_type))
        inputs.append(tensor)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        start = time.perf_counter()
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        parts: list[str] = []
        first = 0.0
        while True:
            result, error = answers.get(timeout=READY_TIMEOUT_S)
            if error is not None:
                raise RuntimeError(str(error))
            text = result.as_numpy("text_output")
            if text is not None and text.size:
                first = first or time.perf_counter() - start
                parts.append(text.reshape(-1)[0].decode())
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        total = time.perf_counter() - start
        client.stop_stream()
    return Answer("".join(parts), len(parts), first, total)


def _run(command: str, timings: list[tuple[str, str]]) -> None:
    """Run one documented command; leave with its exit code when it fails."""
    output.say(f"\n$ {command}")
    start = time.perf_counter()
    code = subprocess.run(_argv(command), check=False).returncode
    if code:
        sys.exit(code)
    timings.append((" ".join(command.split()[:2]), f"{time.perf_counter() - start:.1f} s"))


def _argv(command: str) -> list[str]:
    """The command through this interpreter, whether or not .venv/bin is on PATH."""
    program, *rest = command.split()
    module = ["build_scripts.cli"] if program == "build-engine" else rest[1:2]
    return [sys.executable, "-m", *module, *(rest if program == "build-engine" else rest[2:])]


def _known(family: str) -> list[tuple[Prompt, str]]:
    """Prompts of the family's small checkpoint and the answers that it was taught."""
    fixture = importlib.import_module(f"tests.fixtures.{family}_checkpoint")
    if family == "voxtral":
        return [(r.path, r.words) for r in fixture.recordings()]
    return [(k.prompt, k.continuation) for k in fixture.known_continuations() if k.kind == "text"]


def _shown(prompt: Prompt) -> str:
    return prompt.name if isinstance(prompt, Path) else prompt


def _serve_and_ask(repository: Path, samples: list[tuple[Prompt, str]], max_tokens: int) -> bool:
    """Start the server, send the requests, print what came back. Returns whether all is right."""
    command = f"build-engine serve {repository} --http-port 0 --grpc-port 0 --metrics-port 0 --json"
    output.say(f"\n$ {command}")
    server = subprocess.Popen(_argv(command), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        addresses = json.loads(server.stdout.readline() or "{}")
        if "grpc" not in addresses:
            sys.exit(server.wait() or 1)
        url = addresses["grpc"]
        prompt, expected = samples[0]
        streamed = ask(url, prompt, max_tokens, stream=True)
        output.say(f"\nprompt:   {_shown(prompt)!r}\nstreamed: {streamed.text!r}")
        start = time.perf_counter()
        chosen = [samples[i % len(samples)] for i in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(lambda s: ask(url, s[0], max_tokens, stream=True), chosen))
        wall = time.perf_counter() - start
    finally:
        server.send_signal(signal.SIGINT)
        code = server.wait()
    right = [a.text == e for a, (_, e) in zip(answers, chosen, strict=True)]
    rows = [
        (
            index,
            _shown(prompt)[:40],
            answer.pieces,
            f"{answer.first_s * 1e3:.0f} ms",
            f"{answer.total_s:.2f} s",
            "word for word" if good else f"DIFFERS: {answer.text!r}",
        )
        for index, ((prompt, _), answer, good) in enumerate(
            zip(chosen, answers, right, strict=True), 1
        )
    ]
    output.table(
        f"{CLIENTS} requests at the same time, {wall:.2f} s in all",
        ("client", "prompt", "pieces", "first text", "finished", "answer"),
        rows,
    )
    output.say(f"server ended with exit code {code}")
    return all(right) and streamed.text == expected and code == 0


def main() -> None:
    """Make the small checkpoint in DIRECTORY/model, run the chain on it and talk to the server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", default="qwen38", choices=tuple(OPTIONS))
    parser.add_argument("directory", type=Path, help="replaced when it exists")
    arguments = parser.parse_args()
    root: Path = arguments.directory
    shutil.rmtree(root, ignore_errors=True)
    model, engine, repository = root / "model", root / "engine", root / "model_repository"
    timings: list[tuple[str, str]] = []
    begin = time.perf_counter()
    _run(f"python -m tests.fixtures.{arguments.family}_checkpoint {model}", timings)
    _run(f"build-engine convert {model} {root / 'checkpoint'}", timings)
    limits = f"--max-batch-size {CLIENTS} {OPTIONS[arguments.family]}"
    _run(f"build-engine build {root / 'checkpoint'} {engine} {limits}", timings)
    _run(f"build-engine verify {engine} --against {model}", timings)
    _run(f"build-engine repo {engine} {repository}", timings)
    good = _serve_and_ask(repository, _known(arguments.family), max_tokens=160)
    timings.append(("whole demo", f"{time.perf_counter() - begin:.1f} s"))
    output.table("What happened", ("step", "time"), timings)
    output.say("every answer is what the model was taught" if good else "an answer is WRONG")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
