"""What the front end costs: preprocessing alone, through Triton, and against the obvious model.

    python -m benchmarks.frontend TOKENIZER_DIR [--seconds 5] [--tokens 200]

Four Python models of one server, scheduled in the same way, get the same chats: one that does
nothing and returns as many ids, one that does nothing either but has the inputs and outputs of
`preprocessing` and returns as many tensors, this project's `preprocessing`, and a plain model that
calls AutoTokenizer and its chat template. Requests ask for the ids and their number. They are
those of Triton's own Python clients, over HTTP sent through keep-alive connections of a bare one,
and the generate endpoint's, which names no outputs and so gets all of them. Every request of a
round is another text, prose from the documentation of Python's standard library; all have the same
options.
The models are measured in turns, five of each. The goal's measure is the first of them; the second
shows what an interface of so many tensors costs whoever stands behind it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
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
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from plugins.support.errors import UsageError
from triton_repo.frontend.chat import ChatTemplate
from triton_repo.frontend.options import FrontEnd
from triton_repo.frontend.pipeline import prepare
from triton_repo.frontend.tokenizer import Tokenizer, load_tokenizer
from triton_repo.generate import RepositoryOptions, write_repository
from triton_repo.models.base import limit_threads
from triton_repo.server import TritonServer, running

CLIENTS = (1, 8)
# In turn, so that a slow moment of the machine meets all.
MODELS = ("no_op", "no_op_same_interface", "preprocessing", "auto_tokenizer")
TURNS = 5
MAX_TOKENS = 16
CONTEXT = 32768
TOKENIZER = "preprocessing/1/tokenizer"
CHATS = 2000
OUTPUTS = ("INPUT_ID", "REQUEST_INPUT_LEN")
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
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
# As many and as large tensors as `preprocessing` returns for a chat.
SAME_INTERFACE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        one = np.ones((1, 1), dtype=np.int32)
        self.arrays = {{
            "INPUT_ID": np.zeros((1, {tokens}), dtype=np.int32),
            "REQUEST_INPUT_LEN": {tokens} * one,
            "REQUEST_OUTPUT_LEN": one,
            "OUT_END_ID": one,
            "OUT_PAD_ID": one,
        }}

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(n, a) for n, a in self.arrays.items()])
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


@dataclass
class Measured:
    """Latencies in seconds of the requests of each turn of `turn_s` seconds."""

    turn_s: float
    turns: list[list[float]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Requests per second of each turn."""
        return [len(turn) / self.turn_s for turn in self.turns]

    def row(self, *no_ops: Measured) -> list[str]:
        """Requests per second, their share of each no-op's, median and 99th percentile in ms.

        Medians over turns, each compared with a no-op's turn before it.
        """
        cuts = statistics.quantiles([one for turn in self.turns for one in turn], n=100)
        shares = [
            statistics.median(mine / other for mine, other in zip(self.rates, n.rates, strict=True))
            for n in no_ops
        ]
        rate = f"{statistics.median(self.rates):.0f}"
        return [rate, *(f"{s:.0%}" for s in shares), *(f"{cuts[i] * 1e3:.2f}" for i in (49, 98))]


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


def alone(tokenizer: Tokenizer, texts: list[str], seconds: float) -> list[float]:
    """The library in one thread, without Triton."""
    server = FrontEnd(
        tokenizer,
        CONTEXT,
        tokenizer.vocab_size,
        tokenizer.eos_ids,
        chat_template=ChatTemplate(tokenizer.chat_template or "", tokenizer.special_tokens),
    )
    following = cycle(texts)
    latencies = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        prepare({"messages": next(following), "max_tokens": MAX_TOKENS}, server)
        latencies.append(time.perf_counter() - start)
    return latencies


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
        head, ended, body = self._answer.partition(b"\r\n\r\n")
        if not ended:
            return False
        length = LENGTH.search(head)
        # The generate endpoint answers in chunks; an empty one is the last.
        whole = len(body) == int(length[1]) if length else body.endswith(b"\r\n0\r\n\r\n")
        if whole and b" 200 " not in head[:20]:
            raise RuntimeError(self._answer.decode(errors="replace")[:300])
        if whole:
            self._answer = b""
        return whole


def generate_request(model: str, messages: str) -> bytes:
    """A request of the generate endpoint, head and body."""
    body = json.dumps({"messages": messages, "REQUEST_OUTPUT_LEN": MAX_TOKENS}).encode()
    return _post(f"{model}/generate", body, {})


