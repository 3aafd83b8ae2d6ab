"""A running engine that takes requests from any thread and streams their tokens back."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

import torch

from plugins.support.errors import CapabilityError, UsageError
from runtime.audio_rows import AudioRows
from runtime.contract import Phase
from runtime.engine import Engine
from runtime.requests import (
    GenerationRequest,
    QueueFullError,
    Timings,
    TokenEvent,
)
from runtime.rows import Row
from runtime.sampling import SamplingParams
from runtime.scheduler import Job, Scheduler, Totals

LOG = logging.getLogger(__name__)

Deliver = Callable[[TokenEvent], None]

__all__ = [
    "GenerationHandle",
    "GenerationRequest",
    "QueueFullError",
    "SamplingParams",
    "Session",
    "SessionStats",
    "TokenEvent",
    "prompt_logits",
]


class GenerationHandle:
    """The answer to one request, as it comes. Iterate it once, from one thread.

    Args:
        session: that runs the request.
        request: what was asked.
        deliver: gets the events instead; then there is nothing to iterate.
    """

    def __init__(
        self, session: Session, request: GenerationRequest, deliver: Deliver | None = None
    ) -> None:
        self._session = session
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self._deliver = deliver or self._events.put
        self._job = Job(request, self._emit, Timings(arrival=time.monotonic_ns()))
        self._last: TokenEvent | None = None

    def _emit(self, event: TokenEvent) -> None:
        try:
            self._deliver(event)
        except Exception:
            # Whoever asked is gone or broken; the engine and everybody else must not notice.
            LOG.exception("an answer could not be delivered; its request is cancelled")
            self._job.cancelled = True

    @property
    def timings(self) -> Timings:
        """When things happened; complete after the final event."""
        return self._job.timings

    def next_event(self, timeout: float | None = None) -> TokenEvent | None:
        """The next event; None when `timeout` seconds pass or the final event was returned.

        Without a worker thread this drives the session until there is one.
        """
        if self._last is not None:
            return None
        if not self._session.threaded:
            while self._events.empty() and self._session.step():
                pass
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if event.finish_reason is not None:
            self._last = event
        return event

    def __iter__(self) -> Iterator[TokenEvent]:
        while (event := self.next_event()) is not None:
            yield event

    def cancel(self) -> None:
        """End the request within one step; its last event has finish reason "cancelled".

        Without effect on a request that has ended.
        """
        self._job.cancelled = True
        self._session.wake()

    def result(self) -> tuple[list[int], TokenEvent]:
        """Wait for the end; returns the ids of the answer that were not iterated yet, and the
        final event.
        """
        events = list(self)
        last = self._last
        assert last is not None
        return [event.token_id for event in events if event.token_id is not None], last


@dataclass(frozen=True)
class SessionStats:
    """A session at one moment.

    Attributes:
        slots: of the engine.
        active, waiting: requests with and without a slot.
        totals: since the session began, a copy.
    """

    slots: int
    active: int
    waiting: int
    totals: Totals


class Session:
    """Continuous batching over the slots of one engine.

    Args:
        engine: opened; the session has it alone until `close`.
        max_queue: most requests that wait for a slot; None = any number.
        threaded: whether a worker thread drives it. Without, call `step` (or iterate a handle).
        num_draft_tokens: drafts per generation call; None = as many as the engines verify.

    Raises UsageError when the engine is in use or verifies fewer drafts. A context manager;
    leaving it closes the session.
    """

    def __init__(
        self,
        engine: Engine,
        max_queue: int | None = None,
        threaded: bool = True,
        num_draft_tokens: int | None = None,
    ) -> None:
        self.engine = engine
        self.threaded = threaded
        self._max_queue = max_queue
        self._scheduler = Scheduler(engine, num_draft_tokens)
        self._claim = ExitStack()
        self._claim.enter_context(engine.claim())
        self._wake = threading.Condition()
        self._arrived: list[Job] = []
        self._work = False
        self._closing = False
        self._broken: str | None = None
        self._worker: threading.Thread | None = None
        if threaded:
            self._worker = threading.Thread(target=self._run, name="session", daemon=True)
            self._worker.start()

    def submit(
        self, request: GenerationRequest, deliver: Deliver | None = None
    ) -> GenerationHandle:
        """Queue a request; its tokens come through the handle.

        Args:
            request: what is asked.
            deliver: called with every event, in order, on the thread that drives the session; it
                must return quickly. None = iterate the handle.

        Raises UsageError naming a parameter the engine cannot serve, or when the session is
        closed; QueueFullError when `max_queue` requests wait; CapabilityError after the engine
        has failed for good.
        """
        request.check(self.engine.config)
        handle = GenerationHandle(self, request, deliver)
        if request.audio is not None:
            request.audio.notify(self.wake)
        with self._wake:
            if self._broken is not None:
                raise CapabilityError(
                    "the engine has failed", found=self._broken, fix="start the server again"
                )
            if self._closing:
                raise UsageError("the session is closed")
            waiting = len(self._arrived) + self._scheduler.waiting
            waiting -= self._scheduler.free_slots
            if self._max_queue is not None and waiting >= self._max_queue:
                raise QueueFullError(
                    "too many requests are waiting",
                    expected=f"at most {self._max_queue}",
                    found=f"{max(waiting, 0) + 1}",
                    fix="send it again later",
                )
            self._arrived.append(handle._job)
            self._work = True
            self._wake.notify()
        return handle

    def step(self) -> bool:
        """Do one round of work in the calling thread. Returns whether anything is left to do.

        Raises UsageError when the session has a worker thread.
        """
        if self.threaded:
            raise UsageError("this session is driven by its own thread")
        return self._step()

    def wake(self) -> None:
        """Let the worker look at what changed."""
        with self._wake:
            self._work = True
            self._wake.notify()

    def stats(self) -> SessionStats:
        """The session now."""
        with self._wake:
            scheduler = self._scheduler
            return SessionStats(
                slots=self.engine.slots,
                active=scheduler.active,
                waiting=scheduler.waiting + len(self._arrived),
                totals=replace(scheduler.totals, finished=dict(scheduler.totals.finished)),
            )

    def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """End the session; the engine stays open.

        Args:
            drain: finish the requests that were accepted; else they end as cancelled.
            timeout: seconds to wait for that; then what is left is cancelled.

        Idempotent. Every handle has got its final event when this returns.
        """
        with self._wake:
            self._closing = True
            self._work = True
            if not drain:
                self._scheduler.cancel_all()
            self._wake.notify()
        if self._worker is not None:
            self._worker.join(timeout)
            if self._worker.is_alive():
                with self._wake:
                    self._scheduler.cancel_all()
                    self._work = True
                    self._wake.notify()
                self._worker.join()
        else:
            end = None if timeout is None else time.monotonic() + timeout
            while self._step():
                if end is not None and time.monotonic() > end:
                    self._scheduler.cancel_all()
            # Streams that wait for audio which nobody will send any more.
            self._scheduler.cancel_all()
            self._step()
        self._claim.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(drain=kind is None)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._work:
                    self._wake.wait()
                self._work = False
                closing = self._closing
            left = self._step()
            with self._wake:
                self._work = self._work or left
                idle = not (self._arrived or self._scheduler.active or self._scheduler.waiting)
                if closing and not self._work and idle:
                    return

    def _step(self) -> bool:
        with self._wake:
            for job in self._arrived:
                self._scheduler.add(job)
            self._arrived.clear()
        try:
            left = self._scheduler.step()
        except Exception as error:
            # Jobs end alone where their own call fails; what arrives here has hit the engine.
            with self._wake:
                self._broken = f"{type(error).__name__}: {error}"
            self._scheduler.fail_all(self._broken)
            left = False
        with self._wake:
            return left or bool(self._arrived)


def prompt_logits(
    engine: Engine,
    ids: Sequence[int],
    chunk: int | Sequence[int] | None = None,
    phase: Phase = "context",
    audio: AudioRows | None = None,
) -> torch.Tensor:
    """Logits of every position of a prompt.

    Args:
        engine: opened and not in use.
        ids: the prompt.
        chunk: tokens per call, or the length of every call in turn; None = as many as the engine
            takes.
        phase: "context", or "generation" to go token by token through the generation engine.
        audio: rows of the audio engine that belong to the prompt.

    Returns:
        float32 [len(ids), vocab_size] on the CPU.

    Raises UsageError when the ids, the chunk or the engine's state do not allow it.
    """
    GenerationRequest(ids, 1, audio=audio).check_prompt(engine.config)
    most = min(engine.config.chunk_tokens, engine.config.max_logits_rows)
    if phase == "generation":
        most = 1
    lengths = _chunks(len(ids), chunk if chunk is not None else most, most)
    collected = []
    with engine.claim(), torch.inference_mode():
        engine.executor.begin(0)
        poisoned = True
        try:
            start = 0
            for count in lengths:
                rows = [Row(ids, start, count, range(count), audio)]
                rows_and_padding: list[Row | None] = [*rows]
                if phase == "generation":
                    width = engine.executor.generation_widths[0]
                    rows_and_padding.extend([None] * (width - 1))
                logits = engine.step(phase, 0, rows_and_padding)
                collected.append(
                    logits[0, :count, : engine.config.vocab_size].float().cpu().clone()
                )
                start += count
            poisoned = False
        finally:
            engine.executor.end(0, poisoned)
    return torch.cat(collected)


def _chunks(total: int, chunk: int | Sequence[int], most: int) -> list[int]:
    if isinstance(chunk, int):
        lengths = [min(chunk, total - start) for start in range(0, total, max(chunk, 1))]
    else:
        lengths = list(chunk)
    if min(lengths) < 1 or max(lengths) > most or sum(lengths) != total:
        raise UsageError(
            "the prompt cannot be cut like that",
            where="chunk",
            expected=f"lengths of 1 .. {most} that add up to {total}",
            found=str(chunk),
        )
    return lengths
