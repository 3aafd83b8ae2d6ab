"""Voxtral: which source tensors make which target tensors, in both layouts.

Everything is a rename or a join by rows (queries above keys above values, gate above up): values
and the order of rotary rows stay as they are. What only one layout has: the position table of the
encoder, which Mistral's file lacks and the network then generates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from converters.checkpoint.header import Shape
from converters.checkpoint.match import canonical_names
from converters.checkpoint.recipe import Part, Wanted
from converters.checkpoint.source import SourceCheckpoint
from converters.family import TensorPlan
from converters.voxtral.config import VoxtralCheckpointConfig


@dataclass(frozen=True)
class Names:
    """Source names of one layout; `{}` stands for the layer.

    `plain` are whole names, `audio` and `text` are parts of a layer's name without prefix.
    """

    audio_prefix: str
    text_prefix: str
    plain: Mapping[str, str]
    audio: Mapping[str, str]
    text: Mapping[str, str]


_MISTRAL_AUDIO = {
    "attention_layernorm": "attention_norm",
    "mlp_layernorm": "ffn_norm",
    "q": "attention.wq",
    "k": "attention.wk",
    "v": "attention.wv",
    "dense": "attention.wo",
    "fc": "feed_forward.w1",
    "proj": "feed_forward.w2",
    "gate": "feed_forward.w1",
    "down": "feed_forward.w2",
    "up": "feed_forward.w3",
}
_MISTRAL_TEXT = {
    "input_layernorm": "attention_norm",
    "post_layernorm": "ffn_norm",
    "q": "attention.wq",
    "k": "attention.wk",
    "v": "attention.wv",
    "dense": "attention.wo",
    "gate": "feed_forward.w1",
    "down": "feed_forward.w2",
    "up": "feed_forward.w3",
    "delay_down": "ada_rms_norm_t_cond.0",
    "delay_up": "ada_rms_norm_t_cond.2",
}
_MISTRAL_PLAIN = {
    "lm_head": "output",
    "ln_f": "norm",
    "projector.linear_1": "{audio}audio_language_projection.0",
    "projector.linear_2": "{audio}audio_language_projection.2",
    "audio.ln_f": "{audio}whisper_encoder.transformer.norm",
    "vocab_embedding": "{audio}tok_embeddings",
}
_HF_AUDIO = {
    "attention_layernorm": "self_attn_layer_norm",
    "mlp_layernorm": "final_layer_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "dense": "self_attn.out_proj",
    "fc": "fc1",
    "proj": "fc2",
}
_HF_REALTIME_AUDIO = {
    **_HF_AUDIO,
    "dense": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_HF_TEXT = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "dense": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "delay_down": "ada_rms_norm.linear1",
    "delay_up": "ada_rms_norm.linear2",
}
_HF_PLAIN = {
    "vocab_embedding": "language_model.model.embed_tokens",
    "ln_f": "language_model.model.norm",
    "lm_head": "language_model.lm_head",
    "projector.linear_1": "multi_modal_projector.linear_1",
    "projector.linear_2": "multi_modal_projector.linear_2",
    "audio.position_embedding": "audio_tower.embed_positions",
}

# (layout, realtime) -> names.
_NAMES: dict[tuple[str, bool], Names] = {
    ("huggingface", False): Names(
        "audio_tower.layers.{}.",
        "language_model.model.layers.{}.",
        {
            **_HF_PLAIN,
            "audio.conv1": "audio_tower.conv1",
            "audio.conv2": "audio_tower.conv2",
            "audio.ln_f": "audio_tower.layer_norm",
        },
        _HF_AUDIO,
        _HF_TEXT,
    ),
    ("huggingface", True): Names(
        "audio_tower.layers.{}.",
        "language_model.model.layers.{}.",
        {
            **_HF_PLAIN,
            "audio.conv1": "audio_tower.embedder.conv1",
            "audio.conv2": "audio_tower.embedder.conv2",
            "audio.ln_f": "audio_tower.norm",
        },
        _HF_REALTIME_AUDIO,
        _HF_TEXT,
    ),
    ("mistral", False): Names(
        "{audio}whisper_encoder.transformer.layers.{}.",
        "layers.{}.",
        {
            **_MISTRAL_PLAIN,
            "audio.conv1": "{audio}whisper_encoder.conv_layers.0",
            "audio.conv2": "{audio}whisper_encoder.conv_layers.1",
        },
        _MISTRAL_AUDIO,
        _MISTRAL_TEXT,
    ),
    ("mistral", True): Names(
        "{audio}whisper_encoder.transformer.layers.{}.",
        "layers.{}.",
        {
            **_MISTRAL_PLAIN,
            "audio.conv1": "{audio}whisper_encoder.conv_layers.0.conv",
            "audio.conv2": "{audio}whisper_encoder.conv_layers.1.conv",
        },
        _MISTRAL_AUDIO,
        _MISTRAL_TEXT,
    ),
}
_MISTRAL_PREFIX = {
    False: "mm_whisper_embeddings.",
    True: "mm_streams_embeddings.embedding_module.",
}


def canonical_name(name: str) -> str:
    """The on-disk name of a tensor that may be spelled as in memory."""
    if name == "lm_head.weight":
        return "language_model.lm_head.weight"
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.", 1)
    for part in ("audio_tower.", "multi_modal_projector."):
        if name.startswith(f"model.{part}"):
            return name.removeprefix("model.")
    return name


def plan_tensors(source: SourceCheckpoint, config: VoxtralCheckpointConfig) -> TensorPlan:
    """Name every target tensor and its sources.

    Raises InputError when two names mean the same tensor.
    """
    table = f"{_MISTRAL_PREFIX[config.voxtral.realtime]}tok_embeddings.weight"

    def canonical(name: str) -> str:
        short = canonical_name(name) if source.layout == "huggingface" else name
        return table if short == "tok_embeddings.weight" else short

    names, ignored = canonical_names(source, canonical)
    return TensorPlan(names, _Plan(config, source.layout).wanted(), ignored)


class _Plan:
    """Builds the list of wanted tensors for one configuration and layout."""

    def __init__(self, config: VoxtralCheckpointConfig, layout: str) -> None:
        self.config, self.block = config, config.voxtral
        self.realtime = config.voxtral.realtime
        self.names = _NAMES[layout, self.realtime]
        self.prefix = _MISTRAL_PREFIX[self.realtime]
        self.list: list[Wanted] = []

    def wanted(self) -> list[Wanted]:
        """All target tensors in the order of the model."""
        self._audio()
        config, hidden = self.config, self.config.hidden_size
        vocab = (config.vocab_size, hidden)
        self._whole("transformer.vocab_embedding", "vocab_embedding", vocab)
        for layer in range(config.num_hidden_layers):
            self._text_layer(layer)
        self._whole("transformer.ln_f", "ln_f", (hidden,), may_widen=True)
        if not self.block.tie_word_embeddings:
            self._whole("lm_head", "lm_head", vocab)
        return self.list

    def _plain(self, key: str, kind: str) -> str:
        return f"{self.names.plain[key].replace('{audio}', self.prefix)}.{kind}"

    def _whole(
        self,
        target: str,
        key: str,
        shape: Shape,
        *,
        kind: str = "weight",
        may_widen: bool = False,
        keep_float32: bool = False,
    ) -> None:
        self.list.append(
            Wanted(
                f"{target}.{kind}",
                shape,
                (Part(self._plain(key, kind), shape),),
                may_widen=may_widen,
                keep_float32=keep_float32,
            )
        )

    def _joined(
        self,
        target: str,
        prefix: str,
        parts: Mapping[str, int],
        rest: Shape,
        kind: str = "weight",
        *,
        may_widen: bool = False,
    ) -> None:
        """`parts`: source name within the layer -> rows, joined in order."""
        rows = sum(parts.values())
        sources = tuple(
            Part(f"{prefix}{name}.{kind}", (count, *rest)) for name, count in parts.items()
        )
        wanted = Wanted(f"{target}.{kind}", (rows, *rest), sources, may_widen=may_widen)
        self.list.append(wanted)

    def _audio(self) -> None:
        audio = self.block.audio
        hidden = audio.hidden_size
        for name, inputs in (("audio.conv1", audio.num_mel_bins), ("audio.conv2", hidden)):
            self._whole(name, name, (hidden, inputs, 3))
            self._whole(name, name, (hidden,), kind="bias")
        if self.block.position_table == "file":
            assert audio.max_source_positions is not None
            table = (audio.max_source_positions, hidden)
            # transformers keeps the table in float32 whatever the model's type.
            self._whole(
                "audio.position_embedding", "audio.position_embedding", table, keep_float32=True
            )
        for layer in range(audio.num_hidden_layers):
            self._audio_layer(layer)
        self._whole("audio.ln_f", "audio.ln_f", (hidden,), may_widen=True)
        if not self.realtime:
            self._whole("audio.ln_f", "audio.ln_f", (hidden,), kind="bias", may_widen=True)
        text = self.config.hidden_size
        joined = audio.downsample_factor * hidden
        self._whole("projector.linear_1", "projector.linear_1", (text, joined))
        self._whole("projector.linear_2", "projector.linear_2", (text, text))

    def _audio_layer(self, layer: int) -> None:
        audio, names = self.block.audio, self.names.audio
        prefix = self.names.audio_prefix.replace("{audio}", self.prefix).replace("{}", str(layer))
        target = f"audio.layers.{layer}"
        hidden, inner = audio.hidden_size, audio.intermediate_size
        width = audio.num_attention_heads * audio.head_size

        def one(name: str, key: str, rows: int, rest: Shape, kind: str = "weight") -> None:
            widen = name.endswith("layernorm")
            self._joined(
                f"{target}.{name}", prefix, {names[key]: rows}, rest, kind, may_widen=widen
            )

        norms = ("attention_layernorm", "mlp_layernorm")
        for name in norms:
            one(name, name, hidden, ())
            if not self.realtime:
                one(name, name, hidden, (), "bias")
        for name in ("q", "k", "v"):
            one(f"attention.{name}", name, width, (hidden,))
            if name != "k":
                # A bias on the keys would cancel in the softmax; there is none.
                one(f"attention.{name}", name, width, (), "bias")
        one("attention.dense", "dense", hidden, (width,))
        one("attention.dense", "dense", hidden, (), "bias")
        if self.realtime:
            both = {names["gate"]: inner, names["up"]: inner}
            self._joined(f"{target}.mlp.gate_up", prefix, both, (hidden,))
            one("mlp.down", "down", hidden, (inner,))
            one("mlp.down", "down", hidden, (), "bias")
        else:
            one("mlp.fc", "fc", inner, (hidden,))
            one("mlp.fc", "fc", inner, (), "bias")
            one("mlp.proj", "proj", hidden, (inner,))
            one("mlp.proj", "proj", hidden, (), "bias")

    def _text_layer(self, layer: int) -> None:
        config, names = self.config, self.names.text
        prefix = self.names.text_prefix.replace("{}", str(layer))
        target = f"transformer.layers.{layer}"
        hidden, inner = config.hidden_size, self.block.intermediate_size
        queries = config.num_attention_heads * config.head_size
        keys = config.num_key_value_heads * config.head_size
        for name in ("input_layernorm", "post_layernorm"):
            self._joined(f"{target}.{name}", prefix, {names[name]: hidden}, (), may_widen=True)
        qkv = {names["q"]: queries, names["k"]: keys, names["v"]: keys}
        self._joined(f"{target}.attention.qkv", prefix, qkv, (hidden,))
        self._joined(f"{target}.attention.dense", prefix, {names["dense"]: hidden}, (queries,))
        both = {names["gate"]: inner, names["up"]: inner}
        self._joined(f"{target}.mlp.gate_up", prefix, both, (hidden,))
        self._joined(f"{target}.mlp.down", prefix, {names["down"]: hidden}, (inner,))
        if self.block.delay_rank is not None:
            rank = self.block.delay_rank
            self._joined(
                f"{target}.delay_norm.down", prefix, {names["delay_down"]: rank}, (hidden,)
            )
            self._joined(f"{target}.delay_norm.up", prefix, {names["delay_up"]: hidden}, (rank,))
