"""Typical mistakes of a Dots3 NOTE conversion, made on purpose.

Each is a transformation of the bound weights that turns a right program into one with a known bug
of a public port. A comparison that does not notice every one of them proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from converters.controls import NegativeControl, Weights, magnitudes, multiplied
from converters.dots3.config import Dots3CheckpointConfig, Mla

_Change = Callable[[Tensor], Tensor]


def negative_controls(config: Dots3CheckpointConfig) -> list[NegativeControl]:
    """The mistakes that apply to a checkpoint with this configuration."""
    block, hidden = config.dots3, config.hidden_size

    def where(*suffixes: str, change: _Change) -> Callable[[Weights], dict[str, Tensor]]:
        return lambda weights: {
            name: change(tensor) for name, tensor in weights.items() if name.endswith(suffixes)
        }

    def per_kind(suffix: str, change: Callable[[Tensor, Mla], Tensor]) -> Callable[..., Any]:
        """`change` on the tensors of that name, told the geometry of their layer."""

        def apply(weights: Weights) -> dict[str, Tensor]:
            return {
                name: change(weights[name], block.full if full else block.sliding)
                for index, full in enumerate(k == "full_attention" for k in block.layer_types)
                if (name := f"transformer.layers.{index}.attention.{suffix}") in weights
            }

        return apply

    def halves_swapped(x: Tensor) -> Tensor:
        return torch.cat(list(reversed(x.chunk(2, dim=-2))), dim=-2)

    def by_latent_width(weights: Weights) -> dict[str, Tensor]:
        changed: dict[str, Tensor] = {}
        for index, kind in enumerate(block.layer_types):
            mla = block.full if kind == "full_attention" else block.sliding
            factor = ((mla.nope + mla.rope) / (mla.kv_rank + mla.rope)) ** 0.5
            name = f"transformer.layers.{index}.attention.q_b.weight"
            changed |= multiplied(weights, name, factor)
        return changed

    def rope_first(x: Tensor, mla: Mla) -> Tensor:
        heads = x.unflatten(0, (mla.heads, mla.nope + mla.rope))
        return torch.cat([heads[:, mla.nope :], heads[:, : mla.nope]], dim=1).flatten(0, 1)

    def all_keys_first(x: Tensor, mla: Mla) -> Tensor:
        """Rows laid out as all keys, then all values, read as pairs per head."""
        heads = x.unflatten(0, (mla.heads, mla.nope + mla.value))
        keys, values = heads[:, : mla.nope].flatten(0, 1), heads[:, mla.nope :].flatten(0, 1)
        return torch.cat([keys, values])

    def half_split(x: Tensor, heads: int, width: int, first: int, rope: int) -> Tensor:
        """Rows such that rotating neighbours pairs what half-split rotation would pair."""
        order = torch.arange(width)
        pairs = torch.arange(rope).view(2, -1).T.flatten()
        order[first : first + rope] = first + pairs
        return x.unflatten(0, (heads, width))[:, order].flatten(0, 1)

    def attention_half_split(weights: Weights) -> dict[str, Tensor]:
        queries = per_kind(
            "q_b.weight", lambda x, m: half_split(x, m.heads, m.nope + m.rope, m.nope, m.rope)
        )
        keys = per_kind("kv_a.weight", lambda x, m: half_split(x, 1, len(x), m.kv_rank, m.rope))
        norms = per_kind(
            "k_rope_layernorm.weight", lambda x, m: half_split(x, 1, m.rope, 0, m.rope)
        )
        return queries(weights) | keys(weights) | norms(weights)

    index_heads, width, rope = block.index_n_heads, block.index_head_dim, block.full.rope
    first = 0 if block.index_rope == "leading" else width - rope

    def on_index(change: Callable[[Tensor, int], Tensor]) -> Callable[[Weights], dict[str, Tensor]]:
        """`change` on everything that has index lanes, told how many heads there are."""
        return lambda weights: (
            where("indexer.q_b.weight", change=lambda x: change(x, index_heads))(weights)
            | where(
                "indexer.k.weight",
                "indexer.k_layernorm.weight",
                "indexer.k_layernorm.bias",
                change=lambda x: change(x, 1),
            )(weights)
        )

    def other_end(x: Tensor, heads: int) -> Tensor:
        """The index lanes in the other layout: rotary lanes at the other end."""
        lanes = x.unflatten(0, (heads, width))
        return lanes.roll(-rope if first == 0 else rope, dims=1).flatten(0, 1)

    def rescaled(rank: str) -> Callable[[Tensor, Mla], Tensor]:
        return lambda x, mla: x * (hidden / getattr(mla, rank)) ** 0.5

    controls = [
        NegativeControl(
            "query latent rescaled twice (folded into its norm, and again)",
            per_kind("q_a_layernorm.weight", rescaled("q_rank")),
        ),
        NegativeControl(
            "key/value latent rescaled twice (folded into its norm, and again)",
            per_kind("kv_a_layernorm.weight", rescaled("kv_rank")),
        ),
        NegativeControl(
            "latents not rescaled",
            per_kind("kv_a_layernorm.weight", lambda x, m: x * (m.kv_rank / hidden) ** 0.5),
        ),
        NegativeControl("softmax scaled by the width of the latent", by_latent_width),
        NegativeControl(
            "rotary lanes of a query before the plain ones", per_kind("q_b.weight", rope_first)
        ),
        NegativeControl(
            "keys and values not grouped by head", per_kind("kv_b.weight", all_keys_first)
        ),
        NegativeControl("half-split rotation in the attention", attention_half_split),
        NegativeControl(
            "half-split rotation in the indexer",
            on_index(lambda x, heads: half_split(x, heads, width, first, rope)),
        ),
        NegativeControl("rotary lanes of the indexer at the other end", on_index(other_end)),
        NegativeControl(
            "index keys without the bias of their norm",
            where("indexer.k_layernorm.bias", change=torch.zeros_like),
        ),
        NegativeControl(
            "index head weights made positive",
            where("indexer.weights.weight", change=magnitudes),
        ),
        NegativeControl(
            "rotary key without a norm of its own",
            where("k_rope_layernorm.weight", change=torch.ones_like),
        ),
        NegativeControl(
            "no gates on the attention heads",
            where("attention.gate.weight", change=torch.zeros_like),
        ),
        NegativeControl(
            "router without its correction bias", where("router.bias", change=torch.zeros_like)
        ),
        NegativeControl(
            "expert gate and up swapped", where("experts.gate_up.weight", change=halves_swapped)
        ),
        NegativeControl(
            "norms with an offset of one", where("_layernorm.weight", change=lambda x: x + 1.0)
        ),
    ]
    return controls + _draft_controls() if block.draft_layers else controls


def _draft_controls() -> list[NegativeControl]:
    def change(
        name: str, make: Callable[[Weights], Tensor]
    ) -> Callable[[Weights], dict[str, Tensor]]:
        return lambda weights: {name: make(weights)}

    def hidden_first(weights: Weights) -> Tensor:
        return torch.cat(list(reversed(weights["mtp.eh_proj.weight"].chunk(2, dim=1))), dim=1)

    def norms_exchanged(weights: Weights) -> dict[str, Tensor]:
        names = ("mtp.enorm.weight", "mtp.hnorm.weight")
        return {name: weights[other] for name, other in zip(names, reversed(names), strict=True)}

    mistakes = {
        "draft layer with the text model's embedding": change(
            "mtp.vocab_embedding.weight", lambda w: w["transformer.vocab_embedding.weight"]
        ),
        "draft layer: hidden state before the embedding": change(
            "mtp.eh_proj.weight", hidden_first
        ),
        "draft layer: norms of embedding and hidden state exchanged": norms_exchanged,
        "draft layer with the text model's last norm": change(
            "mtp.ln_f.weight", lambda w: w["transformer.ln_f.weight"]
        ),
    }
    return [NegativeControl(name, weights, phase="draft") for name, weights in mistakes.items()]
