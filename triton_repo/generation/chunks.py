"""Embeddings of prompts that are longer than the model's limit: chunk by chunk, then one vector.

The vector is the mean of the chunks' vectors, each weighted by its number of tokens, divided by its
2-norm. Chunks do not see each other, so this is not what a model with a larger limit would answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from triton_repo.frontend.limits import MAX_CHUNKS
from triton_repo.frontend.problems import problem
from triton_repo.generation.base import Deliver, GenerationCall, GenerationEvent, Generator

# What becomes of the other outputs of the chunks; the first chunk's where nothing is said.
_JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "kv_cache_reused_blocks": sum,
    "arrival_time_ns": min,
    "first_scheduled_time_ns": min,
    "first_token_time_ns": max,
    "last_token_time_ns": max,
    "ECHO_BLOCK_KEYS": lambda lists: [key for keys in lists for key in keys],
}


def submit_chunks(
    generator: Generator, call: GenerationCall, deliver: Deliver
) -> Callable[[], None]:
    """Start all chunks of a call with a window; returns what cancels them.

    Every chunk is the call with some of its ids: salt and everything else are the same. One event
    is delivered. Raises what `Generator.submit` raises, and UsageError for too many chunks.
    """
    window, ids = call.window, call.prompt_ids
    assert window is not None
    parts = [ids[start : start + window] for start in range(0, len(ids), window)]
    if len(parts) > MAX_CHUNKS:
        raise problem(
            "input_ids", "would be embedded in too many chunks", expected=f"<= {MAX_CHUNKS}",
            found=len(parts),
        )  # fmt: skip
    whole = _Whole([len(part) for part in parts], deliver)
    try:
        for index, part in enumerate(parts):
            if whole.ended:
                break
            chunk = replace(call, prompt_ids=part, window=None)
            whole.cancels.append(generator.submit(chunk, partial(whole.on_event, index)))
    except Exception:
        whole.close()
        raise
    if whole.ended:
        # One has failed already; those that were started after it need not go on.
        whole.cancel()
    return whole.cancel


class _Whole:
    """Collects the last events of all chunks."""

    def __init__(self, weights: list[int], deliver: Deliver) -> None:
        self._weights, self._deliver = weights, deliver
        self._extras: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self.ended = False
        self.cancels: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """End every chunk."""
        for cancel in list(self.cancels):
            cancel()

    def close(self) -> None:
        """End every chunk without an event."""
        with self._lock:
            self.ended = True
        self.cancel()

    def on_event(self, index: int, event: GenerationEvent) -> None:
        """Take one event of a chunk; may be called from any thread."""
        if not event.last:
            return
        failed = event.error is not None or event.finish_reason == "cancelled"
        with self._lock:
            if self.ended:
                return
            self._extras[index] = event.extra
            self.ended = failed or len(self._extras) == len(self._weights)
            if not self.ended:
                return
        if failed:
            self.cancel()
            self._deliver(event)
        else:
            self._deliver(self._joined())

    def _joined(self) -> GenerationEvent:
        extras = [self._extras[index] for index in range(len(self._weights))]
        vectors = np.array([extra["embedding"] for extra in extras], dtype=np.float64)
        mean = np.average(vectors, axis=0, weights=self._weights)
        norm = np.linalg.norm(mean)
        if norm < np.finfo(np.float32).eps:
            return GenerationEvent(error=("internal", "the chunks of this text cancel each other"))
        joined = {
            name: _JOINED[name]([extra[name] for extra in extras])
            for name in _JOINED
            if all(name in extra for extra in extras)
        }
        joined["embedding"] = (mean / norm).tolist()
        return GenerationEvent(finish_reason="stop", extra=extras[0] | joined)
