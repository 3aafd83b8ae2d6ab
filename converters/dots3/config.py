"""Dots3 NOTE: its configuration, and everything about it that the networks rely on.

The released file is flat; transformers writes other spellings, in a nested `text_config` beside
leftovers of the flat one, or at the top. All are read into the same block. Values that are absent
from the release have the defaults stated in `_STATED`, and no others: defaults of related models
(expert groups, half-split index rotation) load without a word and answer nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from converters.checkpoint.config import PRODUCER, CheckpointConfig, ComputeDType, Strict
from converters.checkpoint.keys import KeyReader
from converters.checkpoint.source import SourceCheckpoint
from converters.quantization.padding import has_block_scales, padded_width
from plugins.support.errors import InputError

MODEL_TYPES = ("dots3_note", "dots3_note_text")

LayerType = Literal["full_attention", "sliding_attention"]
_LAYER_TYPES: dict[str, LayerType] = {
    "full_attention": "full_attention",
    # transformers' name of the same layer.
    "indexed_attention": "full_attention",
    "sliding_attention": "sliding_attention",
}

# Keys that the release leaves out, with the only values they may have.
_STATED: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "indexer_rope_interleave": True,
    "num_nextn_predict_layers": 1,
}
_IGNORED = (
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "audio_config",
    "audio_token_id",
    "dtype",
    "head_dim",
    "image_token_id",
    "initializer_range",
    "max_window_layers",
    "output_router_logits",
    "pretraining_tp",
    "quantization_config",
    "swa_head_dim",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "video_token_id",
    "vision_config",
)
# Keys of the flat layout that transformers leaves beside its nested one.
_LEFTOVERS = (
    "first_k_dense_replace",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "sliding_window_size",
)


class Mla(Strict):
    """Geometry of one kind of latent attention.

    Attributes:
        heads: query heads; keys and values are shared in latent form.
        q_rank, kv_rank: widths of the query and key/value latents.
        nope, rope, value: widths of a head's position-free and rotated key and of its value.
        rotary_base: base of the rotary frequencies.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    rotary_base: float


class Dots3Config(Strict):
    """The family block.

    Attributes:
        layer_types: kind of every layer; the draft layer is not counted.
        full, sliding: geometry of the two kinds.
        sliding_window: tokens a query of a sliding layer sees, itself included.
        index_rope: which lanes of an index head are rotated.
        dense_layers: leading layers with a dense MLP.
        draft_layers: MTP layers in the checkpoint.
        padded_mlps: whether dense and shared MLPs are padded to whole FP8 blocks.
    """

    layer_types: list[LayerType]
    full: Mla
    sliding: Mla
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_rope: Literal["leading", "tail"]
    intermediate_size: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    dense_layers: int
    draft_layers: int
    padded_mlps: bool


class Dots3CheckpointConfig(CheckpointConfig):
    """`config.json` of a converted Dots3 NOTE."""

    dots3: Dots3Config

    def mlp_width(self, width: int) -> int:
        """The inner width that a dense or shared MLP of the model's `width` is built with."""
        return padded_width(width, self.mapping.tp_size) if self.dots3.padded_mlps else width


