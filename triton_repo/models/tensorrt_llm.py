"""`tensorrt_llm`: runs sequences on an engine session, or echoes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from triton_repo.answers import AnswerOptions, IdAnswer
from triton_repo.control import DrainWatcher
from triton_repo.frontend.options import with_defaults
from triton_repo.frontend.output import TextOptions
from triton_repo.frontend.pipeline import MediaSpan
from triton_repo.frontend.problems import problem
from triton_repo.frontend.sampling import parse_sampling
from triton_repo.frontend.words import from_word_list
from triton_repo.generation.base import GenerationCall, Generator, RequestState
from triton_repo.generation.channel import ChannelServer, socket_path
from triton_repo.generation.echo import EchoGenerator
from triton_repo.generation.metrics import Metrics
from triton_repo.generation.service import GenerationService
from triton_repo.models.base import (
    decoupled,
    limit_threads,
    refuse_to_start,
    request_id_of,
    set_up_logging,
    tensors_of,
)
from triton_repo.parameters import GenerationParameters, model_parameters, open_tokenizer
from triton_repo.replies import ReplyLoop, describe
from triton_repo.tensor_io import Row, check_parameters, read_rows
from triton_repo.tensors import GENERATION_INPUTS, REQUEST, Field

_PUBLIC = {f.tensorrt_llm: f.name for f in REQUEST if f.tensorrt_llm is not None}
_FIELDS = {t.name: Field(_PUBLIC.get(t.name, t.name), t.dtype, t.dims) for t in GENERATION_INPUTS}
_WORD_LISTS = ("stop_words_list", "bad_words_list")
_FEATURES = "input_features"
# Arrays whose entries belong to prompt tokens, and the numbers in one entry.
_PARALLEL = {"attention_mask": 1, "prompt_token_offsets": 2}


class TensorrtLlm:
    """The model behind `tensorrt_llm/1/model.py`."""

    def __init__(self, pb_utils: Any, args: Mapping[str, str]) -> None:
        set_up_logging("tensorrt_llm")
        try:
            parameters, directory, config = model_parameters(GenerationParameters, args)
            limit_threads(parameters.threads)
            self._parameters = parameters
            self._defaults = {
                name: value
                for name, value in parameters.request_defaults.items()
                if name in _PUBLIC.values()
            }
            self._decoupled = decoupled(config)
            self._service = GenerationService(
                _open_generator(parameters, directory),
                open_tokenizer(parameters, directory),
                Metrics(pb_utils, "tensorrt_llm"),
            )
            path = socket_path(parameters.repository_id)
            self._channel = ChannelServer(path, self._service)
        except Exception as error:
            refuse_to_start(pb_utils, error)
        self._replies = ReplyLoop(pb_utils)
        self._drain = DrainWatcher("tensorrt_llm", self._on_drain)

    def execute(self, requests: Sequence[Any]) -> None:
        """Start the sequences of each request; answers come from other threads."""
        for request in requests:
            self._start(request)

    def close(self) -> None:
        """End every sequence, then the threads."""
        self._drain.close()
        self._channel.close()
        self._service.close()
        self._replies.wait_idle(2.0)
        self._replies.close()

    def _on_drain(self, grace_s: float) -> None:
        self._service.drain(grace_s)
        self._replies.wait_idle(2.0)

    def _start(self, request: Any) -> None:
        answer: IdAnswer | None = None
        reply = self._replies.open(request, lambda: answer.cancel() if answer else None)
        request_id = request_id_of(request)
        try:
            tensors = tensors_of(request)
            check_parameters(request.parameters(), list(_FIELDS))
            rows = read_rows({k: v for k, v in tensors.items() if k not in _WORD_LISTS}, _FIELDS)
            if rows[0].get("stop"):
                if not request_id:
                    raise problem("stop", "needs the request id of the request to stop")
                self._service.cancel_request(request_id)
                reply.end()
                return
            for index, row in enumerate(rows):
                row.update({k: tensors[k][index] for k in _WORD_LISTS if k in tensors})
            # Of a prompt's options the server's defaults are already in what preprocessing made.
            rows = [with_defaults(row, self._defaults) for row in rows]
            options = AnswerOptions.of(rows, self._parameters.exclude_input_in_output)
            if options.streaming and not self._decoupled:
                raise problem("stream", "Streaming is only supported in decoupled mode")
            calls = [self._call(row) for row in rows]
            answer = IdAnswer(reply, options, calls)
            for sequence in answer.sequences:
                offsets = _offsets(rows[sequence.row])
                if sequence.index == 0 and offsets is not None:
                    sequence.extra["PROMPT_TOKEN_OFFSETS"] = offsets
        except Exception as error:
            reply.fail(*describe(error))
            return
        for sequence in answer.sequences:
            number = self._service.submit(
                sequence.call, partial(answer.on_event, sequence), request_id, answer.key
            )
            sequence.cancel = partial(self._service.cancel, number)
        if reply.cancel_seen:
            answer.cancel()

    def _call(self, row: Row) -> GenerationCall:
        for name in ("input_ids", "input_lengths", "request_output_len"):
            if row.get(name) is None:
                raise problem(name, "is required")
        length, padded = row["input_lengths"], row["input_ids"]
        if not 1 <= length <= len(padded):
            raise problem(
                "input_lengths", "is out of range", expected=f"1 to {len(padded)}", found=length
            )
        for name, width in _PARALLEL.items():
            entries = len(row[name]) // width if name in row else len(padded)
            if entries != len(padded):
                raise problem(
                    name, "does not have one entry per prompt token",
                    expected=f"{len(padded)} entries", found=entries,
                )  # fmt: skip
        ids = padded[:length]
        vocabulary = self._parameters.vocab_size
        if min(ids) < 0 or max(ids) >= vocabulary:
            bad = next(i for i in ids if not 0 <= i < vocabulary)
            raise problem(
                "input_ids", "holds an id that is out of range",
                expected=f"0 to {vocabulary - 1}", found=bad,
            )  # fmt: skip
        state = RequestState.parse(row.get("request_state"))
        if state.task != "embed" and row["request_output_len"] < 1:
            raise problem(
                "request_output_len", "is out of range", expected=">= 1",
                found=row["request_output_len"],
            )  # fmt: skip
        # Called directly, without an end id, generation goes on to its limit.
        end_ids = state.end_ids
        if end_ids is None:
            end_ids = () if row.get("end_id", -1) == -1 else (row["end_id"],)
        words = {
            name: from_word_list(name, row[name]) if name in row else [] for name in _WORD_LISTS
        }
        features = row.get(_FEATURES)
        if features is not None and row.get("request_state") is not None:
            # In a batch every row is as large as the largest, also one without audio.
            shape = state.features_shape
            features = None if shape is None else features[tuple(slice(0, n) for n in shape)]
        if features is not None and not np.isfinite(features).all():
            raise problem(_FEATURES, "holds values that are not finite")
        return GenerationCall(
            prompt_ids=ids,
            max_tokens=row["request_output_len"],
            sampling=parse_sampling(row),
            end_ids=end_ids,
            stop_ids=words["stop_words_list"],
            bad_ids=words["bad_words_list"],
            text=TextOptions(**state.text.model_dump(), end_ids=end_ids),
            cache_salt_id=row.get("cache_salt_id"),
            task=state.task,
            window=state.window,
            media=[MediaSpan(**span.model_dump()) for span in state.media],
            features=features,
            echo=self._echo(row, state) if self._parameters.generation == "echo" else {},
        )

    def _echo(self, row: Row, state: RequestState) -> dict[str, Any]:
        padded: list[int] = row["input_ids"]
        real = row["input_lengths"]
        return {
            "input_ids": padded,
            "attention_mask": row.get("attention_mask", [1] * real + [0] * (len(padded) - real)),
            "offsets": _offsets(row),
            "mm_views": state.mm_views,
            "pad_id": row.get("pad_id"),
            "echo_output_ids": row.get("echo_output_ids"),
            "echo_delay_ms": row.get("echo_delay_ms"),
        }


def _offsets(row: Row) -> list[tuple[int, int]] | None:
    flat = row.get("prompt_token_offsets")
    return None if flat is None else list(zip(flat[::2], flat[1::2], strict=True))


def _open_generator(parameters: GenerationParameters, directory: Any) -> Generator:
    if parameters.generation == "echo":
        return EchoGenerator(parameters.vocab_size)
    # torch and the runtime are not needed for an echo, and take a second to import.
    from triton_repo.generation.engine import EngineGenerator

    return EngineGenerator(
        directory / parameters.engine_dir,
        parameters.executor,
        parameters.device,
        parameters.max_queue,
    )
