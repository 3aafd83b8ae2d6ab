"""Starts, watches and ends a real tritonserver on a model repository."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import requests
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from plugins.support.errors import CapabilityError, InputError, UsageError
from triton_repo.control import ENVIRONMENT_VARIABLE, request_drain
from triton_repo.generate import MANIFEST_FILE
from triton_repo.installation import find_installation

SHARED_MEMORY = Path("/dev/shm")
# The Python backend's default; one such region per model instance at start.
SHARED_MEMORY_PER_INSTANCE = 1 << 20
READY_POLL_S = 0.05
# At the end no model is loaded; the server only waits this long for idle connections to close.
SERVER_EXIT_TIMEOUT_S = 2
# A client that keeps its gRPC stream open keeps the model of its last request loaded. By then every
# generation has ended, so that what is left after these times may be killed.
UNLOAD_TIMEOUT_S = 2.5
KILL_AFTER_S = SERVER_EXIT_TIMEOUT_S + 1.5
WATCH_INTERVAL_S = 0.5
# The tritonserver of nvidia-pytriton 0.7 can crash when a unary gRPC call is cancelled.
MOST_RESTARTS = 3
RESTART_WINDOW_S = 600.0
_KEY_HEADER = "launcher-key"
# The first request may have to wait for kernels to be compiled.
PROBE_TIMEOUT_S = 300.0
LOG_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1
_LOAD_FAILURE = re.compile(r"failed to load '([^']+)' version \d+: (.*)")
_CONFIG_FAILURE = re.compile(r'^E\d+ .*model_repository_manager\.cc:\d+\] "(.*)"', re.MULTILINE)

_CONSEQUENCE = "which has no loaded version"
# What the server adds to the words of a model: the kind of the exception, and where it was raised.
_RAISED_BY_MODEL = "Internal: TritonModelException: "
_RAISED_AT = "\\n\\nAt:\\n"

Probe = Callable[["TritonServer"], None]


@dataclass(frozen=True)
class Ports:
    """Listening ports; 0 means: pick a free one."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


