"""The transformers implementation as reference for Voxtral and Voxtral realtime.

`Oracle` runs it in float32 on the CPU and returns the values of the networks' taps. It reads both
layouts: Mistral's file is renamed, and its rotary rows are put into the order of transformers, by
code of its own, so that a mistake in the converter is not repeated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from converters.checkpoint.source import SourceCheckpoint
from converters.reference import HEARING_MODEL, STREAMING_MODEL
from converters.voxtral.config import VoxtralCheckpointConfig, plan_config

# Tokens beside those of the audio, and audio tokens of the realtime sample.
_TEXT_TOKENS, _STREAM_TOKENS = 24, 96


class Oracle:
    """One checkpoint in transformers, float32.

    Args:
        hf_dir: checkpoint in either layout.
        dtype: type the converter rounded the weights to; rounded here too before they are widened.

    Attributes:
        features: float32 [chunks, mels, frames] that the sample listens to; for a stream with one
            "chunk" of as many frames as its tokens need.
        listens: whether the sample of the text engines takes the rows of these features.
    """

    def __init__(self, hf_dir: Path, dtype: str) -> None:
        source = SourceCheckpoint.open(hf_dir)
        self._config = plan_config(source, "float32")
        self._realtime = self._config.voxtral.realtime
        contract = STREAMING_MODEL if self._realtime else HEARING_MODEL
        self.model = contract.require(_load(source, self._config))
        rounded = getattr(torch, dtype)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "embed_positions" not in name:
                    parameter.copy_(parameter.to(rounded).float())
        self.model.float().eval()
        self.features = torch.zeros(0)
        self.listens = True

    def sample_ids(self, limit: int) -> list[int]:
        """Ids of a sample of at most `limit` tokens, and its features.

        With room for a whole chunk the sample holds its placeholders; otherwise it is text, and
        the features are compared through the audio engine alone.
        """
        audio, vocab = self._config.voxtral.audio, self._config.vocab_size
        generator = torch.Generator().manual_seed(11)
        placeholder = self._config.voxtral.audio_token_id

        def words(count: int) -> list[int]:
            drawn = torch.randint(3, vocab, (count,), generator=generator).tolist()
            return [token if token != placeholder else 3 for token in drawn]

        if self._realtime:
            count = min(limit, _STREAM_TOKENS)
            frames = count * 2 * audio.downsample_factor
            self.features = _spectrogram(1, audio.num_mel_bins, frames, generator)
            return words(count)
        assert audio.max_source_positions is not None and audio.tokens_per_chunk is not None
        frames = 2 * audio.max_source_positions
        self.features = _spectrogram(1, audio.num_mel_bins, frames, generator)
        rows = audio.tokens_per_chunk
        self.listens = limit >= rows + _TEXT_TOKENS
        if not self.listens:
            return words(min(limit, _TEXT_TOKENS))
        assert placeholder is not None
        half = _TEXT_TOKENS // 2
        return [*words(half), *[placeholder] * rows, *words(half)]

    def run(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Run one sequence without cache.

        Returns:
            "logits" float32 [n, vocab] and every tap of the text networks, [n, hidden].
        """
        tokens = torch.tensor([list(ids)])
        heard: dict[str, Any] = {}
        if self._realtime:
            heard = {"input_features": self.features}
            heard["num_delay_tokens"] = self._config.voxtral.default_num_delay_tokens
        elif self.listens:
            heard = {"input_features": self.features}
        captured: dict[str, Tensor] = {}
        text = self.model.model.language_model
        with torch.no_grad(), ExitStack() as stack:
            for number, layer in enumerate(text.layers):
                _watch(stack, captured, layer, f"layers.{number}.hidden")
                _watch(stack, captured, layer.self_attn, f"layers.{number}.mixer")
                _watch(stack, captured, layer.mlp, f"layers.{number}.mlp")
            _watch(stack, captured, text.norm, "final_hidden")
            logits = self.model(input_ids=tokens, use_cache=False, **heard).logits[0]
        return captured | {"logits": logits.float()}

    def run_audio(self) -> dict[str, Tensor]:
        """Hear the features of the sample.

        Returns:
            "audio_rows" [rows, H] and every tap of the audio network, [frames, hidden].
        """
        captured: dict[str, Tensor] = {}
        model = self.model.model
        with torch.no_grad(), ExitStack() as stack:
            for number, layer in enumerate(model.audio_tower.layers):
                _watch(stack, captured, layer, f"audio.layers.{number}.hidden")
            last = model.audio_tower.norm if self._realtime else model.audio_tower.layer_norm
            _watch(stack, captured, last, "audio.encoded")
            rows = self.model.get_audio_features(self.features).pooler_output
        return captured | {"audio_rows": rows.reshape(-1, rows.shape[-1])}


def canonical(tap: str, value: Tensor) -> Tensor:
    """The comparable form of a tap: every tap of this family is compared as it is."""
    return value