def infer_request(model: str, messages: str) -> bytes:
    """What Triton's own Python client sends for the tensors that an engine takes."""
    body, header = httpclient.InferenceServerClient.generate_request_body(
        tensors(httpclient, messages),
        outputs=[httpclient.InferRequestedOutput(name, binary_data=True) for name in OUTPUTS],
    )
    return _post(f"{model}/infer", body, {"Inference-Header-Content-Length": header})


def _post(path: str, body: bytes, headers: dict[str, int]) -> bytes:
    lines = [f"POST /v2/models/{path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def tensors(client: Any, messages: str) -> list[Any]:
    """The inputs of a request, of one of Triton's Python clients."""
    chat = client.InferInput("messages", [1, 1], "BYTES")
    chat.set_data_from_numpy(np.array([[messages.encode()]], dtype=np.object_))
    most = client.InferInput("REQUEST_OUTPUT_LEN", [1, 1], "INT32")
    most.set_data_from_numpy(np.array([[MAX_TOKENS]], dtype=np.int32))
    return [chat, most]


def over_http(
    request: Callable[[str, str], bytes],
    server: TritonServer,
    model: str,
    texts: list[str],
    clients: int,
    seconds: float,
) -> list[float]:
    """Requests of `clients` connections that one thread serves: threads of Python would wait for
    each other, and that would count as the server's latency.
    """
    latencies: list[float] = []
    following = cycle([request(model, text) for text in texts])
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
    return latencies


def over_grpc(
    server: TritonServer, model: str, texts: list[str], clients: int, seconds: float
) -> list[float]:
    """Requests of `clients` threads with Triton's own Python client, each with its own channel."""
    latencies: list[list[float]] = [[] for _ in range(clients)]
    inputs = [tensors(grpcclient, text) for text in texts]
    outputs = [grpcclient.InferRequestedOutput(name) for name in OUTPUTS]

    def client(index: int) -> None:
        following = cycle(inputs[index::clients])
        with grpcclient.InferenceServerClient(server.grpc_url) as channel:
            end = time.perf_counter() + seconds
            while (start := time.perf_counter()) < end:
                channel.infer(model, next(following), outputs=outputs)
                latencies[index].append(time.perf_counter() - start)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [value for part in latencies for value in part]


WAYS: dict[str, Callable[..., list[float]]] = {
    "HTTP": partial(over_http, infer_request),
    "HTTP generate": partial(over_http, generate_request),
    "gRPC": over_grpc,
}


def add_model(repository: Path, name: str, source: str, config: str | None = None) -> None:
    """A hand-written model beside the generated ones; `config` in place of `CONFIG`."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config or CONFIG.format(name=name))
    (version / "model.py").write_text(textwrap.dedent(source))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Cost of the front end.")
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER_DIR")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring for each line")
    parser.add_argument("--tokens", type=int, default=200)
    chosen = parser.parse_args()
    source = load_tokenizer(chosen.tokenizer)
    texts = chats(source, chosen.tokens)
    turn_s = chosen.seconds / TURNS
    results: dict[tuple[str, int, str], Measured] = {}
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
        served = load_tokenizer(repository / TOKENIZER)
        library = Measured(turn_s, [alone(served, texts, turn_s) for _ in range(TURNS)])
        add_model(repository, "no_op", NO_OP.format(tokens=chosen.tokens))
        own = (repository / "preprocessing" / "config.pbtxt").read_text()
        same = own.replace('name: "preprocessing"', 'name: "no_op_same_interface"')
        nothing = SAME_INTERFACE.format(tokens=chosen.tokens)
        add_model(repository, "no_op_same_interface", nothing, same)
        plain = PLAIN.format(directory=str(chosen.tokenizer.resolve()))
        add_model(repository, "auto_tokenizer", plain)
        with running(repository) as server:
            for (way, measure), clients in product(WAYS.items(), CLIENTS):
                for model in MODELS:
                    measure(server, model, texts, clients, 0.5)
                    results[way, clients, model] = Measured(turn_s)
                for _, model in product(range(TURNS), MODELS):
                    latencies = measure(server, model, texts, clients, turn_s)
                    results[way, clients, model].turns.append(latencies)
    characters = statistics.mean(sum(len(m["content"]) for m in json.loads(t)) for t in texts)
    print(f"chats of {chosen.tokens} tokens, {characters:.0f} characters on average\n")
    print("| what | clients | requests/s | of no-op | of no-op, same interface | p50 ms | p99 ms |")
    print("|---|---|---|---|---|---|---|")
    rate, *latencies = library.row()
    print(f"| library alone | 1 | {rate} | | | {' | '.join(latencies)} |")
    for (way, clients, model), measured in results.items():
        columns = measured.row(*(results[way, clients, no_op] for no_op in MODELS[:2]))
        print(f"| {model} | {clients} {way} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
