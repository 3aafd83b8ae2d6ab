"""The tensors that clients of TensorRT-LLM's backend know: names, types and shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from triton_repo.generate import write_repository

# Without the batch dimension.
REQUEST = {
    # A6
    "cache_salt": ("STRING", [1]), "truncate_prompt_tokens": ("INT32", [1]),
    "truncation_side": ("STRING", [1]), "padding": ("STRING", [1]),
    "mm_processor_kwargs": ("STRING", [1]), "messages": ("STRING", [1]),
    "chat_template_kwargs": ("STRING", [1]), "add_special_tokens": ("BOOL", [1]),
    "return_token_offsets": ("BOOL", [1]),
    # C2
    "text_input": ("STRING", [1]), "max_tokens": ("INT32", [1]),
    "num_return_sequences": ("INT32", [1]), "bad_words": ("STRING", [-1]),
    "stop_words": ("STRING", [-1]), "exclude_input_in_output": ("BOOL", [1]),
    "end_id": ("INT32", [1]), "pad_id": ("INT32", [1]), "top_k": ("INT32", [1]),
    "top_p": ("FP32", [1]), "temperature": ("FP32", [1]), "length_penalty": ("FP32", [1]),
    "repetition_penalty": ("FP32", [1]), "min_tokens": ("INT32", [1]),
    "presence_penalty": ("FP32", [1]), "frequency_penalty": ("FP32", [1]),
    "seed": ("UINT64", [1]), "random_seed": ("UINT64", [1]), "return_log_probs": ("BOOL", [1]),
    "return_perf_metrics": ("BOOL", [1]), "return_num_input_tokens": ("BOOL", [1]),
    "return_num_output_tokens": ("BOOL", [1]), "beam_width": ("INT32", [1]),
    "stream": ("BOOL", [1]),
}  # fmt: skip
RESPONSE = {
    "text_output": ("STRING", [-1]), "cum_log_probs": ("FP32", [-1]),
    "output_log_probs": ("FP32", [-1, -1]), "batch_index": ("INT32", [1]),
    "sequence_index": ("INT32", [1]), "kv_cache_reused_blocks": ("INT32", [1]),
    "arrival_time_ns": ("INT64", [1]), "first_scheduled_time_ns": ("INT64", [1]),
    "first_token_time_ns": ("INT64", [1]), "last_token_time_ns": ("INT64", [1]),
    "num_input_tokens": ("INT32", [1]), "num_output_tokens": ("INT32", [1]),
    "PROMPT_TOKEN_OFFSETS": ("INT32", [-1, 2]),
}  # fmt: skip
PREPROCESSING = (
    {
        "QUERY": ("STRING", [1]), "REQUEST_OUTPUT_LEN": ("INT32", [1]),
        "BAD_WORDS_DICT": ("STRING", [-1]), "STOP_WORDS_DICT": ("STRING", [-1]),
        "END_ID": ("INT32", [1]), "PAD_ID": ("INT32", [1]),
    },
    {
        "INPUT_ID": ("INT32", [-1]), "REQUEST_INPUT_LEN": ("INT32", [1]),
        "BAD_WORDS_IDS": ("INT32", [2, -1]), "STOP_WORDS_IDS": ("INT32", [2, -1]),
        "OUT_END_ID": ("INT32", [1]), "OUT_PAD_ID": ("INT32", [1]),
        "CACHE_SALT_ID": ("UINT64", [1]), "PROMPT_TOKEN_OFFSETS": ("INT32", [-1, 2]),
    },
)  # fmt: skip
GENERATION = (
    {
        "input_ids": ("INT32", [-1]), "input_lengths": ("INT32", [1]),
        "request_output_len": ("INT32", [1]), "num_return_sequences": ("INT32", [1]),
        "end_id": ("INT32", [1]), "pad_id": ("INT32", [1]), "stop_words_list": ("INT32", [2, -1]),
        "bad_words_list": ("INT32", [2, -1]), "beam_width": ("INT32", [1]),
        "temperature": ("FP32", [1]), "runtime_top_k": ("INT32", [1]),
        "runtime_top_p": ("FP32", [1]), "len_penalty": ("FP32", [1]),
        "repetition_penalty": ("FP32", [1]), "min_tokens": ("INT32", [1]),
        "presence_penalty": ("FP32", [1]), "frequency_penalty": ("FP32", [1]),
        "seed": ("UINT64", [1]), "return_log_probs": ("BOOL", [1]),
        "return_perf_metrics": ("BOOL", [1]), "return_num_input_tokens": ("BOOL", [1]),
        "return_num_output_tokens": ("BOOL", [1]), "exclude_input_in_output": ("BOOL", [1]),
        "stop": ("BOOL", [1]), "streaming": ("BOOL", [1]), "cache_salt_id": ("UINT64", [1]),
    },
    {"output_ids": ("INT32", [-1, -1]), "sequence_length": ("INT32", [-1])},
)  # fmt: skip
TENSORS = {
    "ensemble": (REQUEST, RESPONSE),
    "tensorrt_llm_bls": (REQUEST, RESPONSE),
    "preprocessing": PREPROCESSING,
    "tensorrt_llm": GENERATION,
}
# C1: what a step calls what the ensemble's clients know, and what one step's output is to the next.
RENAMED = {
    "preprocessing": {
        "QUERY": "text_input", "REQUEST_OUTPUT_LEN": "max_tokens", "BAD_WORDS_DICT": "bad_words",
        "STOP_WORDS_DICT": "stop_words", "END_ID": "end_id", "PAD_ID": "pad_id",
    },
    "tensorrt_llm": {
        "input_ids": "_INPUT_ID", "input_lengths": "_REQUEST_INPUT_LEN",
        "request_output_len": "_REQUEST_OUTPUT_LEN", "stop_words_list": "_STOP_WORDS_IDS",
        "bad_words_list": "_BAD_WORDS_IDS", "end_id": "_OUT_END_ID", "pad_id": "_OUT_PAD_ID",
        "cache_salt_id": "_CACHE_SALT_ID", "runtime_top_k": "top_k", "runtime_top_p": "top_p",
        "len_penalty": "length_penalty", "streaming": "stream",
    },
    "postprocessing": {
        "TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The configs of an echo repository by model."""
    target: Path = tmp_path_factory.mktemp("tensors") / "repository"
    repository = write_repository(None, target, tokenizer="bytes", generation="echo")
    return {
        path.parent.name: text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
        for path in repository.glob("*/config.pbtxt")
    }


