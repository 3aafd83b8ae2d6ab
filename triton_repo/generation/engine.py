"""Generation by an engine session: continuous batching over the engine's slots."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plugins.support.errors import CapabilityError, UsageError
from runtime.audio_rows import AudioRows
from runtime.engine import Engine
from runtime.requests import Timings
from runtime.session import GenerationHandle, GenerationRequest, SamplingParams, Session
from triton_repo.frontend.problems import problem
from triton_repo.generation.base import Deliver, GenerationCall, GenerationEvent
from triton_repo.generation.hearing import Hearing

LOG = logging.getLogger(__name__)

CLIENT_NAMES = {
    "prompt_ids": "input_ids",
    "max_new_tokens": "request_output_len",
    "end_ids": "end_id",
    "stop_ids": "stop_words_list",
    "bad_ids": "bad_words_list",
    "audio": "audio_bytes",
}


class EngineGenerator:
    """Runs calls on one session. Raises what `Engine.load` raises."""

    def __init__(self, engine_dir: Path, executor: str, device: str, max_queue: int) -> None:
        self._engine = Engine.load(engine_dir, executor=executor, device=device, preload=True)
        for line in self._engine.notices:
            LOG.info(line)
        hears = "audio" in self._engine.config.engines
        self._hearing = Hearing(self._engine) if hears else None
        self._session = Session(self._engine, max_queue=max_queue)

    def submit(self, call: GenerationCall, deliver: Deliver) -> Callable[[], None]:
        """Queue a call; its events come from a thread of their own."""
        if call.task == "embed" and self._engine.config.build_config.pooling is None:
            raise CapabilityError(
                "this engine has no pooling",
                where="task",
                expected="an engine built with --pooling",
            )
        if call.features is None and call.feed is None:
            if call.media:
                raise CapabilityError(
                    "this engine takes text only", where=f"{call.media[0].modality}_url"
                )
            return self._start(call, None, deliver).cancel
        if self._hearing is None:
            raise CapabilityError("this engine takes text only", where="input_features")
        return self._hearing.submit(call, lambda rows: self._start(call, rows, deliver), deliver)

    def _start(
        self, call: GenerationCall, audio: AudioRows | None, deliver: Deliver
    ) -> GenerationHandle:
        request = GenerationRequest(
            prompt_ids=call.prompt_ids,
            max_new_tokens=call.max_tokens,
            sampling=_sampling(call),
            end_ids=call.end_ids,
            stop_ids=call.stop_ids,
            bad_ids=call.bad_ids,
            audio=audio,
            embed=call.task == "embed",
        )
        try:
            handle = self._session.submit(request)
        except UsageError as error:
            # The names that a client of this model knows.
            error.where = CLIENT_NAMES.get(error.where or "", error.where)
            raise
        threading.Thread(
            target=_pump, args=(handle, deliver), name="generation", daemon=True
        ).start()
        return handle

    def gauges(self) -> dict[str, float]:
        """Sequences with and without a slot."""
        stats = self._session.stats()
        return {"active": float(stats.active), "waiting": float(stats.waiting)}

    def close(self) -> None:
        """Cancel what runs and close the session."""
        if self._hearing is not None:
            self._hearing.close()
        self._session.close()


def _pump(handle: GenerationHandle, deliver: Deliver) -> None:
    for event in handle:
        extra: dict[str, Any] = {}
        if event.finish_reason is not None:
            extra = _times(handle.timings)
        if event.embedding is not None:
            extra["embedding"] = event.embedding.tolist()
        if event.finish_reason == "error":
            deliver(GenerationEvent(error=("internal", event.error or "the engine has failed")))
            return
        tokens = [] if event.token_id is None else [event.token_id]
        log_probs = [event.log_prob or 0.0] if tokens else []
        deliver(GenerationEvent(tokens, log_probs, event.finish_reason, extra=extra))


def _times(timings: Timings) -> dict[str, Any]:
    return {
        "arrival_time_ns": timings.arrival,
        "first_scheduled_time_ns": timings.scheduled,
        "first_token_time_ns": timings.first_token,
        "last_token_time_ns": timings.last_token,
    }


def _sampling(call: GenerationCall) -> SamplingParams:
    given = call.sampling.given()
    given.pop("num_return_sequences", None)
    if given.pop("length_penalty", None) is not None:
        raise problem("length_penalty", "only has a meaning for beam search")
    return SamplingParams(**given)
