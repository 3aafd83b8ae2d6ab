"""Qwen3.8-Flash-Next: its configuration, and everything about it that the network relies on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from converters.checkpoint.config import PRODUCER, CheckpointConfig, ComputeDType, Strict
from converters.checkpoint.keys import KeyReader
from converters.checkpoint.source import SourceCheckpoint
from plugins.ngram import layer_constants
from plugins.support.errors import InputError

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")

LayerType = Literal["linear_attention", "full_attention"]
# The released files say "full_attention"; other tools write the same layer under these names.
_LAYER_TYPES: dict[str, LayerType] = {
    "linear_attention": "linear_attention",
    "full_attention": "full_attention",
    "indexed_attention": "full_attention",
    "qwen_sparse_attention": "full_attention",
}

# Keys that change training, saving or another engine, never the text network.
_IGNORED_TEXT_KEYS = (
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "full_attention_interval",
    "index_share_for_mtp_iteration",
    "initializer_range",
    "mamba_ssm_dtype",
    "mlp_only_layers",
    "mtp",
    "mtp_use_dedicated_embeddings",
    "number_of_conv_states",
    "output_router_logits",
    "pad_token_id",
    "ple_embedding_dtype",
    "quantization_config",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
_IGNORED_TOP_KEYS = (
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "language_model_only",
    "pad_token_id",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "vision_config",
)


class PleLayer(Strict):
    """Hash constants of one PLE layer, equal to the ones stored in the checkpoint.

    Attributes:
        layer: index of the decoder layer, from 0.
        multipliers: per position of the n-gram, newest token first.
        sizes: rows of each hash head.
        offsets: first row of each hash head.
        rows: rows of the joined table.
    """

    layer: int
    multipliers: list[int]
    sizes: list[int]
    offsets: list[int]
    rows: int


class Qwen38Config(Strict):
    """The family block; keys have their Hugging Face names and meaning.

    `ngram_eos_token_id` is the text model's end id, at which n-grams stop. It is not the list of
    ids that end a generation (`eos_token_id` of the checkpoint).
    """

    layer_types: list[LayerType]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    output_gate_type: Literal["sigmoid", "silu"]
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    hc_count: int
    hc_lowrank: int
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    mrope_section: list[int]
    mrope_interleaved: bool
    ple_layer_ids: list[int]
    ple_embed_dim: int
    ple_conv_kernel_size: int
    ngram_size: int
    heads_per_ngram: int
    split_ngram_parts: int
    ngram_vocab_size_base: int
    make_ngram_vocab_size_divisible_by: int
    seed: int
    ngram_eos_token_id: int
    ple_layers: list[PleLayer]
    mtp_num_hidden_layers: int
    image_token_id: int | None
    video_token_id: int | None
    vision_start_token_id: int | None
    vision_end_token_id: int | None


class Qwen38CheckpointConfig(CheckpointConfig):
    """`config.json` of a converted Qwen3.8-Flash-Next."""

    qwen38: Qwen38Config


def text_config(source: SourceCheckpoint) -> tuple[Mapping[str, Any], str]:
    """The text model's keys and their place: nested in released files, flat in text-only ones."""
    where = str(source.directory / "config.json")
    if "text_config" not in source.config:
        return source.config, where
    top = KeyReader(source.config, where)
    nested = source.config["text_config"]
    if not isinstance(nested, Mapping):
        raise InputError("text_config is not an object", where=where, found=repr(nested))
    top.choice("model_type", ["qwen4_exp"])
    top.rely_on_if_present("tie_word_embeddings", False, "the head has its own weights")
    top.ignore("text_config", *_IGNORED_TOP_KEYS)
    for key in _SPECIAL_TOKENS:
        top.optional_integer(key)
    top.finish()
    return nested, f"{where}: text_config"


_SPECIAL_TOKENS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)


