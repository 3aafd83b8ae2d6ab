"""The documents say what is: languages of blocks, generated pages, and every command is run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_scripts import cli, reference
from plugins.support import errors
from tests.docs.blocks import DOCUMENTS, ROOT, Block, blocks
from tests.fixtures.qwen38_checkpoint import first_layers

# "sh" is run, "make" is a target of the Makefile, the others are not commands.
LANGUAGES = {"sh", "make", "json", "text", "python"}
PORTS = ("8000", "8001", "8002")
READY_TIMEOUT_S = 60


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_every_block_is_of_a_kind_that_is_checked(path: Path) -> None:
    for block in blocks(path):
        assert block.language in LANGUAGES, f"{block.document}:{block.line}"


def test_the_reference_is_the_commands_own_help() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == reference.render(), "run `make docs`"


def test_exit_codes_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "exit_codes.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    used = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert documented == used | {cli.EXIT_UNEXPECTED, cli.EXIT_INTERRUPTED, cli.EXIT_NO_READER}
    for code in documented:
        assert str(code) in cli.HELP


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_documented_make_targets_exist() -> None:
    commands = [
        c for path in DOCUMENTS for b in blocks(path) if b.language == "make" for c in b.commands()
    ]
    assert {"make demo", "make test"} <= set(commands)
    for command in commands:
        done = subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


class Shell:
    """Runs documented commands in one directory; servers go on in the background."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._servers: list[subprocess.Popen[str]] = []
        self._ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        paths = (str(Path(sys.executable).parent), os.environ["PATH"])
        self._environment = os.environ | {"PATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def run(self, block: Block, command: str) -> None:
        """Run one command; fails the test when it does not end with 0."""
        for documented, free in self._ports.items():
            command = re.sub(rf"\b{documented}\b", free, command)
        if command.startswith("build-engine serve"):
            self._serve(command)
            return
        done = subprocess.run(
            command,
            shell=True,
            cwd=self._directory,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        where = f"{block.document}:{block.line}: {command}"
        assert done.returncode == 0, f"{where}\n{done.stdout}{done.stderr}"
        assert '"error"' not in done.stdout, f"{where}\n{done.stdout}"

    def _serve(self, command: str) -> None:
        http, grpc, metrics = self._ports.values()
        command += f" --http-port {http} --grpc-port {grpc} --metrics-port {metrics}"
        log = self._directory / "serve.log"
        with log.open("w") as file:
            server = subprocess.Popen(
                command.split(), cwd=self._directory, env=self._environment, stderr=file, text=True
            )
        self._servers.append(server)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while "ready" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def close(self) -> None:
        """Ctrl-C to every server; each must end with 0."""
        for server in self._servers:
            server.send_signal(signal.SIGINT)
        codes = [server.wait(timeout=READY_TIMEOUT_S) for server in self._servers]
        assert not any(codes), codes


def _free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def shell(trained_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A directory with a checkpoint under the name that the documents use: four layers, among which
    there is one of every kind.
    """
    directory = tmp_path_factory.mktemp("documents")
    first_layers(trained_checkpoint, directory / "model", 4)
    shell = Shell(directory)
    yield shell
    shell.close()


def _shell_blocks() -> list[Block]:
    # cli.md repeats the examples of the help, whose directories are only names.
    paths = [path for path in DOCUMENTS if path.name != "cli.md"]
    return [block for path in paths for block in blocks(path) if block.language == "sh"]


def test_every_documented_command_runs(shell: Shell) -> None:
    commands = [(block, command) for block in _shell_blocks() for command in block.commands()]
    assert any(command.startswith("curl") for _, command in commands)
    for block, command in commands:
        shell.run(block, command)


def test_a_wrong_command_would_be_noticed(tmp_path: Path) -> None:
    block = Block("test", 1, "sh", "build-engine inspect nowhere\n")
    with pytest.raises(AssertionError, match="no such directory"):
        Shell(tmp_path).run(block, block.commands()[0])
