"""Voxtral and Voxtral realtime: configuration, and everything that the networks rely on.

Both exist in two layouts, Hugging Face's (`config.json`) and Mistral's (`params.json`). Their
query and key rows differ in order: Hugging Face pairs rotary channels (i, i + d/2), Mistral
(2i, 2i + 1). The rows are kept as they are and the network rotates by the order it is told, which
is TensorRT-LLM's `position_embedding_type` (`rope_gpt_neox`, `rope_gptj`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from converters.checkpoint.config import PRODUCER, CheckpointConfig, ComputeDType, Strict
from converters.checkpoint.keys import KeyReader
from converters.checkpoint.source import SourceCheckpoint
from plugins.support.errors import InputError

VOXTRAL, REALTIME = "voxtral", "voxtral_realtime"
MODEL_TYPES = (VOXTRAL, REALTIME)

# Log-mel geometry that all released encoders were trained with; the front end has no other.
SAMPLING_RATE, HOP, WINDOW = 16000, 160, 400
# The second convolution halves the frames.
_FRAMES_PER_POSITION = 2
# The file has no id for the placeholder in Mistral's layout; it is fixed by the tokenizer.
_AUDIO_TOKEN = 24
_REALTIME_MEL_CEILING = 1.5
# Of the encoder's norms; no file of the released models says it.
_EPSILON = 1e-5
_TEKKEN = "tekken.json"
# Of the released realtime model: 480 ms.
_DELAY_TOKENS = 6

_IGNORED_TOP = (
    "architectures",
    "dtype",
    "generation_config",
    "initializer_range",
    # Compared with the tensors.
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
_IGNORED_TEXT = (
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "dtype",
    "initializer_range",
    "pad_token_id",
    "pretraining_tp",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
_IGNORED_AUDIO = (
    "_name_or_path",
    "activation_dropout",
    "architectures",
    "attention_dropout",
    "dropout",
    "dtype",
    "initializer_range",
    "layerdrop",
    "max_position_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "vocab_size",
)


class AudioConfig(Strict):
    """The audio encoder and its projector.

    Attributes:
        max_source_positions: frames per chunk after the convolutions; None for a stream.
        sliding_window: frames a frame attends to, itself included; None for a whole chunk.
        rotary_base: base of the rotary frequencies; None where a position table is added.
        downsample_factor: encoder frames joined into one row of the text model.
        tokens_per_chunk: rows per chunk; None for a stream.
        mel_ceiling: upper end of the spectrogram's range; None = the audio's own maximum.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_size: int
    intermediate_size: int
    norm_epsilon: float
    num_mel_bins: int
    max_source_positions: int | None
    sliding_window: int | None
    rotary_base: float | None
    downsample_factor: int
    tokens_per_chunk: int | None
    mel_ceiling: float | None


class VoxtralConfig(Strict):
    """The family block.

    Attributes:
        realtime: audio rows are added at every position instead of replacing placeholders.
        source_layout: of the converted files.
        position_table: where the encoder's position table comes from.
        delay_rank: width of the delay-conditioned norm; None without.
        default_num_delay_tokens: tokens the text lags behind the audio; None without.
    """

    realtime: bool
    source_layout: Literal["huggingface", "mistral"]
    intermediate_size: int
    sliding_window: int | None
    tie_word_embeddings: bool
    audio: AudioConfig
    audio_token_id: int | None
    position_table: Literal["file", "generated", "rotary"]
    delay_rank: int | None
    default_num_delay_tokens: int | None


class VoxtralCheckpointConfig(CheckpointConfig):
    """`config.json` of a converted Voxtral."""

    voxtral: VoxtralConfig