def plan_config(source: SourceCheckpoint, dtype: ComputeDType) -> Dots3CheckpointConfig:
    """Translate the configuration after checking all of it.

    Raises InputError listing every key that is missing, unknown, or has a value that the networks
    are not written for.
    """
    where = str(source.config_file)
    top = KeyReader(source.config, where)
    keys, values = top, source.config
    if "text_config" in source.config:
        top.choice("model_type", ["dots3_note"])
        top.ignore(*source.config)
        keys = top.table("text_config")
        values = source.config["text_config"] or {}
    # transformers writes its own spellings under its own name, nested or not.
    canonical = keys.choice("model_type", list(MODEL_TYPES)) == "dots3_note_text"
    layers = keys.integer("num_hidden_layers")
    kinds = _layer_types(keys, layers)
    shared = {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": keys.integer("hidden_size"),
        "num_attention_heads": keys.integer("num_attention_heads"),
        "num_key_value_heads": keys.integer("num_key_value_heads"),
        "max_position_embeddings": keys.integer("max_position_embeddings"),
    }
    sizes = {
        name: keys.integer(name)
        for name in (
            "index_n_heads",
            "index_head_dim",
            "index_topk",
            "intermediate_size",
            "moe_intermediate_size",
            "n_routed_experts",
            "num_experts_per_tok",
        )
    }
    full, sliding = (_canonical_mla if canonical else _flat_mla)(keys, values, kinds)
    window = keys.integer("sliding_window" if canonical else "sliding_window_size")
    width = (
        keys.integer(
            "shared_experts_intermediate_size"
            if canonical
            else "moe_shared_expert_intermediate_size"
        )
        if canonical or "moe_shared_expert_intermediate_size" in values
        else None
    )
    shared_experts = keys.integer("n_shared_experts")
    dense = _dense_layers(keys, layers, canonical)
    epsilon = keys.positive_number("rms_norm_eps")
    norm_topk = keys.boolean("norm_topk_prob")
    scaling = keys.positive_number("routed_scaling_factor")
    drafts = _preconditions(keys)
    _relations(keys, shared, sizes, full, sliding)
    bos = keys.optional_integer("bos_token_id")
    pad = keys.optional_integer("pad_token_id")
    keys.ignore("eos_token_id", *_IGNORED, *_LEFTOVERS)
    _towers(top)
    top.finish()

    stops = _stop_ids(source, values, shared["vocab_size"])
    return Dots3CheckpointConfig.model_validate(
        {
            "producer": PRODUCER,
            "architecture": "Dots3NoteForCausalLM",
            "model_type": "dots3_note",
            "dtype": dtype,
            "vocab_size_padded": shared["vocab_size"],
            "num_hidden_layers": layers,
            "head_size": full.nope + full.rope,
            "hidden_act": "silu",
            "norm_epsilon": epsilon,
            "position_embedding_type": "rope_gptj",
            "rotary_embedding_dim": full.rope,
            "rotary_base": full.rotary_base,
            "eos_token_id": stops,
            "bos_token_id": bos,
            "pad_token_id": pad,
            "source": source.identity(),
            "dots3": {
                "layer_types": kinds,
                "full": full,
                "sliding": sliding,
                "sliding_window": window,
                "index_rope": index_rope(source),
                "shared_intermediate_size": width
                or shared_experts * sizes["moe_intermediate_size"],
                "norm_topk_prob": norm_topk,
                "routed_scaling_factor": scaling,
                "dense_layers": dense,
                "draft_layers": drafts if has_draft_layer(source, layers) else 0,
                "padded_mlps": has_block_scales(source.tensors),
                **sizes,
            },
            **shared,
        }
    )


def canonical_name(name: str) -> str:
    """The name of a tensor without the prefixes that different classes put before it."""
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def has_draft_layer(source: SourceCheckpoint, layers: int) -> bool:
    """Whether any tensor of the draft layer is there; no key of the configuration says so."""
    prefixes = ("mtp.", f"layers.{layers}.")
    return any(canonical_name(name).startswith(prefixes) for name in source.tensors)


def index_rope(source: SourceCheckpoint) -> Literal["leading", "tail"]:
    """Which lanes of the index heads are rotated, from the metadata of the weights.

    Raises InputError for a layout nobody has described, and for a conversion note without one.
    """
    metadata = source.metadata()
    layout = metadata.get("indexer_rope_layout")
    where = f"{source.directory}: weight metadata"
    if layout is None:
        if "indexer_rope_converted_from" in metadata:
            raise InputError(
                "the index heads were converted, but it is not said to which layout",
                where=where,
                expected="indexer_rope_layout beside indexer_rope_converted_from",
                found=f"indexer_rope_converted_from {metadata['indexer_rope_converted_from']!r}",
            )
        # Files older than the note have the layout of the training.
        return "tail"
    if layout == "leading":
        return "leading"
    if layout == "tail":
        return "tail"
    raise InputError(
        "unknown layout of the index heads",
        where=f"{where}: indexer_rope_layout",
        expected="leading or tail",
        found=repr(layout),
    )


