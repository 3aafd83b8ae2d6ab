"""The networks of Voxtral: the text decoder (two engines) and the audio encoder (one).

The decoder is a Llama: it takes token ids and, per position, a row of the audio engine. Voxtral
replaces the embedding of placeholder ids by the row; the realtime variant adds the row at every
position. The encoder of Voxtral hears whole chunks of 30 seconds; the realtime encoder hears a
stream in order and carries its convolutions' and its attention's past from call to call.
"""

from __future__ import annotations

import math

import torch

from converters.definition import Definition, Dims, EngineLimits, Phase
from converters.layers.inputs import Inputs
from converters.layers.linear import linear, swiglu
from converters.layers.text_engine import TextEngine
from converters.voxtral.config import VoxtralCheckpointConfig
from plugins.trt.network import Network
from plugins.trt.norms import rms_norm
from plugins.trt.rope import RotaryTable
from plugins.trt.types import Tensor

# Encoder frames per mel frame, and the kernel of both convolutions.
_STRIDE, _KERNEL = 2, 3
# Half of the encoder's float16 range is kept free, as in the reference.
_FLOAT16_LIMIT = 65504.0 - 1000.0
# Chunks of one call; the caller cuts longer audio. More would only need more scratch memory.
MAX_CHUNKS = 4


def define(
    net: Network, config: VoxtralCheckpointConfig, phase: Phase, limits: EngineLimits
) -> Definition:
    """Add one engine's network to `net`.

    Raises InputError for limits that the model cannot have, BuildError from the facade.
    """
    if phase == "audio":
        encoder = _Stream if config.voxtral.realtime else _Chunks
        return encoder(net, config, limits).run()
    return _Decoder(net, config, phase, limits).run()


