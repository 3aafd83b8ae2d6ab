"""Continuous batching over slots: which sequence does what in the next call.

One `step` admits waiting requests into free slots in order of arrival, feeds one chunk of prompts,
and lets every running sequence make one token. Not thread-safe; `runtime.session` drives it.

A generation call is uniform: every running slot brings its newest token and as many drafts as all
others, padding slots bring nothing; whatever has another length is a prompt and goes through the
context engine. What is accepted of the drafts is decided between calls, see `runtime.speculative`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from plugins.support.errors import ToolchainError
from runtime.contract import HIDDEN, TOKEN_BLOCK, Phase
from runtime.engine import Engine
from runtime.executors import OUTPUTS
from runtime.pooling import Pool
from runtime.requests import FinishReason, GenerationRequest, Timings, TokenEvent
from runtime.rows import Row
from runtime.sampling import Sampled, TokenChooser, choose_tokens
from runtime.slots import SlotPool
from runtime.speculative import Drafter, DraftState, checked_count


@dataclass(eq=False)
class Job:
    """One accepted request.

    Attributes:
        request: what was asked.
        emit: gets every event, in order; the last one has a finish reason.
        timings: filled as things happen.
        cancelled: set by anyone, at any time; heeded at the next step.
        drafts: what is guessed to come next.
        rejected: tokens of the last generation call that did not stay.
        pool: of a request for an embedding; None for all others.
    """

    request: GenerationRequest
    emit: Callable[[TokenEvent], None]
    timings: Timings = field(default_factory=Timings)
    cancelled: bool = False
    slot: int = -1
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    chooser: TokenChooser | None = None
    drafts: DraftState = field(default_factory=DraftState)
    rejected: int = 0
    pool: Pool | None = None

    @property
    def prompt_length(self) -> int:
        """Ids of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is not cached yet."""
        return self.cached < self.prompt_length

    def chunk(self, most: int) -> int:
        """Prompt tokens of the next context call."""
        return min(most, self.prompt_length - self.cached)

    def heard(self, count: int) -> bool:
        """Whether the audio of the next `count` tokens is there."""
        audio = self.request.audio
        return audio is None or audio.covers(self.cached + count - 1)

    @property
    def audio_is_over(self) -> bool:
        """Whether the stream has ended and every row has its token, were it one of the prompt."""
        audio = self.request.audio
        return audio is not None and audio.over(len(self.tokens))


@dataclass
class Totals:
    """What a scheduler has done since it began; times in seconds, summed over requests.

    Attributes:
        finished: requests by finish reason.
        prompt_tokens, generated_tokens: processed.
        context_calls, generation_calls: engine calls.
        queue_wait_s, time_to_first_token_s: sums over requests that got that far.
        scheduled, answered: how many got that far.
        decode_s, decode_tokens: time between tokens, and how many such gaps.
        drafted, accepted: draft tokens that were verified, and that became part of an answer.
    """

    finished: dict[FinishReason, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "cancelled": 0, "error": 0}
    )
    prompt_tokens: int = 0
    generated_tokens: int = 0
    context_calls: int = 0
    generation_calls: int = 0
    scheduled: int = 0
    queue_wait_s: float = 0.0
    answered: int = 0
    time_to_first_token_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    drafted: int = 0
    accepted: int = 0


class Scheduler:
    """Runs jobs over the slots of one engine.

    Args:
        engine: opened; nobody else may use its slots meanwhile.
        num_draft_tokens: drafts per generation call; None = as many as the engines verify.

    Raises UsageError for more drafts than the engines verify, CapabilityError for an executor that
    lacks what the engines are for.
    """

    def __init__(self, engine: Engine, num_draft_tokens: int | None = None) -> None:
        self._engine = engine
        count = checked_count(engine.config, num_draft_tokens)
        self._drafter = Drafter(engine, count) if count else None
        pools = engine.config.build_config.pooling is not None
        self._outputs = OUTPUTS.require(engine.executor) if pools else None
        self._pool = SlotPool(engine.slots)
        self._waiting: deque[Job] = deque()
        self._active: dict[int, Job] = {}
        self._cancelling = False
        self.totals = Totals()

    @property
    def waiting(self) -> int:
        """Jobs without a slot."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Jobs with a slot."""
        return len(self._active)

    @property
    def free_slots(self) -> int:
        """Slots without a job."""
        return len(self._pool)

    def add(self, job: Job) -> None:
        """Queue a job whose request has been checked."""
        self._waiting.append(job)

    def step(self) -> bool:
        """Do one round. Returns whether any job can go on; one that waits for audio cannot.

        An engine call that fails ends the jobs in it with finish reason "error", no others.
        """
        self._drop_cancelled()
        self._end_streams()
        self._admit()
        self._prefill()
        self._decode()
        self._end_streams()
        if self._waiting and self.free_slots:
            return True
        chunk = self._engine.config.chunk_tokens
        return any(
            job.heard(job.chunk(chunk) if job.prefilling else 1) for job in self._active.values()
        )

    def _end_streams(self) -> None:
        for job in [job for job in self._active.values() if job.audio_is_over]:
            self._finish(job, TokenEvent(None, finish_reason="stop"))

    def fail_all(self, error: str) -> None:
        """End every job with finish reason "error" without touching the engine."""
        for job in [*self._active.values(), *self._waiting]:
            self._report(job, TokenEvent(None, finish_reason="error", error=error))
        self._active.clear()
        self._waiting.clear()

    def cancel_all(self) -> None:
        """End every job as cancelled at the next step. May be called from any thread."""
        self._cancelling = True

    def _drop_cancelled(self) -> None:
        gone = TokenEvent(None, finish_reason="cancelled")
        everything = self._cancelling
        if everything:
            self._cancelling = False
        for job in [job for job in self._active.values() if everything or job.cancelled]:
            self._finish(job, gone)
        for job in [job for job in self._waiting if everything or job.cancelled]:
            self._waiting.remove(job)
            self._report(job, gone)

    def _admit(self) -> None:
        while self._waiting and len(self._pool):
            job = self._waiting.popleft()
            job.slot = self._pool.take()
            # From here on the job is found by whoever ends all jobs, whatever raises below.
            self._active[job.slot] = job
            job.tokens = list(job.request.prompt_ids)
            job.timings.scheduled = time.monotonic_ns()
            self.totals.scheduled += 1
            self.totals.queue_wait_s += job.timings.queue_wait_s()
            try:
                pooling = self._engine.config.build_config.pooling
                if job.request.embed and pooling is not None:
                    job.pool = Pool(pooling)
                job.chooser = job.request.chooser(self._engine.config.vocab_size)
                self._engine.executor.begin(job.slot)
            except Exception as error:
                self._finish_with_error(job, _message(error))

    def _prefill(self) -> None:
        jobs = self._prefill_range()
        if not jobs:
            return
        chunk = self._engine.config.chunk_tokens
        rows = []
        for job in jobs:
            count = job.chunk(chunk)
            done = job.cached + count == job.prompt_length
            logits = (count - 1,) if done and job.pool is None else ()
            rows.append(Row(job.tokens, job.cached, count, logits, job.request.audio))
        self.totals.context_calls += 1
        self._call("context", jobs[0].slot, jobs, rows)

    def _prefill_range(self) -> list[Job]:
        """The job that waits longest for its prompt, and neighbours that fit into its call."""
        config = self._engine.config
        prefilling = {
            slot: job
            for slot, job in self._active.items()
            if job.prefilling and job.heard(job.chunk(config.chunk_tokens))
        }
        if not prefilling:
            return []
        oldest = min(prefilling.values(), key=lambda job: job.timings.scheduled)
        most = config.build_config.max_num_tokens

        def padded(job: Job) -> int:
            return -(-job.chunk(config.chunk_tokens) // TOKEN_BLOCK) * TOKEN_BLOCK

        first = last = oldest.slot
        columns = padded(oldest)
        for step in (1, -1):
            while (neighbour := prefilling.get((last if step > 0 else first) + step)) is not None:
                wider = max(columns, padded(neighbour))
                slots = last - first + 2
                if slots > config.context_slots or slots * wider > most:
                    break
                columns = wider
                first, last = min(first, neighbour.slot), max(last, neighbour.slot)
        return [prefilling[slot] for slot in range(first, last + 1)]

    def _decode(self) -> None:
        running = {slot: job for slot, job in self._active.items() if not job.prefilling}
        ready = {
            slot: job
            for slot, job in running.items()
            if job.cached < len(job.tokens) and job.heard(1)
        }
        if not ready:
            return
        needed = max(ready) + 1
        width = next(w for w in self._engine.executor.generation_widths if w >= needed)
        jobs = [ready.get(slot) for slot in range(width)]
        if self._drafter is not None:
            try:
                drafts = {slot: job.drafts for slot, job in ready.items()}
                self._drafter.extend(drafts, width)
            except Exception as error:
                for job in ready.values():
                    self._finish_with_error(job, _message(error))
                return
        rows = [self._step_row(job) if job else None for job in jobs]
        self.totals.generation_calls += 1
        self._call("generation", 0, jobs, rows)

    def _step_row(self, job: Job) -> Row:
        """The newest token of a job and its drafts, all to be verified."""
        drafts = job.drafts.tokens if self._drafter is not None else []
        count = 1 + len(drafts)
        sequence = [*job.tokens, *drafts] if drafts else job.tokens
        return Row(
            sequence, job.cached, count, range(count), job.request.audio, rejected=job.rejected
        )

    def _call(
        self, phase: Phase, first: int, jobs: Sequence[Job | None], rows: Sequence[Row | None]
    ) -> None:
        taking_part = [
            (index, job, row)
            for index, (job, row) in enumerate(zip(jobs, rows, strict=True))
            if job is not None and row is not None
        ]
        try:
            logits = self._engine.step(phase, first, rows)
            self._choose(logits, taking_part)
            if phase == "context":
                self.totals.prompt_tokens += sum(row.count for _, _, row in taking_part)
                self._pool_states(taking_part)
            if self._drafter is not None:
                self._follow(first, len(rows), taking_part)
        except Exception as error:
            for _, job, _ in taking_part:
                if self._active.get(job.slot) is job:
                    self._finish_with_error(job, _message(error))

    def _choose(self, logits: torch.Tensor, calls: Sequence[tuple[int, Job, Row]]) -> None:
        """Take tokens from a call's logits: one, and one more for every draft that was right."""
        going_on = [(index, job, row) for index, job, row in calls if row.logits]
        place = -1
        while going_on:
            place += 1
            choosers = [job.chooser for _, job, _ in going_on if job.chooser is not None]
            picked = [index for index, _, _ in going_on]
            sampled = choose_tokens(logits[picked, place], choosers)
            further = []
            for (index, job, row), result in zip(going_on, sampled, strict=True):
                self._take(job, result)
                known = row.start + place + 1
                if place + 1 < len(row.logits) and result.token_id == row.sequence[known]:
                    self.totals.accepted += 1
                    if self._active.get(job.slot) is job:
                        further.append((index, job, row))
            going_on = further
        for _, job, row in calls:
            verified = len(row.logits) > 1
            # Of a step stays what a chosen token lies behind.
            stays = len(job.tokens) - 1 - row.start if verified else row.count
            self.totals.drafted += len(row.logits) - 1 if verified else 0
            job.rejected = row.count - stays
            job.cached += stays

    def _pool_states(self, calls: Sequence[tuple[int, Job, Row]]) -> None:
        """Add what a context call has read to embeddings, and end those that are whole."""
        for index, job, row in calls:
            if job.pool is None or self._outputs is None:
                continue
            job.pool.add(self._outputs.output(HIDDEN)[index, : row.count])
            if not job.prefilling:
                event = TokenEvent(None, finish_reason="stop", embedding=job.pool.vector())
                self._finish(job, event)

    def _follow(self, first: int, width: int, calls: Sequence[tuple[int, Job, Row]]) -> None:
        """Let the draft engine read what the text engine has read, as far as it was accepted."""
        assert self._drafter is not None
        states: list[DraftState | None] = [None] * width
        next_ids: list[list[int]] = [[]] * width
        for index, job, row in calls:
            if self._active.get(job.slot) is job:
                states[index] = job.drafts
                next_ids[index] = job.tokens[row.start + 1 : job.cached + 1]
        if any(states):
            self._drafter.follow(first, states, next_ids)

    def _take(self, job: Job, sampled: Sampled) -> None:
        """Add one token to a job and end the job if that was its last."""
        if sampled.error is not None:
            self._finish_with_error(job, sampled.error)
            return
        token = sampled.token_id
        assert job.chooser is not None
        job.tokens.append(token)
        job.chooser.accept(token)
        now = time.monotonic_ns()
        timings = job.timings
        if timings.tokens == 0:
            timings.first_token = now
            self.totals.answered += 1
            self.totals.time_to_first_token_s += timings.time_to_first_token_s()
        else:
            self.totals.decode_s += (now - timings.last_token) / 1e9
            self.totals.decode_tokens += 1
        timings.last_token = now
        timings.tokens += 1
        self.totals.generated_tokens += 1
        reason = _finish_reason(job)
        event = TokenEvent(token, sampled.log_prob, reason, sampled.top_log_probs)
        if reason is None:
            job.emit(event)
        else:
            self._finish(job, event)

    def _finish_with_error(self, job: Job, error: str) -> None:
        self._finish(job, TokenEvent(None, finish_reason="error", error=error), poisoned=True)

    def _finish(self, job: Job, event: TokenEvent, poisoned: bool = False) -> None:
        del self._active[job.slot]
        self._pool.give_back(job.slot)
        try:
            self._engine.executor.end(job.slot, poisoned)
        finally:
            self._report(job, event)

    def _report(self, job: Job, event: TokenEvent) -> None:
        assert event.finish_reason is not None
        self.totals.finished[event.finish_reason] += 1
        job.emit(event)


def _finish_reason(job: Job) -> FinishReason | None:
    request = job.request
    assert job.chooser is not None
    answer = job.chooser.answer
    if answer[-1] in request.end_ids:
        return "stop"
    for stop in request.stop_ids:
        if tuple(answer[-len(stop) :]) == tuple(stop):
            return "stop"
    return "length" if len(answer) >= request.max_new_tokens else None


def _message(error: Exception) -> str:
    if isinstance(error, ToolchainError):
        return str(error)
    return f"{type(error).__name__}: {error}"
