"""Typical mistakes of a Qwen3.8-Flash-Next conversion, made on purpose.

Each is a transformation of the bound weights or of the host inputs that turns a right program into
one with a known bug of a public port. A comparison that does not notice every one of them proves
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from converters.controls import HostInput, NegativeControl, Weights
from converters.qwen38.config import Qwen38CheckpointConfig
from plugins.ngram import layer_constants

_CENTERED = (
    "hyper_connection.norm.weight",
    "hyper_connection_mixer.norm.weight",
    "_layernorm.weight",
    "ple.norm_key.weight",
    "ple.norm_query.weight",
    "ple.norm_conv.weight",
)


def negative_controls(config: Qwen38CheckpointConfig) -> list[NegativeControl]:
    """The mistakes that apply to a checkpoint with this configuration."""
    family = config.qwen38
    head = config.head_size
    keys = family.linear_num_key_heads * family.linear_key_head_dim

    def where(
        suffixes: tuple[str, ...], change: Callable[[Tensor], Tensor]
    ) -> Callable[[Weights], dict[str, Tensor]]:
        return lambda weights: {
            name: change(tensor) for name, tensor in weights.items() if name.endswith(suffixes)
        }

    def halves_swapped(x: Tensor) -> Tensor:
        return torch.cat(list(reversed(x.chunk(2, dim=1))), dim=1)

    def gate_after_all_queries(x: Tensor) -> Tensor:
        queries, gates = (half.unflatten(0, (-1, head)) for half in x.chunk(2, dim=0))
        return torch.stack([queries, gates], dim=1).flatten(0, 2)

    def query_key_swapped(x: Tensor) -> Tensor:
        return torch.cat([x[keys : 2 * keys], x[:keys], x[2 * keys :]])

    def neighbours_paired(rows: int) -> Callable[[Tensor], Tensor]:
        """Put what (2i, 2i + 1) held into the rotated pairs (i, i + half) of every head."""
        rotated = config.rotary_embedding_dim
        order = torch.arange(rows)
        order[:rotated] = torch.arange(rotated).view(-1, 2).T.flatten()
        return lambda x: x.unflatten(0, (-1, rows))[:, order].flatten(0, 1)

    def neighbours_rotated(weights: Weights) -> dict[str, Tensor]:
        attention = {n: x for n, x in weights.items() if ".indexer." not in n}
        per_head = where(
            ("attention.k.weight", "attention.q_layernorm.weight", "attention.k_layernorm.weight"),
            neighbours_paired(head),
        )
        return per_head(attention) | where(("attention.q.weight",), neighbours_paired(2 * head))(
            attention
        )

    controls = [
        NegativeControl("norm offset missing", where(_CENTERED, lambda x: x - 1.0)),
        NegativeControl("norm offset added twice", where(_CENTERED, lambda x: x + 1.0)),
        NegativeControl(
            "norm offset also on the gated norm",
            where(("linear_attention.norm.weight",), lambda x: x + 1.0),
        ),
        NegativeControl(
            "expert gate and up swapped", where(("experts.gate_up.weight",), halves_swapped)
        ),
        NegativeControl(
            "query and gate not interleaved per head",
            where(("attention.q.weight",), gate_after_all_queries),
        ),
        NegativeControl(
            "recurrence query and key swapped",
            where(("in_proj_qkv.weight", "linear_attention.conv1d.weight"), query_key_swapped),
        ),
        NegativeControl(
            "value heads tiled over key heads",
            lambda weights: _tiled_value_heads(weights, config),
        ),
        NegativeControl(
            "convolution taps reversed", where(("conv1d.weight",), lambda x: x.flip(-1))
        ),
        NegativeControl("decay without A_log", where(("A_log",), torch.zeros_like)),
        NegativeControl("decay without dt_bias", where(("dt_bias",), torch.zeros_like)),
        NegativeControl("rotary pairs are neighbours", neighbours_rotated),
        NegativeControl(
            "index keys swapped with an index query head",
            where(("indexer.qk.weight",), lambda x: x.roll(family.indexer_head_dim, 0)),
        ),
    ]
    if family.ple_layer_ids:
        controls += _ple_controls(config)
    return controls


def _tiled_value_heads(weights: Weights, config: Qwen38CheckpointConfig) -> dict[str, Tensor]:
    """Permute the value heads such that head h meets key head h mod key heads."""
    family = config.qwen38
    key_heads, heads = family.linear_num_key_heads, family.linear_num_value_heads
    depth = family.linear_value_head_dim
    keys = key_heads * family.linear_key_head_dim
    order = torch.arange(heads).view(-1, key_heads).T.flatten()

    def rows(x: Tensor, width: int) -> Tensor:
        return x.unflatten(0, (heads, width))[order].flatten(0, 1)

    changed: dict[str, Tensor] = {}
    for name, x in weights.items():
        if name.endswith(("in_proj_qkv.weight", "linear_attention.conv1d.weight")):
            changed[name] = torch.cat([x[: 2 * keys], rows(x[2 * keys :], depth)])
        elif name.endswith("in_proj_z.weight"):
            changed[name] = rows(x, depth)
        elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", ".A_log", ".dt_bias")):
            changed[name] = rows(x, 1)
        elif name.endswith("out_proj.weight") and x.dtype != torch.uint8:
            # Columns of packed codes stay: the other tensors are mistaken enough.
            changed[name] = rows(x.T, depth).T.contiguous()
    return changed


def _ple_controls(config: Qwen38CheckpointConfig) -> list[NegativeControl]:
    family = config.qwen38
    parts = family.split_ngram_parts

    def shards_by_name(weights: Weights) -> dict[str, Tensor]:
        order = sorted(range(parts), key=str)
        changed = {}
        for name, table in weights.items():
            if name.endswith("ngram_embedding.weight"):
                shards = table.split(math.ceil(table.shape[0] / parts))
                changed[name] = torch.cat([shards[part] for part in order])
        return changed

    def every(change: Callable[[HostInput], HostInput]) -> Callable[..., list[HostInput]]:
        return lambda inputs: [change(dict(entry)) for entry in inputs]

    def other_seed(inputs: Sequence[HostInput]) -> list[HostInput]:
        changed = []
        for number, entry in enumerate(inputs):
            # Only the multipliers depend on the seed; the table's sizes play no part in them.
            constants = layer_constants(
                vocab_size=config.vocab_size,
                ngram_size=family.ngram_size,
                heads_per_ngram=family.heads_per_ngram,
                ngram_vocab_size_base=2,
                divisor=1,
                seed=0,
                layer_number=number,
            )
            changed.append(entry | {"multipliers": list(constants.multipliers)})
        return changed

    controls = [
        NegativeControl("hash multipliers of seed 0", host_inputs=other_seed),
        NegativeControl(
            "hash head offsets ignored",
            host_inputs=every(lambda entry: entry | {"offsets": [0] * len(entry["offsets"])}),
        ),
        NegativeControl(
            "another end token in the n-gram history",
            host_inputs=every(lambda entry: entry | {"eos_token_id": entry["eos_token_id"] + 1}),
        ),
    ]
    if parts > 10:
        controls.append(NegativeControl("table shards in the order of their names", shards_by_name))
    return controls