@pytest.mark.parametrize("model", TENSORS)
def test_names_types_and_shapes(configs: dict[str, Any], model: str) -> None:
    for wanted, found in zip(
        TENSORS[model], (configs[model].input, configs[model].output), strict=True
    ):
        tensors = {
            t.name: (model_config_pb2.DataType.Name(t.data_type)[5:], list(t.dims)) for t in found
        }
        assert {name: tensors.get(name) for name in wanted} == wanted
    required = {t.name for t in configs[model].input if not t.optional}
    always = {"input_ids", "input_lengths", "request_output_len"}
    assert required == (always if model == "tensorrt_llm" else set())


def test_names_across_the_ensemble(configs: dict[str, Any]) -> None:
    maps = {s.model_name: s for s in configs["ensemble"].ensemble_scheduling.step}
    for model, names in RENAMED.items():
        assert {name: maps[model].input_map.get(name) for name in names} == names
    assert maps["tensorrt_llm"].output_map["output_ids"] == "_TOKENS_BATCH"
    assert maps["tensorrt_llm"].output_map["sequence_length"] == "_SEQUENCE_LENGTH"
    assert maps["postprocessing"].output_map["OUTPUT"] == "text_output"
    # What stays inside begins with an underscore, and nothing else does.
    public = {t.name for t in (*configs["ensemble"].input, *configs["ensemble"].output)}
    assert not any(name.startswith("_") for name in public)
    inside = {n for s in maps.values() for n in (*s.input_map.values(), *s.output_map.values())}
    assert all(name.startswith("_") for name in inside - public)