class _Decoder:
    """Embedding, audio rows, decoder layers and head."""

    def __init__(
        self, net: Network, config: VoxtralCheckpointConfig, phase: Phase, limits: EngineLimits
    ) -> None:
        self.net, self.config, self.block = net, config, config.voxtral
        self.engine = TextEngine(net, config, phase, limits)
        self.rotary = RotaryTable(
            net, limits.cache_rows, config.head_size, config.rotary_base, config.dtype
        )
        self.angles = self.rotary.at(self.engine.positions)
        self.mask = self.engine.causal_mask(self.block.sliding_window)

    def run(self) -> Definition:
        """Ids and audio rows to logits."""
        net, config, engine = self.net, self.config, self.engine
        vocab = (config.vocab_size, config.hidden_size)
        table = net.weight("transformer.vocab_embedding.weight", config.dtype, vocab)
        x = net.gather(table, engine.ids, 0)
        audio = engine.per_token("audio_embeddings", config.hidden_size)
        if self.block.realtime:
            x = net.add(x, audio)
        else:
            assert self.block.audio_token_id is not None
            heard = net.equal(engine.ids, self.block.audio_token_id)
            x = net.select(net.unsqueeze(heard, [2]), audio, x)
        for layer in range(config.num_hidden_layers):
            with net.scope(f"layers.{layer}"):
                x = net.tap(self._layer(layer, x), f"layers.{layer}.hidden")
        with net.scope("head"):
            hidden = engine.head_rows(x, lambda rows: self._norm(rows, "transformer.ln_f"))
            net.tap(hidden, "final_hidden")
            if self.block.tie_word_embeddings:
                head = net.unsqueeze(table, [0])
                logits = net.matmul(hidden, head, transpose_b=True)
            else:
                logits = linear(net, hidden, "lm_head", config.vocab_size)
            net.output(net.cast(logits, "float32"), "logits")
        return engine.definition()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.net.weight(f"{name}.weight", self.config.dtype, (self.config.hidden_size,))
        return rms_norm(self.net, x, weight, self.config.norm_epsilon, centered=False)

    def _layer(self, layer: int, x: Tensor) -> Tensor:
        net, name = self.net, f"transformer.layers.{layer}"
        with net.scope("attention"):
            out = self._attention(layer, self._norm(x, f"{name}.input_layernorm"))
            x = net.add(x, net.tap(out, f"layers.{layer}.mixer"))
        with net.scope("mlp"):
            normed = self._norm(x, f"{name}.post_layernorm")
            if self.block.delay_rank is not None:
                normed = net.mul(normed, self._delay_scale(f"{name}.delay_norm"))
            inner = self.block.intermediate_size
            both = linear(net, normed, f"{name}.mlp.gate_up", 2 * inner)
            hidden = swiglu(net, net.narrow(both, -1, 0, inner), net.narrow(both, -1, inner, inner))
            out = linear(net, hidden, f"{name}.mlp.down", self.config.hidden_size)
            return net.add(x, net.tap(out, f"layers.{layer}.mlp"))

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        net, config, engine = self.net, self.config, self.engine
        name = f"transformer.layers.{layer}.attention"
        heads, kv_heads, width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_size,
        )
        joined = linear(net, x, f"{name}.qkv", (heads + 2 * kv_heads) * width)

        def part(first: int, count: int) -> Tensor:
            piece = net.narrow(joined, -1, first * width, count * width)
            piece = net.reshape(piece, [engine.batch, engine.count, count, width])
            return net.transpose(piece, (0, 2, 1, 3))

        interleaved = config.position_embedding_type == "rope_gptj"
        query = self.rotary.rotate(part(0, heads), self.angles, interleaved=interleaved)
        key = self.rotary.rotate(part(heads, kv_heads), self.angles, interleaved=interleaved)
        keys = engine.cache(f"key_cache.{layer}", key, engine.token_row)
        value = part(heads + kv_heads, kv_heads)
        values = engine.cache(f"value_cache.{layer}", value, engine.token_row)
        mixed = net.attention(
            net.mul(query, width**-0.5), engine.visible(keys), engine.visible(values), self.mask
        )
        mixed = net.transpose(mixed, (0, 2, 1, 3))
        mixed = net.reshape(mixed, [engine.batch, engine.count, heads * width])
        return linear(net, mixed, f"{name}.dense", config.hidden_size)

    def _delay_scale(self, name: str) -> Tensor:
        """1 + up(gelu(down(c))) with the embedding c of the delay, [1, 1, H].

        The delay is that of the checkpoint, so that the whole vector is a constant.
        """
        net, hidden = self.net, self.config.hidden_size
        assert self.block.delay_rank is not None
        assert self.block.default_num_delay_tokens is not None
        exponent = torch.arange(hidden // 2, dtype=torch.float32) / (hidden // 2)
        angles = self.block.default_num_delay_tokens * torch.exp(-math.log(10000.0) * exponent)
        embedding = torch.cat([angles.cos(), angles.sin()])[None, None]
        condition = net.literal(embedding.to(getattr(torch, self.config.dtype)))
        low = net.gelu_erf(linear(net, condition, f"{name}.down", self.block.delay_rank))
        return net.add(linear(net, low, f"{name}.up", hidden), 1.0)


class _Encoder:
    """What both encoders share: biased linear maps, heads, joining frames, projector."""

    def __init__(self, net: Network, config: VoxtralCheckpointConfig, limits: EngineLimits) -> None:
        self.net, self.config, self.audio = net, config, config.voxtral.audio
        self.limits, self.dtype = limits, config.dtype
        self.width = self.audio.num_attention_heads * self.audio.head_size

    def _weight(self, name: str, shape: Dims) -> Tensor:
        return self.net.weight(name, self.dtype, shape)

    def _biased(self, x: Tensor, name: str, out: int) -> Tensor:
        bias = self.net.unsqueeze(self._weight(f"{name}.bias", (out,)), [0, 1])
        return self.net.add(linear(self.net, x, name, out), bias)

    def _convolution(self, x: Tensor, name: str, inputs: int, stride: int, padding: int) -> Tensor:
        """[B, inputs, 1, F] to [B, hidden, 1, F / stride], with bias and GELU."""
        net, hidden = self.net, self.audio.hidden_size
        kernel = self._weight(f"{name}.weight", (hidden, inputs, _KERNEL))
        kernel = net.reshape(kernel, [hidden, inputs, 1, _KERNEL])
        bias = net.reshape(self._weight(f"{name}.bias", (hidden,)), [1, hidden, 1, 1])
        out = net.convolution(x, kernel, stride=(1, stride), padding=(0, padding))
        return net.gelu_erf(net.add(out, bias))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, F, heads * D] to [B, heads, F, D]."""
        net, audio = self.net, self.audio
        shape = [net.dim(x, 0), net.dim(x, 1), audio.num_attention_heads, audio.head_size]
        return net.transpose(net.reshape(x, shape), (0, 2, 1, 3))

    def _merged(self, x: Tensor) -> Tensor:
        """[B, heads, F, D] to [B, F, heads * D]."""
        net = self.net
        x = net.transpose(x, (0, 2, 1, 3))
        return net.reshape(x, [net.dim(x, 0), net.dim(x, 1), self.width])

    def _project(self, frames: Tensor) -> None:
        """Join every few frames to a row, project the rows, and make them the output."""
        net, audio = self.net, self.audio
        factor, hidden = audio.downsample_factor, self.config.hidden_size
        rows = net.dim_floor_div(net.dim(frames, 1), factor)
        joined = net.reshape(frames, [net.dim(frames, 0), rows, factor * audio.hidden_size])
        with net.scope("projector"):
            inner = net.gelu_erf(linear(net, joined, "projector.linear_1", hidden))
            net.output(linear(net, inner, "projector.linear_2", hidden), "audio_rows")


class _Chunks(_Encoder):
    """The Whisper encoder over chunks of a fixed number of frames, each heard as a whole."""

    def run(self) -> Definition:
        """`input_features` float32 [N, mels, frames] to `audio_rows` [N, rows, H]."""
        net, audio = self.net, self.audio
        assert audio.max_source_positions is not None
        frames = audio.max_source_positions * _STRIDE
        shape = (audio.num_mel_bins, frames)
        inputs = Inputs(net, MAX_CHUNKS, 1)
        mel = net.cast(inputs.add("input_features", "host", "float32", shape), self.dtype)
        with net.scope("audio.stem"):
            x = net.unsqueeze(mel, [2])
            x = self._convolution(x, "audio.conv1", audio.num_mel_bins, 1, 1)
            x = self._convolution(x, "audio.conv2", audio.hidden_size, _STRIDE, 1)
            x = net.transpose(net.squeeze(x, [2]), (0, 2, 1))
            table = net.unsqueeze(self._positions(), [0])
            # The table is float32 in every checkpoint, so the sum is rounded once.
            x = net.cast(net.add(net.cast(x, "float32"), table), self.dtype)
        for layer in range(audio.num_hidden_layers):
            with net.scope(f"audio.layers.{layer}"):
                x = net.tap(self._layer(f"audio.layers.{layer}", x), f"audio.layers.{layer}.hidden")
        x = net.tap(self._norm(x, "audio.ln_f"), "audio.encoded")
        self._project(x)
        return inputs.definition()

    def _positions(self) -> Tensor:
        audio = self.audio
        assert audio.max_source_positions is not None
        if self.config.voxtral.position_table == "file":
            shape = (audio.max_source_positions, audio.hidden_size)
            name = "audio.position_embedding.weight"
            info = self.net.source.info(name)
            kind = info.dtype if info is not None else "float32"
            return self.net.cast(self.net.weight(name, kind, shape), "float32")
        return self.net.literal(sinusoids(audio.max_source_positions, audio.hidden_size))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        net, hidden = self.net, self.audio.hidden_size
        scale = net.reshape(self._weight(f"{name}.weight", (hidden,)), [1, 1, hidden])
        bias = net.reshape(self._weight(f"{name}.bias", (hidden,)), [1, 1, hidden])
        return net.layer_norm(x, scale, bias, [2], self.audio.norm_epsilon)

    def _layer(self, name: str, x: Tensor) -> Tensor:
        net, audio = self.net, self.audio
        normed = self._norm(x, f"{name}.attention_layernorm")
        query = self._biased(normed, f"{name}.attention.q", self.width)
        query = net.mul(query, audio.head_size**-0.5)
        key = linear(net, normed, f"{name}.attention.k", self.width)
        value = self._biased(normed, f"{name}.attention.v", self.width)
        mixed = net.attention(self._heads(query), self._heads(key), self._heads(value))
        out = self._biased(self._merged(mixed), f"{name}.attention.dense", audio.hidden_size)
        x = net.add(x, out)
        normed = self._norm(x, f"{name}.mlp_layernorm")
        inner = net.gelu_erf(self._biased(normed, f"{name}.mlp.fc", audio.intermediate_size))
        x = net.add(x, self._biased(inner, f"{name}.mlp.proj", audio.hidden_size))
        if self.dtype == "float16":
            x = net.maximum(net.minimum(x, _FLOAT16_LIMIT), -_FLOAT16_LIMIT)
        return x


class _Stream(_Encoder):
    """The realtime encoder: causal, with a window, one slot per stream.

    States: `audio_conv_state.{1,2}` the inputs before this call's, `audio_key_state.{i}` and
    `audio_value_state.{i}` the last `window - 1` rotated keys and values. `past_frames` says how
    many encoder frames came before; rows of the states from before the beginning are masked.
    """

    def __init__(self, net: Network, config: VoxtralCheckpointConfig, limits: EngineLimits) -> None:
        super().__init__(net, config, limits)
        self.inputs = Inputs(net, limits.max_batch_size, 1)

    def run(self) -> Definition:
        """`input_features` float32 [B, mels, F] (F a multiple of 8) to `audio_rows` [B, F/8, H]."""
        net, audio, limits = self.net, self.audio, self.limits
        mels, hidden = audio.num_mel_bins, audio.hidden_size
        per_row = _STRIDE * audio.downsample_factor
        most = limits.chunk_size * per_row
        features = self.inputs.add(
            "input_features",
            "host",
            "float32",
            (mels, -1),
            ((mels, per_row), (mels, most), (mels, most)),
        )
        past = self.inputs.add("past_frames", "token", "int32")
        x = net.unsqueeze(net.cast(features, self.dtype), [2])
        with net.scope("audio.stem"):
            x = self._causal_convolution(x, "audio.conv1", 1, mels, 1)
            x = self._causal_convolution(x, "audio.conv2", 2, hidden, _STRIDE)
            x = net.transpose(net.squeeze(x, [2]), (0, 2, 1))
        count = net.dim(x, 1)
        window = self._window()
        index = net.unsqueeze(net.iota(count), [0])
        positions = net.add(net.unsqueeze(past, [1]), index)
        assert audio.rotary_base is not None
        rows = limits.visible_rows * audio.downsample_factor + limits.chunk_size * per_row
        rotary = RotaryTable(net, rows, audio.head_size, audio.rotary_base, self.dtype)
        angles = rotary.at(positions)
        # Key j of [state | call] is the frame past - (window - 1) + j.
        keys = net.add(net.iota(net.dim_add(count, window - 1)), 1 - window)
        frame = net.add(net.unsqueeze(keys, [0]), net.unsqueeze(past, [1]))
        mask = self._mask(frame, positions, window)
        for layer in range(audio.num_hidden_layers):
            with net.scope(f"audio.layers.{layer}"):
                x = self._layer(layer, x, rotary, angles, mask, window)
                net.tap(x, f"audio.layers.{layer}.hidden")
        x = net.tap(self._norm(x, "audio.ln_f"), "audio.encoded")
        self._project(x)
        return self.inputs.definition()

    def _window(self) -> int:
        assert self.audio.sliding_window is not None
        return self.audio.sliding_window

    def _carried(self, name: str, x: Tensor, axis: int, rows: int, shape: Dims) -> Tensor:
        """[state | x] along an axis; the last `rows` of it become the next state."""
        net = self.net
        state = self.inputs.add(name, "state", self.dtype, shape)
        both = net.concat([state, x], axis)
        start = net.dim_sub(net.dim(both, axis), rows)
        net.output(net.narrow(both, axis, start, rows), f"{name}.next")
        return both

    def _causal_convolution(
        self, x: Tensor, name: str, number: int, inputs: int, stride: int
    ) -> Tensor:
        """Left-padded by the inputs before, kernel - stride of them."""
        before = _KERNEL - stride
        state = f"audio_conv_state.{number}"
        both = self._carried(state, x, 3, before, (inputs, 1, before))
        return self._convolution(both, name, inputs, stride, 0)

    def _mask(self, frame: Tensor, positions: Tensor, window: int) -> Tensor:
        """Which keys each frame hears: its own and the window - 1 before it, from the beginning."""
        net = self.net
        key, query = net.unsqueeze(frame, [1]), net.unsqueeze(positions, [2])
        near = net.logical_and(net.less_equal(key, query), net.greater(key, net.sub(query, window)))
        begun = net.greater_equal(key, 0)
        return net.unsqueeze(net.logical_and(near, begun), [1])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weight(f"{name}.weight", (self.audio.hidden_size,))
        return rms_norm(self.net, x, weight, self.audio.norm_epsilon, centered=False)

    def _layer(
        self,
        layer: int,
        x: Tensor,
        rotary: RotaryTable,
        angles: tuple[Tensor, Tensor],
        mask: Tensor,
        window: int,
    ) -> Tensor:
        net, audio, name = self.net, self.audio, f"audio.layers.{layer}"
        interleaved = self.config.position_embedding_type == "rope_gptj"
        normed = self._norm(x, f"{name}.attention_layernorm")
        query = self._heads(self._biased(normed, f"{name}.attention.q", self.width))
        key = self._heads(linear(net, normed, f"{name}.attention.k", self.width))
        value = self._heads(self._biased(normed, f"{name}.attention.v", self.width))
        query = rotary.rotate(query, angles, interleaved=interleaved)
        key = rotary.rotate(key, angles, interleaved=interleaved)
        shape = (audio.num_attention_heads, window - 1, audio.head_size)
        keys = self._carried(f"audio_key_state.{layer}", key, 2, window - 1, shape)
        values = self._carried(f"audio_value_state.{layer}", value, 2, window - 1, shape)
        mixed = net.attention(net.mul(query, audio.head_size**-0.5), keys, values, mask)
        out = self._biased(self._merged(mixed), f"{name}.attention.dense", audio.hidden_size)
        x = net.add(x, out)
        normed = self._norm(x, f"{name}.mlp_layernorm")
        inner = audio.intermediate_size
        both = linear(net, normed, f"{name}.mlp.gate_up", 2 * inner)
        hidden = swiglu(net, net.narrow(both, -1, 0, inner), net.narrow(both, -1, inner, inner))
        return net.add(x, self._biased(hidden, f"{name}.mlp.down", audio.hidden_size))


def sinusoids(positions: int, channels: int) -> torch.Tensor:
    """Whisper's position table, float32 [positions, channels]: sines, then cosines.

    The frequencies are exp(-i ln(10000) / (channels / 2 - 1)).
    """
    half = channels // 2
    rates = torch.exp(-math.log(10000.0) / (half - 1) * torch.arange(half, dtype=torch.float32))
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)
