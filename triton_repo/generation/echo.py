"""A generator that answers with what it received, for tests and for finding front-end faults.

It plays back `echo_output_ids`, one by one with `echo_delay_ms` between them; without them it
repeats the prompt. It keeps a set of block keys like a prefix cache does, so that the number of
reused blocks shows whether salts and media keys isolate requests.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from triton_repo.frontend.problems import problem
from triton_repo.frontend.salt import block_keys
from triton_repo.frontend.stop import IdStopMatcher
from triton_repo.generation.base import Deliver, GenerationCall, GenerationEvent

BLOCK_SIZE = 4
MAX_KNOWN_BLOCKS = 4096
MAX_DELAY_MS = 60_000
EMBEDDING_SIZE = 16


@dataclass(order=True)
class _Step:
    due: float
    order: int
    task: _Task = field(compare=False)


@dataclass
class _Task:
    ids: list[int]
    delay_s: float
    deliver: Deliver
    extra: dict[str, Any]
    call: GenerationCall
    stop: IdStopMatcher
    position: int = 0
    arrival_ns: int = 0
    cancelled: bool = False


class EchoGenerator:
    """Plays back ids; all sequences share one thread.

    Args:
        vocab_size: ids below it are played back.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._known: OrderedDict[int, None] = OrderedDict()
        self._steps: list[_Step] = []
        self._active = 0
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="echo", daemon=True)
        self._thread.start()

    def submit(self, call: GenerationCall, deliver: Deliver) -> Callable[[], None]:
        """Schedule the playback. Raises UsageError for a delay or an id out of range."""
        delay = call.echo.get("echo_delay_ms") or 0
        if not 0 <= delay <= MAX_DELAY_MS:
            raise problem(
                "echo_delay_ms", "is out of range", expected=f"0 to {MAX_DELAY_MS}", found=delay
            )
        given = call.echo.get("echo_output_ids")
        wrong = [i for i in given or () if not 0 <= i < self._vocab_size]
        if wrong:
            raise problem(
                "echo_output_ids", "holds an id that is out of range",
                expected=f"0 to {self._vocab_size - 1}", found=wrong[0],
            )  # fmt: skip
        ids = list(call.prompt_ids if given is None else given)[: call.max_tokens]
        task = _Task(
            ids=ids,
            delay_s=delay / 1000,
            deliver=deliver,
            extra=self._received(call),
            call=call,
            stop=IdStopMatcher(call.stop_ids),
            arrival_ns=time.time_ns(),
        )
        with self._wake:
            self._active += 1
            heapq.heappush(self._steps, _Step(0.0, next(self._order), task))
            self._wake.notify()

        def cancel() -> None:
            with self._wake:
                task.cancelled = True
                heapq.heappush(self._steps, _Step(0.0, next(self._order), task))
                self._wake.notify()

        return cancel

    def gauges(self) -> dict[str, float]:
        """All sequences run at once."""
        with self._wake:
            return {"active": float(self._active), "waiting": 0.0}

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout=5.0)

    def _received(self, call: GenerationCall) -> dict[str, Any]:
        extra = [span.key for span in call.media]
        keys = block_keys(call.prompt_ids, BLOCK_SIZE, call.cache_salt_id, extra)
        with self._wake:
            reused = len(list(itertools.takewhile(lambda k: k in self._known, keys)))
            for key in keys:
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > MAX_KNOWN_BLOCKS:
                self._known.popitem(last=False)
        echo = call.echo
        sampling = call.sampling.given() | {
            "max_tokens": call.max_tokens,
            "end_ids": list(call.end_ids),
            "pad_id": echo.get("pad_id"),
            "stop_words": list(call.text.stop_words),
            "stop_words_ids": call.stop_ids,
            "bad_words_ids": call.bad_ids,
        }
        out: dict[str, Any] = {
            "ECHO_INPUT_IDS": echo.get("input_ids", call.prompt_ids),
            "ECHO_ATTENTION_MASK": echo.get("attention_mask", [1] * len(call.prompt_ids)),
            "ECHO_BLOCK_KEYS": keys,
            "ECHO_MM_VIEWS": json.dumps(echo.get("mm_views", {})),
            "ECHO_MEDIA": json.dumps([vars(span) for span in call.media]),
            "ECHO_SAMPLING": json.dumps(sampling),
            "kv_cache_reused_blocks": reused,
        }
        if echo.get("offsets") is not None:
            out["ECHO_PROMPT_TOKEN_OFFSETS"] = echo["offsets"]
        if call.cache_salt_id is not None:
            out["ECHO_CACHE_SALT_ID"] = call.cache_salt_id
        if call.task == "embed":
            out["embedding"] = toy_embedding(call.prompt_ids)
        return out

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._closing and (
                    not self._steps or self._steps[0].due > time.monotonic()
                ):
                    due = self._steps[0].due if self._steps else None
                    self._wake.wait(None if due is None else max(due - time.monotonic(), 0.0))
                if self._closing:
                    tasks = {id(s.task): s.task for s in self._steps}
                    self._steps.clear()
                else:
                    tasks = {0: heapq.heappop(self._steps).task}
            for task in tasks.values():
                task.cancelled = task.cancelled or self._closing
                if self._advance(task):
                    with self._wake:
                        due = time.monotonic() + task.delay_s if task.delay_s else 0.0
                        heapq.heappush(self._steps, _Step(due, next(self._order), task))
            if self._closing:
                return

    def _advance(self, task: _Task) -> bool:
        """Deliver the next event of one task; returns whether more will follow."""
        if task.position < 0:
            return False
        first = task.position == 0
        event = self._next_event(task)
        if first:
            event.extra.update(task.extra)
        if event.last:
            now = time.time_ns()
            event.extra.update(
                arrival_time_ns=task.arrival_ns,
                first_scheduled_time_ns=task.arrival_ns,
                first_token_time_ns=now if first else task.arrival_ns,
                last_token_time_ns=now,
            )
            # A second, late step of a cancelled task finds it ended.
            task.position = -1
            with self._wake:
                self._active -= 1
        task.deliver(event)
        return not event.last

    def _next_event(self, task: _Task) -> GenerationEvent:
        if task.cancelled:
            return GenerationEvent(finish_reason="cancelled")
        if task.position >= len(task.ids):
            return GenerationEvent(finish_reason="stop")
        token = task.ids[task.position]
        task.position += 1
        reason = None
        if token in task.call.end_ids or task.stop.feed(token):
            reason = "stop"
        elif task.position >= task.call.max_tokens:
            reason = "length"
        elif task.position >= len(task.ids):
            reason = "stop"
        # A stand-in with known values: the n-th token has log-probability -n / 8.
        return GenerationEvent([token], [-task.position / 8], reason)


def toy_embedding(ids: Sequence[int]) -> list[float]:
    """A unit vector of 16 numbers that depends on the tokens and their order, not on padding."""
    vector = [0.0] * EMBEDDING_SIZE
    for position, token in enumerate(ids):
        for i in range(EMBEDDING_SIZE):
            vector[i] += math.sin((token + 1) * (i + 1) * 0.37) / (position + 1)
    norm = math.sqrt(sum(v * v for v in vector)) or 1.0
    return [v / norm for v in vector]
