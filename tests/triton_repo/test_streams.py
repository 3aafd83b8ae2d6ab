"""Many clients, cancellation, and the end of the server, on a real tritonserver."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from plugins.support.errors import InputError, UsageError
from tests.triton_repo.clients import (
    generate,
    generate_stream,
    grpc_stream,
    metric,
    ok,
    text_of,
    wait_for,
)
from triton_repo.generate import RepositoryOptions, write_repository
from triton_repo.server import SHARED_MEMORY, Ports, TritonServer, running

MODELS = ("tensorrt_llm_bls", "ensemble")
CLIENTS = 64
# What the issue of a cancelled request may cost until generation has ended.
CANCEL_WITHIN_S = 0.5
LONG = {"text_input": "x", "stream": True, "max_tokens": 2000, "echo_delay_ms": 50,
        "echo_output_ids": [97] * 2000}  # fmt: skip


# The same for the model behind both.
LONG_IDS = {"input_ids": [1], "input_lengths": 1, "request_output_len": 2000, "streaming": True,
            "echo_output_ids": [97] * 2000, "echo_delay_ms": 50}  # fmt: skip


def in_threads(count: int, work: Callable[[int], None]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a client hangs"
    return errors


@pytest.mark.parametrize("model", MODELS)
def test_a5_22_64_streams_at_once(echo_server: TritonServer, model: str) -> None:
    texts = [f"client {i}: ä€😀 " + "0123456789"[i % 10] * (i % 7) for i in range(CLIENTS)]
    seen: dict[int, str] = {}

    def client(index: int) -> None:
        body = {
            "text_input": f"prompt {index}", "stream": True, "echo_delay_ms": index % 4,
            "echo_output_ids": list(texts[index].encode()),
        }  # fmt: skip
        # All with the same request id: it is only a label.
        with grpc_stream(echo_server, body, model, request_id="same") as stream:
            seen[index] = text_of(stream.collect())

    assert in_threads(CLIENTS, client) == []
    assert [seen[i] for i in range(CLIENTS)] == texts


def test_64_http_streams_at_once(echo_server: TritonServer) -> None:
    texts = [f"http {i} ✓" for i in range(CLIENTS)]
    seen: dict[int, str] = {}

    def client(index: int) -> None:
        body = {"text_input": "x", "echo_output_ids": list(texts[index].encode())}
        events = generate_stream(echo_server, body)
        seen[index] = "".join(e["text_output"] for e in events)

    assert in_threads(CLIENTS, client) == []
    assert [seen[i] for i in range(CLIENTS)] == texts


@pytest.mark.parametrize("model", [*MODELS, "tensorrt_llm"])
def test_a_cancelled_grpc_stream_ends_generation(echo_server: TritonServer, model: str) -> None:
    body = LONG_IDS if model == "tensorrt_llm" else LONG
    before = metric(echo_server, "requests_cancelled")
    with grpc_stream(echo_server, body, model, cancel=True) as stream:
        stream.next()
    assert wait_for(
        lambda: metric(echo_server, "requests_cancelled") == before + 1, CANCEL_WITHIN_S
    )


@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("tensorrt_llm_bls", LONG | {"stream": False}),
        ("tensorrt_llm", LONG_IDS | {"streaming": False}),
    ],
)
def test_a_cancelled_answer_that_is_not_streamed_ends_generation(
    echo_server: TritonServer, model: str, body: dict[str, Any]
) -> None:
    before = metric(echo_server, "requests_cancelled")
    with grpc_stream(echo_server, body, model, cancel=True):
        assert wait_for(lambda: metric(echo_server, "requests_active") == 1, 5)
    assert wait_for(
        lambda: metric(echo_server, "requests_cancelled") == before + 1, CANCEL_WITHIN_S
    )


@pytest.mark.parametrize("model", [*MODELS, "tensorrt_llm"])
def test_a_closed_http_stream_ends_generation(echo_server: TritonServer, model: str) -> None:
    body = LONG_IDS if model == "tensorrt_llm" else LONG
    before = metric(echo_server, "requests_cancelled")
    connection = http.client.HTTPConnection("127.0.0.1", echo_server.ports.http)
    path = f"/v2/models/{model}/generate_stream"
    connection.request("POST", path, json.dumps(body))
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    assert connection.sock is None or connection.sock.close() is None
    answer.close()
    connection.close()
    assert wait_for(
        lambda: metric(echo_server, "requests_cancelled") == before + 1, CANCEL_WITHIN_S
    )


def test_a_stop_request_ends_the_request_with_that_id(echo_server: TritonServer) -> None:
    with grpc_stream(echo_server, LONG, request_id="to-stop") as stream:
        stream.next()
        status, _ = generate(echo_server, {"id": "to-stop", "stop": True, "text_input": ""})
        assert status == 200
        results = stream.collect()
    assert results[-1].as_numpy("finish_reason").reshape(-1)[0] == b"cancelled"


@pytest.mark.parametrize("model", [*MODELS, "tensorrt_llm"])
def test_a_stop_request_without_id_ends_nothing(echo_server: TritonServer, model: str) -> None:
    with grpc_stream(echo_server, LONG | {"max_tokens": 20}) as stream:
        stream.next()
        ids = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1}
        body = ids if model == "tensorrt_llm" else {"text_input": "x", "max_tokens": 1}
        status, answer = generate(echo_server, body | {"stop": True}, model)
        assert status == 400 and "stop: " in answer["error"]
        assert stream.collect()[-1].as_numpy("finish_reason").reshape(-1)[0] == b"length"


def test_the_server_serves_on_after_cancelled_requests(echo_server: TritonServer) -> None:
    def client(_: int) -> None:
        with grpc_stream(echo_server, LONG, cancel=True) as stream:
            stream.next()

    assert in_threads(16, client) == []
    assert ok(echo_server, {"text_input": "still here"})["finish_reason"] == "stop"
    assert wait_for(lambda: metric(echo_server, "requests_active") == 0, 2.0)


# A client that keeps its stream open after the end keeps the server from unloading that model.
@pytest.mark.parametrize(
    ("model", "clients", "stay"),
    [*((model, 8, False) for model in MODELS), ("tensorrt_llm_bls", CLIENTS, True)],
)
def test_shutdown_with_requests_in_flight(
    echo_repository: Path, model: str, clients: int, stay: bool
) -> None:
    server = TritonServer(echo_repository, ports=Ports(0, 0, 0), grace_s=0.2)
    server.start(60)
    assert server._work is not None
    name = server._work.name
    ends: list[Any] = []
    stopped = threading.Event()
    # A request that was cancelled before is none that the server waits for.
    with grpc_stream(server, LONG, model, cancel=True) as cancelled:
        cancelled.next()
    assert wait_for(lambda: metric(server, "requests_cancelled") == 1, 5)

    def client() -> None:
        with grpc_stream(server, LONG, model) as stream:
            ends.append(stream.collect()[-1].as_numpy("finish_reason"))
            if stay:
                stopped.wait(20)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    assert wait_for(lambda: metric(server, "requests_active") == clients, 20)
    started = time.monotonic()
    # With streams open the server may have to be killed: its models have ended by then.
    assert server.stop() or stay
    assert time.monotonic() - started < 10
    stopped.set()
    for thread in threads:
        thread.join(10)
    # Every client got an end, not a broken stream.
    assert [bytes(e.reshape(-1)[0]) for e in ends] == [b"cancelled"] * clients
    assert not list(SHARED_MEMORY.glob(f"{name}*"))


def test_without_decoupled_models(tmp_path: Path) -> None:
    repository = write_repository(
        None, tmp_path / "repository", tokenizer="bytes", generation="echo",
        options=RepositoryOptions(decoupled=False, max_batch_size=4),
    )  # fmt: skip
    with running(repository) as server:
        for model in MODELS:
            inputs = [
                {"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "data": ["a", "bc"]},
                {"name": "max_tokens", "datatype": "INT32", "shape": [2, 1], "data": [4, 4]},
            ]
            url = f"{server.http_url}/v2/models/{model}/infer"
            answer = requests.post(url, json={"inputs": inputs}, timeout=20).json()
            outputs = {o["name"]: o for o in answer["outputs"]}
            assert outputs["text_output"]["data"] == ["aa", "bcbc"]
            assert outputs["text_output"]["shape"] == [2, 1]
            status, answer = generate(server, {"text_input": "a", "max_tokens": 3, "stream": True},
                                      model)  # fmt: skip
            assert status == 400
            assert "Streaming is only supported in decoupled mode" in answer["error"]


def test_a_model_that_cannot_start_is_named(tmp_path: Path) -> None:
    repository = write_repository(None, tmp_path / "r", tokenizer="bytes", generation="echo")
    config = repository / "preprocessing" / "config.pbtxt"
    config.write_text(config.read_text().replace('"32768"', '"many"'))
    with pytest.raises(InputError) as caught, running(repository):
        pass
    # One line that says which parameter of which model, what it is, and what it has to be.
    found = caught.value.found or ""
    wrong = "Input should be a valid integer, unable to parse string as an integer (found 'many')"
    assert found == (
        "preprocessing: preprocessing/config.pbtxt: the parameters are not valid: "
        f"max_context: {wrong}; max_prompt: {wrong}"
    )


def test_ports_in_use_are_named(echo_server: TritonServer, echo_repository: Path) -> None:
    server = TritonServer(echo_repository, ports=Ports(echo_server.ports.http, 0, 0))
    with pytest.raises(UsageError, match="http port"):
        server.start(5)


def test_a_missing_repository(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        TritonServer(tmp_path / "none").start(5)


SERVE = """
import sys
from pathlib import Path
from plugins.support.errors import ToolchainError
from triton_repo.server import Ports, serve