def plan_config(source: SourceCheckpoint, dtype: ComputeDType) -> Qwen38CheckpointConfig:
    """Translate the configuration after checking all of it.

    Raises InputError listing every key that is missing, unknown, or has a value that the network
    is not written for.
    """
    values, where = text_config(source)
    flat = values is source.config
    keys = KeyReader(values, where)
    if flat:
        keys.choice("model_type", ["qwen4_exp_text"])
        keys.ignore(*_SPECIAL_TOKENS)
    else:
        # Early uploads repeat the outer type here.
        keys.choice("model_type", ["qwen4_exp_text", "qwen4_exp"])
    layers = keys.integer("num_hidden_layers")
    shared = {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": keys.integer("hidden_size"),
        "num_attention_heads": keys.integer("num_attention_heads"),
        "num_key_value_heads": keys.integer("num_key_value_heads"),
        "head_size": keys.integer("head_dim"),
        "max_position_embeddings": keys.integer("max_position_embeddings"),
    }
    norm_epsilon = keys.positive_number("rms_norm_eps")
    sizes = {
        name: keys.integer(name)
        for name in (
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "hc_count",
            "hc_lowrank",
            "indexer_n_heads",
            "indexer_head_dim",
            "indexer_budget",
            "indexer_compress_ratio",
        )
    }
    kinds = _layer_types(keys, layers)
    gate = keys.choice("output_gate_type", ["sigmoid", "silu"])
    norm_topk = keys.boolean("norm_topk_prob")
    rope = _Rope(keys, shared["head_size"])
    ple = _Ple(keys, values, kinds, shared["vocab_size"])
    drafts = keys.optional_integer("mtp_num_hidden_layers") or 0
    keys.require(drafts <= 1, "mtp_num_hidden_layers", f"{drafts} draft layers, at most 1 is known")
    _preconditions(keys, shared, sizes, rope.dim)
    keys.ignore(*_IGNORED_TEXT_KEYS)
    keys.finish()

    special = {name: source.config.get(name) for name in _SPECIAL_TOKENS}
    stops = stop_ids(source, values)
    _check_ids(shared["vocab_size"], [*stops, ple.eos], where)
    block = {
        "layer_types": kinds,
        "output_gate_type": gate,
        "norm_topk_prob": norm_topk,
        "mrope_section": rope.section,
        "mrope_interleaved": True,
        "ple_layer_ids": ple.layer_ids,
        "ple_embed_dim": ple.embed_dim,
        "ple_conv_kernel_size": ple.conv_kernel,
        "ngram_size": ple.ngram_size,
        "heads_per_ngram": ple.heads_per_ngram,
        "split_ngram_parts": ple.parts,
        "ngram_vocab_size_base": ple.base,
        "make_ngram_vocab_size_divisible_by": ple.divisor,
        "seed": ple.seed,
        "ngram_eos_token_id": ple.eos,
        "ple_layers": ple.constants(),
        "mtp_num_hidden_layers": int(has_draft_layer(source)),
        **sizes,
        **special,
    }
    return Qwen38CheckpointConfig.model_validate(
        {
            "producer": PRODUCER,
            "architecture": "Qwen4ExpForCausalLM",
            "model_type": "qwen4_exp",
            "dtype": dtype,
            "vocab_size_padded": shared["vocab_size"],
            "num_hidden_layers": layers,
            "hidden_act": "silu",
            "norm_epsilon": norm_epsilon,
            "position_embedding_type": "mrope",
            "rotary_embedding_dim": rope.dim,
            "rotary_base": rope.theta,
            "eos_token_id": stops,
            "bos_token_id": values.get("bos_token_id"),
            "pad_token_id": values.get("pad_token_id"),
            "source": source.identity(),
            "qwen38": block,
            **shared,
        }
    )


def has_draft_layer(source: SourceCheckpoint) -> bool:
    """Whether the MTP tensors are there; some exports declare the layer but drop it."""
    return any(name.removeprefix("model.").startswith("mtp.") for name in source.tensors)


def stop_ids(source: SourceCheckpoint, text: Mapping[str, Any]) -> list[int]:
    """Ids that end a generation: `generation_config.json` decides, the text config otherwise."""
    generation = source.optional_json("generation_config.json") or {}
    value = generation.get("eos_token_id", text.get("eos_token_id"))
    if value is None:
        value = text.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(type(item) is int for item in ids):
        raise InputError(
            "eos_token_id must be a token id or a list of them",
            where=str(source.directory / "generation_config.json"),
            found=repr(value),
        )
    return list(dict.fromkeys(ids))


def _layer_types(keys: KeyReader, layers: int) -> list[LayerType]:
    names = keys.strings("layer_types")
    unknown = sorted(set(names) - _LAYER_TYPES.keys())
    keys.require(not unknown, "layer_types", f"unknown kinds {unknown}")
    keys.require(
        len(names) == layers,
        "layer_types",
        f"{len(names)} entries for num_hidden_layers = {layers}",
    )
    return [_LAYER_TYPES[name] for name in names if name in _LAYER_TYPES]


