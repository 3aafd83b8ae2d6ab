"""Streams of `tensorrt_llm_bls`: audio in pieces, text back as it is heard.

All pieces of a stream are requests with the same sequence id. The first one (sequence start) opens
it, may set every other field, and gets all the text; the others bring `audio_samples` and get an
empty final response. The last one (sequence end) may be empty.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from plugins.support.errors import ToolchainError
from triton_repo.frontend.problems import problem
from triton_repo.generation.feed import Features
from triton_repo.replies import describe

if TYPE_CHECKING:
    from triton_repo.frontend.audio.live import LiveAudio

START, END = 1, 2
# A stream keeps a slot of the engine; one that nobody speaks into any more has to give it back.
IDLE_LIMIT_S = 60.0
CHECK_S = 1.0
# What a piece may bring; everything else was said when the stream began.
PIECE_FIELDS = frozenset({"audio_samples"})


@dataclass
class LiveStream:
    """An open stream.

    Attributes:
        audio: turns samples into frames.
        send: takes frames, and whether they are the last.
        fail: ends the stream with an error for the request that opened it.
    """

    audio: LiveAudio
    send: Callable[[Features, bool], None]
    fail: Callable[[str, str], None]
    used: float = field(default_factory=time.monotonic)

    def push(self, row: dict[str, Any], last: bool) -> None:
        """Take the samples of a piece; what is wrong with them ends the stream."""
        samples = np.asarray(row.get("audio_samples", ()), dtype=np.float32).reshape(-1)
        try:
            frames = self.audio.push(samples, last=last)
        except ToolchainError as error:
            _, message = describe(error)
            self.fail("invalid", message)
            return
        self.used = time.monotonic()
        if frames.shape[1] or last:
            self.send(frames, last)


class LiveStreams:
    """The open streams by sequence id."""

    def __init__(self, idle_limit_s: float = IDLE_LIMIT_S) -> None:
        self._streams: dict[int | str, LiveStream] = {}
        self._idle_limit_s = idle_limit_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="idle-streams", daemon=True).start()

    def check_new(self, number: int | str) -> None:
        """Raise UsageError when a stream with that id is open."""
        with self._lock:
            if number in self._streams:
                raise problem("sequence_id", "a stream of that id is open", found=number)

    def open(self, number: int | str, stream: LiveStream) -> None:
        """Remember a stream."""
        with self._lock:
            self._streams[number] = stream

    def get(self, number: int | str) -> LiveStream:
        """The open stream of that id; raises UsageError when there is none."""
        with self._lock:
            stream = self._streams.get(number)
        if stream is None:
            raise problem("sequence_id", "no stream of that id is open", found=number)
        return stream

    def forget(self, number: int | str) -> None:
        """The stream has ended."""
        with self._lock:
            self._streams.pop(number, None)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(CHECK_S):
            limit = time.monotonic() - self._idle_limit_s
            with self._lock:
                idle = [s for s in self._streams.values() if s.used < limit and not s.audio.ended]
            for stream in idle:
                stream.fail(
                    "invalid",
                    f"audio_samples: nothing came for {self._idle_limit_s:g} s; the stream is over",
                )
