"""`preprocessing`: from request fields to the inputs of `tensorrt_llm`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from plugins.support.errors import UsageError
from triton_repo.frontend.media import MediaPending
from triton_repo.frontend.options import FrontEnd, RequestOptions
from triton_repo.frontend.pipeline import Prepared, prepare
from triton_repo.frontend.problems import problem
from triton_repo.frontend.words import to_word_list
from triton_repo.generation.base import RequestState
from triton_repo.models.base import (
    belongs_to_stream,
    hide_from_collector,
    limit_threads,
    refuse_to_start,
    set_up_logging,
    tensors_of,
)
from triton_repo.parameters import FrontEndParameters, model_parameters, open_front_end
from triton_repo.replies import describe, triton_error
from triton_repo.tensor_io import Array, batch_of, check_parameters, read_rows
from triton_repo.tensors import PREPROCESSED, request_fields

# Requests whose media are being fetched or decoded; others are answered at once.
MEDIA_THREADS = 8
# Most prompt lengths whose tensor is kept.
REMEMBERED_LENGTHS = 4096
_OUTPUTS = {tensor.name: tensor for tensor, _ in PREPROCESSED}


class Preprocessing:
    """The model behind `preprocessing/1/model.py`."""

    def __init__(self, pb_utils: Any, args: Mapping[str, str]) -> None:
        set_up_logging("preprocessing")
        self._pb = pb_utils
        try:
            parameters, directory, _ = model_parameters(FrontEndParameters, args)
            limit_threads(parameters.threads)
            self._front_end = open_front_end(parameters, directory)
        except Exception as error:
            refuse_to_start(pb_utils, error)
        self._fields = {
            f.preprocessing: f for f in request_fields(echo=True) if f.preprocessing is not None
        }
        # The ensemble's clients know the public names, this model's own the others.
        self._names = [f.name for f in request_fields(echo=True)] + list(self._fields)
        self._tensors: WeakKeyDictionary[RequestOptions, list[Any]] = WeakKeyDictionary()
        self._length_tensor = lru_cache(REMEMBERED_LENGTHS)(self._new_length_tensor)
        self._pool = ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="media")
        hide_from_collector()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer a batch; requests that name media are answered from other threads, with None
        in their place.
        """
        return [self._answer_or_start(request) for request in requests]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _answer_or_start(self, request: Any) -> Any | None:
        inputs = tensors_of(request)
        try:
            return self._answer(request, inputs, self._front_end.at_once)
        except MediaPending:
            self._pool.submit(self._send, request, inputs, request.get_response_sender())
            return None

    def _send(self, request: Any, inputs: dict[str, Array], sender: Any) -> None:
        response = self._answer(request, inputs, self._front_end)
        sender.send(response, flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answer(self, request: Any, inputs: dict[str, Array], front_end: FrontEnd) -> Any:
        pb = self._pb
        try:
            check_parameters(request.parameters(), self._names)
            if belongs_to_stream(request):
                raise problem(
                    "sequence_id", "audio in pieces goes to tensorrt_llm_bls", found="ensemble"
                )
            rows = read_rows(inputs, self._fields)
            if len(rows) == 1:
                outputs = self._row_outputs(prepare(rows[0], front_end))
            else:
                outputs = self._outputs([prepare(row, front_end) for row in rows])
        except MediaPending:
            raise
        except Exception as error:
            return pb.InferenceResponse(error=triton_error(pb, *describe(error)))
        return pb.InferenceResponse(outputs)

    def _row_outputs(self, prepared: Prepared) -> list[Any]:
        """Triton's tensors for one row; what others have in common with it is made once."""
        options, ids = prepared.options, prepared.prompt.ids
        if not prepared.is_plain:
            return self._outputs([prepared])
        kept = self._tensors.get(options)
        if kept is None:
            arrays = option_tensors([options])
            kept = self._tensors[options] = [self._pb.Tensor(n, a) for n, a in arrays.items()]
        made = self._pb.Tensor("INPUT_ID", np.asarray(ids, dtype=np.int32)[np.newaxis])
        return [made, self._length_tensor(len(ids)), *kept]

    def _outputs(self, prepared: Sequence[Prepared]) -> list[Any]:
        """Triton's tensors for the rows of a batch."""
        arrays = option_tensors([p.options for p in prepared]) | prompt_tensors(prepared)
        return [self._pb.Tensor(name, array) for name, array in arrays.items()]

    def _new_length_tensor(self, length: int) -> Any:
        return self._pb.Tensor("REQUEST_INPUT_LEN", np.array([[length]], dtype=np.int32))


def prompt_tensors(prepared: Sequence[Prepared]) -> dict[str, Array]:
    """Output tensors for the prompts of a batch.

    Rows of unequal length are filled: ids with the pad id, offsets and masks with 0;
    REQUEST_INPUT_LEN has the length before padding.
    """
    ids = [p.prompt.ids for p in prepared]
    tensors: dict[str, Array] = {
        "INPUT_ID": batch_of(_OUTPUTS["INPUT_ID"], ids, prepared[0].options.pad_id or 0),
        "REQUEST_INPUT_LEN": np.array([[p.prompt.real_length] for p in prepared], dtype=np.int32),
    }
    rows: dict[str, list[Any]] = {}
    if any(p.max_tokens != p.options.max_tokens for p in prepared):
        # In place of what the options ask for.
        rows["REQUEST_OUTPUT_LEN"] = [[p.max_tokens] for p in prepared]
    if any(p.features is not None for p in prepared):
        nothing = np.zeros((0, 0, 0), dtype=np.float32)
        rows["INPUT_FEATURES"] = [nothing if p.features is None else p.features for p in prepared]
    states = [RequestState.of_prompt(p) for p in prepared]
    if any(states):
        # In place of the state of the options alone.
        rows["REQUEST_STATE"] = [
            json.dumps(RequestState.of_options(p.options) | state)
            for p, state in zip(prepared, states, strict=True)
        ]
    # Without padding the mask says nothing.
    if any(len(p.prompt.ids) > p.prompt.real_length for p in prepared):
        rows["ATTENTION_MASK"] = [p.prompt.attention_mask for p in prepared]
    if all("offsets" in p.prompt.arrays for p in prepared):
        rows["PROMPT_TOKEN_OFFSETS"] = [p.prompt.arrays["offsets"] for p in prepared]
    return tensors | {name: batch_of(_OUTPUTS[name], values) for name, values in rows.items()}


def option_tensors(options: Sequence[RequestOptions]) -> dict[str, Array]:
    """Output tensors for what the rows of a batch ask for besides their prompts."""
    rows: dict[str, list[Any]] = {"REQUEST_OUTPUT_LEN": [[o.max_tokens or 0] for o in options]}
    ends = [bool(o.end_ids) for o in options]
    if all(ends):
        rows["OUT_END_ID"] = [[o.end_ids[0]] for o in options]
    if any(map(RequestState.is_needed, options)) or any(ends) != all(ends):
        rows["REQUEST_STATE"] = [json.dumps(RequestState.of_options(o)) for o in options]
    if any(o.bad_ids is not None for o in options):
        rows["BAD_WORDS_IDS"] = [to_word_list(o.bad_ids) for o in options]
    if any(o.stop_ids is not None for o in options):
        rows["STOP_WORDS_IDS"] = [to_word_list(o.stop_ids) for o in options]
    if all(o.pad_id is not None for o in options):
        rows["OUT_PAD_ID"] = [[o.pad_id] for o in options]
    # Absent means absent: no salt is neither id 0 nor the id of an empty text.
    salts = [o.cache_salt_id for o in options]
    if all(s is not None for s in salts):
        rows["CACHE_SALT_ID"] = [[s] for s in salts]
    elif any(s is not None for s in salts):
        raise UsageError("every row of a batch needs a salt, or none", where="cache_salt")
    fills = {"BAD_WORDS_IDS": -1, "STOP_WORDS_IDS": -1}
    return {n: batch_of(_OUTPUTS[n], v, fills.get(n, 0)) for n, v in rows.items()}
