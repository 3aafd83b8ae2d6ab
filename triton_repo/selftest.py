"""Asks a running server real questions, as clients do, and says what is wrong with the answers.

    python -m triton_repo.selftest [--http http://127.0.0.1:8000] [--grpc 127.0.0.1:8001]

Exit code 0 when everything is right, 5 when something is not, 4 when no server answers.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import requests
import tritonclient.grpc as grpcclient

from plugins.support.errors import EXIT_MISSING_CAPABILITY, EXIT_VERIFICATION_FAILED

MODELS = ("tensorrt_llm_bls", "ensemble")
PROMPT = "Hello, world"
MAX_TOKENS = 16
# The first request may have to wait for kernels to be compiled.
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class CheckResult:
    """One check: its name, what is wrong (None: nothing), and seconds it took."""

    name: str
    problem: str | None
    seconds: float


def self_test(http_url: str, grpc_url: str) -> list[CheckResult]:
    """Run all checks against a server; a failed one does not keep the others from running."""
    results = [_run("server is ready", lambda: _check_ready(http_url))]
    if results[0].problem is not None:
        return results
    streaming = _streams(http_url)
    for model in MODELS:
        checks = {
            "answer": partial(_check_answer, http_url, model),
            "refusal": partial(_check_refusal, http_url, model),
        }
        if streaming:
            checks["HTTP stream"] = partial(_check_http_stream, http_url, model)
            checks["gRPC stream"] = partial(_check_grpc_stream, http_url, grpc_url, model)
        results += [_run(f"{model}: {name}", check) for name, check in checks.items()]
    return results


def _run(name: str, check: Callable[[], str | None]) -> CheckResult:
    started = time.monotonic()
    try:
        problem = check()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return CheckResult(name, problem, time.monotonic() - started)


def _check_ready(http_url: str) -> str | None:
    status = requests.get(f"{http_url}/v2/health/ready", timeout=5).status_code
    return None if status == 200 else f"status {status}"


def _streams(http_url: str) -> bool:
    config = requests.get(f"{http_url}/v2/models/tensorrt_llm_bls/config", timeout=5).json()
    return bool(config.get("model_transaction_policy", {}).get("decoupled"))


def _body(**more: Any) -> dict[str, Any]:
    return {
        "text_input": PROMPT, "max_tokens": MAX_TOKENS, "exclude_input_in_output": True,
    } | more  # fmt: skip


def _generate(http_url: str, model: str, body: dict[str, Any]) -> dict[str, Any]:
    url = f"{http_url}/v2/models/{model}/generate"
    answer: dict[str, Any] = requests.post(url, json=body, timeout=TIMEOUT_S).json()
    return answer


def _check_answer(http_url: str, model: str) -> str | None:
    answer = _generate(http_url, model, _body(return_num_output_tokens=True))
    if "error" in answer:
        return str(answer["error"])
    if answer.get("finish_reason") not in ("stop", "length"):
        return f"finish reason {answer.get('finish_reason')}"
    count = answer.get("num_output_tokens", 0)
    return None if 1 <= count <= MAX_TOKENS else f"{count} tokens for max_tokens {MAX_TOKENS}"


def _check_refusal(http_url: str, model: str) -> str | None:
    answer = _generate(http_url, model, _body(max_tokens=-1))
    error = str(answer.get("error", "no error"))
    return None if "max_tokens" in error else f"a negative max_tokens gave: {error}"


def _check_http_stream(http_url: str, model: str) -> str | None:
    whole = _generate(http_url, model, _body()).get("text_output")
    url = f"{http_url}/v2/models/{model}/generate_stream"
    with requests.post(url, json=_body(stream=True), stream=True, timeout=TIMEOUT_S) as answer:
        lines = [line for line in answer.iter_lines() if line]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    if not events or "error" in events[-1]:
        return f"no answer: {events[-1:]}"
    return _compare([e["text_output"] for e in events], whole, events[-1].get("finish_reason"))


def _check_grpc_stream(http_url: str, grpc_url: str, model: str) -> str | None:
    whole = _generate(http_url, model, _body()).get("text_output")
    inputs = []
    for name, kind, dtype, value in (
        ("text_input", "BYTES", np.object_, PROMPT.encode()),
        ("max_tokens", "INT32", np.int32, MAX_TOKENS),
        ("stream", "BOOL", np.bool_, True),
    ):
        tensor = grpcclient.InferInput(name, [1, 1], kind)
        tensor.set_data_from_numpy(np.array([[value]], dtype=dtype))
        inputs.append(tensor)
    events: queue.Queue[tuple[Any, Any]] = queue.Queue()
    pieces, reason, finals = [], None, 0
    with grpcclient.InferenceServerClient(grpc_url) as client:
        client.start_stream(lambda result, error: events.put((result, error)))
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        while not finals:
            result, error = events.get(timeout=TIMEOUT_S)
            if error is not None:
                return str(error)
            response = result.get_response()
            finals += response.parameters["triton_final_response"].bool_param
            if response.outputs:
                pieces.append(result.as_numpy("text_output").reshape(-1)[0].decode())
                ended = result.as_numpy("finish_reason")
                reason = reason if ended is None else ended.reshape(-1)[0].decode()
        client.stop_stream()
    return _compare(pieces, whole, reason)


def _compare(pieces: list[str], whole: str | None, reason: str | None) -> str | None:
    text = "".join(pieces)
    if text != whole:
        return f"the streamed text is {text!r}, the whole answer {whole!r}"
    if any("\ufffd" in piece for piece in pieces[:-1]):
        return "a piece holds half a character"
    return None if reason in ("stop", "length") else f"finish reason {reason}"


def main(arguments: list[str] | None = None) -> int:
    """Print one line per check; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check a running server with real requests.")
    parser.add_argument("--http", default="http://127.0.0.1:8000", metavar="URL")
    parser.add_argument("--grpc", default="127.0.0.1:8001", metavar="HOST:PORT")
    chosen = parser.parse_args(arguments)
    results = self_test(chosen.http, chosen.grpc)
    for result in results:
        print(f"{result.seconds:7.3f} s  {result.name}: {result.problem or 'right'}")
    if results[0].problem is not None:
        return EXIT_MISSING_CAPABILITY
    return EXIT_VERIFICATION_FAILED if any(r.problem for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
