"""`preprocessing`: from request fields to the inputs of `tensorrt_llm`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from plugins.support.errors import UsageError
from triton_repo.frontend.pipeline import Prepared, prepare
from triton_repo.frontend.problems import problem
from triton_repo.frontend.words import to_word_list
from triton_repo.generation.base import RequestState
from triton_repo.models.base import (
    belongs_to_stream,
    hide_from_collector,
    limit_threads,
    may_take_long,
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
        self._public_names = [f.name for f in request_fields(echo=True)]
        self._pool = ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="media")
        hide_from_collector()

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer a batch; from other threads when a request names media to fetch."""
        tensors = [tensors_of(request) for request in requests]
        if not any(may_take_long(t) for t in tensors):
            return [self._answer(r, t) for r, t in zip(requests, tensors, strict=True)]
        for request, inputs in zip(requests, tensors, strict=True):
            sender = request.get_response_sender()
            self._pool.submit(self._send, request, inputs, sender)
        return None

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, request: Any, inputs: dict[str, Array], sender: Any) -> None:
        response = self._answer(request, inputs)
        sender.send(response, flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answer(self, request: Any, inputs: dict[str, Array]) -> Any:
        pb = self._pb
        try:
            check_parameters(request.parameters(), self._public_names)
            if belongs_to_stream(request):
                raise problem(
                    "sequence_id", "audio in pieces goes to tensorrt_llm_bls", found="ensemble"
                )
            rows = read_rows(inputs, self._fields)
            prepared = [prepare(row, self._front_end) for row in rows]
            outputs = preprocessed_tensors(prepared)
        except Exception as error:
            return pb.InferenceResponse(error=triton_error(pb, *describe(error)))
        return pb.InferenceResponse([pb.Tensor(n, a) for n, a in outputs.items()])


def preprocessed_tensors(prepared: Sequence[Prepared]) -> dict[str, Array]:
    """Output tensors of `preprocessing` for a batch of prompts.

    Rows of unequal length are filled: ids with the pad id, offsets and masks with 0;
    REQUEST_INPUT_LEN has the length before padding.
    """
    first = prepared[0]
    rows: dict[str, list[Any]] = {
        "INPUT_ID": [p.prompt.ids for p in prepared],
        "REQUEST_INPUT_LEN": [[p.prompt.real_length] for p in prepared],
        "REQUEST_OUTPUT_LEN": [[p.max_tokens] for p in prepared],
    }
    ends = [bool(p.end_ids) for p in prepared]
    if all(ends):
        rows["OUT_END_ID"] = [[p.end_ids[0]] for p in prepared]
    if any(RequestState.is_needed(p) for p in prepared) or any(ends) != all(ends):
        rows["REQUEST_STATE"] = [RequestState.write(p) for p in prepared]
    if any(p.features is not None for p in prepared):
        nothing = np.zeros((0, 0, 0), dtype=np.float32)
        rows["INPUT_FEATURES"] = [nothing if p.features is None else p.features for p in prepared]
    # Without padding the mask says nothing.
    if any(len(p.prompt.ids) > p.prompt.real_length for p in prepared):
        rows["ATTENTION_MASK"] = [p.prompt.attention_mask for p in prepared]
    if any(p.bad_ids is not None for p in prepared):
        rows["BAD_WORDS_IDS"] = [to_word_list(p.bad_ids) for p in prepared]
    if any(p.stop_ids is not None for p in prepared):
        rows["STOP_WORDS_IDS"] = [to_word_list(p.stop_ids) for p in prepared]
    if all(p.pad_id is not None for p in prepared):
        rows["OUT_PAD_ID"] = [[p.pad_id] for p in prepared]
    # Absent means absent: no salt is neither id 0 nor the id of an empty text.
    salts = [p.cache_salt_id for p in prepared]
    if all(s is not None for s in salts):
        rows["CACHE_SALT_ID"] = [[s] for s in salts]
    elif any(s is not None for s in salts):
        raise UsageError("every row of a batch needs a salt, or none", where="cache_salt")
    if all("offsets" in p.prompt.arrays for p in prepared):
        rows["PROMPT_TOKEN_OFFSETS"] = [p.prompt.arrays["offsets"] for p in prepared]
    fills = {"INPUT_ID": first.pad_id or 0, "BAD_WORDS_IDS": -1, "STOP_WORDS_IDS": -1}
    return {n: batch_of(_OUTPUTS[n], v, fills.get(n, 0)) for n, v in rows.items()}
