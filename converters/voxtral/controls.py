"""Typical mistakes of a Voxtral conversion, made on purpose.

Each is a transformation of the bound weights that turns a right program into one with a known bug
of a public port. A comparison that does not notice every one of them proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from converters.controls import NegativeControl, Weights
from converters.voxtral.config import VoxtralCheckpointConfig


def negative_controls(config: VoxtralCheckpointConfig) -> list[NegativeControl]:
    """The mistakes that apply to a checkpoint with this configuration."""
    block, audio = config.voxtral, config.voxtral.audio
    heads, kv_heads, head = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_size,
    )
    rotated = (heads + kv_heads) * head

    def where(
        suffix: str, change: Callable[[Tensor], Tensor]
    ) -> Callable[[Weights], dict[str, Tensor]]:
        return lambda weights: {
            name: change(tensor) for name, tensor in weights.items() if name.endswith(suffix)
        }

    def other_pairs(rows: Tensor) -> Tensor:
        """Query and key rows as if the other layout's order were meant."""
        by_head = rows[:rotated].unflatten(0, (heads + kv_heads, head))
        if config.position_embedding_type == "rope_gptj":
            turned = by_head.unflatten(1, (head // 2, 2)).transpose(1, 2)
        else:
            turned = by_head.unflatten(1, (2, head // 2)).transpose(1, 2)
        return torch.cat([turned.reshape(rotated, -1), rows[rotated:]]).contiguous()

    def keys_before_queries(rows: Tensor) -> Tensor:
        return torch.cat([rows[head * heads : rotated], rows[: head * heads], rows[rotated:]])

    def swapped(rows: Tensor) -> Tensor:
        return rows.roll(rows.shape[0] // 2, 0)

    def feature_major(columns: Tensor) -> Tensor:
        shape = (audio.downsample_factor, audio.hidden_size)
        order = torch.arange(columns.shape[1]).unflatten(0, shape).T.flatten()
        return columns[:, order].contiguous()

    def first_frame_only(columns: Tensor) -> Tensor:
        kept = torch.zeros_like(columns)
        kept[:, : audio.hidden_size] = columns[:, : audio.hidden_size]
        return kept

    controls = [
        NegativeControl(
            "rotary rows in the other layout's order", where("attention.qkv.weight", other_pairs)
        ),
        NegativeControl("keys above queries", where("attention.qkv.weight", keys_before_queries)),
        NegativeControl("gate and up swapped", where("mlp.gate_up.weight", swapped)),
        NegativeControl(
            "audio frames joined feature by feature",
            where("projector.linear_1.weight", feature_major),
        ),
        NegativeControl(
            "every fourth audio frame only", where("projector.linear_1.weight", first_frame_only)
        ),
        NegativeControl(
            "convolution kernels reversed",
            where("audio.conv2.weight", lambda x: x.flip(-1).contiguous()),
        ),
        NegativeControl(
            "bias of the audio queries dropped",
            lambda weights: {
                name: torch.zeros_like(tensor)
                for name, tensor in weights.items()
                if name.startswith("audio.layers.") and name.endswith("attention.q.bias")
            },
        ),
    ]
    if block.position_table == "file":
        controls.append(
            NegativeControl(
                "position table with the wrong divisor",
                where("audio.position_embedding.weight", _wrong_table),
            )
        )
    if not block.tie_word_embeddings:
        controls.append(
            NegativeControl(
                "head tied to the embedding",
                lambda weights: {
                    "lm_head.weight": weights["transformer.vocab_embedding.weight"].clone()
                },
            )
        )
    if block.delay_rank is not None:
        controls.append(
            NegativeControl(
                "delay-conditioned norm ignored",
                where("delay_norm.up.weight", torch.zeros_like),
            )
        )
    return controls


def _wrong_table(table: Tensor) -> Tensor:
    half = table.shape[1] // 2
    rates = torch.exp(-math.log(10000.0) * torch.arange(half) / half)
    angles = torch.arange(table.shape[0])[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(table.dtype)
