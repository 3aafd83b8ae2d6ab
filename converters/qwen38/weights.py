"""Qwen3.8-Flash-Next: which source tensors make which target tensors.

Apart from renaming, only joins by rows: the shards of the n-gram table in numeric order, and, where
experts lie one by one, the experts with each one's gate rows above its up rows. Values are never
changed: centred norm weights stay centred, the network adds the 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from converters.checkpoint.header import Shape
from converters.checkpoint.match import Ignored, canonical_names
from converters.checkpoint.recipe import Part, Wanted, routed_experts
from converters.checkpoint.source import SourceCheckpoint
from converters.family import TensorPlan
from converters.quantization.kv_cache import Cached
from converters.qwen38.config import Qwen38CheckpointConfig
from plugins.support.errors import InputError

EMBEDDING = "embed_tokens.weight"

_IGNORED: dict[str, str] = {
    r"visual\..+": "vision tower, not part of the text engine",
    r"layers\.\d+\.ple\.ple_embedding\..*(hashstats_.*|token_lookup)": "statistics of the n-gram "
    "table, not used by the model",
    r"(mtp\.)?hyper_connection_mixer\.block_inject_weight\.weight": "the last mixer of a model "
    "injects nothing",
}


def canonical_name(name: str) -> str:
    """The name without the prefixes that different classes and exporters put before it."""
    for prefix in ("model.language_model.", "language_model.model.", "model.", "language_model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def plan_tensors(source: SourceCheckpoint, config: Qwen38CheckpointConfig) -> TensorPlan:
    """Name every target tensor and its sources, and check the stored hash constants.

    Raises InputError when two names mean the same tensor or a hash constant is another one.
    """
    names, groups = canonical_names(source, canonical_name, _IGNORED)
    constants = _check_hash_constants(source, config, names)
    # Main and draft experts may lie in different layouts, so each group is looked at.
    stacked = {name.partition(".experts.")[0] for name in names if _STACKED.search(name)}
    wanted = _Names(config, lambda experts: experts.removesuffix(".experts") in stacked).wanted()
    groups.append(Ignored("hash constants, checked and kept in config.json", tuple(constants)))
    used = [group for group in groups if group.names]
    return TensorPlan(names, wanted, used, _declared_name(config), cached_layers(config))


def cached_layers(config: Qwen38CheckpointConfig) -> list[Cached]:
    """The layers with keys and values; the draft layer last."""
    layers = [
        Cached(f"transformer.layers.{index}.attention", f"layers.{index}.self_attn")
        for index, kind in enumerate(config.qwen38.layer_types)
        if kind != "linear_attention"
    ]
    if config.qwen38.mtp_num_hidden_layers:
        drafts = "mtp.layers.0."
        layers.append(Cached(f"{drafts}attention", f"{drafts}self_attn", optional=True))
    return layers


def wanted_tensors(config: Qwen38CheckpointConfig, *, stacked_experts: bool) -> list[Wanted]:
    """All target tensors, made from a source whose experts all lie in one layout."""
    return _Names(config, lambda _experts: stacked_experts).wanted()


def _declared_name(config: Qwen38CheckpointConfig) -> Callable[[str], str]:
    """Canonical names for declarations, where the draft layer may count as the last layer."""
    after_last = f"layers.{config.num_hidden_layers}."

    def canonical(name: str) -> str:
        short = canonical_name(name)
        if short.startswith(after_last):
            return "mtp.layers.0." + short.removeprefix(after_last)
        return short

    return canonical


def _check_hash_constants(
    source: SourceCheckpoint, config: Qwen38CheckpointConfig, names: dict[str, str]
) -> list[str]:
    """Compare the stored constants with the recomputed ones; their names on disk."""
    found = []
    for layer in config.qwen38.ple_layers:
        base = f"layers.{layer.layer}.ple.ple_embedding."
        for name, expected in (
            ("layer_multipliers", layer.multipliers),
            ("ngram_heads_vocab_sizes", layer.sizes),
            ("ngram_heads_offsets", layer.offsets),
        ):
            disk = names.pop(base + name, None)
            if disk is None:
                raise InputError(
                    "a hash constant of the n-gram table is missing",
                    where=str(source.directory),
                    expected=f"int64 tensor {base}{name}",
                )
            entry = source.tensors[disk]
            stored = source.read(disk).tolist() if entry.dtype.name == "int64" else None
            if stored != expected:
                raise InputError(
                    "a hash constant of the n-gram table is not the one that the configuration "
                    "gives; every looked-up row would be wrong",
                    where=f"{entry.file}: {disk}",
                    expected=f"int64 {expected}",
                    found=f"{entry.dtype.name} {stored if stored is not None else ''}".strip(),
                    fix="check seed, ngram_vocab_size_base and vocab_size in config.json",
                )
            found.append(disk)
    return found


class _Names:
    """Builds the list of wanted tensors for one configuration and one layout of the source."""

    def __init__(self, config: Qwen38CheckpointConfig, is_stacked: Callable[[str], bool]) -> None:
        self.config, self.block, self.is_stacked = config, config.qwen38, is_stacked
        self.hidden = config.hidden_size
        self.list: list[Wanted] = []

    def wanted(self) -> list[Wanted]:
        """All target tensors in the order of the model."""
        vocab = (self.config.vocab_size, self.hidden)
        self._one("transformer.vocab_embedding.weight", EMBEDDING, vocab)
        for index, kind in enumerate(self.block.layer_types):
            self._layer(f"transformer.layers.{index}.", f"layers.{index}.", kind)
        for layer in self.block.ple_layers:
            self._ple(layer.layer, layer.rows, len(layer.sizes))
        self._hyper_connection(
            "transformer.hyper_connection_mixer.", "hyper_connection_mixer.", inject=False
        )
        self._one("lm_head.weight", "lm_head.weight", vocab)
        if self.block.mtp_num_hidden_layers:
            self._drafts()
        return self.list

    def _one(
        self,
        target: str,
        source: str,
        shape: Shape,
        *,
        keep_float32: bool = False,
        may_widen: bool = False,
    ) -> None:
        self.list.append(
            Wanted(
                target,
                shape,
                (Part(source, shape),),
                keep_float32=keep_float32,
                may_widen=may_widen,
            )
        )

    def _linear(
        self,
        target: str,
        source: str,
        rows: int,
        columns: int,
        group: Literal["mlp", "all"],
        fused: str | None = None,
    ) -> None:
        shape = (rows, columns)
        part = Part(f"{source}.weight", shape)
        self.list.append(Wanted(f"{target}.weight", shape, (part,), quantize=group, fused=fused))

    def _hyper_connection(self, target: str, source: str, *, inject: bool) -> None:
        width, rank = self.block.hc_count * self.hidden, self.block.hc_lowrank
        self._one(f"{target}norm.weight", f"{source}hc_norm.weight", (width,), may_widen=True)
        for name, shape in (("down", (rank, width)), ("up", (width, rank))):
            self._one(f"{target}{name}.weight", f"{source}input_mix_weight_{name}.weight", shape)
        if inject:
            shape = (self.block.hc_count, width)
            self._one(f"{target}inject.weight", f"{source}block_inject_weight.weight", shape)

    def _layer(self, target: str, source: str, kind: str) -> None:
        self._hyper_connection(
            f"{target}attention_hyper_connection.", f"{source}attn_hyper_connection.", inject=True
        )
        if kind == "linear_attention":
            self._linear_attention(f"{target}linear_attention.", f"{source}linear_attn.")
        else:
            self._attention(f"{target}attention.", f"{source}self_attn.")
        self._hyper_connection(
            f"{target}mlp_hyper_connection.", f"{source}mlp_hyper_connection.", inject=True
        )
        self._experts(f"{target}mlp.", f"{source}mlp.")

    def _linear_attention(self, target: str, source: str) -> None:
        block = self.block
        key = block.linear_num_key_heads * block.linear_key_head_dim
        heads = block.linear_num_value_heads
        value = heads * block.linear_value_head_dim
        mixed = 2 * key + value
        for name, rows in (("in_proj_qkv", mixed), ("in_proj_z", value)):
            self._linear(
                f"{target}{name}", f"{source}{name}", rows, self.hidden, "all", f"{target}in_proj"
            )
        for name in ("in_proj_b.weight", "in_proj_a.weight"):
            self._one(f"{target}{name}", f"{source}{name}", (heads, self.hidden))
        self._one(
            f"{target}conv1d.weight",
            f"{source}conv1d.weight",
            (mixed, 1, block.linear_conv_kernel_dim),
        )
        for name in ("A_log", "dt_bias"):
            self._one(f"{target}{name}", f"{source}{name}", (heads,), keep_float32=True)
        norm = (block.linear_value_head_dim,)
        self._one(f"{target}norm.weight", f"{source}norm.weight", norm, may_widen=True)
        self._linear(f"{target}out_proj", f"{source}out_proj", self.hidden, value, "all")

    def _attention(self, target: str, source: str) -> None:
        head = self.config.head_size
        queries = self.config.num_attention_heads * head
        keys = self.config.num_key_value_heads * head
        for name, rows in (("q", 2 * queries), ("k", keys), ("v", keys)):
            self._linear(
                f"{target}{name}", f"{source}{name}_proj", rows, self.hidden, "all", f"{target}qkv"
            )
        self._linear(f"{target}dense", f"{source}o_proj", self.hidden, queries, "all")
        for name, origin in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
            self._one(f"{target}{name}.weight", f"{source}{origin}.weight", (head,), may_widen=True)
        index = self.block.indexer_head_dim
        self._one(
            f"{target}indexer.qk.weight",
            f"{source}indexer.index_qk_proj.weight",
            ((self.block.indexer_n_heads + 1) * index, self.hidden),
        )
        for name in ("indexer.q_layernorm.weight", "indexer.k_layernorm.weight"):
            self._one(f"{target}{name}", f"{source}{name}", (index,), may_widen=True)

    def _experts(self, target: str, source: str) -> None:
        block, hidden = self.block, self.hidden
        experts, inner = block.num_experts, block.moe_intermediate_size
        self._one(f"{target}router.weight", f"{source}gate.weight", (experts, hidden))
        self.list += routed_experts(
            f"{target}experts",
            f"{source}experts",
            experts,
            hidden,
            inner,
            lambda _: self.is_stacked(f"{source}experts"),
        )
        shared = block.shared_expert_intermediate_size
        for name, rows, columns in (
            ("gate", shared, hidden),
            ("up", shared, hidden),
            ("down", hidden, shared),
        ):
            self._linear(
                f"{target}shared_expert.{name}",
                f"{source}shared_expert.{name}_proj",
                rows,
                columns,
                "mlp",
                None if name == "down" else f"{target}shared_expert.gate_up",
            )
        self._one(
            f"{target}shared_expert_gate.weight", f"{source}shared_expert_gate.weight", (1, hidden)
        )

    def _ple(self, layer: int, rows: int, heads: int) -> None:
        block = self.block
        target, source = f"transformer.layers.{layer}.ple.", f"layers.{layer}.ple."
        width = block.hc_count * self.hidden
        for name, count in (("key", width), ("value", self.hidden)):
            self._linear(
                f"{target}{name}",
                f"{source}{name}_proj",
                count,
                block.ple_embed_dim,
                "all",
                f"{target}key_value",
            )
        for name in ("norm_key", "norm_query", "norm_conv"):
            self._one(f"{target}{name}.weight", f"{source}{name}.weight", (width,), may_widen=True)
        self._one(
            f"{target}conv1d.weight",
            f"{source}conv1d.weight",
            (width, 1, block.ple_conv_kernel_size),
        )
        columns = block.ple_embed_dim // heads
        per_shard = -(-rows // block.split_ngram_parts)
        parts = tuple(
            Part(
                f"{source}ple_embedding.ngram_embedding.shard_{number}.weight",
                (min(per_shard, rows - number * per_shard), columns),
            )
            for number in range(block.split_ngram_parts)
        )
        self.list.append(
            Wanted(
                f"{target}ngram_embedding.weight",
                (rows, columns),
                parts,
                scale_owner=f"{source}ple_embedding.ngram_embedding",
            )
        )

    def _drafts(self) -> None:
        hidden = self.hidden
        for name in ("fc_embedding", "fc_hidden"):
            self._one(f"mtp.{name}.weight", f"mtp.{name}.weight", (hidden, hidden))
        for name, size in (
            ("pre_fc_norm_embedding", hidden),
            ("pre_fc_norm_hidden", self.block.hc_count * hidden),
        ):
            self._one(f"mtp.{name}.weight", f"mtp.{name}.weight", (size,), may_widen=True)
        self._layer("mtp.layers.0.", "mtp.layers.0.", "full_attention")
        self._hyper_connection(
            "mtp.hyper_connection_mixer.", "mtp.hyper_connection_mixer.", inject=False
        )


# Single experts have a number in this place.
_STACKED = re.compile(r"\.experts\.(gate_up|down)_proj")
