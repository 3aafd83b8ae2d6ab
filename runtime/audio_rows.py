"""Rows of the audio engine on their way into a text engine, whole or as they are heard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from plugins.support.errors import UsageError


class AudioRows:
    """The rows of one request and the positions they belong to.

    With a placeholder, row n belongs to the n-th placeholder of the prompt; a generated placeholder
    has no row. Without one, row n belongs to position n, more rows may be added while the request
    runs, and the request ends where the stream does.

    Args:
        rows: [n, H]; for a stream the rows heard so far.
        placeholder_id: as in the engine's configuration.
        ended: whether no more rows will come; always true with a placeholder.
    """

    def __init__(
        self, rows: torch.Tensor, placeholder_id: int | None, *, ended: bool = True
    ) -> None:
        self.placeholder_id = placeholder_id
        # The buffer doubles when full: a long stream does not copy all its rows for each new one.
        self._buffer = rows
        self._count = len(rows)
        self._ended = ended or placeholder_id is not None
        self._lock = threading.Lock()
        self._on_change: Callable[[], None] | None = None
        self._positions = np.zeros(0, dtype=np.int64)

    @property
    def streaming(self) -> bool:
        """Whether every position has a row."""
        return self.placeholder_id is None

    @property
    def count(self) -> int:
        """Rows so far."""
        with self._lock:
            return self._count

    def append(self, rows: torch.Tensor, *, last: bool = False) -> None:
        """Add rows [n, H] to a stream; `last`: no more will come.

        The end has to come with the last rows: a token of a stream is made as soon as its row is
        there, and there are as many tokens as rows. Raises UsageError after the end.
        """
        with self._lock:
            if self._ended:
                raise UsageError("the audio has ended", where="audio")
            end = self._count + len(rows)
            if end > len(self._buffer):
                larger = rows.new_empty(max(end, 2 * len(self._buffer)), *rows.shape[1:])
                larger[: self._count] = self._buffer[: self._count]
                self._buffer = larger
            self._buffer[self._count : end] = rows
            self._count, self._ended = end, last
        if self._on_change is not None:
            self._on_change()

    def notify(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever rows come or end."""
        self._on_change = on_change

    def covers(self, position: int) -> bool:
        """Whether the token at `position` can be computed now."""
        with self._lock:
            return self.placeholder_id is not None or position < self._count

    def over(self, tokens: int) -> bool:
        """Whether a stream has ended and a sequence of that many tokens is as long as it."""
        with self._lock:
            return self.placeholder_id is None and self._ended and tokens >= self._count

    def bind(self, prompt: Sequence[int]) -> None:
        """Remember where the placeholders of a prompt are.

        Raises UsageError when placeholders and rows do not match.
        """
        if self.placeholder_id is None:
            return
        self._positions = np.flatnonzero(np.asarray(prompt) == self.placeholder_id)
        if len(self._positions) != self._count:
            raise UsageError(
                "placeholders and audio rows do not match",
                where="prompt_ids",
                expected=f"{self._count} ids {self.placeholder_id}, one for each audio row",
                found=str(len(self._positions)),
            )

    def place(self, start: int, into: torch.Tensor) -> None:
        """Copy the rows of positions start .. start + len(into) - 1 to where they belong."""
        end = start + len(into)
        rows = self.all()
        if self.placeholder_id is None:
            into.copy_(rows[start:end])
            return
        first, last = np.searchsorted(self._positions, (start, end))
        if first < last:
            targets = torch.from_numpy(self._positions[first:last] - start)
            into[targets] = rows[int(first) : int(last)].to(into.dtype)

    def all(self) -> torch.Tensor:
        """Every row so far, [n, H]."""
        with self._lock:
            return self._buffer[: self._count]
