"""What the front end costs: preprocessing alone, through Triton, and against the obvious model.

    python -m benchmarks.frontend TOKENIZER_DIR [--seconds 4] [--tokens 200]

Three Python models of one server, scheduled in the same way, get the same chats, as JSON over HTTP
keep-alive connections of a bare client and with Triton's own Python client over gRPC: one that
does nothing and returns as many ids, this project's `preprocessing`, and a plain model that calls
AutoTokenizer and its chat template. Every request of a round is another text, prose from the
documentation of Python's standard library; all have the same options.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import selectors
import socket
import statistics
import tempfile
import textwrap
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient

from plugins.support.errors import UsageError
from triton_repo.frontend.chat import ChatTemplate
from triton_repo.frontend.options import FrontEnd
from triton_repo.frontend.pipeline import prepare
from triton_repo.frontend.tokenizer import Tokenizer, load_tokenizer
from triton_repo.generate import RepositoryOptions, write_repository
from triton_repo.models.base import limit_threads
from triton_repo.server import TritonServer, running

CLIENTS = (1, 8)
MAX_TOKENS = 16
CONTEXT = 32768
TOKENIZER = "preprocessing/1/tokenizer"
CHATS = 2000
# Modules with long documentation; their words are the chats.
DOCUMENTED = (
    "argparse", "ast", "asyncio", "codecs", "collections", "configparser", "contextlib", "csv",
    "ctypes", "datetime", "decimal", "difflib", "doctest", "email", "fractions", "functools",
    "gettext", "heapq", "http.client", "http.server", "inspect", "ipaddress", "json", "logging",
    "mailbox", "multiprocessing", "optparse", "pathlib", "pickle", "random", "re", "shutil",
    "socket", "sqlite3", "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "traceback", "turtle", "typing", "unittest", "urllib.request", "uuid",
    "weakref", "xml.dom.minidom", "zipfile",
)  # fmt: skip

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


def prose() -> list[str]:
    """The words of the documentation of `DOCUMENTED`, in order."""
    words: list[str] = []
    for name in DOCUMENTED:
        module = importlib.import_module(name)
        for member in (module, *(vars(module)[n] for n in sorted(vars(module)))):
            text = getattr(member, "__doc__", None)
            words += text.split() if isinstance(text, str) else []
    return words


def chats(tokenizer: Tokenizer, tokens: int) -> list[str]:
    """`CHATS` different conversations, each of `tokens` ids or a few more when it is rendered."""
    if not tokenizer.chat_template:
        raise UsageError("the tokenizer has no chat template", where="TOKENIZER_DIR")
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    words = prose()
    choose = random.Random(0)

    def messages(start: int, count: int) -> list[dict[str, str]]:
        asked = words[start : start + count]
        return [
            {"role": "user", "content": " ".join(asked[: count // 2])},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": " ".join(asked[count // 2 :])},
        ]

    def length(start: int, count: int) -> int:
        text = template.render(list(messages(start, count)), {})
        return len(tokenizer.encode(text, False, False).ids)

    made = []
    for _ in range(CHATS):
        start = choose.randrange(len(words) - tokens)
        counts = range(2, tokens)
        count = counts[bisect_left(counts, tokens, key=lambda n: length(start, n))]
        made.append(json.dumps(messages(start, count)))
    return made


def alone(tokenizer: Tokenizer, texts: list[str], seconds: float) -> Measured:
    """The library in one thread, without Triton."""
    server = FrontEnd(
        tokenizer,
        CONTEXT,
        tokenizer.vocab_size,
        tokenizer.eos_ids,
        chat_template=ChatTemplate(tokenizer.chat_template or "", tokenizer.special_tokens),
    )
    following = cycle(texts)
    return measure_one(
        lambda: prepare({"messages": next(following), "max_tokens": MAX_TOKENS}, server), seconds
    )


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

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answer = b""
        self.sent = 0.0

    def send(self, request: bytes) -> None:
        """Send a request."""
        self.sent = time.perf_counter()
        self.socket.sendall(request)

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


def http_request(model: str, messages: str) -> bytes:
    """A request of the generate endpoint, head and body."""
    body = json.dumps({"messages": messages, "REQUEST_OUTPUT_LEN": MAX_TOKENS}).encode()
    head = f"POST /v2/models/{model}/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def over_http(
    server: TritonServer, model: str, texts: list[str], clients: int, seconds: float
) -> Measured:
    """Requests of `clients` connections that one thread serves: threads of Python would wait for
    each other, and that would count as the server's latency.
    """
    latencies: list[float] = []
    following = cycle([http_request(model, text) for text in texts])
    with selectors.DefaultSelector() as ready, ExitStack() as open_sockets:
        for _ in range(clients):
            connection = Connection(server.ports.http)
            open_sockets.enter_context(connection.socket)
            ready.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send(next(following))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for key, _ in ready.select(1.0):
                if key.data.receive():
                    latencies.append(time.perf_counter() - key.data.sent)
                    key.data.send(next(following))
    return Measured.of(latencies, seconds)


def over_grpc(
    server: TritonServer, model: str, texts: list[str], clients: int, seconds: float
) -> Measured:
    """Requests of `clients` threads with Triton's own Python client, each with its own channel."""
    latencies: list[list[float]] = [[] for _ in range(clients)]
    inputs = []
    for text in texts:
        messages = grpcclient.InferInput("messages", [1, 1], "BYTES")
        messages.set_data_from_numpy(np.array([[text.encode()]], dtype=np.object_))
        inputs.append(messages)
    most = grpcclient.InferInput("REQUEST_OUTPUT_LEN", [1, 1], "INT32")
    most.set_data_from_numpy(np.array([[MAX_TOKENS]], dtype=np.int32))

    def client(index: int) -> None:
        following = cycle(inputs[index::clients])
        with grpcclient.InferenceServerClient(server.grpc_url) as channel:
            end = time.perf_counter() + seconds
            while (start := time.perf_counter()) < end:
                channel.infer(model, [next(following), most])
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
    source = load_tokenizer(chosen.tokenizer)
    texts = chats(source, chosen.tokens)
    rows: list[tuple[str, str, int, Measured]] = []
    with tempfile.TemporaryDirectory() as directory:
        repository = write_repository(
            None,
            Path(directory) / "repository",
            tokenizer=chosen.tokenizer,
            generation="echo",
            options=RepositoryOptions(max_context=CONTEXT),
        )
        # As the server has it: written once, and opened without transformers.
        limit_threads(1)
        library = alone(load_tokenizer(repository / TOKENIZER), texts, chosen.seconds)
        add_model(repository, "no_op", NO_OP.format(tokens=chosen.tokens))
        plain = PLAIN.format(directory=str(chosen.tokenizer.resolve()))
        add_model(repository, "auto_tokenizer", plain)
        with running(repository) as server:
            for way, measure in {"HTTP": over_http, "gRPC": over_grpc}.items():
                for model in ("no_op", "preprocessing", "auto_tokenizer"):
                    for clients in CLIENTS:
                        measure(server, model, texts, clients, 0.5)
                        measured = measure(server, model, texts, clients, chosen.seconds)
                        rows.append((model, way, clients, measured))
    characters = statistics.mean(sum(len(m["content"]) for m in json.loads(t)) for t in texts)
    print(f"chats of {chosen.tokens} tokens, {characters:.0f} characters on average\n")
    print("| what | clients | requests/s | of no-op | p50 ms | p99 ms |")
    print("|---|---|---|---|---|---|")
    print(f"| library alone | 1 | {library.rate:.0f} | | {library.p50:.2f} | {library.p99:.2f} |")
    no_op = {(way, clients): m.rate for name, way, clients, m in rows if name == "no_op"}
    for name, way, clients, m in rows:
        share = f"{m.rate / no_op[way, clients]:.0%}"
        print(f"| {name} | {clients} {way} | {m.rate:.0f} | {share} | {m.p50:.2f} | {m.p99:.2f} |")


if __name__ == "__main__":
    main()
