"""Collects the events of all sequences of one client request into responses.

`TextAnswer` makes the responses of the BLS model, `IdAnswer` those of `tensorrt_llm`.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from triton_repo.frontend.detokenize import MAX_CONTEXT_IDS, decode_all
from triton_repo.frontend.output import OutputText
from triton_repo.frontend.problems import problem
from triton_repo.frontend.tokenizer import Tokenizer
from triton_repo.generation.base import GenerationCall, GenerationEvent
from triton_repo.replies import Reply
from triton_repo.tensor_io import Array, Row, batch_of, response_tensor
from triton_repo.tensors import GENERATED

_GENERATED = {t.name: t for t in GENERATED}
# All rows of a request are answered together.
_ANSWER_FIELDS = (
    "stream", "exclude_input_in_output", "return_log_probs", "return_num_input_tokens",
    "return_num_output_tokens", "return_perf_metrics",
)  # fmt: skip
PERF_METRICS = (
    "arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns",
)  # fmt: skip


@dataclass(frozen=True)
class AnswerOptions:
    """What a client wants back, for all rows of a request."""

    streaming: bool
    exclude_input: bool
    log_probs: bool
    input_count: bool
    output_count: bool
    perf_metrics: bool

    @staticmethod
    def of(rows: Sequence[Row], exclude_input_default: bool) -> AnswerOptions:
        """From the fields of a request. Raises UsageError where its rows want different answers."""
        row = rows[0]
        for name in _ANSWER_FIELDS if len(rows) > 1 else ():
            if any(other.get(name) != row.get(name) for other in rows):
                raise problem(name, "must be the same in all rows of a request")
        exclude = row.get("exclude_input_in_output")
        return AnswerOptions(
            streaming=bool(row.get("stream", False)),
            exclude_input=exclude_input_default if exclude is None else bool(exclude),
            log_probs=bool(row.get("return_log_probs", False)),
            input_count=bool(row.get("return_num_input_tokens", False)),
            output_count=bool(row.get("return_num_output_tokens", False)),
            perf_metrics=bool(row.get("return_perf_metrics", False)),
        )


@dataclass
class SequenceState:
    """One sequence on its way to the client.

    `ids`, `log_probs`, `pieces`, `thoughts` and `extra` hold what has not been sent yet; when not
    streaming that is everything.
    """

    row: int
    index: int
    call: GenerationCall
    text: OutputText | None = None
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    generated: int = 0
    cum_log_prob: float = 0.0
    sent: int = 0
    cancel: Callable[[], None] | None = None


class Answer:
    """All sequences of one client request."""

    def __init__(
        self, reply: Reply, options: AnswerOptions, calls: Sequence[GenerationCall]
    ) -> None:
        self._reply, self._options = reply, options
        self._lock = threading.Lock()
        self._failed = False
        self.key = secrets.token_hex(8)
        self.sequences = [
            SequenceState(row, index, one)
            for row, call in enumerate(calls)
            for index, one in enumerate(call.sequences())
        ]
        self._rows = len(calls)
        self._left = len(self.sequences)
        self._several = any(s.index for s in self.sequences)

    @property
    def failed(self) -> bool:
        """Whether an error was sent."""
        return self._failed

    def cancel(self) -> None:
        """End every sequence that still runs."""
        for sequence in self.sequences:
            if sequence.finish_reason is None and sequence.cancel is not None:
                sequence.cancel()

    def on_event(self, sequence: SequenceState, event: GenerationEvent) -> None:
        """Take one event; may be called from any thread."""
        stop = False
        with self._lock:
            if self._failed or sequence.finish_reason is not None:
                return
            if event.error is not None:
                self._failed = True
                self._reply.fail(*event.error)
            else:
                stop = self._take(sequence, event)
                if sequence.finish_reason is not None:
                    self._left -= 1
                self._respond(sequence)
        if self._failed:
            self.cancel()
        elif stop and sequence.cancel is not None:
            sequence.cancel()

    def _take(self, sequence: SequenceState, event: GenerationEvent) -> bool:
        """Add an event to the state; returns whether generation has to be ended."""
        ids, log_probs, reason = event.token_ids, event.log_probs, event.finish_reason
        text = sequence.text
        stopped = False
        if text is not None:
            piece, used = text.feed(ids)
            ids, log_probs = ids[:used], log_probs[:used]
            stopped = text.stopped and reason is None
            if text.stopped:
                reason = "stop"
            if reason is not None:
                piece = piece.joined(text.finish())
                if text.stopped:
                    reason = "stop"
            if piece.text:
                sequence.pieces.append(piece.text)
            if piece.reasoning:
                sequence.thoughts.append(piece.reasoning)
        sequence.ids += ids
        sequence.log_probs += log_probs
        sequence.generated += len(ids)
        sequence.cum_log_prob += sum(log_probs)
        sequence.extra.update(event.extra)
        sequence.finish_reason = reason
        return stopped

    def _respond(self, sequence: SequenceState) -> None:
        done = self._left == 0
        if not self._options.streaming:
            if done:
                self._reply.send(self._whole(), final=True)
            return
        if sequence.finish_reason is not None or self._worth_sending(sequence):
            self._reply.send(self._piece(sequence), final=done)
            sequence.sent += 1
            sequence.ids, sequence.log_probs, sequence.extra = [], [], {}
            sequence.pieces, sequence.thoughts = [], []

    def _worth_sending(self, sequence: SequenceState) -> bool:
        raise NotImplementedError

    def _piece(self, sequence: SequenceState) -> dict[str, Array]:
        raise NotImplementedError

    def _whole(self) -> dict[str, Array]:
        raise NotImplementedError

    def _shared(self, groups: list[list[SequenceState]]) -> dict[str, Array]:
        """Outputs that text and ids answers have in common; one group per batch row."""
        options = self._options
        out: dict[str, Array] = {}

        def put(name: str, rows: Sequence[Any]) -> None:
            out[name] = batch_of(response_tensor(name), rows)

        if options.log_probs:
            longest = max(len(s.log_probs) for g in groups for s in g)
            put("cum_log_probs", [[s.cum_log_prob for s in g] for g in groups])
            put(
                "output_log_probs",
                [[s.log_probs + [0.0] * (longest - len(s.log_probs)) for s in g] for g in groups],
            )
        if options.input_count:
            put("num_input_tokens", [[len(g[0].call.prompt_ids)] for g in groups])
        if options.output_count:
            put("num_output_tokens", [[sum(s.generated for s in g)] for g in groups])
        names = dict.fromkeys(k for g in groups for k in g[0].extra)
        for name in names:
            values = [g[0].extra.get(name) for g in groups]
            if (name in PERF_METRICS and not options.perf_metrics) or None in values:
                continue
            tensor = response_tensor(name)
            put(name, [[v] if tensor.dims == (1,) else v for v in values])
        return out

    def _indices(self, sequence: SequenceState) -> dict[str, Array]:
        """Which row and sequence a streamed response belongs to."""
        out = {}
        if self._rows > 1:
            out["batch_index"] = batch_of(response_tensor("batch_index"), [[sequence.row]])
        if self._several:
            out["sequence_index"] = batch_of(response_tensor("sequence_index"), [[sequence.index]])
        return out

    def _by_row(self) -> list[list[SequenceState]]:
        return [[s for s in self.sequences if s.row == row] for row in range(self._rows)]


class TextAnswer(Answer):
    """Responses with text, for the BLS model."""

    def __init__(
        self,
        reply: Reply,
        options: AnswerOptions,
        calls: Sequence[GenerationCall],
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(reply, options, calls)
        self._tokenizer = tokenizer
        for sequence in self.sequences:
            call = sequence.call
            sequence.text = OutputText(tokenizer, call.prompt_ids, call.text)

    def _worth_sending(self, sequence: SequenceState) -> bool:
        # Ids without text yet (half a character, a possible stop word) go with the text to come.
        said = sequence.pieces or sequence.thoughts
        return bool(said) or (sequence.sent == 0 and bool(sequence.extra))

    def _piece(self, sequence: SequenceState) -> dict[str, Array]:
        return self._indices(sequence) | self._texts([[sequence]], prompt=False)

    def _whole(self) -> dict[str, Array]:
        return self._texts(self._by_row(), prompt=not self._options.exclude_input)

    def _texts(self, groups: list[list[SequenceState]], prompt: bool) -> dict[str, Array]:
        def text(sequence: SequenceState) -> str:
            call = sequence.call
            front = ""
            if prompt and call.has_text:
                front = decode_all(
                    self._tokenizer, call.prompt_ids, (), call.text.skip_special_tokens
                )
            return front + "".join(sequence.pieces)

        out = {
            "text_output": batch_of(
                response_tensor("text_output"), [[text(s) for s in g] for g in groups]
            ),
            "output_ids": id_tensor([[s.ids for s in g] for g in groups]),
        }
        thoughts = [["".join(s.thoughts) for s in g] for g in groups]
        if any(t for g in thoughts for t in g):
            out["reasoning_content"] = batch_of(response_tensor("reasoning_content"), thoughts)
        if all(s.finish_reason is not None for g in groups for s in g):
            out["finish_reason"] = batch_of(
                response_tensor("finish_reason"), [[s.finish_reason for s in g] for g in groups]
            )
            reasons = [[(s.text and s.text.stop_reason) or "" for s in g] for g in groups]
            if any(r for g in reasons for r in g):
                out["stop_reason"] = batch_of(response_tensor("stop_reason"), reasons)
            calls = [[(s.text and s.text.tool_calls) or "" for s in g] for g in groups]
            if any(c for g in calls for c in g):
                out["tool_calls"] = batch_of(response_tensor("tool_calls"), calls)
        return out | self._shared(groups)


class IdAnswer(Answer):
    """Responses with ids, for `tensorrt_llm`; `stream_state` tells postprocessing the rest."""

    def _worth_sending(self, sequence: SequenceState) -> bool:
        return bool(sequence.ids) or (sequence.sent == 0 and bool(sequence.extra))

    def _piece(self, sequence: SequenceState) -> dict[str, Array]:
        state: dict[str, Any] = {
            "answer": self.key,
            "key": f"{self.key}:{sequence.row}:{sequence.index}",
            "number": sequence.sent,
        }
        if sequence.sent == 0:
            state |= text_state(sequence.call)
        out = self._indices(sequence)
        out |= self._ids([[sequence]], [[sequence.ids]])
        out["stream_state"] = batch_of(_GENERATED["stream_state"], [json.dumps(state)])
        return out

    def _whole(self) -> dict[str, Array]:
        groups = self._by_row()
        prompt = not self._options.exclude_input
        fronts = [g[0].call.prompt_ids if prompt and g[0].call.has_text else [] for g in groups]
        ids = [[front + s.ids for s in g] for front, g in zip(fronts, groups, strict=True)]
        states = [
            json.dumps(text_state(g[0].call) | {"prompt_length": len(front)})
            for front, g in zip(fronts, groups, strict=True)
        ]
        out = self._ids(groups, ids)
        out["stream_state"] = batch_of(_GENERATED["stream_state"], states)
        return out

    def _ids(
        self, groups: list[list[SequenceState]], ids: list[list[list[int]]]
    ) -> dict[str, Array]:
        out = {
            "output_ids": id_tensor(ids),
            "sequence_length": batch_of(
                _GENERATED["sequence_length"], [[len(i) for i in g] for g in ids]
            ),
        }
        if all(s.finish_reason is not None for g in groups for s in g):
            out["finish_reason"] = batch_of(
                _GENERATED["finish_reason"], [[s.finish_reason for s in g] for g in groups]
            )
        return out | self._shared(groups)


def text_state(call: GenerationCall) -> dict[str, Any]:
    """What postprocessing has to know to make the text of a sequence."""
    return {
        "context": call.prompt_ids[-MAX_CONTEXT_IDS:],
        "text": call.text.to_json(),
    }


def id_tensor(rows: list[list[list[int]]]) -> Array:
    """`[batch, sequences, length]`, shorter ones filled with -1."""
    longest = max(len(ids) for sequences in rows for ids in sequences)
    most = max(map(len, rows))
    empty = [-1] * longest
    filled = [
        [ids + [-1] * (longest - len(ids)) for ids in sequences] + [empty] * (most - len(sequences))
        for sequences in rows
    ]
    return np.array(filled, dtype=np.int32).reshape(len(rows), most, longest)