def _layer_types(keys: KeyReader, layers: int) -> list[LayerType]:
    names = keys.strings("layer_types")
    unknown = sorted(set(names) - _LAYER_TYPES.keys())
    keys.require(not unknown, "layer_types", f"unknown kinds {unknown}")
    keys.require(
        len(names) == layers,
        "layer_types",
        f"{len(names)} entries for num_hidden_layers = {layers}",
    )
    kinds = [_LAYER_TYPES[name] for name in names if name in _LAYER_TYPES]
    keys.require(len(set(kinds)) == 2, "layer_types", "both kinds must occur")
    return kinds


def _flat_mla(
    keys: KeyReader, values: Mapping[str, Any], kinds: list[LayerType]
) -> tuple[Mla, Mla]:
    def one(prefix: str) -> Mla:
        heads = keys.integer(f"{prefix}num_attention_heads")
        keys.rely_on(f"{prefix}num_key_value_heads", heads, "every head has its own keys")
        nope = keys.integer(f"{prefix}qk_nope_head_dim")
        rope = keys.integer(f"{prefix}qk_rope_head_dim")
        return Mla(
            heads=heads,
            q_rank=keys.integer(f"{prefix}q_lora_rank"),
            kv_rank=keys.integer(f"{prefix}kv_lora_rank"),
            nope=nope,
            rope=rope,
            value=keys.integer(f"{prefix}v_head_dim"),
            rotary_base=keys.positive_number(f"{prefix}rope_theta"),
        )

    full, sliding = one(""), one("swa_")
    keys.rely_on_if_present("swa_head_dim", sliding.nope + sliding.rope, "a head is its two parts")
    keys.rely_on_if_present("rope_scaling", None, "scaled position encodings are not implemented")
    keys.rely_on_if_present("rope_parameters", None, "the two bases stand on their own")
    return full, sliding


def _canonical_mla(
    keys: KeyReader, values: Mapping[str, Any], kinds: list[LayerType]
) -> tuple[Mla, Mla]:
    rope = keys.table("rope_parameters")
    bases = {}
    for kind in ("indexed_attention", "sliding_attention"):
        entry = rope.table(kind)
        entry.rely_on("rope_type", "default", "scaled position encodings are not implemented")
        entry.ignore("partial_rotary_factor")
        bases[kind] = entry.positive_number("rope_theta")
    per_layer = keys.table("per_layer_config")
    raw = values.get("per_layer_config") or {}
    per_layer.ignore(*raw)
    overrides = [raw.get(str(i), {}) for i, kind in enumerate(kinds) if kind != "full_attention"]
    keys.require(
        all(item == overrides[0] for item in overrides),
        "per_layer_config",
        "the sliding layers differ among themselves",
    )
    keys.require(
        not any(raw.get(str(i)) for i, kind in enumerate(kinds) if kind == "full_attention"),
        "per_layer_config",
        "a full layer has a geometry of its own",
    )

    def one(theta: float, changes: Mapping[str, Any]) -> Mla:
        def size(name: str) -> int:
            own = changes.get(name)
            return own if type(own) is int and own > 0 else keys.integer(name)

        return Mla(
            heads=size("num_attention_heads"),
            q_rank=size("q_lora_rank"),
            kv_rank=size("kv_lora_rank"),
            nope=size("qk_nope_head_dim"),
            rope=size("qk_rope_head_dim"),
            value=size("v_head_dim"),
            rotary_base=theta,
        )

    full = one(bases["indexed_attention"], {})
    return full, one(bases["sliding_attention"], overrides[0] if overrides else {})


def _dense_layers(keys: KeyReader, layers: int, canonical: bool) -> int:
    if not canonical:
        keys.rely_on_if_present("moe_layer_freq", 1, "every layer after the dense ones has experts")
        return keys.integer("first_k_dense_replace", minimum=0)
    names = keys.strings("mlp_layer_types")
    dense = len(names) - names.count("sparse")
    proper = names == ["dense"] * dense + ["sparse"] * (layers - dense)
    keys.require(proper, "mlp_layer_types", "dense layers must come first, then sparse ones")
    return dense


