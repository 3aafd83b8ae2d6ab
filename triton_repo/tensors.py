"""Every tensor of the model repository, once: names, types, shapes and how they flow.

Public names are those of TensorRT-LLM's ensemble and BLS models. Inside the ensemble the classic
names of `preprocessing`, `tensorrt_llm` and `postprocessing` are used. All `config.pbtxt` files,
the ensemble's maps and the parsing of requests come from these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Field:
    """One request field.

    Attributes:
        name: on the ensemble and the BLS.
        dtype: Triton type without prefix.
        dims: without the batch dimension; (1,) is a scalar.
        preprocessing: its name as an input of `preprocessing`; None when that does not need it.
        tensorrt_llm: its name as an input of `tensorrt_llm` straight from the client.
        echo: only in repositories that echo.
    """

    name: str
    dtype: str
    dims: Dims = (1,)
    preprocessing: str | None = None
    tensorrt_llm: str | None = None
    echo: bool = False

    @cached_property
    def scalar(self) -> bool:
        """Whether a row holds one value."""
        return self.dims == (1,)


@dataclass(frozen=True)
class Tensor:
    """One tensor of one model."""

    name: str
    dtype: str
    dims: Dims = (1,)
    optional: bool = False
    echo: bool = False


def _same(name: str, dtype: str, dims: Dims = (1,)) -> Field:
    """A field that `preprocessing` knows by its public name."""
    return Field(name, dtype, dims, preprocessing=name)


REQUEST: tuple[Field, ...] = (
    Field("text_input", "STRING", preprocessing="QUERY"),
    _same("input_ids", "INT32", (-1,)),
    _same("messages", "STRING"),
    _same("content_parts", "STRING"),
    _same("mm_features", "STRING"),
    Field("max_tokens", "INT32", preprocessing="REQUEST_OUTPUT_LEN"),
    Field("bad_words", "STRING", (-1,), preprocessing="BAD_WORDS_DICT"),
    Field("stop_words", "STRING", (-1,), preprocessing="STOP_WORDS_DICT"),
    Field("end_id", "INT32", preprocessing="END_ID"),
    Field("pad_id", "INT32", preprocessing="PAD_ID"),
    _same("cache_salt", "STRING"),
    _same("truncate_prompt_tokens", "INT32"),
    _same("truncation_side", "STRING"),
    _same("truncation", "STRING"),
    _same("padding", "STRING"),
    _same("max_length", "INT32"),
    _same("add_special_tokens", "BOOL"),
    _same("return_token_offsets", "BOOL"),
    _same("lowercase", "BOOL"),
    _same("chat_template_kwargs", "STRING"),
    _same("mm_processor_kwargs", "STRING"),
    _same("image_url_input", "STRING", (-1,)),
    _same("image_bytes_input", "STRING", (-1,)),
    _same("video_bytes_input", "STRING", (-1,)),
    _same("audio_bytes", "UINT8", (-1,)),
    _same("audio_url", "STRING", (-1,)),
    _same("audio_samples", "FP32", (-1,)),
    _same("language", "STRING"),
    _same("delay_ms", "INT32"),
    _same("task", "STRING"),
    _same("enable_chunked_processing", "BOOL"),
    _same("include_stop_str_in_output", "BOOL"),
    _same("skip_special_tokens", "BOOL"),
    Field("num_return_sequences", "INT32", tensorrt_llm="num_return_sequences"),
    Field("exclude_input_in_output", "BOOL", tensorrt_llm="exclude_input_in_output"),
    Field("top_k", "INT32", tensorrt_llm="runtime_top_k"),
    Field("top_p", "FP32", tensorrt_llm="runtime_top_p"),
    Field("temperature", "FP32", tensorrt_llm="temperature"),
    Field("length_penalty", "FP32", tensorrt_llm="len_penalty"),
    Field("repetition_penalty", "FP32", tensorrt_llm="repetition_penalty"),
    Field("min_tokens", "INT32", preprocessing="min_tokens", tensorrt_llm="min_tokens"),
    Field("presence_penalty", "FP32", tensorrt_llm="presence_penalty"),
    Field("frequency_penalty", "FP32", tensorrt_llm="frequency_penalty"),
    Field("seed", "UINT64", tensorrt_llm="seed"),
    Field("random_seed", "UINT64", tensorrt_llm="random_seed"),
    Field("beam_width", "INT32", tensorrt_llm="beam_width"),
    Field("return_log_probs", "BOOL", tensorrt_llm="return_log_probs"),
    Field("return_num_input_tokens", "BOOL", tensorrt_llm="return_num_input_tokens"),
    Field("return_num_output_tokens", "BOOL", tensorrt_llm="return_num_output_tokens"),
    Field("return_perf_metrics", "BOOL", tensorrt_llm="return_perf_metrics"),
    Field("stream", "BOOL", tensorrt_llm="streaming"),
    Field("stop", "BOOL", tensorrt_llm="stop"),
    Field("echo_output_ids", "INT32", (-1,), tensorrt_llm="echo_output_ids", echo=True),
    Field("echo_delay_ms", "INT32", tensorrt_llm="echo_delay_ms", echo=True),
)

# Outputs of preprocessing, and the input of tensorrt_llm that each one feeds.
PREPROCESSED: tuple[tuple[Tensor, str], ...] = (
    (Tensor("INPUT_ID", "INT32", (-1,)), "input_ids"),
    (Tensor("REQUEST_INPUT_LEN", "INT32"), "input_lengths"),
    (Tensor("REQUEST_OUTPUT_LEN", "INT32"), "request_output_len"),
    (Tensor("ATTENTION_MASK", "INT64", (-1,), optional=True), "attention_mask"),
    (Tensor("BAD_WORDS_IDS", "INT32", (2, -1), optional=True), "bad_words_list"),
    (Tensor("STOP_WORDS_IDS", "INT32", (2, -1), optional=True), "stop_words_list"),
    (Tensor("OUT_END_ID", "INT32", optional=True), "end_id"),
    (Tensor("OUT_PAD_ID", "INT32", optional=True), "pad_id"),
    (Tensor("CACHE_SALT_ID", "UINT64", optional=True), "cache_salt_id"),
    (Tensor("PROMPT_TOKEN_OFFSETS", "INT32", (-1, 2), optional=True), "prompt_token_offsets"),
    (Tensor("REQUEST_STATE", "STRING", optional=True), "request_state"),
    (Tensor("INPUT_FEATURES", "FP32", (-1, -1, -1), optional=True), "input_features"),
)

# Inputs of tensorrt_llm: from preprocessing, then straight from the client.
GENERATION_INPUTS: tuple[Tensor, ...] = tuple(
    Tensor(
        target,
        tensor.dtype,
        tensor.dims,
        optional=target not in ("input_ids", "input_lengths", "request_output_len"),
    )
    for tensor, target in PREPROCESSED
) + tuple(
    Tensor(f.tensorrt_llm, f.dtype, f.dims, optional=True, echo=f.echo)
    for f in REQUEST
    if f.tensorrt_llm is not None
)

# Outputs that pass from tensorrt_llm to the client; the same names on ensemble and BLS.
PASSED_THROUGH: tuple[Tensor, ...] = (
    Tensor("cum_log_probs", "FP32", (-1,), optional=True),
    Tensor("output_log_probs", "FP32", (-1, -1), optional=True),
    Tensor("batch_index", "INT32", optional=True),
    Tensor("sequence_index", "INT32", optional=True),
    Tensor("num_input_tokens", "INT32", optional=True),
    Tensor("num_output_tokens", "INT32", optional=True),
    Tensor("kv_cache_reused_blocks", "INT32", optional=True),
    Tensor("arrival_time_ns", "INT64", optional=True),
    Tensor("first_scheduled_time_ns", "INT64", optional=True),
    Tensor("first_token_time_ns", "INT64", optional=True),
    Tensor("last_token_time_ns", "INT64", optional=True),
    Tensor("embedding", "FP32", (-1,), optional=True),
    Tensor("PROMPT_TOKEN_OFFSETS", "INT32", (-1, 2), optional=True),
    Tensor("ECHO_INPUT_IDS", "INT32", (-1,), optional=True, echo=True),
    Tensor("ECHO_PROMPT_TOKEN_OFFSETS", "INT32", (-1, 2), optional=True, echo=True),
    Tensor("ECHO_ATTENTION_MASK", "INT64", (-1,), optional=True, echo=True),
    Tensor("ECHO_CACHE_SALT_ID", "UINT64", optional=True, echo=True),
    Tensor("ECHO_BLOCK_KEYS", "UINT64", (-1,), optional=True, echo=True),
    Tensor("ECHO_MM_VIEWS", "STRING", optional=True, echo=True),
    Tensor("ECHO_MEDIA", "STRING", optional=True, echo=True),
    Tensor("ECHO_SAMPLING", "STRING", optional=True, echo=True),
)

# What postprocessing takes from tensorrt_llm besides what passes through.
GENERATED: tuple[Tensor, ...] = (
    Tensor("output_ids", "INT32", (-1, -1)),
    Tensor("sequence_length", "INT32", (-1,)),
    Tensor("finish_reason", "STRING", (-1,), optional=True),
    Tensor("stream_state", "STRING"),
)
POSTPROCESSING_INPUTS: tuple[tuple[Tensor, str], ...] = (
    (Tensor("TOKENS_BATCH", "INT32", (-1, -1)), "output_ids"),
    (Tensor("SEQUENCE_LENGTH", "INT32", (-1,)), "sequence_length"),
    (Tensor("FINISH_REASON", "STRING", (-1,), optional=True), "finish_reason"),
    (Tensor("STREAM_STATE", "STRING"), "stream_state"),
)

# What postprocessing makes, and its public name.
TEXT_OUTPUTS: tuple[tuple[Tensor, str], ...] = (
    (Tensor("OUTPUT", "STRING", (-1,)), "text_output"),
    (Tensor("OUTPUT_IDS", "INT32", (-1, -1)), "output_ids"),
    (Tensor("OUT_FINISH_REASON", "STRING", (-1,), optional=True), "finish_reason"),
    (Tensor("STOP_REASON", "STRING", (-1,), optional=True), "stop_reason"),
    (Tensor("TOOL_CALLS", "STRING", (-1,), optional=True), "tool_calls"),
    (Tensor("REASONING_CONTENT", "STRING", (-1,), optional=True), "reasoning_content"),
)

RESPONSE: tuple[Tensor, ...] = (
    tuple(Tensor(public, t.dtype, t.dims, t.optional) for t, public in TEXT_OUTPUTS)
    + PASSED_THROUGH
)


def request_fields(echo: bool) -> tuple[Field, ...]:
    """The request fields of an echo repository, or of one with an engine."""
    return tuple(f for f in REQUEST if echo or not f.echo)


def select_echo(tensors: tuple[Tensor, ...], echo: bool) -> tuple[Tensor, ...]:
    """The tensors of an echo repository, or of one with an engine."""
    return tuple(t for t in tensors if echo or not t.echo)
