"""What the front end costs: preprocessing alone, through Triton, and against the obvious model.

    python -m benchmarks.frontend TOKENIZER_DIR [--seconds 4] [--tokens 200]

Three Python models of one server, scheduled in the same way, get the same chats, as JSON over HTTP
keep-alive connections of a bare client and with Triton's own Python client over gRPC: one that
does nothing and returns as many ids, this project's `preprocessing`, and a plain model that calls
AutoTokenizer and its chat template.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient

from plugins.support.errors import UsageError
from triton_repo.frontend.chat import ChatTemplate
from triton_repo.frontend.pipeline import FrontEnd, prepare
from triton_repo.frontend.tokenizer import Tokenizer, load_tokenizer
from triton_repo.generate import RepositoryOptions, write_repository
from triton_repo.server import TritonServer, running

CLIENTS = (1, 8)
MAX_TOKENS = 16
CONTEXT = 32768
TEXT = "the old crane lifts its yellow arm over the harbour while gulls argue about boats"
WORDS = TEXT.split()

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 8
input {{ name: "messages" data_type: TYPE_STRING dims: [1] }}
input {{ name: "REQUEST_OUTPUT_LEN" data_type: TYPE_INT32 dims: [1] }}
output {{ name: "INPUT_ID" data_type: TYPE_INT32 dims: [-1] }}
output {{ name: "REQUEST_INPUT_LEN" data_type: TYPE_INT32 dims: [1] }}
instance_group {{ kind: KIND_CPU count: 1 }}
dynamic_batching {{ }}
"""
NO_OP = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.ids = np.zeros((1, {tokens}), dtype=np.int32)
        self.length = np.array([[{tokens}]], dtype=np.int32)

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("INPUT_ID", self.ids),
                pb_utils.Tensor("REQUEST_INPUT_LEN", self.length),
            ])
            for _ in requests
        ]
"""
PLAIN = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer

class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = AutoTokenizer.from_pretrained({directory!r})

    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "messages").as_numpy()[0, 0].decode()
            ids = self.tokenizer.apply_chat_template(
                json.loads(text), add_generation_prompt=True, return_dict=False
            )
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("INPUT_ID", np.array([ids], dtype=np.int32)),
                pb_utils.Tensor("REQUEST_INPUT_LEN", np.array([[len(ids)]], dtype=np.int32)),
            ]))
        return responses
"""


@dataclass(frozen=True)
class Measured:
    """Requests per second and latencies in milliseconds."""

    rate: float
    p50: float
    p99: float

    @staticmethod
    def of(latencies: list[float], seconds: float) -> Measured:
        """From the latencies in seconds of all requests of a run."""
        cuts = statistics.quantiles(latencies, n=100)
        return Measured(len(latencies) / seconds, cuts[49] * 1e3, cuts[98] * 1e3)


