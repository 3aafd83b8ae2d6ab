"""`postprocessing`: from ids to text, with a state per sequence."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from triton_repo.answers import id_tensor
from triton_repo.frontend.detokenize import decode_all
from triton_repo.frontend.output import OutputText, Piece
from triton_repo.frontend.problems import problem
from triton_repo.generation.base import StreamState
from triton_repo.generation.channel import ChannelClient, socket_path
from triton_repo.models.base import (
    hide_from_collector,
    limit_threads,
    refuse_to_start,
    set_up_logging,
    tensors_of,
)
from triton_repo.parameters import CommonParameters, model_parameters, open_tokenizer
from triton_repo.replies import CANCEL_POLL_S, describe, triton_error
from triton_repo.tensor_io import Array, batch_of, response_tensor
from triton_repo.tensors import POSTPROCESSING_INPUTS

_REQUIRED = frozenset(t.name for t, _ in POSTPROCESSING_INPUTS if not t.optional)
# A stream whose end never came is forgotten after this long.
FORGET_AFTER_S = 3600.0
TENSOR_NAMES = {
    "text_output": "OUTPUT",
    "output_ids": "OUTPUT_IDS",
    "finish_reason": "OUT_FINISH_REASON",
    "stop_reason": "STOP_REASON",
    "tool_calls": "TOOL_CALLS",
    "reasoning_content": "REASONING_CONTENT",
}


class _Part(NamedTuple):
    """What one response says of one sequence."""

    text: str
    reasoning_content: str
    ids: list[int]
    finish_reason: str | None
    stop_reason: str | None
    tool_calls: str | None


class _Stream:
    def __init__(self, text: OutputText) -> None:
        self.text = text
        self.number = 0
        self.used = self.looked = time.monotonic()


class Postprocessing:
    """The model behind `postprocessing/1/model.py`.

    Responses of one stream come in order because there is one instance; a gap is an error.
    """

    def __init__(self, pb_utils: Any, args: Mapping[str, str]) -> None:
        set_up_logging("postprocessing")
        self._pb = pb_utils
        try:
            parameters, directory, _ = model_parameters(CommonParameters, args)
            limit_threads(parameters.threads)
            self._tokenizer = open_tokenizer(parameters, directory)
            self._channel = ChannelClient(socket_path(parameters.repository_id))
        except Exception as error:
            refuse_to_start(pb_utils, error)
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        hide_from_collector()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Text for each response of `tensorrt_llm`."""
        pb = self._pb
        responses = []
        for request in requests:
            try:
                inputs = tensors_of(request)
                for name in _REQUIRED - inputs.keys():
                    # Triton counts inputs; an optional one may stand for a required one.
                    raise problem(name, "is required")
                states = [StreamState.parse(bytes(s)) for s in inputs["STREAM_STATE"].reshape(-1)]
                outputs = self.text_tensors(inputs, states)
                self._look_for_clients(request, states)
                tensors = [pb.Tensor(TENSOR_NAMES[n], a) for n, a in outputs.items()]
                responses.append(pb.InferenceResponse(tensors))
            except Exception as error:
                responses.append(pb.InferenceResponse(error=triton_error(pb, *describe(error))))
        return responses

    def close(self) -> None:
        """Forget all streams."""
        self._streams.clear()
        self._channel.close()

    def _look_for_clients(self, request: Any, states: Sequence[StreamState]) -> None:
        """End the generation of streams whose client is gone.

        An ensemble does not cancel a step that runs, but marks the requests that follow: those of
        this model. Looking is a call into the server, so not every piece of text does it.
        """
        now = time.monotonic()
        streams = [self._streams.get(state.key) for state in states]
        due = [s for s in streams if s is not None and now - s.looked >= CANCEL_POLL_S]
        if not due:
            return
        for stream in due:
            stream.looked = now
        if request.is_cancelled():
            for answer in {state.answer for state in states if state.answer}:
                self._channel.lost(answer)

    def text_tensors(
        self, inputs: Mapping[str, Array], states: Sequence[StreamState]
    ) -> dict[str, Array]:
        """Text outputs by public name for the inputs of one request, and the state of each row.

        Raises UsageError for tensors that do not fit each other.
        """
        tokens, lengths = inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"]
        reasons = inputs.get("FINISH_REASON")
        _check(tokens, lengths, reasons)
        done: list[list[_Part]] = []
        for row, state in enumerate(states):
            finished = None
            if reasons is not None:
                finished = [bytes(reason).decode("utf-8", "replace") for reason in reasons[row]]
            sequences = [
                tokens[row, s, : int(lengths[row, s])].tolist() for s in range(lengths.shape[1])
            ]
            if state.key:
                reason = finished[0] if finished else None
                done.append([self._stream(state, sequences[0], reason)])
            else:
                reasons_of_row = finished or [""] * len(sequences)
                done.append(
                    [
                        self._complete(state, one, reason)
                        for one, reason in zip(sequences, reasons_of_row, strict=True)
                    ]
                )

        def column(name: str) -> list[list[str]]:
            return [[getattr(part, name) or "" for part in parts] for parts in done]

        out = {
            "text_output": batch_of(response_tensor("text_output"), column("text")),
            "output_ids": id_tensor([[part.ids for part in parts] for parts in done]),
        }
        ends = column("finish_reason")
        if all(r for row_ends in ends for r in row_ends):
            out["finish_reason"] = batch_of(response_tensor("finish_reason"), ends)
        for name in ("stop_reason", "tool_calls", "reasoning_content"):
            values = column(name)
            if any(v for row_values in values for v in row_values):
                out[name] = batch_of(response_tensor(name), values)
        return out

    def _stream(self, state: StreamState, ids: list[int], reason: str | None) -> _Part:
        key, number = state.key, state.number
        if number == 0:
            self._forget_old()
            self._streams[key] = _Stream(self._text(state))
        stream = self._streams.get(key)
        if stream is None or stream.number != number:
            self._streams.pop(key, None)
            raise problem("STREAM_STATE", "responses of a stream came out of order", found=number)
        stream.number += 1
        stream.used = time.monotonic()
        output = stream.text
        piece, used = output.feed(ids)
        if reason is not None:
            piece = piece.joined(output.finish())
            del self._streams[key]
        return _Part(*piece, ids[:used], reason, output.stop_reason, output.tool_calls)

    def _complete(self, state: StreamState, ids: list[int], reason: str) -> _Part:
        prompt = ids[: state.prompt_length]
        output = self._text(state)
        front = decode_all(self._tokenizer, prompt, (), state.text.skip_special_tokens)
        generated = ids[len(prompt) :]
        piece, used = output.feed(generated)
        whole = Piece(front).joined(piece).joined(output.finish())
        return _Part(*whole, generated[:used], reason, output.stop_reason, output.tool_calls)

    def _text(self, state: StreamState) -> OutputText:
        return OutputText(self._tokenizer, state.context, state.text.options())

    def _forget_old(self) -> None:
        limit = time.monotonic() - FORGET_AFTER_S
        while self._streams:
            key, stream = next(iter(self._streams.items()))
            if stream.used > limit:
                return
            del self._streams[key]


def _check(tokens: Array, lengths: Array, reasons: Array | None) -> None:
    """Raise UsageError unless there is a length, and a reason or none, for every sequence."""
    batch, sequences, longest = tokens.shape
    if sequences < 1 or lengths.shape != (batch, sequences):
        raise problem(
            "SEQUENCE_LENGTH", "has the wrong shape", expected=str([batch, max(sequences, 1)]),
            found=list(lengths.shape),
        )  # fmt: skip
    if reasons is not None and reasons.shape != lengths.shape:
        raise problem(
            "FINISH_REASON", "has the wrong shape", expected=str(list(lengths.shape)),
            found=list(reasons.shape),
        )  # fmt: skip
    if lengths.min() < 0 or lengths.max() > longest:
        raise problem("SEQUENCE_LENGTH", "is out of range", expected=f"0 to {longest}")
    real = np.arange(longest) < lengths[..., np.newaxis]
    if tokens[real].size and tokens[real].min() < 0:
        raise problem("TOKENS_BATCH", "holds an id that is out of range", expected=">= 0")
