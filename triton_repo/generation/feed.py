"""Frames of a stream on their way from whoever receives them to whoever encodes them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Features = npt.NDArray[np.float32]
Take = Callable[[Features, bool], None]


class AudioFeed:
    """Keeps order and loses nothing, whether frames or their consumer come first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Features, bool]] = []
        self._take: Take | None = None

    def push(self, frames: Features, last: bool) -> None:
        """Add frames, float32 [mels, F]; `last`: no more will come."""
        with self._lock:
            if self._take is None:
                self._waiting.append((frames, last))
            else:
                self._take(frames, last)

    def attach(self, take: Take) -> None:
        """Hand all frames to `take`, which has to return at once."""
        with self._lock:
            for frames, last in self._waiting:
                take(frames, last)
            self._waiting.clear()
            self._take = take