@dataclass(frozen=True)
class _Text:
    """The decoder's sizes, whatever the layout they were read from."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float
    rotary_base: float
    sliding_window: int | None
    tied: bool
    bos: int
    eos: list[int]


def mistral_model_type(params: Mapping[str, Any]) -> str | None:
    """The model type of a `params.json`, None when it is not a Voxtral."""
    args = (params.get("multimodal") or {}).get("whisper_model_args")
    if not isinstance(args, Mapping):
        return None
    return REALTIME if (args.get("encoder_args") or {}).get("causal") else VOXTRAL


def plan_config(source: SourceCheckpoint, dtype: ComputeDType) -> VoxtralCheckpointConfig:
    """Translate the configuration after checking all of it.

    Raises InputError listing every key that is missing, unknown, or has a value that the networks
    are not written for.
    """
    where = str(source.config_file)
    if source.layout == "mistral":
        realtime = mistral_model_type(source.config) == REALTIME
        text, audio, audio_token = _read_mistral(source.config, where, realtime)
        delay = _mistral_delay(source, where) if realtime else None
    else:
        realtime = source.config.get("model_type") == REALTIME
        text, audio, audio_token, delay = _read_huggingface(source, where, realtime)
    _check(text, audio, audio_token, where)
    if delay is not None and _tokenizer_delay(source) not in (None, delay):
        raise InputError(
            "the configuration and the tokenizer name different delays of the text",
            where=where,
            expected=f"{_tokenizer_delay(source)} tokens, as {_TEKKEN} says",
            found=f"{delay} tokens",
            fix="make both the delay that the model is to have",
        )
    table: Literal["file", "generated", "rotary"] = "rotary"
    if not realtime:
        table = "generated" if source.layout == "mistral" else "file"
    order = "rope_gptj" if source.layout == "mistral" else "rope_gpt_neox"
    return VoxtralCheckpointConfig.model_validate(
        {
            "producer": PRODUCER,
            "architecture": (
                "VoxtralRealtimeForConditionalGeneration"
                if realtime
                else "VoxtralForConditionalGeneration"
            ),
            "model_type": REALTIME if realtime else VOXTRAL,
            "dtype": dtype,
            "vocab_size": text.vocab_size,
            "vocab_size_padded": text.vocab_size,
            "hidden_size": text.hidden_size,
            "num_hidden_layers": text.num_hidden_layers,
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": text.num_key_value_heads,
            "head_size": text.head_size,
            "hidden_act": "silu",
            "norm_epsilon": text.norm_epsilon,
            "position_embedding_type": order,
            "max_position_embeddings": text.max_position_embeddings,
            "rotary_embedding_dim": text.head_size,
            "rotary_base": text.rotary_base,
            "eos_token_id": text.eos,
            "bos_token_id": text.bos,
            "pad_token_id": 11,
            "source": source.identity(),
            "voxtral": {
                "realtime": realtime,
                "source_layout": source.layout,
                "intermediate_size": text.intermediate_size,
                "sliding_window": text.sliding_window,
                "tie_word_embeddings": text.tied,
                "audio": audio,
                "audio_token_id": None if realtime else audio_token,
                "position_table": table,
                "delay_rank": 32 if realtime else None,
                "default_num_delay_tokens": delay,
            },
        }
    )


def _check(text: _Text, audio: AudioConfig, audio_token: int | None, where: str) -> None:
    problems = []
    if text.num_attention_heads % text.num_key_value_heads:
        problems.append("key/value heads do not divide the query heads")
    if text.hidden_size % 2:
        problems.append("hidden_size must be even")
    positions, factor = audio.max_source_positions, audio.downsample_factor
    if positions is not None and positions % factor:
        problems.append(f"{positions} positions of a chunk are not divisible by {factor}")
    for name, value in (("audio_token_id", audio_token), ("eos_token_id", max(text.eos))):
        if value is not None and not 0 <= value < text.vocab_size:
            problems.append(f"{name} {value} is not in the vocabulary of {text.vocab_size}")
    if problems:
        raise InputError(
            "the model configuration is not one this family is written for",
            where=where,
            found="; ".join(problems),
        )


# -- Hugging Face ---------------------------------------------------------------------------------


def _read_huggingface(
    source: SourceCheckpoint, where: str, realtime: bool
) -> tuple[_Text, AudioConfig, int | None, int | None]:
    top = KeyReader(source.config, where)
    top.choice("model_type", [REALTIME if realtime else VOXTRAL])
    top.rely_on("projector_hidden_act", "gelu", "the projector has one exact GELU")
    top.ignore(*_IGNORED_TOP, "hidden_size")
    delay = None
    factor = None
    if realtime:
        audio_token = None
        delay = top.integer("default_num_delay_tokens")
        factor = top.integer("downsample_factor")
        top.rely_on(
            "audio_length_per_tok",
            factor * _FRAMES_PER_POSITION,
            "mel frames of one token: the downsample factor times the stride",
        )
        top.rely_on_if_present("tie_word_embeddings", True, "the head is the embedding")
    else:
        audio_token = top.integer("audio_token_id", minimum=0)
        if top.has("downsample_factor"):
            factor = top.integer("downsample_factor")
        top.ignore("downsample_factor")
        top.rely_on_if_present("tie_word_embeddings", False, "the head has its own weights")
    text = _huggingface_text(top.table("text_config"), source, realtime)
    audio = _huggingface_audio(top.table("audio_config"), realtime, factor)
    top.finish()
    return text, audio, audio_token, delay


def _tokenizer_delay(source: SourceCheckpoint) -> int | None:
    """Tokens that the text lags behind the audio as the tokenizer says; None when it does not."""
    audio = (source.optional_json(_TEKKEN) or {}).get("audio")
    return _delay_tokens(audio, f"{source.directory / _TEKKEN}: audio")


def _delay_tokens(block: object, where: str) -> int | None:
    """The delay in tokens of a block that may name one in milliseconds.

    Raises InputError for one that is no whole number of tokens.
    """
    if not isinstance(block, Mapping) or block.get("transcription_delay_ms") is None:
        return None
    delay, rate = block["transcription_delay_ms"], block.get("frame_rate")
    tokens = delay * rate / 1000 if type(delay) is int and isinstance(rate, int | float) else 0.5
    if tokens < 1 or tokens != int(tokens):
        raise InputError(
            "the delay of the text is no whole number of tokens",
            where=f"{where}.transcription_delay_ms",
            expected="a multiple of 1000 / frame_rate",
            found=f"{delay!r} at frame_rate {rate!r}",
        )
    return int(tokens)


def _theta(keys: KeyReader) -> float:
    """`rope_parameters.rope_theta` wins over `rope_theta`; one of them must be there."""
    keys.rely_on_if_present("rope_scaling", None, "scaled position encodings are not implemented")
    keys.ignore("rope_parameters", "rope_theta")
    if not keys.has("rope_parameters"):
        return keys.positive_number("rope_theta")
    rope = keys.table("rope_parameters")
    rope.rely_on("rope_type", "default", "scaled position encodings are not implemented")
    rope.ignore("type")
    return rope.positive_number("rope_theta")


def _huggingface_text(keys: KeyReader, source: SourceCheckpoint, realtime: bool) -> _Text:
    keys.choice("model_type", ["voxtral_realtime_text"] if realtime else ["llama"])
    keys.rely_on("hidden_act", "silu", "the decoder's MLP uses silu")
    keys.rely_on_if_present("attention_bias", False, "projections have no bias")
    keys.rely_on_if_present("mlp_bias", False, "projections have no bias")
    keys.rely_on_if_present("tie_word_embeddings", realtime, "as the released files have it")
    window = None
    if realtime:
        window = keys.integer("sliding_window")
    else:
        keys.rely_on_if_present("sliding_window", None, "the decoder attends to everything")
    # The file of a whole model may leave the end to generation_config.json.
    table = source.config.get("text_config")
    values = table if isinstance(table, dict) else {}
    generation = source.optional_json("generation_config.json") or {}
    ends = generation.get("eos_token_id", values.get("eos_token_id"))
    keys.ignore("eos_token_id", "bos_token_id", *_IGNORED_TEXT)
    ids: list[Any] = ends if isinstance(ends, list) else [ends]
    proper = bool(ids) and all(type(item) is int for item in ids)
    keys.require(proper, "eos_token_id", f"expected a token id or a list of them, found {ends!r}")
    return _Text(
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_hidden_layers=keys.integer("num_hidden_layers"),
        num_attention_heads=keys.integer("num_attention_heads"),
        num_key_value_heads=keys.integer("num_key_value_heads"),
        head_size=keys.integer("head_dim", minimum=2),
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        norm_epsilon=keys.positive_number("rms_norm_eps"),
        rotary_base=_theta(keys),
        sliding_window=window,
        tied=realtime,
        bos=values.get("bos_token_id", 1),
        eos=list(dict.fromkeys(ids)) if proper else [2],
    )


def _huggingface_audio(keys: KeyReader, realtime: bool, factor: int | None) -> AudioConfig:
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    inner = keys.integer("intermediate_size")
    keys.ignore(*_IGNORED_AUDIO)
    keys.rely_on("activation_function", "gelu", "convolutions and MLP use the exact GELU")
    keys.rely_on_if_present("num_key_value_heads", heads, "every head has its own keys")
    theta = window = positions = None
    epsilon = _EPSILON
    if realtime:
        keys.choice("model_type", ["voxtral_realtime_encoder"])
        keys.rely_on("hidden_act", "silu", "the encoder's MLP is a SwiGLU")
        head = keys.integer("head_dim", minimum=2)
        window = keys.integer("sliding_window")
        epsilon = keys.positive_number("rms_norm_eps")
        theta = _theta(keys)
    else:
        keys.choice("model_type", ["voxtral_encoder"])
        keys.rely_on("scale_embedding", False, "features are not scaled")
        head = hidden // heads
        keys.require(hidden % heads == 0, "num_attention_heads", "does not divide hidden_size")
        keys.rely_on_if_present("head_dim", head, "the heads share the hidden size")
        positions = keys.integer("max_source_positions")
        if factor is None:
            # transformers joins as many frames as fill the MLP's width.
            factor = max(inner // hidden, 1)
            keys.require(inner % hidden == 0, "intermediate_size", "no multiple of hidden_size")
    layers, mels = keys.integer("num_hidden_layers"), keys.integer("num_mel_bins")
    return AudioConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_size=head,
        intermediate_size=inner,
        norm_epsilon=epsilon,
        num_mel_bins=mels,
        max_source_positions=positions,
        sliding_window=window,
        rotary_base=theta,
        downsample_factor=factor or 1,
        tokens_per_chunk=None if positions is None else positions // (factor or 1),
        mel_ceiling=_REALTIME_MEL_CEILING if realtime else None,
    )


# -- Mistral --------------------------------------------------------------------------------------


def _read_mistral(
    params: Mapping[str, Any], where: str, realtime: bool
) -> tuple[_Text, AudioConfig, int | None]:
    top = KeyReader(params, where)
    args = top.table("multimodal").table("whisper_model_args")
    factor = args.table("downsample_args").integer("downsample_factor")
    raw = ((params.get("multimodal") or {}).get("whisper_model_args") or {}).get("encoder_args")
    audio = _mistral_audio(args.table("encoder_args"), raw or {}, realtime, factor)
    heads, head = top.integer("n_heads"), top.integer("head_dim", minimum=2)
    window = None
    if realtime:
        window = _mistral_window(top, params.get("sliding_window"))
        top.rely_on("ada_rms_norm_t_cond", True, "the decoder's norms depend on the delay")
        top.rely_on("ada_rms_norm_t_cond_dim", 32, "width of the conditioning")
    else:
        top.rely_on_if_present("sliding_window", None, "the decoder attends to everything")
    top.rely_on_if_present("quantization", None, "quantised weights are not read in this layout")
    top.rely_on_if_present("tied_embeddings", realtime, "as the released files have it")
    top.rely_on_if_present("tie_embeddings", realtime, "as the released files have it")
    longest = "max_position_embeddings" if top.has("max_position_embeddings") else "max_seq_len"
    top.ignore("max_position_embeddings", "max_seq_len", "model_type", "causal", "use_biases")
    text = _Text(
        hidden_size=top.integer("dim"),
        intermediate_size=top.integer("hidden_dim"),
        num_hidden_layers=top.integer("n_layers"),
        num_attention_heads=heads,
        num_key_value_heads=top.integer("n_kv_heads"),
        head_size=head,
        vocab_size=top.integer("vocab_size"),
        max_position_embeddings=top.integer(longest),
        norm_epsilon=top.positive_number("norm_eps"),
        rotary_base=top.positive_number("rope_theta"),
        sliding_window=window,
        tied=realtime,
        bos=1,
        eos=[2],
    )
    top.finish()
    return text, audio, None if realtime else _AUDIO_TOKEN


def _mistral_delay(source: SourceCheckpoint, where: str) -> int:
    """Of `params.json`, of the tokenizer, or of the released model, whichever says it first."""
    encoder = source.config["multimodal"]["whisper_model_args"]["encoder_args"]
    own = _delay_tokens(encoder["audio_encoding_args"], f"{where}: audio_encoding_args")
    return own or _tokenizer_delay(source) or _DELAY_TOKENS


def _mistral_window(keys: KeyReader, value: object) -> int:
    """The window is a number, or a number in a string."""
    keys.ignore("sliding_window")
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    proper = type(value) is int and value > 0
    keys.require(proper, "sliding_window", f"expected a positive integer, found {value!r}")
    return value if proper and isinstance(value, int) else 1


def _mistral_audio(
    keys: KeyReader, values: Mapping[str, Any], realtime: bool, factor: int
) -> AudioConfig:
    mel = keys.table("audio_encoding_args")
    mel.rely_on("sampling_rate", SAMPLING_RATE, "the front end resamples to this rate")
    mel.rely_on("hop_length", HOP, "the front end's spectrogram")
    mel.rely_on("window_size", WINDOW, "the front end's spectrogram")
    mels = mel.integer("num_mel_bins")
    mel.rely_on(
        "frame_rate",
        SAMPLING_RATE / HOP / _FRAMES_PER_POSITION / factor,
        "tokens per second, as stride and downsample factor give",
    )
    hidden, heads = keys.integer("dim"), keys.integer("n_heads")
    head = keys.integer("head_dim", minimum=2)
    theta = window = positions = None
    keys.ignore("vocab_size", "max_source_positions", "sliding_window", "max_seq_len")
    keys.rely_on_if_present("n_kv_heads", heads, "every head has its own keys")
    if realtime:
        keys.rely_on("causal", True, "frames are heard in order")
        keys.rely_on("pos_embed", "rope", "the encoder has rotary positions")
        keys.rely_on("ffn_type", "swiglu", "the encoder's MLP")
        keys.rely_on("norm_type", "rms_norm", "the encoder's norms")
        keys.rely_on("use_biases", True, "queries, values, outputs and down projections have one")
        keys.rely_on_if_present("norm_eps", _EPSILON, "the encoder's norms")
        theta = keys.positive_number("rope_theta")
        window = _mistral_window(keys, values.get("sliding_window"))
        mel.rely_on_if_present("chunk_length_s", None, "a stream has no chunks")
        mel.rely_on_if_present("transcription_format", "streaming", "the realtime model")
        mel.rely_on_if_present("global_log_mel_max", _REALTIME_MEL_CEILING, "the front end's range")
        mel.ignore(
            "transcription_delay_ms",
            "streaming_look_ahead_ms",
            "streaming_look_back_ms",
            "streaming_n_left_pad_tokens",
        )
    else:
        keys.rely_on_if_present("causal", False, "a chunk is heard as a whole")
        positions = keys.integer("max_source_positions")
        seconds = positions * _FRAMES_PER_POSITION * HOP / SAMPLING_RATE
        mel.rely_on("chunk_length_s", seconds, "the length that max_source_positions gives")
        keys.require(
            heads * head == hidden, "head_dim", f"{heads} heads of {head} are not dim {hidden}"
        )
    layers, inner = keys.integer("n_layers"), keys.integer("hidden_dim")
    return AudioConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_size=head,
        intermediate_size=inner,
        norm_epsilon=_EPSILON,
        num_mel_bins=mels,
        max_source_positions=positions,
        sliding_window=window,
        rotary_base=theta,
        downsample_factor=factor,
        tokens_per_chunk=None if positions is None else positions // factor,
        mel_ceiling=_REALTIME_MEL_CEILING if realtime else None,
    )