def chat(tokenizer: Tokenizer, tokens: int) -> str:
    """Messages whose rendered prompt has about `tokens` ids."""
    if not tokenizer.chat_template:
        raise UsageError("the tokenizer has no chat template", where="TOKENIZER_DIR")
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    words: list[str] = []
    while True:
        words.append(WORDS[len(words) % len(WORDS)])
        messages = [
            {"role": "user", "content": " ".join(words[::2]) or "x"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": " ".join(words[1::2]) or "y"},
        ]
        text = template.render([dict(m) for m in messages], {})
        if len(tokenizer.encode(text, False, False).ids) >= tokens:
            return json.dumps(messages)


def alone(tokenizer: Tokenizer, messages: str, seconds: float) -> Measured:
    """The library in one thread, without Triton."""
    server = FrontEnd(
        tokenizer,
        CONTEXT,
        tokenizer.vocab_size,
        tokenizer.eos_ids,
        chat_template=ChatTemplate(tokenizer.chat_template or "", tokenizer.special_tokens),
    )
    row = {"messages": messages, "max_tokens": MAX_TOKENS}
    return measure_one(lambda: prepare(row, server), seconds)


def measure_one(work: Callable[[], object], seconds: float) -> Measured:
    """Call `work` again and again for `seconds`."""
    latencies = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        work()
        latencies.append(time.perf_counter() - start)
    return Measured.of(latencies, seconds)


class Connection:
    """One keep-alive connection that always has one request on its way."""

    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request
        self._answer = b""
        self.sent = 0.0

    def send(self) -> None:
        """Send the request."""
        self.sent = time.perf_counter()
        self.socket.sendall(self._request)

    def receive(self) -> bool:
        """Take what has come; returns whether that completes an answer."""
        self._answer += self.socket.recv(1 << 16)
        # The generate endpoint answers in chunks; an empty one is the last.
        if not self._answer.endswith(b"\r\n0\r\n\r\n"):
            return False
        if b" 200 " not in self._answer[:20]:
            raise RuntimeError(self._answer.decode()[:300])
        self._answer = b""
        return True


def through_triton(
    server: TritonServer, model: str, body: bytes, clients: int, seconds: float
) -> Measured:
    """Requests of `clients` connections that one thread serves: threads of Python would wait for
    each other, and that would count as the server's latency.
    """
    head = f"POST /v2/models/{model}/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    latencies: list[float] = []
    with selectors.DefaultSelector() as ready, ExitStack() as open_sockets:
        for _ in range(clients):
            connection = Connection(server.ports.http, head.encode() + b"\r\n\r\n" + body)
            open_sockets.enter_context(connection.socket)
            ready.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for key, _ in ready.select(1.0):
                if key.data.receive():
                    latencies.append(time.perf_counter() - key.data.sent)
                    key.data.send()
    return Measured.of(latencies, seconds)


def over_grpc(
    server: TritonServer, model: str, messages: str, clients: int, seconds: float
) -> Measured:
    """Requests of `clients` threads with Triton's own Python client, each with its own channel."""
    latencies: list[list[float]] = [[] for _ in range(clients)]
    text = grpcclient.InferInput("messages", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[messages.encode()]], dtype=np.object_))
    most = grpcclient.InferInput("REQUEST_OUTPUT_LEN", [1, 1], "INT32")
    most.set_data_from_numpy(np.array([[MAX_TOKENS]], dtype=np.int32))

    def client(index: int) -> None:
        with grpcclient.InferenceServerClient(server.grpc_url) as channel:
            end = time.perf_counter() + seconds
            while (start := time.perf_counter()) < end:
                channel.infer(model, [text, most])
                latencies[index].append(time.perf_counter() - start)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Measured.of([value for part in latencies for value in part], seconds)


def add_model(repository: Path, name: str, source: str) -> None:
    """A hand-written model beside the generated ones."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(name=name))
    (version / "model.py").write_text(textwrap.dedent(source))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Cost of the front end.")
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER_DIR")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=200)
    chosen = parser.parse_args()
    tokenizer = load_tokenizer(chosen.tokenizer)
    messages = chat(tokenizer, chosen.tokens)
    body = json.dumps({"messages": messages, "REQUEST_OUTPUT_LEN": MAX_TOKENS}).encode()
    library = alone(tokenizer, messages, chosen.seconds)
    rows: list[tuple[str, str, int, Measured]] = []
    with tempfile.TemporaryDirectory() as directory:
        repository = write_repository(
            None,
            Path(directory) / "repository",
            tokenizer=chosen.tokenizer,
            generation="echo",
            options=RepositoryOptions(max_context=CONTEXT),
        )
        add_model(repository, "no_op", NO_OP.format(tokens=chosen.tokens))
        source = PLAIN.format(directory=str(chosen.tokenizer.resolve()))
        add_model(repository, "auto_tokenizer", source)
        with running(repository) as server:
            ways: dict[str, Callable[[str, int, float], Measured]] = {
                "HTTP": lambda model, n, s: through_triton(server, model, body, n, s),
                "gRPC": lambda model, n, s: over_grpc(server, model, messages, n, s),
            }
            for way, measure in ways.items():
                for model in ("no_op", "preprocessing", "auto_tokenizer"):
                    for clients in CLIENTS:
                        measure(model, clients, 0.5)
                        rows.append((model, way, clients, measure(model, clients, chosen.seconds)))
    print(f"chat of {chosen.tokens} tokens\n")
    print("| what | clients | requests/s | of no-op | p50 ms | p99 ms |")
    print("|---|---|---|---|---|---|")
    print(f"| library alone | 1 | {library.rate:.0f} | | {library.p50:.2f} | {library.p99:.2f} |")
    no_op = {(way, clients): m.rate for name, way, clients, m in rows if name == "no_op"}
    for name, way, clients, m in rows:
        share = f"{m.rate / no_op[way, clients]:.0%}"
        print(f"| {name} | {clients} {way} | {m.rate:.0f} | {share} | {m.p50:.2f} | {m.p99:.2f} |")


if __name__ == "__main__":
    main()
