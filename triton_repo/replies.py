"""Sends responses and notices cancellation, from one thread per model instance.

Triton's request objects are used by the model's own thread and by this one only.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from plugins.support.errors import ToolchainError
from triton_repo.frontend.problems import one_line
from triton_repo.generation.service import error_kind
from triton_repo.tensor_io import Array

LOG = logging.getLogger(__name__)
CANCEL_POLL_S = 0.2

Tensors = Mapping[str, Array]
_Item = tuple["Reply", Tensors | None, tuple[str, str] | None, bool]
_Signal = Literal["wake", "close"]


class Reply:
    """The way back to one client request; exactly one final message is sent."""

    def __init__(self, loop: ReplyLoop, sender: Any, on_cancel: Callable[[], None]) -> None:
        self._loop, self.sender, self.on_cancel = loop, sender, on_cancel
        self.ended = False
        self.cancel_seen = False

    def send(self, tensors: Tensors, final: bool) -> None:
        """Queue a response; after the final one nothing is sent."""
        self._loop.put((self, tensors, None, final))

    def fail(self, kind: str, message: str) -> None:
        """Queue an error as the final message."""
        self._loop.put((self, None, (kind, message), True))

    def end(self) -> None:
        """Queue the final flag without a response."""
        self._loop.put((self, None, None, True))


class ReplyLoop:
    """One thread that sends, and polls open requests for cancellation."""

    def __init__(self, pb_utils: Any) -> None:
        self._pb = pb_utils
        self._queue: queue.SimpleQueue[_Item | _Signal] = queue.SimpleQueue()
        self._open: set[Reply] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="replies", daemon=True)
        self._thread.start()

    def open(self, request: Any, on_cancel: Callable[[], None]) -> Reply:
        """Start answering a request."""
        reply = Reply(self, request.get_response_sender(), on_cancel)
        with self._lock:
            first = not self._open
            self._open.add(reply)
        if first:
            # Without open requests the thread waits until something is queued, and an answer that
            # is not streamed queues nothing before its end.
            self._queue.put("wake")
        return reply

    @property
    def open_count(self) -> int:
        """Requests without a final message."""
        with self._lock:
            return len(self._open)

    def put(self, item: _Item) -> None:
        """Queue a message."""
        self._queue.put(item)

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until every request has its final message."""
        deadline = time.monotonic() + timeout_s
        while self.open_count and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._queue.put("close")
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        next_poll = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=CANCEL_POLL_S if self._open else None)
            except queue.Empty:
                pass
            else:
                if item == "close":
                    return
                if item != "wake":
                    try:
                        self._send(*item)
                    except Exception:
                        LOG.exception("a response could not be sent")
            if time.monotonic() >= next_poll:
                next_poll = time.monotonic() + CANCEL_POLL_S
                self._poll()

    def _send(
        self, reply: Reply, tensors: Tensors | None, error: tuple[str, str] | None, final: bool
    ) -> None:
        if reply.ended or (reply.cancel_seen and not final):
            return
        pb = self._pb
        response = None
        if reply.cancel_seen:
            # Nobody reads it any more; the server only wants to know that this is the end.
            pass
        elif error is not None:
            response = pb.InferenceResponse(error=triton_error(pb, *error))
        elif tensors is not None:
            response = pb.InferenceResponse([pb.Tensor(n, a) for n, a in tensors.items()])
        flags = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        if final:
            reply.ended = True
            with self._lock:
                self._open.discard(reply)
        if response is None:
            reply.sender.send(flags=flags)
        else:
            reply.sender.send(response, flags=flags)

    def _poll(self) -> None:
        with self._lock:
            replies = [r for r in self._open if not r.cancel_seen]
        for reply in replies:
            if reply.sender.is_cancelled():
                reply.cancel_seen = True
                reply.on_cancel()


def triton_error(pb_utils: Any, kind: str, message: str) -> Any:
    """A Triton error of the kind; the message has no path and no trace."""
    codes = {
        "invalid": pb_utils.TritonError.INVALID_ARG,
        "unavailable": pb_utils.TritonError.UNAVAILABLE,
        "unsupported": pb_utils.TritonError.UNSUPPORTED,
        "internal": pb_utils.TritonError.INTERNAL,
    }
    return pb_utils.TritonError(message, codes[kind])


def describe(error: Exception) -> tuple[str, str]:
    """Kind and message of an exception for a client; an unexpected one goes to the log only."""
    if isinstance(error, ToolchainError):
        return error_kind(error), one_line(error)
    LOG.error("unexpected error", exc_info=error)
    return "internal", "internal error; the server's log has the details"