def _preconditions(keys: KeyReader) -> int:
    """Values that the networks are written for; returns the number of draft layers."""
    keys.rely_on("hidden_act", "silu", "gates and experts use silu")
    keys.rely_on("scoring_func", "sigmoid", "the router's scores")
    keys.rely_on("topk_method", "noaux_tc", "the correction bias chooses, plain scores weigh")
    for name in ("attention_gate_type", "swa_attention_gate_type"):
        keys.rely_on(name, "headwise", "one gate per head")
    keys.rely_on("apply_mla_qkv_lora_rescale", True, "latents are rescaled after their norm")
    keys.rely_on("k_rope_only_layernorm", True, "the shared rotary key has a norm of its own")
    keys.rely_on_if_present("qk_layernorm", True, "latents are normed")
    keys.rely_on_if_present("use_dsa", True, "full layers have an indexer")
    keys.rely_on_if_present("use_sliding_window", True, "sliding layers have a window")
    keys.rely_on_if_present("tie_word_embeddings", False, "the head has its own weights")
    keys.rely_on_if_present("attention_bias", False, "projections have no bias")
    keys.rely_on_if_present("mlp_bias", False, "projections have no bias")
    keys.rely_on_if_present("mtp_use_moe", False, "the draft layer has a dense MLP")
    keys.rely_on_if_present(
        "mtp_layer_types", ["sliding_attention"], "the draft layer is a sliding one"
    )
    for name, value in _STATED.items():
        keys.rely_on_if_present(name, value, "the value that the release leaves out")
    return int(_STATED["num_nextn_predict_layers"])


def _towers(top: KeyReader) -> None:
    """Variants of the towers that exist in code and in no release.

    A checkpoint with one of them is not the model that this family is written for, even though the
    towers themselves stay out of the engines.
    """
    for name, key, value, why in (
        ("audio_config", "use_causal", False, "the released audio tower is bidirectional"),
        ("audio_config", "use_conv2d_stem", True, "the released audio stem is two-dimensional"),
        ("vision_config", "adapter_type", "patch_merger", "the released vision adapter"),
    ):
        if top.has(name):
            tower = top.table(name)
            tower.ignore_rest()
            tower.rely_on_if_present(key, value, why)


def _relations(
    keys: KeyReader, shared: Mapping[str, int], sizes: Mapping[str, int], full: Mla, sliding: Mla
) -> None:
    keys.require(
        shared["num_key_value_heads"] == shared["num_attention_heads"],
        "num_key_value_heads",
        "must equal num_attention_heads",
    )
    for name, mla in (("qk_rope_head_dim", full), ("swa_qk_rope_head_dim", sliding)):
        keys.require(mla.rope % 2 == 0, name, f"{mla.rope} is odd")
        keys.require(
            mla.value <= mla.nope + mla.rope, name, "values are wider than keys, which is unknown"
        )
    keys.require(
        full.rope <= sizes["index_head_dim"],
        "index_head_dim",
        f"smaller than the {full.rope} rotated lanes",
    )
    keys.require(
        sizes["num_experts_per_tok"] <= sizes["n_routed_experts"],
        "num_experts_per_tok",
        "more than n_routed_experts",
    )


def _stop_ids(source: SourceCheckpoint, text: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Ids that end a generation: `generation_config.json` decides, the model config otherwise."""
    generation = source.optional_json("generation_config.json") or {}
    value = generation.get("eos_token_id")
    if value is None:
        value = text.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(type(item) is int and 0 <= item < vocab_size for item in ids):
        raise InputError(
            "eos_token_id must be token ids of the vocabulary",
            where=str(source.directory / "generation_config.json"),
            expected=f"0 to {vocab_size - 1}",
            found=repr(value),
        )
    return list(dict.fromkeys(ids))