@dataclass
class TritonServer:
    """One running tritonserver; use `running()` or `start()` and `stop()`.

    Attributes:
        repository: the model repository directory.
        host: address to listen on, e.g. "127.0.0.1" or "0.0.0.0".
        ports: the ports; those given as 0 are replaced by the chosen ones at start.
        log_file: where the server's output goes; None keeps it in the work directory.
        grace_s: seconds that running requests get to finish after stop().
    """

    repository: Path
    host: str = "127.0.0.1"
    ports: Ports = field(default_factory=Ports)
    log_file: Path | None = None
    grace_s: float = 1.0
    environment: dict[str, str] = field(default_factory=dict)

    _key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    _process: subprocess.Popen[bytes] | None = None
    _work: Path | None = None
    _log: Path | None = None

    @property
    def client_host(self) -> str:
        """The address a client on this machine uses."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host

    @property
    def http_url(self) -> str:
        """`http://host:port` of the HTTP endpoint."""
        return f"http://{self.client_host}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        """`host:port` of the gRPC endpoint, as tritonclient wants it."""
        return f"{self.client_host}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        """URL of the metrics page."""
        return f"http://{self.client_host}:{self.ports.metrics}/metrics"

    @property
    def pid(self) -> int:
        """Process id of the running tritonserver."""
        if self._process is None:
            raise UsageError("the server is not running")
        return self._process.pid

    def log_text(self) -> str:
        """Everything the server has logged so far."""
        return "" if self._log is None else self._log.read_text(errors="replace")

    def model_processes(self) -> int:
        """How many processes of Python models run; a crashed one stays away for good, while the
        server goes on calling itself ready.
        """
        count = 0
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                # The parent's id is the second field after the name in parentheses.
                fields = status.read_text().rpartition(")")[2].split()
                count += fields[1] == str(self.pid) and fields[0] != "Z"
        return count

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, ready_timeout_s: float = 120.0, probe: Probe | None = None) -> None:
        """Start the server and wait until it answers.

        `probe` sends a real request and raises when the answer is not right; readiness alone stays
        true when a model's process has died. Raises CapabilityError (no server, too little shared
        memory), UsageError (port in use), InputError (a model does not load or does not answer in
        time).
        """
        if not self.repository.is_dir():
            raise InputError("the model repository does not exist", where=str(self.repository))
        installation = find_installation()
        check_shared_memory(model_instances(self.repository))
        self.ports = _choose_ports(self.host, self.ports)
        self._work = Path(tempfile.mkdtemp(prefix="build-engine-serve-"))
        self._log = self.log_file or self._work / "server.log"
        control = self._work / "control"
        control.mkdir()
        backends = installation.make_backend_directory(self._work / "backends")
        command = [
            str(installation.binary),
            f"--model-repository={self.repository}",
            f"--backend-directory={backends}",
            f"--http-address={self.host}",
            f"--grpc-address={self.host}",
            f"--metrics-address={self.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-port={self.ports.metrics}",
            # Auto-completion starts a throw-away process per model; generated configs are complete.
            "--disable-auto-complete-config",
            # Models are unloaded one by one at the end; nobody but this launcher can ask for it.
            "--model-control-mode=explicit",
            "--load-model=*",
            f"--http-restricted-api=model-repository:{_KEY_HEADER}={self._key}",
            f"--grpc-restricted-protocol=model-repository:{_KEY_HEADER}={self._key}",
            "--model-load-thread-count=8",
            f"--exit-timeout-secs={SERVER_EXIT_TIMEOUT_S}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix()}",
            f"--backend-config=python,shm-default-byte-size={SHARED_MEMORY_PER_INSTANCE}",
        ]
        environment = installation.environment() | self.environment
        environment[ENVIRONMENT_VARIABLE] = str(control)
        # Appended: what a crashed server has said stays in a log file that was asked for.
        with self._log.open("ab") as log:
            self._process = _SPAWNER.submit(
                subprocess.Popen,
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its own session: Ctrl-C reaches only the launcher, which drains first.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            ).result()
        try:
            deadline = time.monotonic() + ready_timeout_s
            self._wait_ready(deadline, ready_timeout_s)
            if probe is not None:
                probe(self)
        except BaseException:
            self.stop(drain=False)
            raise

    def stop(self, drain: bool = True) -> bool:
        """End running generations, then the server; remove its shared memory and work directory.

        Returns whether the server ended by itself with exit status 0.
        """
        process, work = self._process, self._work
        if process is None or work is None:
            return True
        if drain and process.poll() is None:
            request_drain(work / "control", self.grace_s, timeout_s=self.grace_s + 3.0)
        if process.poll() is None:
            self._unload()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            clean = process.wait(timeout=KILL_AFTER_S) == 0
        except subprocess.TimeoutExpired:
            clean = False
        # Also ends stubs that a crashed server left behind: they share its session's group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for region in SHARED_MEMORY.glob(f"{self._shm_prefix()}*"):
            region.unlink(missing_ok=True)
        shutil.rmtree(work, ignore_errors=True)
        self._process = self._work = None
        return clean

    def _unload(self) -> None:
        """Unload every model while the server still answers; wait until all are gone.

        Told to exit, the server spends its whole time on idle client connections first, and then
        leaves without unloading.
        """
        deadline = time.monotonic() + UNLOAD_TIMEOUT_S
        api = "/v2/repository"
        with contextlib.suppress(requests.RequestException, ValueError, KeyError):
            while time.monotonic() < deadline:
                index = self._ask("POST", f"{api}/index", timeout_s=2.0).json()
                states = {m["name"]: m.get("state") for m in index}
                if not set(states.values()) - {None, "UNAVAILABLE"}:
                    return
                for name in [n for n, state in states.items() if state == "READY"]:
                    self._ask("POST", f"{api}/models/{name}/unload", timeout_s=5.0)
                time.sleep(READY_POLL_S)

    def _ask(self, method: str, path: str, timeout_s: float) -> requests.Response:
        # At its end the server waits for every connection that somebody keeps.
        headers = {"Connection": "close", _KEY_HEADER: self._key}
        body: dict[str, Any] | None = {} if method == "POST" else None
        url = f"{self.http_url}{path}"
        return requests.request(method, url, json=body, headers=headers, timeout=timeout_s)

    def _shm_prefix(self) -> str:
        # Several servers may share /dev/shm, each with regions of its own.
        assert self._work is not None
        return f"{self._work.name}_"

    def _wait_ready(self, deadline: float, timeout_s: float) -> None:
        while time.monotonic() < deadline:
            if not self.alive():
                raise self._start_failure()
            with contextlib.suppress(requests.RequestException):
                if self._ask("GET", "/v2/health/ready", timeout_s=2.0).status_code == 200:
                    return
            time.sleep(READY_POLL_S)
        raise InputError(
            f"the server was not ready after {timeout_s:.0f} s",
            where=str(self.repository),
            found=_tail(self.log_text()),
        )

    def _start_failure(self) -> Exception:
        text = self.log_text()
        failures = {name: _reason(reason) for name, reason in _LOAD_FAILURE.findall(text)}
        for message in _CONFIG_FAILURE.findall(text):
            # That an ensemble lacks a model which has said why is nothing new.
            if not failures or _CONSEQUENCE not in message:
                failures.setdefault("configuration", _reason(message))
        if failures:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(failures.items()))
            return InputError(
                "the models did not all load", where=str(self.repository), found=reasons
            )
        return InputError(
            "the server ended while it was starting", where=str(self.repository), found=_tail(text)
        )


def probe(server: TritonServer) -> None:
    """Ask for one token; readiness of a server says nothing about the processes of its models.

    Raises InputError with the answer when it is not one.
    """
    url = f"{server.http_url}/v2/models/tensorrt_llm_bls/generate"
    body: dict[str, Any] = {"input_ids": [0], "max_tokens": 1}
    manifest = json.loads((server.repository / MANIFEST_FILE).read_text())
    if manifest.get("input") == "stream":
        body = {"audio_samples": [0.0, 0.1] * 640, "max_tokens": 1}
    try:
        answer = requests.post(url, json=body, timeout=PROBE_TIMEOUT_S)
        right = answer.status_code == 200 and "finish_reason" in answer.json()
        found = answer.text[:300]
    except (requests.RequestException, ValueError) as error:
        right, found = False, type(error).__name__
    if not right:
        raise InputError(
            "the server is up, but its models do not answer",
            where=str(server.repository),
            expected="one token",
            found=found,
        )


@contextmanager
def running(
    repository: Path,
    *,
    ports: Ports | None = None,
    probe: Probe | None = None,
    ready_timeout_s: float = 120.0,
    log_file: Path | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[TritonServer]:
    """A server for the length of a `with` block, on free ports of the loopback interface."""
    server = TritonServer(
        repository,
        ports=ports or Ports(0, 0, 0),
        log_file=log_file,
        environment=environment or {},
    )
    server.start(ready_timeout_s, probe)
    try:
        yield server
    finally:
        server.stop()


def serve(
    repository: Path,
    *,
    host: str = "127.0.0.1",
    ports: Ports | None = None,
    probe: Probe | None = probe,
    log_file: Path | None = None,
    ready_timeout_s: float = 300.0,
    on_ready: Callable[[TritonServer], None] | None = None,
    on_restart: Callable[[InputError], None] | None = None,
    grace_s: float = 1.0,
    restarts: int = MOST_RESTARTS,
) -> None:
    """Serve `repository` until SIGINT or SIGTERM, then drain and stop.

    A server that ends by itself, or loses the process of a model, is started again on the same
    ports: `on_restart` is told why, before that; `on_ready` only of the first start. When it
    happens more often than `restarts` times within `RESTART_WINDOW_S`, the InputError about it is
    raised. Must be called from the main thread. Raises what `TritonServer.start` raises.
    """
    server = TritonServer(repository, host, ports or Ports(), log_file, grace_s)
    ready, asked_to_stop = threading.Event(), threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        # While the server starts, and when somebody insists, there is nothing to wait for.
        if asked_to_stop.is_set() or not ready.is_set():
            raise KeyboardInterrupt
        asked_to_stop.set()

    previous = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    deaths: deque[float] = deque()

    def run_once(first: bool) -> InputError | None:
        """Start, and wait until it has to stop (None), or something has died."""
        try:
            server.start(ready_timeout_s, probe)
        except InputError as error:
            if first:
                raise
            return error
        ready.set()
        if first and on_ready is not None:
            on_ready(server)
        return _watch(server, asked_to_stop)

    try:
        failure = run_once(first=True)
        while failure is not None:
            deaths.append(time.monotonic())
            while deaths[0] < deaths[-1] - RESTART_WINDOW_S:
                deaths.popleft()
            if len(deaths) > restarts:
                raise failure
            ready.clear()
            server.stop(drain=False)
            if on_restart is not None:
                on_restart(failure)
            failure = run_once(first=False)
    finally:
        server.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(server: TritonServer, asked_to_stop: threading.Event) -> InputError | None:
    """Wait until somebody asks to stop (None), or something has died."""
    processes = model_instances(server.repository)
    while not asked_to_stop.wait(WATCH_INTERVAL_S):
        if not server.alive():
            return InputError(
                "the server ended by itself",
                where=str(server.repository),
                found=_tail(server.log_text()),
            )
        if server.model_processes() < processes:
            return InputError(
                "the process of a model has died",
                where=str(server.repository),
                found=_tail(server.log_text()),
            )
    return None


def model_instances(repository: Path) -> int:
    """Instances of Python models in a repository; each is a process."""
    count = 0
    for path in repository.glob("*/config.pbtxt"):
        # What cannot be parsed is for the server to name.
        with contextlib.suppress(text_format.ParseError):
            config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
            if config.backend == "python":
                count += sum(group.count for group in config.instance_group) or 1
    return count


def check_shared_memory(instances: int) -> None:
    """Raise CapabilityError when /dev/shm cannot hold the regions of `instances` instances."""
    if not SHARED_MEMORY.is_dir():
        raise CapabilityError("there is no /dev/shm, which Triton's Python models need")
    needed = instances * SHARED_MEMORY_PER_INSTANCE
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        raise CapabilityError(
            "too little shared memory for the model instances",
            where=str(SHARED_MEMORY),
            expected=f"{instances} instances x 1 MiB = {needed >> 20} MiB",
            found=f"{free >> 20} MiB free",
            fix="start the container with a larger --shm-size",
        )


def _choose_ports(host: str, ports: Ports) -> Ports:
    """Replace zeros by free ports; raise UsageError for a port that is taken."""
    chosen = []
    with contextlib.ExitStack() as stack:
        for name, port in (("http", ports.http), ("grpc", ports.grpc), ("metrics", ports.metrics)):
            probe = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise UsageError(
                    f"the {name} port cannot be used",
                    where=f"{host}:{port}",
                    found=error.strerror or str(error),
                    fix=f"choose another with --{name}-port, or 0 for any free one",
                ) from error
            chosen.append(probe.getsockname()[1])
    return Ports(*chosen)


_libc = ctypes.CDLL(None, use_errno=True)
# To the kernel the parent is a thread: a server that a short-lived one has started would end with
# it. This one lives as long as the process.
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="servers")


def _die_with_parent() -> None:
    # A launcher that is killed must not leave a server behind on its ports.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _reason(logged: str) -> str:
    """Why a model did not load, without the trace that the server has logged with it."""
    return logged.partition(_RAISED_AT)[0].removeprefix(_RAISED_BY_MODEL).rstrip('"')


def _tail(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n" + "\n".join(lines[-LOG_TAIL_LINES:])