class _Rope:
    """The rotary part of the attention heads."""

    def __init__(self, keys: KeyReader, head: int) -> None:
        rope = keys.table("rope_parameters")
        rope.rely_on("rope_type", "default", "scaled position encodings are not implemented")
        rope.rely_on("mrope_interleaved", True, "the three position axes alternate")
        rope.ignore("type")
        self.theta = rope.positive_number("rope_theta")
        factor = rope.positive_number("partial_rotary_factor")
        self.section = rope.integers("mrope_section")
        self.dim = int(head * factor)
        rope.require(
            self.dim % 2 == 0 and 0 < self.dim <= head,
            "partial_rotary_factor",
            f"rotates {self.dim} of {head} dimensions",
        )
        rope.require(
            len(self.section) == 3 and 2 * sum(self.section) == self.dim,
            "mrope_section",
            f"{self.section} does not add up to half of the {self.dim} rotated dimensions",
        )


class _Ple:
    """The hashed n-gram blocks."""

    def __init__(
        self, keys: KeyReader, values: Mapping[str, Any], kinds: list[LayerType], vocab_size: int
    ) -> None:
        ids = keys.integers("ple_layer_ids")
        self.layer_ids = sorted(set(ids))
        self.embed_dim = keys.integer("ple_embed_dim")
        self.conv_kernel = keys.integer("ple_conv_kernel_size")
        self.ngram_size = keys.integer("ngram_size", minimum=2)
        self.heads_per_ngram = keys.integer("heads_per_ngram")
        self.parts = keys.integer("split_ngram_parts")
        self.base = keys.integer("ngram_vocab_size_base", minimum=2)
        self.divisor = keys.integer("make_ngram_vocab_size_divisible_by")
        # The one default that files rely on: the released configuration has no seed.
        self.seed = keys.integer("seed", minimum=0) if keys.has("seed") else 1234
        keys.ignore("seed")
        self._vocab_size = vocab_size
        # A list means its first entry here; all of them may end a generation.
        self.eos = keys.token_ids("eos_token_id")[0]
        for layer_id in self.layer_ids:
            keys.require(
                1 <= layer_id <= len(kinds) and kinds[layer_id - 1] == "linear_attention",
                "ple_layer_ids",
                f"layer {layer_id} (counted from 1) is not a linear attention layer",
            )
        heads = (self.ngram_size - 1) * self.heads_per_ngram
        keys.require(
            self.embed_dim % heads == 0,
            "ple_embed_dim",
            f"{self.embed_dim} is not divisible by {heads} hash heads",
        )

    def constants(self) -> list[PleLayer]:
        """Recomputed hash constants of every PLE layer."""
        layers = []
        for number, layer_id in enumerate(self.layer_ids):
            constants = layer_constants(
                vocab_size=self._vocab_size,
                ngram_size=self.ngram_size,
                heads_per_ngram=self.heads_per_ngram,
                ngram_vocab_size_base=self.base,
                divisor=self.divisor,
                seed=self.seed,
                layer_number=number,
            )
            layers.append(
                PleLayer(
                    layer=layer_id - 1,
                    multipliers=list(constants.multipliers),
                    sizes=list(constants.sizes),
                    offsets=list(constants.offsets),
                    rows=constants.rows,
                )
            )
        return layers


def _preconditions(
    keys: KeyReader, shared: Mapping[str, int], sizes: Mapping[str, int], rotary: int
) -> None:
    """Values and relations that the network is written for."""
    keys.rely_on("hidden_act", "silu", "gates and experts use silu")
    keys.rely_on("indexer_kv_heads", 1, "all index heads share one key")
    keys.rely_on_if_present("attention_bias", False, "projections have no bias")
    keys.rely_on_if_present("tie_word_embeddings", False, "the head has its own weights")
    keys.rely_on_if_present("decoder_sparse_step", 1, "every layer has experts")
    for divisor, number in (
        ("num_key_value_heads", "num_attention_heads"),
        ("linear_num_key_heads", "linear_num_value_heads"),
        ("indexer_compress_ratio", "indexer_budget"),
    ):
        both = {**shared, **sizes}
        keys.require(
            both[number] % both[divisor] == 0,
            number,
            f"{both[number]} is not divisible by {divisor} = {both[divisor]}",
        )
    keys.require(sizes["hc_count"] > 1, "hc_count", "must be at least 2 residual streams")
    keys.require(
        sizes["num_experts_per_tok"] <= sizes["num_experts"],
        "num_experts_per_tok",
        "more than num_experts",
    )
    keys.require(
        rotary <= sizes["indexer_head_dim"],
        "indexer_head_dim",
        f"smaller than the {rotary} rotated dimensions",
    )


def _check_ids(vocab_size: int, ids: list[int], where: str) -> None:
    wrong = [item for item in ids if not 0 <= item < vocab_size]
    if wrong:
        raise InputError(
            "end token ids lie outside the vocabulary",
            where=where,
            expected=f"0 to {vocab_size - 1}",
            found=str(wrong),
        )
