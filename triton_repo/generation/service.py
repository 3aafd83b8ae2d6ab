"""Runs calls of all clients on one generator: ids, stop strings, cancellation, drain, metrics."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from plugins.support.errors import CapabilityError, ToolchainError, UsageError
from triton_repo.frontend.output import OutputText
from triton_repo.frontend.problems import one_line
from triton_repo.frontend.tokenizer import Tokenizer
from triton_repo.generation.base import (
    Deliver,
    ErrorKind,
    GenerationCall,
    GenerationEvent,
    Generator,
)
from triton_repo.generation.chunks import submit_chunks
from triton_repo.generation.metrics import Metrics

LOG = logging.getLogger(__name__)


@dataclass
class _Running:
    request_id: str
    answer: str
    deliver: Deliver
    cancel: Callable[[], None] | None = None
    text: OutputText | None = None
    started: float = 0.0
    tokens: int = 0
    wanted_cancel: bool = False
    ended: bool = False


class GenerationService:
    """Keeps every running sequence under a number of its own.

    A client's request id is only a label: two running requests may have the same one, and a stop
    request for it ends both.

    Args:
        generator: makes tokens.
        tokenizer: finds stop strings in decoded text; None leaves them to the caller.
    """

    def __init__(self, generator: Generator, tokenizer: Tokenizer | None, metrics: Metrics) -> None:
        self._generator, self._tokenizer, self._metrics = generator, tokenizer, metrics
        self._running: dict[int, _Running] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._draining = False

    def submit(
        self, call: GenerationCall, deliver: Deliver, request_id: str = "", answer: str = ""
    ) -> int:
        """Start one sequence; returns its number. `answer` names the answer that it is part of.

        All outcomes come through `deliver`, a refusal too. Exactly one event is the last.
        """
        number = next(self._numbers)
        running = _Running(request_id, answer, deliver, started=time.monotonic())
        with self._lock:
            if self._draining:
                refused = GenerationEvent(error=("unavailable", "the server is shutting down"))
            else:
                refused = None
                self._running[number] = running
        if refused is not None:
            deliver(refused)
            return number
        self._metrics.add(requests=1, prompt_tokens=len(call.prompt_ids))
        if call.text.stop_words and self._tokenizer is not None:
            running.text = OutputText(self._tokenizer, call.prompt_ids, call.text)
        try:
            cancel = self._start(call, lambda event: self._on_event(number, event))
        except ToolchainError as error:
            self._on_event(number, GenerationEvent(error=(error_kind(error), one_line(error))))
            return number
        except Exception:
            LOG.exception("a sequence could not be started")
            self._on_event(number, GenerationEvent(error=("internal", "internal error")))
            return number
        with self._lock:
            running.cancel = cancel
            wanted = running.wanted_cancel
        if wanted:
            cancel()
        self._set_gauges()
        return number

    def _start(self, call: GenerationCall, deliver: Deliver) -> Callable[[], None]:
        if call.task == "embed" and call.window is not None:
            return submit_chunks(self._generator, call, deliver)
        return self._generator.submit(call, deliver)

    def cancel(self, number: int) -> None:
        """End one sequence; without effect when it has ended."""
        with self._lock:
            running = self._running.get(number)
            if running is None:
                return
            running.wanted_cancel = True
            cancel = running.cancel
        if cancel is not None:
            cancel()

    def cancel_request(self, request_id: str) -> int:
        """End every sequence of a client's request id; returns how many.

        Requests without an id have nothing in common: the empty id ends none.
        """
        if not request_id:
            return 0
        return self._cancel_all(lambda running: running.request_id == request_id)

    def cancel_answer(self, answer: str) -> int:
        """End every sequence of an answer that nobody takes any more; returns how many."""
        return self._cancel_all(lambda running: running.answer == answer)

    def _cancel_all(self, chosen: Callable[[_Running], bool]) -> int:
        with self._lock:
            numbers = [n for n, r in self._running.items() if chosen(r)]
        for number in numbers:
            self.cancel(number)
        return len(numbers)

    @property
    def running(self) -> int:
        """Sequences that have not ended."""
        with self._lock:
            return len(self._running)

    def drain(self, grace_s: float) -> None:
        """Refuse new sequences, wait `grace_s` for the running ones, then cancel the rest."""
        with self._idle:
            self._draining = True
            self._idle.wait_for(lambda: not self._running, timeout=grace_s)
            numbers = list(self._running)
        for number in numbers:
            self.cancel(number)
        with self._idle:
            self._idle.wait_for(lambda: not self._running, timeout=3.0)

    def close(self) -> None:
        """End everything."""
        self.drain(0.0)
        self._generator.close()

    def _on_event(self, number: int, event: GenerationEvent) -> None:
        with self._lock:
            running = self._running.get(number)
        if running is None or running.ended:
            return
        stopped = False
        if running.text is not None and event.token_ids:
            _, used = running.text.feed(event.token_ids)
            stopped = running.text.stopped
            if stopped:
                event = GenerationEvent(
                    event.token_ids[:used], event.log_probs[:used], "stop", None, event.extra
                )
        running.ended = event.last
        self._count(running, event)
        if event.last:
            with self._idle:
                del self._running[number]
                self._idle.notify_all()
            if stopped and running.cancel is not None:
                running.cancel()
        running.deliver(event)
        if event.last:
            self._set_gauges()

    def _count(self, running: _Running, event: GenerationEvent) -> None:
        first = running.tokens == 0 and bool(event.token_ids)
        running.tokens += len(event.token_ids)
        self._metrics.add(
            generated_tokens=len(event.token_ids),
            first_tokens=int(first),
            time_to_first_token_us=(time.monotonic() - running.started) * 1e6 if first else 0,
            requests_failed=int(event.error is not None),
            requests_cancelled=int(event.finish_reason == "cancelled"),
            cache_reused_blocks=event.extra.get("kv_cache_reused_blocks", 0),
        )

    def _set_gauges(self) -> None:
        gauges = self._generator.gauges()
        self._metrics.set(requests_active=gauges["active"], requests_waiting=gauges["waiting"])


def error_kind(error: ToolchainError) -> ErrorKind:
    """How a client should understand an error."""
    if isinstance(error, UsageError):
        return "invalid"
    return "unsupported" if isinstance(error, CapabilityError) else "unavailable"
