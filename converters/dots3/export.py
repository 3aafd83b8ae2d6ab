"""Dots3 NOTE as the released checkpoint has it on disk, text model and draft layer only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.checkpoint.config import CheckpointConfig
from converters.checkpoint.header import TensorEntry
from converters.checkpoint.hf_layout import HfLayout
from converters.dots3.config import Dots3CheckpointConfig, Mla
from converters.dots3.weights import wanted_tensors

_SAME = (
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "routed_scaling_factor",
)


def layout(config: CheckpointConfig, entries: Mapping[str, TensorEntry]) -> HfLayout:
    """Names and configuration; experts lie one by one, and padded MLPs stay as wide as they are."""
    if not isinstance(config, Dots3CheckpointConfig):
        raise TypeError(f"not a Dots3 configuration: {type(config).__name__}")
    metadata = {"indexer_rope_layout": config.dots3.index_rope}
    return HfLayout(_config(config), wanted_tensors(config), _disk_name, {}, metadata)


def _disk_name(canonical: str) -> str:
    # Of a tensor or of its module.
    return canonical if canonical.partition(".")[0] == "lm_head" else f"model.{canonical}"


def _geometry(prefix: str, mla: Mla) -> dict[str, Any]:
    return {
        f"{prefix}num_attention_heads": mla.heads,
        f"{prefix}num_key_value_heads": mla.heads,
        f"{prefix}q_lora_rank": mla.q_rank,
        f"{prefix}kv_lora_rank": mla.kv_rank,
        f"{prefix}qk_nope_head_dim": mla.nope,
        f"{prefix}qk_rope_head_dim": mla.rope,
        f"{prefix}v_head_dim": mla.value,
        f"{prefix}rope_theta": mla.rotary_base,
    }


def _config(config: Dots3CheckpointConfig) -> dict[str, Any]:
    block = config.dots3
    return {
        "architectures": [config.architecture],
        "model_type": config.model_type,
        "dtype": config.dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_width(block.intermediate_size),
        "moe_shared_expert_intermediate_size": config.mlp_width(block.shared_intermediate_size),
        # The width says everything about the shared experts.
        "n_shared_experts": 1,
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": list(block.layer_types),
        "first_k_dense_replace": block.dense_layers,
        "moe_layer_freq": 1,
        **_geometry("", block.full),
        **_geometry("swa_", block.sliding),
        "swa_head_dim": block.sliding.nope + block.sliding.rope,
        "sliding_window_size": block.sliding_window,
        **{name: getattr(block, name) for name in _SAME},
        "use_dsa": True,
        "attention_gate_type": "headwise",
        "swa_attention_gate_type": "headwise",
        "apply_mla_qkv_lora_rescale": True,
        "k_rope_only_layernorm": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": config.eos_token_id,
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
    }