def _watch(stack: ExitStack, into: dict[str, Tensor], module: Any, name: str) -> None:
    def hook(_module: Any, _args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        into[name] = first[0].float()

    stack.callback(module.register_forward_hook(hook).remove)


def _spectrogram(chunks: int, mels: int, frames: int, generator: torch.Generator) -> Tensor:
    """Values in the range of a log-mel, changing slowly enough to look like sound."""
    steps = torch.randn(chunks, mels, frames, generator=generator) * 0.2
    return steps.cumsum(-1).sin() * 0.8


# -- loading --------------------------------------------------------------------------------------


def _load(source: SourceCheckpoint, config: VoxtralCheckpointConfig) -> Any:
    import transformers

    realtime = config.voxtral.realtime
    name = "VoxtralRealtime" if realtime else "Voxtral"
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    if source.layout == "huggingface":
        return model_class.from_pretrained(
            source.directory, dtype=torch.float32, attn_implementation="eager"
        )
    hf_config = getattr(transformers, f"{name}Config")(**_hf_config(config))
    hf_config._attn_implementation = "eager"
    model = model_class(hf_config)
    renamed = _from_mistral(load_file(source.files[0]), config)
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    left = [key for key in missing if "embed_positions" not in key and "lm_head" not in key]
    if left or unexpected:
        raise KeyError(f"the reference was not loaded whole: {left[:3]} {list(unexpected)[:3]}")
    if not realtime:
        table = model.model.audio_tower.embed_positions.weight
        table.data.copy_(transformers.models.whisper.modeling_whisper.sinusoids(*table.shape))
    return model


def _hf_config(config: VoxtralCheckpointConfig) -> dict[str, Any]:
    block, audio = config.voxtral, config.voxtral.audio

    def rope(theta: float) -> dict[str, Any]:
        return {"rope_theta": theta, "rope_type": "default"}

    text: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": block.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope(config.rotary_base),
    }
    tower: dict[str, Any] = {
        "hidden_size": audio.hidden_size,
        "intermediate_size": audio.intermediate_size,
        "num_hidden_layers": audio.num_hidden_layers,
        "num_attention_heads": audio.num_attention_heads,
        "num_mel_bins": audio.num_mel_bins,
    }
    if block.realtime:
        text |= {"sliding_window": block.sliding_window, "tie_word_embeddings": True}
        tower |= {
            "head_dim": audio.head_size,
            "sliding_window": audio.sliding_window,
            "rope_parameters": rope(audio.rotary_base or 0.0),
        }
        return {
            "audio_config": tower,
            "text_config": text,
            "downsample_factor": audio.downsample_factor,
            "default_num_delay_tokens": block.default_num_delay_tokens,
        }
    text["model_type"] = "llama"
    tower |= {
        "model_type": "voxtral_encoder",
        "max_source_positions": audio.max_source_positions,
    }
    return {"audio_config": tower, "text_config": text, "audio_token_id": block.audio_token_id}


_LAYER = {
    "attention_norm": ("self_attn_layer_norm", "input_layernorm"),
    "ffn_norm": ("final_layer_norm", "post_attention_layernorm"),
    "attention.wq": ("self_attn.q_proj",) * 2,
    "attention.wk": ("self_attn.k_proj",) * 2,
    "attention.wv": ("self_attn.v_proj",) * 2,
    "ada_rms_norm_t_cond.0": ("", "ada_rms_norm.linear1"),
    "ada_rms_norm_t_cond.2": ("", "ada_rms_norm.linear2"),
}


def _from_mistral(tensors: dict[str, Tensor], config: VoxtralCheckpointConfig) -> dict[str, Tensor]:
    """Mistral's tensors under the names that transformers has in memory."""
    realtime, audio = config.voxtral.realtime, config.voxtral.audio
    prefix = "mm_streams_embeddings.embedding_module." if realtime else "mm_whisper_embeddings."
    tower = "model.audio_tower."
    whole = {
        "output": "lm_head",
        "norm": "model.language_model.norm",
        "tok_embeddings": "model.language_model.embed_tokens",
        "audio_language_projection.0": "model.multi_modal_projector.linear_1",
        "audio_language_projection.2": "model.multi_modal_projector.linear_2",
        "whisper_encoder.transformer.norm": f"{tower}{'norm' if realtime else 'layer_norm'}",
        "whisper_encoder.conv_layers.0": f"{tower}conv1",
        "whisper_encoder.conv_layers.1": f"{tower}conv2",
        "whisper_encoder.conv_layers.0.conv": f"{tower}embedder.conv1",
        "whisper_encoder.conv_layers.1.conv": f"{tower}embedder.conv2",
    }
    renamed = {}
    for name, value in tensors.items():
        stem, kind = name.removeprefix(prefix).rsplit(".", 1)
        if stem in whole:
            renamed[f"{whole[stem]}.{kind}"] = value
            continue
        hears = stem.startswith("whisper_encoder.")
        number, part = stem.split("layers.", 1)[1].split(".", 1)
        head = config.head_size if not hears else audio.head_size
        if part in ("attention.wq", "attention.wk") and (realtime or not hears):
            value = _half_split(value, head)
        base = f"{tower}layers." if hears else "model.language_model.layers."
        renamed[f"{base}{number}.{_layer_name(part, hears, realtime)}.{kind}"] = value
    return renamed


def _layer_name(part: str, hears: bool, realtime: bool) -> str:
    if part in _LAYER:
        return _LAYER[part][0 if hears else 1]
    if part == "attention.wo":
        return "self_attn.out_proj" if hears and not realtime else "self_attn.o_proj"
    if hears and not realtime:
        return {"feed_forward.w1": "fc1", "feed_forward.w2": "fc2"}[part]
    return {
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
    }[part]


def _half_split(rows: Tensor, head: int) -> Tensor:
    """Rotary rows (or a bias) from adjacent pairs to halves, head by head."""
    pairs = rows.unflatten(0, (-1, head // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()