def ready(server):
    print(server.pid, server.ports.http, server.ports.grpc, server.ports.metrics, flush=True)

def restarting(failure):
    print(f"again: {failure.what}", flush=True)

try:
    serve(Path(sys.argv[1]), ports=Ports(0, 0, 0), on_ready=ready, on_restart=restarting,
          grace_s=0.2, restarts=2, probe=None)
except ToolchainError as error:
    sys.exit(f"error: {error.what}")
print("stopped", flush=True)
"""


@pytest.fixture
def launcher(echo_repository: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(echo_repository)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def ready_server(launcher: subprocess.Popen[str], repository: Path) -> tuple[int, TritonServer]:
    assert launcher.stdout is not None
    pid, *ports = (int(word) for word in launcher.stdout.readline().split())
    return pid, TritonServer(repository, ports=Ports(*ports))


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}/fd").exists() or not os.listdir(f"/proc/{pid}/fd")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_told_to_stop(
    launcher: subprocess.Popen[str], echo_repository: Path, number: int
) -> None:
    pid, server = ready_server(launcher, echo_repository)
    with grpc_stream(server, LONG) as stream:
        stream.next()
        launcher.send_signal(number)
        out, err = launcher.communicate(timeout=20)
        assert stream.collect()[-1].as_numpy("finish_reason").reshape(-1)[0] == b"cancelled"
    assert (launcher.returncode, out, err) == (0, "stopped\n", "")
    assert gone(pid)


def test_a_killed_launcher_leaves_no_server(
    launcher: subprocess.Popen[str], echo_repository: Path
) -> None:
    pid, _ = ready_server(launcher, echo_repository)
    launcher.kill()
    launcher.wait()
    assert wait_for(lambda: gone(pid), 20)


def kill_stub(server: int) -> None:
    stub = next(
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if stat.read_text().rpartition(")")[2].split()[1] == str(server)
    )
    os.kill(stub, signal.SIGKILL)


def server_of(launcher: subprocess.Popen[str]) -> int:
    """The tritonserver that the launcher runs now; 0 when there is none."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        if name == "tritonserver" and fields[1] == str(launcher.pid) and fields[0] != "Z":
            return int(stat.parent.name)
    return 0


def test_what_has_died_is_started_again(
    launcher: subprocess.Popen[str], echo_repository: Path
) -> None:
    pid, server = ready_server(launcher, echo_repository)
    assert launcher.stdout is not None

    def answers() -> bool:
        try:
            return generate(server, {"text_input": "x", "max_tokens": 1})[0] == 200
        except requests.RequestException:
            return False

    for death in ("the server ended by itself", "the process of a model has died"):
        assert answers()
        if death.startswith("the server"):
            os.kill(pid, signal.SIGSEGV)
        else:
            kill_stub(pid)
        assert launcher.stdout.readline() == f"again: {death}\n"
        assert gone(pid)
        # On the same ports, which is what clients know.
        assert wait_for(answers, 30)
        pid = server_of(launcher)
        assert pid
    # What dies again and again is not hidden by starting it for ever.
    kill_stub(pid)
    out, err = launcher.communicate(timeout=30)
    assert (launcher.returncode, out) == (1, "")
    assert "the process of a model has died" in err
    assert gone(pid)
