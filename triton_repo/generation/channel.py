"""A local stream from the models beside it to the generation model.

Triton's own way for a Python model to call another one cannot cancel the call, needs one thread per
request, and corrupts the server's memory when many decoupled calls run at once. The two processes
therefore talk over a Unix socket in a directory that only the server's user can reach. Messages
are JSON, one per line: {"op": "submit", "key", "id", "call", "audio", "live"},
{"op": "audio", "key", "audio", "last"}, {"op": "cancel", "key"}, {"op": "stop", "id"},
{"op": "lost", "answer"} one way,
events with their key the other way. "audio" is a shape; the float32 values follow the line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import socket
import tempfile
import threading
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from plugins.support.errors import CapabilityError
from triton_repo.control import ENVIRONMENT_VARIABLE
from triton_repo.generation.base import Deliver, GenerationCall, GenerationEvent
from triton_repo.generation.feed import AudioFeed, Features
from triton_repo.generation.service import GenerationService

LOG = logging.getLogger(__name__)
# Longest path of a Unix socket on Linux, less the final zero.
MAX_SOCKET_PATH = 107


def socket_path(repository_id: str) -> Path:
    """The socket of one running server: beside the launcher's control files, or, when the server
    was started by hand, in a private directory named after the repository.
    """
    control = os.environ.get(ENVIRONMENT_VARIABLE)
    if control:
        path = Path(control) / "generation.sock"
    else:
        directory = Path(tempfile.gettempdir()) / f"trtllm-toolchain-{os.getuid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
        owner = directory.stat()
        if owner.st_uid != os.getuid() or owner.st_mode & 0o077:
            raise CapabilityError("the socket directory is open to others", where=str(directory))
        path = directory / f"{repository_id}.sock"
    if len(str(path)) > MAX_SOCKET_PATH:
        raise CapabilityError(
            "the path of the generation socket is too long",
            where=str(path),
            expected=f"<= {MAX_SOCKET_PATH} characters",
            fix="set TMPDIR to a shorter directory",
        )
    return path


def _encoded(message: dict[str, Any], audio: Features | None) -> bytes:
    if audio is None:
        return json.dumps(message).encode() + b"\n"
    line = json.dumps(message | {"audio": audio.shape}).encode() + b"\n"
    return line + np.ascontiguousarray(audio, dtype=np.float32).tobytes()


def _read_audio(lines: Any, shape: list[int] | None) -> Features | None:
    if shape is None:
        return None
    data = lines.read(4 * math.prod(shape))
    return np.frombuffer(data, np.float32).reshape(shape).copy()


class ChannelServer:
    """Generation side: accepts connections and runs their calls on the service."""

    def __init__(self, path: Path, service: GenerationService) -> None:
        self._service = service
        self._path = path
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen()
        threading.Thread(target=self._accept, name="channel-accept", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        # A thread that waits in accept only returns when the socket is shut down.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="channel", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        """One connection until it closes; then everything it started is cancelled."""
        numbers: dict[int, int] = {}
        feeds: dict[int, AudioFeed] = {}
        lock = threading.Lock()

        def deliver(key: int, event: GenerationEvent) -> None:
            data = json.dumps({"key": key, **asdict(event)}).encode() + b"\n"
            with lock, contextlib.suppress(OSError):
                connection.sendall(data)
            if event.last:
                numbers.pop(key, None)
                feeds.pop(key, None)

        with connection, connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                key = message.get("key")
                audio = _read_audio(lines, message.get("audio"))
                if message["op"] == "submit":
                    feed = AudioFeed() if message["live"] else None
                    call = replace(
                        GenerationCall.from_json(message["call"]), features=audio, feed=feed
                    )
                    numbers[key] = 0
                    if feed is not None:
                        feeds[key] = feed
                    number = self._service.submit(call, partial(deliver, key), message["id"])
                    if key in numbers:
                        numbers[key] = number
                elif message["op"] == "audio":
                    if key in feeds and audio is not None:
                        feeds[key].push(audio, message["last"])
                elif message["op"] == "cancel":
                    self._service.cancel(numbers.get(key, 0))
                elif message["op"] == "stop":
                    self._service.cancel_request(message["id"])
                elif message["op"] == "lost":
                    self._service.cancel_answer(message["answer"])
        for number in list(numbers.values()):
            self._service.cancel(number)


class ChannelClient:
    """BLS side: submits calls and hands their events out; connects when it is first needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = itertools.count(1)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._waiting: dict[int, Deliver] = {}

    def submit(self, call: GenerationCall, deliver: Deliver, request_id: str) -> int:
        """Start a sequence; its events come on another thread. Returns its key.

        Raises CapabilityError when the generation model cannot be reached.
        """
        key = next(self._keys)
        message = {"op": "submit", "key": key, "id": request_id, "call": call.to_json()}
        data = _encoded(message | {"live": call.feed is not None}, call.features)
        with self._lock:
            self._waiting[key] = deliver
            try:
                self._connect().sendall(data)
            except OSError as error:
                self._waiting.pop(key, None)
                raise CapabilityError(
                    "the generation model does not answer", found=type(error).__name__
                ) from None
        return key

    def audio(self, key: int, frames: Features, last: bool) -> None:
        """Send the next frames, float32 [mels, F], of a call that was submitted with a feed."""
        self._send({"op": "audio", "key": key, "last": last}, frames)

    def cancel(self, key: int) -> None:
        """End a sequence; its last event still comes."""
        self._send({"op": "cancel", "key": key})

    def stop(self, request_id: str) -> None:
        """End every sequence of a client's request id, whichever way it came."""
        self._send({"op": "stop", "id": request_id})

    def lost(self, answer: str) -> None:
        """End the generation of an answer of `tensorrt_llm` itself: its client is gone."""
        self._send({"op": "lost", "answer": answer}, connect=True)

    def close(self) -> None:
        """Close the connection; running sequences are cancelled at the other end."""
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _send(
        self, message: dict[str, Any], frames: Features | None = None, *, connect: bool = False
    ) -> None:
        """Send what needs no answer. Most messages mean nothing to a server not yet connected."""
        data = _encoded(message, frames)
        with self._lock, contextlib.suppress(OSError):
            connection = self._connect() if connect else self._connection
            if connection is not None:
                connection.sendall(data)

    def _connect(self) -> socket.socket:
        if self._connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(self._path))
            except OSError:
                connection.close()
                raise
            self._connection = connection
            threading.Thread(
                target=self._read, args=(connection,), name="channel-read", daemon=True
            ).start()
        return self._connection

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError):
            for line in lines:
                message = json.loads(line)
                key = message.pop("key")
                if message["error"] is not None:
                    message["error"] = tuple(message["error"])
                event = GenerationEvent(**message)
                with self._lock:
                    deliver = self._waiting.pop(key) if event.last else self._waiting[key]
                deliver(event)
        with self._lock:
            self._connection = None
            orphans = list(self._waiting.values())
            self._waiting.clear()
        for deliver in orphans:
            deliver(GenerationEvent(error=("unavailable", "the generation model has stopped")))
