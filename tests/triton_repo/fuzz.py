"""Sends malformed requests to an echo server and watches that nothing gives way.

    python -m tests.triton_repo.fuzz [--requests 20000] [--seed 1] [--clients 8]

Every answer must come in time, be a refusal of 4xx type or a right answer, and hold no trace and
no path; a refusal by a model must begin with the name of a request field. Ordinary requests must be
served in between, the models' processes must stay the same, and memory must not grow.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import requests
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from triton_repo.generate import RepositoryOptions, write_repository
from triton_repo.server import TritonServer, running
from triton_repo.tensor_io import NUMPY
from triton_repo.tensors import GENERATION_INPUTS, POSTPROCESSING_INPUTS, REQUEST

MODELS = ("tensorrt_llm_bls", "ensemble", "tensorrt_llm", "preprocessing")
TIMEOUT_S = 20.0
ORDINARY_EVERY = 25
# Growth of one process that is still noise: allocator pools, not one request in a thousand.
MEMORY_NOISE_MB = 40
NAMES = {f.name for f in REQUEST} | {t.name for t in GENERATION_INPUTS}
ANSWERED = tuple(tensor for tensor, _ in POSTPROCESSING_INPUTS)
NAMES |= {tensor.name for tensor in ANSWERED}
# What tritonserver itself answers to JSON or tensors that do not fit a model's configuration.
SERVER_REFUSALS = re.compile(
    r"Unable to parse|attempt to|Raw request|failed to parse|unexpected|expected|must be|JSON"
    r"|invalid|already exists|does not match|input byte size|not found|out of bounds|unknown model"
    r"|batch|incomplete|decoupled|exactly 1 response|shape|parameter|no response|overflow"
    r"|too (?:large|small)|Value|type|missing|unable|size|unsupported",
    re.IGNORECASE,
)
LEAKS = re.compile(r"Traceback|\.py\b|/usr/|/home/|/root/|/tmp/|site-packages|0x[0-9a-f]{8}")

TEXTS = [
    "", " ", "a", "é" * 50, "\u0000", "\ud7ff", "🏴‍☠️" * 9, "x" * 20000, "\u202e", "{", "[]", "null",
    "'",
    "%s%n", "<image>", "\n\n", "true", "-1", "1e999", "NaN", "../../x", "A" * 129, "a/b", "a@b",
]  # fmt: skip
NUMBERS: list[Any] = [
    0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**40, 2**63, 2**64 - 1,
    2**64, 1e30, -1e30, 0.5, -0.0, 1e-45,
]  # fmt: skip
# One pixel.
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAA"
    "AgABSK+kcQAAAABJRU5ErkJggg=="
)
JSONS = [
    "", "{", "[]", "{}", "null", "[null]", "[1]", '"x"', "[[]]", '[{"role": "user"}]',
    '{"a": {"b": []}}',
    '[{"role": "user", "content": "x"}]', '[{"role": "user", "content": [{"type": "image_url"}]}]',
    '[{"role": 5, "content": {}}]', '[{"type": "image_url", "image_url": "file:///etc/passwd"}]',
    '[{"type": "image_url", "image_url": "http://127.0.0.1:1/x"}]', '[{"type": "token_ids"}]',
    '[{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]', "[" * 3000,
    '{"a":' * 2000,
    '{"videos_kwargs": 5}', '{"size": {"longest_edge": -1}}', '[{"modality": "image"}]',
    '[{"modality": "image", "offset": -1, "length": 1, "key": 1}]', '{"messages": 1}',
    '[{"type": "image_url", "image_url": {"url": "http://[64:ff9b::7f00:1]/x", "fps": {}}}]',
    '[{"type": "image", "image": "PNG", "max_pixels": "x"}]'.replace("PNG", PNG),
    '[{"type": "image", "image": "PNG", "size": {"longest_edge": [1]}}]'.replace("PNG", PNG),
    '[{"type": "video", "video": "PNG", "max_pixels": 1e400}]'.replace("PNG", PNG),
    "1e999", "[NaN]", '{"key": "a", "number": 5}', '{"key": "a"}', '{"context": [-1]}',
    '{"text": {"tools": "x"}}', '{"text": {"reasoning": "open"}}', '{"window": 0}',
    '{"prompt_length": 99}',
]  # fmt: skip


@dataclass
class Report:
    """What a run saw."""

    sent: int = 0
    ordinary: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    memory_growth_mb: dict[str, float] = field(default_factory=dict)
    restarted: bool = False

    @property
    def good(self) -> bool:
        """Whether nothing gave way."""
        return not self.failures and not self.restarted


class Fuzzer:
    """One client thread."""

    def __init__(self, server: TritonServer, seed: int, report: Report, lock: Any) -> None:
        self._server, self._random = server, random.Random(seed)
        self._report, self._lock = report, lock
        self._session = requests.Session()
        self._grpc = grpcclient.InferenceServerClient(server.grpc_url)

    def run(self, count: int) -> None:
        for index in range(count):
            if index % ORDINARY_EVERY == 0:
                self._ordinary()
            kind = self._random.choice((self._generate, self._infer, self._raw, self._over_grpc))
            try:
                kind()
            except requests.RequestException as error:
                self._note(f"no answer: {type(error).__name__}: {error}")
            with self._lock:
                self._report.sent += 1
        self._session.close()
        self._grpc.close()

    def _note(self, failure: str) -> None:
        with self._lock:
            self._report.failures.append(failure[:600])

    def _ordinary(self) -> None:
        word = f"ordinary {self._random.randrange(10**6)} é"
        body = {"text_input": word, "max_tokens": 64, "exclude_input_in_output": True}
        model = self._random.choice(MODELS[:2])
        url = f"{self._server.http_url}/v2/models/{model}/generate"
        answer = self._session.post(url, json=body, timeout=TIMEOUT_S)
        if answer.status_code != 200 or answer.json().get("text_output") != word:
            self._note(f"an ordinary request failed: {answer.status_code} {answer.text[:300]}")
        with self._lock:
            self._report.ordinary += 1

    def _judge(self, status: int, text: str, what: object) -> None:
        with self._lock:
            self._report.statuses[str(status)] += 1
        if LEAKS.search(text):
            self._note(f"leak in {text[:300]!r} for {what!r}")
        if status == 200 and '"error"' not in text:
            return
        found = re.search(r'"error":\s*"((?:[^"\\]|\\.)*)"', text)
        message = found.group(1) if found else text
        message = message.removeprefix("in ensemble 'ensemble', ")
        name = re.match(r"[\w\[\]. ]+", message)
        field_name = re.split(r"[\[. ]", name.group(0))[0] if name else ""
        if field_name not in NAMES and not SERVER_REFUSALS.search(message) and status != 404:
            unknown = "is not known" in message
            if not unknown:
                self._note(f"{status}, no field is named: {message[:200]!r} for {what!r}")
        if status >= 500 and not SERVER_REFUSALS.search(message):
            self._note(f"status {status}: {message[:200]!r} for {what!r}")

    def _value(self, name: str, dtype: str) -> Any:
        pick = self._random.random()
        if dtype == "STRING":
            pool = JSONS if name in _JSON_FIELDS and pick < 0.8 else TEXTS
            return self._random.choice(pool)
        if dtype == "BOOL" and pick < 0.7:
            return self._random.random() < 0.5
        return self._random.choice(NUMBERS)

    def _body(self) -> dict[str, Any]:
        made = self._random
        body: dict[str, Any] = {}
        if made.random() < 0.8:
            body["max_tokens"] = made.choice([4, 4, 4, 4, *NUMBERS])
        if made.random() < 0.6:
            body["text_input"] = made.choice(TEXTS)
        for spec in made.sample(REQUEST, made.randrange(0, 5)):
            value = self._value(spec.name, spec.dtype)
            shape = made.random()
            if not spec.scalar and shape < 0.8:
                count = made.randrange(0, 5)
                value = [self._value(spec.name, spec.dtype) for _ in range(count)]
            elif shape > 0.93:
                value = made.choice([None, [], [value, value], {"a": 1}, "text", 3.5, True, [[1]]])
            body[spec.name] = value
        if made.random() < 0.05:
            body[made.choice(["max_token", "temp", "prompt", "random_sed", "é"])] = 1
        # A delay only makes the run slow, and a stop by id is somebody else's end.
        body.pop("echo_delay_ms", None)
        return body

    def _generate(self) -> None:
        model = self._random.choice(MODELS[:2])
        path = self._random.choice(("generate", "generate", "generate_stream"))
        body = self._body()
        url = f"{self._server.http_url}/v2/models/{model}/{path}"
        answer = self._session.post(url, data=_dumps(body), timeout=TIMEOUT_S)
        self._judge(answer.status_code, answer.text, body)

    def _infer(self) -> None:
        """The generation model and postprocessing, with tensors of their own names."""
        made = self._random
        if made.random() < 0.3:
            self._postprocess()
            return
        body: dict[str, Any] = {}
        for tensor in made.sample(GENERATION_INPUTS, made.randrange(1, 8)):
            values = [self._value(tensor.name, tensor.dtype) for _ in range(made.randrange(0, 4))]
            body[tensor.name] = values if made.random() < 0.7 else (values or [0])[0]
        for name, value in (("input_ids", [1, 2]), ("input_lengths", 2), ("request_output_len", 3)):
            if made.random() < 0.7:
                body[name] = value
        body.pop("echo_delay_ms", None)
        url = f"{self._server.http_url}/v2/models/tensorrt_llm/generate"
        answer = self._session.post(url, data=_dumps(body), timeout=TIMEOUT_S)
        self._judge(answer.status_code, answer.text, body)

    def _postprocess(self) -> None:
        made = self._random
        inputs = []
        for tensor in ANSWERED:
            if made.random() < 0.1:
                continue
            shape = [1, *(made.choice([1, 1, 2, 0]) for _ in tensor.dims)]
            if made.random() < 0.05:
                shape[0] = 2
            count = int(np.prod(shape))
            data = [self._value(tensor.name, tensor.dtype) for _ in range(count)]
            if tensor.dtype == "INT32" and made.random() < 0.8:
                data = [made.choice([0, 1, 2, 97, -1, 10**6]) for _ in range(count)]
            kind = "BYTES" if tensor.dtype == "STRING" else tensor.dtype
            inputs.append({"name": tensor.name, "datatype": kind, "shape": shape, "data": data})
        url = f"{self._server.http_url}/v2/models/postprocessing/infer"
        answer = self._session.post(url, data=_dumps({"inputs": inputs}), timeout=TIMEOUT_S)
        self._judge(answer.status_code, answer.text, inputs)

    def _raw(self) -> None:
        made = self._random
        model = made.choice((*MODELS, "nothing", "é"))
        action = made.choice(("infer", "generate", "generate_stream", "nothing", ""))
        text = made.choice([*JSONS, *TEXTS])
        data = made.choice(
            [text.encode("utf-8", "replace"), bytes(made.randrange(256) for _ in range(64)),
             _dumps({"inputs": made.choice([None, [], {}, [1], [{"name": "QUERY"}],
                                            [{"name": "QUERY", "datatype": "BYTES",
                                              "shape": [made.choice([-1, 0, 1, 9])],
                                              "data": ["x"]}],
                                            ])})]
        )  # fmt: skip
        headers = {}
        if made.random() < 0.2:
            headers["Inference-Header-Content-Length"] = made.choice(["0", "5", "99999", "x", "-1"])
        url = f"{self._server.http_url}/v2/models/{model}/{action}"
        answer = self._session.post(url, data=data, headers=headers, timeout=TIMEOUT_S)
        self._judge(answer.status_code, answer.text, (url, data[:80], headers))

    def _over_grpc(self) -> None:
        """`preprocessing` over gRPC, with shapes and types that may not fit."""
        made = self._random
        inputs = []
        for spec in made.sample(REQUEST, made.randrange(1, 5)):
            if spec.preprocessing is None:
                continue
            shape = made.choice([[1, 1], [1, 1], [1, 3], [2, 1], [1, 0], [1]])
            dtype = spec.dtype if made.random() < 0.9 else made.choice(list(NUMPY))
            count = int(np.prod(shape))
            flat = [_fitting(self._value(spec.name, dtype), dtype) for _ in range(count)]
            array = np.array(flat, dtype=NUMPY[dtype]).reshape(shape)
            tensor = grpcclient.InferInput(
                spec.preprocessing, shape, "BYTES" if dtype == "STRING" else dtype
            )
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        if not inputs:
            return
        try:
            self._grpc.infer("preprocessing", inputs, client_timeout=TIMEOUT_S)
            self._judge(200, "", None)
        except InferenceServerException as error:
            code = 400 if "INVALID_ARGUMENT" in str(error.status()) else 500
            if "DEADLINE" in str(error.status()):
                self._note("no answer over gRPC in time")
            self._judge(code, str(error.message()), [i.name() for i in inputs])


_JSON_FIELDS = {
    "messages", "content_parts", "mm_features", "chat_template_kwargs", "mm_processor_kwargs",
    "request_state", "STREAM_STATE",
}  # fmt: skip


def _dumps(body: Any) -> bytes:
    return json.dumps(body).encode("utf-8", "replace")


def _fitting(value: Any, dtype: str) -> Any:
    """A value that numpy can put into an array of the type."""
    if dtype == "STRING":
        return str(value).encode("utf-8", "replace")
    if not isinstance(value, (int, float)):
        return 0
    if dtype in ("FP32", "BOOL"):
        return value
    limits = np.iinfo(NUMPY[dtype])
    return int(min(max(value, int(limits.min)), int(limits.max)))


def processes(server: TritonServer) -> dict[int, str]:
    """The server and its model processes: id and name."""
    found = {server.pid: "tritonserver"}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(
                line.split(":", 1) for line in status.read_text().splitlines() if ":" in line
            )
        except OSError:
            continue
        if int(lines["PPid"]) in found:
            command = Path(status.parent / "cmdline").read_bytes().split(b"\0")
            model = next((a.decode() for a in command if b"/1/model.py" in a), "stub")
            found[int(status.parent.name)] = model.rpartition("/1/")[0].rpartition("/")[2] or model
    return found


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def fuzz(server: TritonServer, count: int, seed: int, clients: int) -> Report:
    """Send `count` requests from `clients` threads."""
    report, lock = Report(), threading.Lock()
    started = time.monotonic()

    def burst(total: int, first_seed: int) -> None:
        threads = [
            threading.Thread(
                target=Fuzzer(server, first_seed + i, report, lock).run, args=(total // clients,)
            )
            for i in range(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # Pools fill up at first; what counts is growth from then on.
    burst(max(count // 4, clients), seed)
    before = processes(server)
    memory = {pid: resident_mb(pid) for pid in before}
    burst(count - count // 4, seed + 1000)
    after = processes(server)
    report.restarted = set(before) != set(after)
    for pid, name in after.items():
        if pid in memory:
            report.memory_growth_mb[name] = round(resident_mb(pid) - memory[pid], 1)
    for name, growth in report.memory_growth_mb.items():
        if growth > MEMORY_NOISE_MB:
            report.failures.append(f"{name} grew by {growth} MB")
    report.seconds = time.monotonic() - started
    return report


def main() -> int:
    """Fuzz a server of its own and print what happened."""
    parser = argparse.ArgumentParser(description="Malformed requests against an echo server.")
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        repository = write_repository(
            None, Path(directory) / "echo", tokenizer="bytes", generation="echo",
            options=RepositoryOptions(max_context=4096),
        )  # fmt: skip
        with running(repository) as server:
            report = fuzz(server, chosen.requests, chosen.seed, chosen.clients)
    print(f"{report.sent} malformed and {report.ordinary} ordinary requests in "
          f"{report.seconds:.0f} s")  # fmt: skip
    print(f"statuses: {dict(sorted(report.statuses.items()))}")
    print(f"memory growth, MB: {report.memory_growth_mb}")
    print(f"failures: {len(report.failures)}; processes restarted: {report.restarted}")
    for failure in report.failures[:20]:
        print(f"  {failure}")
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
