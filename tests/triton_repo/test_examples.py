"""Every client example runs against a real server."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import triton_repo.examples
from triton_repo.examples import chat, grpc_stream, http_generate, http_stream, tenants
from triton_repo.selftest import main as self_test
from triton_repo.server import TritonServer

TEXT = "Héllo 👋"


def test_all_examples_are_tested() -> None:
    names = {m.name for m in pkgutil.iter_modules(triton_repo.examples.__path__)}
    # `speech` is tested where there is a model that hears.
    assert names == {"chat", "grpc_stream", "http_generate", "http_stream", "speech", "tenants"}


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble"])
def test_answers(echo_server: TritonServer, capsys: pytest.CaptureFixture[str], model: str) -> None:
    for example, url in (
        (http_generate, echo_server.http_url),
        (http_stream, echo_server.http_url),
        (grpc_stream, echo_server.grpc_url),
    ):
        assert example.main([TEXT, "--url", url, "--model", model]) == 0
        assert capsys.readouterr().out == f"{TEXT}\n"
        assert example.main([TEXT, "--url", url, "--max-tokens", "-1"]) == 1
        assert "max_tokens" in capsys.readouterr().err


def test_chat(echo_server: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [TEXT, "--system", "Brief.", "--seed", "1", "--url", echo_server.http_url]
    assert chat.main(arguments) == 0
    assert capsys.readouterr().out == f"system: Brief.\nuser: {TEXT}\nassistant: \n"


def test_tenants(echo_server: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert tenants.main(["a prompt that nobody else sends", "--url", echo_server.http_url]) == 0
    counts = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert counts[0] == counts[2] == 0
    assert counts[1] == counts[3] > 0


def test_the_self_test(echo_server: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    code = self_test(["--http", echo_server.http_url, "--grpc", echo_server.grpc_url])
    out = capsys.readouterr().out
    assert code == 0, out
    assert out.count(": right") == 9
    assert self_test(["--http", "http://127.0.0.1:9", "--grpc", "127.0.0.1:9"]) == 4


def test_an_example_is_a_command(echo_server: TritonServer) -> None:
    command = [sys.executable, "-m", "triton_repo.examples.http_generate", "hi"]
    done = subprocess.run(
        [*command, "--url", echo_server.http_url], capture_output=True, text=True, check=True
    )
    assert done.stdout == "hi\n"
