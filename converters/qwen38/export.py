"""Qwen3.8-Flash-Next as the text-only Hugging Face class has it on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from converters.checkpoint.config import CheckpointConfig
from converters.checkpoint.header import TensorEntry
from converters.checkpoint.hf_layout import HfLayout
from converters.checkpoint.recipe import Wanted
from converters.qwen38.config import Qwen38CheckpointConfig
from converters.qwen38.weights import cached_layers, wanted_tensors

# Keys of the family block that have no place in a Hugging Face configuration.
_OWN_KEYS = {"ple_layers", "ngram_eos_token_id", "mrope_section", "mrope_interleaved"}
_TABLE_TYPES = {"float8_e4m3fn": "float8_e4m3fn", "uint8": "nvfp4"}
_VISION_KEYS = {
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
}


def layout(config: CheckpointConfig, entries: Mapping[str, TensorEntry]) -> HfLayout:
    """Names and configuration; quantised experts lie one by one, plain ones are stacked."""
    if not isinstance(config, Qwen38CheckpointConfig):
        raise TypeError(f"not a Qwen3.8 configuration: {type(config).__name__}")
    quantised = {name for name in entries if entries[name].dtype.name in ("uint8", "float8_e4m3fn")}
    wanted: list[Wanted] = []
    # Main and draft experts may be stored differently, so each tensor is taken in its own layout.
    stacked = {item.target: item for item in wanted_tensors(config, stacked_experts=True)}
    for item in wanted_tensors(config, stacked_experts=False):
        wanted.append(item if item.target in quantised else stacked[item.target])
    return HfLayout(
        _config(config) | _table_type(wanted, entries),
        wanted,
        _disk_name,
        _constants(config),
        caches=cached_layers(config),
    )


def _table_type(wanted: Sequence[Wanted], entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """The key by which servers choose the table's storage before anything else is asked."""
    for item in wanted:
        if item.scale_owner is not None and item.target in entries:
            kind = _TABLE_TYPES.get(entries[item.target].dtype.name)
            return {} if kind is None else {"ple_embedding_dtype": kind}
    return {}


def _disk_name(canonical: str) -> str:
    own = canonical.partition(".")[0] in ("lm_head", "mtp")
    return canonical if own else f"model.{canonical}"


def _constants(config: Qwen38CheckpointConfig) -> dict[str, torch.Tensor]:
    tensors = {}
    for layer in config.qwen38.ple_layers:
        base = f"model.layers.{layer.layer}.ple.ple_embedding."
        tensors[f"{base}layer_multipliers"] = torch.tensor(layer.multipliers)
        tensors[f"{base}ngram_heads_vocab_sizes"] = torch.tensor(layer.sizes)
        tensors[f"{base}ngram_heads_offsets"] = torch.tensor(layer.offsets)
    return tensors


def _config(config: Qwen38CheckpointConfig) -> dict[str, Any]:
    block = config.qwen38.model_dump(exclude=_OWN_KEYS | _VISION_KEYS)
    return {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "dtype": config.dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "indexer_kv_heads": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rotary_base,
            "partial_rotary_factor": config.rotary_embedding_dim / config.head_size,
            "mrope_interleaved": config.qwen38.mrope_interleaved,
            "mrope_section": config.qwen38.mrope_section,
        },
        "eos_token_id": config.qwen38.ngram_eos_token_id,
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
        **block,
    }
