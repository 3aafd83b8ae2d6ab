"""`tensorrt_llm_bls`: the whole way from a request to text in one model.

Unlike the ensemble it can be cancelled at any time over gRPC; over HTTP the next token of a stream
finds the connection closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from triton_repo.answers import AnswerOptions, TextAnswer
from triton_repo.control import DrainWatcher
from triton_repo.frontend.media import MediaPending
from triton_repo.frontend.options import FrontEnd, with_defaults
from triton_repo.frontend.pipeline import prepare, prepare_live
from triton_repo.frontend.problems import problem
from triton_repo.generation.base import GenerationEvent, call_from_prepared
from triton_repo.generation.channel import ChannelClient, socket_path
from triton_repo.generation.feed import AudioFeed
from triton_repo.models.base import (
    belongs_to_stream,
    decoupled,
    hide_from_collector,
    limit_threads,
    refuse_to_start,
    request_id_of,
    set_up_logging,
    tensors_of,
)
from triton_repo.models.live import END, PIECE_FIELDS, START, LiveStream, LiveStreams
from triton_repo.parameters import FrontEndParameters, model_parameters, open_front_end
from triton_repo.replies import Reply, ReplyLoop, describe
from triton_repo.tensor_io import Array, Row, batch_of, check_parameters, read_rows, response_tensor
from triton_repo.tensors import request_fields

MEDIA_THREADS = 8


class Bls:
    """The model behind `tensorrt_llm_bls/1/model.py`."""

    def __init__(self, pb_utils: Any, args: Mapping[str, str]) -> None:
        set_up_logging("tensorrt_llm_bls")
        try:
            parameters, directory, config = model_parameters(FrontEndParameters, args)
            limit_threads(parameters.threads)
            self._parameters = parameters
            self._decoupled = decoupled(config)
            self._front_end = open_front_end(parameters, directory)
            self._channel = ChannelClient(socket_path(parameters.repository_id))
            self._echo = any(i["name"] == "echo_output_ids" for i in config["input"])
        except Exception as error:
            refuse_to_start(pb_utils, error)
        self._fields = {f.name: f for f in request_fields(self._echo)}
        self._names = list(self._fields)
        self._replies = ReplyLoop(pb_utils)
        self._pool = ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="media")
        self._live = LiveStreams() if self._hears_streams else None
        self._drain = DrainWatcher("tensorrt_llm_bls", self._on_drain)
        hide_from_collector()

    def execute(self, requests: Sequence[Any]) -> None:
        """Start each request; answers come from other threads."""
        for request in requests:
            pending = _Pending(request_id_of(request))
            pending.reply = self._replies.open(request, pending.cancel)
            try:
                tensors = tensors_of(request)
                check_parameters(request.parameters(), self._names)
                rows = read_rows(tensors, self._fields)
                if belongs_to_stream(request):
                    self._take_piece(request, pending, rows)
                    continue
            except Exception as error:
                pending.reply.fail(*describe(error))
                continue
            try:
                self._start(pending, rows, self._front_end.at_once)
            except MediaPending:
                # Other requests do not wait for somebody's slow web server.
                self._pool.submit(self._start, pending, rows, self._front_end)

    def close(self) -> None:
        """End every request, then the threads."""
        self._drain.close()
        if self._live is not None:
            self._live.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._channel.close()
        self._replies.wait_idle(2.0)
        self._replies.close()

    def _on_drain(self, grace_s: float) -> None:
        # Generations end at the other side; here only the answers have to leave.
        self._replies.wait_idle(grace_s + 3.0)

    def _start(self, pending: _Pending, rows: list[Row], front_end: FrontEnd) -> None:
        reply = pending.reply
        assert reply is not None
        try:
            if rows[0].get("stop"):
                self._stop(pending.request_id, reply)
                return
            wanted = [with_defaults(row, front_end.defaults) for row in rows]
            options = AnswerOptions.of(wanted, self._parameters.exclude_input_in_output)
            if options.streaming and not self._decoupled:
                raise problem("stream", "Streaming is only supported in decoupled mode")
            calls = []
            offsets = []
            for row in rows:
                prepared = prepare(row, front_end)
                echo = None
                if self._echo:
                    echo = {k: row.get(k) for k in ("echo_output_ids", "echo_delay_ms")}
                calls.append(call_from_prepared(prepared, echo))
                offsets.append(prepared.prompt.arrays.get("offsets"))
            answer = TextAnswer(reply, options, calls, self._front_end.tokenizer)
            for sequence in answer.sequences:
                if offsets[sequence.row] is not None and sequence.index == 0:
                    sequence.extra["PROMPT_TOKEN_OFFSETS"] = offsets[sequence.row]
        except MediaPending:
            raise
        except Exception as error:
            reply.fail(*describe(error))
            return
        pending.answer = answer
        for sequence in answer.sequences:
            try:
                key = self._channel.submit(
                    sequence.call, partial(answer.on_event, sequence), pending.request_id
                )
            except Exception as error:
                _, message = describe(error)
                answer.on_event(sequence, GenerationEvent(error=("unavailable", message)))
                return
            sequence.cancel = partial(self._channel.cancel, key)
        if reply.cancel_seen or answer.failed:
            answer.cancel()

    @property
    def _hears_streams(self) -> bool:
        audio = self._front_end.audio
        return audio is not None and audio.streaming

    def _take_piece(self, request: Any, pending: _Pending, rows: list[Row]) -> None:
        """One request of a stream. Pieces come in order: one instance, one thread."""
        number, flags = request.correlation_id(), request.flags()
        reply = pending.reply
        assert reply is not None
        if self._live is None:
            raise problem("sequence_id", "this model hears no streams", found=number)
        if len(rows) != 1:
            raise problem("audio_samples", "a stream is one row", found=f"{len(rows)} rows")
        row = rows[0]
        if flags & START:
            self._live.check_new(number)
            self._open_stream(number, pending, row)
        else:
            others = sorted(row.keys() - PIECE_FIELDS)
            if others:
                raise problem(others[0], "belongs to the request that opens the stream")
        self._live.get(number).push(row, bool(flags & END))
        if not flags & START:
            reply.end()

    def _open_stream(self, number: int | str, pending: _Pending, row: Row) -> None:
        reply, live = pending.reply, self._live
        assert reply is not None and live is not None
        if not self._decoupled:
            raise problem("stream", "Streaming is only supported in decoupled mode")
        wanted = [with_defaults(row, self._front_end.defaults)]
        options = replace(
            AnswerOptions.of(wanted, self._parameters.exclude_input_in_output), streaming=True
        )
        prepared, audio = prepare_live(row, self._front_end)
        call = replace(call_from_prepared(prepared, None), feed=AudioFeed())
        answer = TextAnswer(reply, options, [call], self._front_end.tokenizer)
        sequence = answer.sequences[0]

        def deliver(event: GenerationEvent) -> None:
            if event.last:
                live.forget(number)
            answer.on_event(sequence, event)

        key = self._channel.submit(sequence.call, deliver, pending.request_id)
        sequence.cancel = partial(self._channel.cancel, key)

        def fail(kind: str, message: str) -> None:
            deliver(GenerationEvent(error=(kind, message)))
            self._channel.cancel(key)

        live.open(number, LiveStream(audio, partial(self._channel.audio, key), fail))
        pending.answer = answer
        if sequence.finish_reason is not None or answer.failed:
            # Refused before it was remembered.
            live.forget(number)

    def _stop(self, request_id: str, reply: Reply) -> None:
        if not request_id:
            raise problem("stop", "needs the request id of the request to stop")
        self._channel.stop(request_id)
        out: dict[str, Array] = {
            "text_output": batch_of(response_tensor("text_output"), [[""]]),
            "finish_reason": batch_of(response_tensor("finish_reason"), [["cancelled"]]),
        }
        reply.send(out, final=True)


class _Pending:
    """A request before and after its sequences exist; both may be cancelled."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.reply: Reply | None = None
        self.answer: TextAnswer | None = None

    def cancel(self) -> None:
        """End what runs; a request that has not started is ended when it does."""
        if self.answer is not None:
            self.answer.cancel()
