"""The text network of Qwen3.8-Flash-Next as TensorRT layers.

One definition serves both engines: `context` takes any number of tokens per slot, `generation` a
fixed few; they differ in the form of the recurrence, of the sparse attention and of the experts.
The residual is a bundle of `hc_count` streams, [B, S, n, H], all the way. Tensors are in the
checkpoint's type; norms, gates, decays, routing and scores are computed in float32.
"""

from __future__ import annotations

import math
from dataclasses import replace

from converters.definition import TOKEN_BLOCK, Definition, Dims, EngineLimits, Phase
from converters.layers.conv import causal_conv
from converters.layers.delta_rule import delta_rule_chunks, delta_rule_steps
from converters.layers.linear import linear, stored_weight, swiglu
from converters.layers.moe import Experts, run_experts, softmax_router
from converters.layers.norm import l2_normalize
from converters.layers.text_engine import TextEngine
from converters.quantization import kv_cache
from converters.qwen38.config import Qwen38CheckpointConfig
from plugins.qsa import layer as qsa
from plugins.qsa.geometry import Geometry
from plugins.qsa.site import Calls, Memory, Norms, Projections, Site
from plugins.support.errors import InputError
from plugins.trt.network import Network
from plugins.trt.norms import rms_norm
from plugins.trt.types import Tensor

_L2_EPS = 1e-6
_LEAST_GATE = 1e-6


def define(
    net: Network, config: Qwen38CheckpointConfig, phase: Phase, limits: EngineLimits
) -> Definition:
    """Add one engine's network to `net`.

    Inputs and outputs are those of the text engine contract (docs/architecture.md).
    Raises InputError for limits that the model cannot have, BuildError from the facade.
    """
    network = _TextNetwork(net, config, phase, limits)
    network.run()
    return network.engine.definition()


class _TextNetwork:
    """The network under construction: the engine's inputs and one method per block."""

    def __init__(
        self, net: Network, config: Qwen38CheckpointConfig, phase: Phase, limits: EngineLimits
    ) -> None:
        self.net, self.config, self.limits = net, config, limits
        self.family = config.qwen38
        self.dtype, self.eps = config.dtype, config.norm_epsilon
        self.hidden, self.streams = config.hidden_size, self.family.hc_count
        self.ratio = self.family.indexer_compress_ratio
        if TOKEN_BLOCK % self.ratio:
            raise InputError(
                "tokens per index block must divide the token block",
                where="indexer_compress_ratio",
                expected=f"a divisor of {TOKEN_BLOCK}",
                found=str(self.ratio),
            )
        budget = self.family.indexer_budget // self.ratio
        # Top-k needs that many blocks to choose from.
        blocks = min(budget, limits.visible_rows // self.ratio)
        least_span = -(-blocks * self.ratio // TOKEN_BLOCK) * TOKEN_BLOCK
        self.engine = TextEngine(net, config, phase, limits, least_span=least_span)
        self.batch, self.count = self.engine.batch, self.engine.count
        slots, steps = self.engine.largest_call
        calls = Calls(
            net=net,
            context=self.engine.context,
            past=self.engine.past,
            new=self.engine.new,
            positions=self.engine.positions,
            queries=self.engine.queries,
            active=self.engine.active,
            token_row=self.engine.token_row,
            span=self.engine.span,
            rows=limits.visible_rows,
            cache_rows=limits.cache_rows,
            slots=slots,
            steps=steps,
            ratio=self.ratio,
            rotary_dim=config.rotary_embedding_dim,
            theta=config.rotary_base,
            eps=self.eps,
            dtype=self.dtype,
        )
        geometry = Geometry(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            width=config.head_size,
            index_heads=self.family.indexer_n_heads,
            index_width=self.family.indexer_head_dim,
            ratio=self.ratio,
            blocks=budget,
            dtype=self.dtype,
            cache_dtype=self.dtype,
        )
        self.site = Site(calls, geometry)
        self.fp8_caches = config.quantization.kv_cache_quant_algo is not None
        if self.fp8_caches and not self.site.plugins:
            raise kv_cache.refusal(
                f"{net.capability.flavor} has no plugin layers for attention of these sizes: "
                f"{geometry}"
            )

    def _weight(self, name: str, shape: Dims) -> Tensor:
        return self.net.weight(f"{name}.weight", self.dtype, shape)

    # -- the model -----------------------------------------------------------------------------

    def run(self) -> None:
        """Embedding to logits."""
        net, config, family = self.net, self.config, self.family
        table = self._weight("transformer.vocab_embedding", (config.vocab_size, self.hidden))
        embedded = net.unsqueeze(net.gather(table, self.engine.ids, 0), [2])
        bundle = net.expand(embedded, [-1, -1, self.streams, -1])
        for layer, kind in enumerate(family.layer_types):
            with net.scope(f"layers.{layer}"):
                bundle = self._layer(layer, kind, bundle)
        with net.scope("head"):
            hidden = self.engine.head_rows(
                bundle, lambda rows: self._mix(rows, "transformer.hyper_connection_mixer")[0]
            )
            net.tap(hidden, "final_hidden")
            logits = linear(net, hidden, "lm_head", config.vocab_size)
            net.output(net.cast(logits, "float32"), "logits")

    def _layer(self, layer: int, kind: str, bundle: Tensor) -> Tensor:
        net, name, tap = self.net, f"transformer.layers.{layer}", f"layers.{layer}"
        if layer + 1 in self.family.ple_layer_ids:
            with net.scope("ple"):
                bundle = net.add(bundle, self._ple(layer, f"{name}.ple", bundle))
        with net.scope("attention_hyper_connection"):
            mixed, normed = self._mix(bundle, f"{name}.attention_hyper_connection")
        with net.scope("mixer"):
            if kind == "linear_attention":
                out = self._gated_delta_net(layer, f"{name}.linear_attention", mixed)
            else:
                out = self._sparse_attention(layer, f"{name}.attention", mixed)
            net.tap(out, f"{tap}.mixer")
        with net.scope("attention_hyper_connection"):
            bundle = self._inject(bundle, normed, out, f"{name}.attention_hyper_connection")
        with net.scope("mlp_hyper_connection"):
            mixed, normed = self._mix(bundle, f"{name}.mlp_hyper_connection")
        with net.scope("mlp"):
            out = net.tap(self._experts(f"{name}.mlp", mixed), f"{tap}.mlp")
        with net.scope("mlp_hyper_connection"):
            bundle = self._inject(bundle, normed, out, f"{name}.mlp_hyper_connection")
        return net.tap(bundle, f"{tap}.bundle")

    def _mix(self, bundle: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Block input [B, S, H] as gated mean of the normed streams; and those, [B, S, n * H]."""
        net, width = self.net, self.streams * self.hidden
        rows = [net.dim(bundle, 0), net.dim(bundle, 1)]
        streams = self._stream_norm(bundle, f"{name}.norm")
        normed = net.reshape(streams, [*rows, width])
        rank = self.family.hc_lowrank
        down = net.cast(linear(net, normed, f"{name}.down", rank), "float32")
        low = net.cast(net.silu(net.mul(down, 1.0 / self.streams)), self.dtype)
        gate = net.sigmoid(net.cast(linear(net, low, f"{name}.up", width), "float32"))
        gate = net.reshape(gate, [*rows, self.streams, self.hidden])
        weighted = net.mul(gate, net.cast(streams, "float32"))
        mean = net.reduce_mean(weighted, axes=[2], keepdims=False)
        return net.cast(mean, self.dtype), normed

    def _inject(self, bundle: Tensor, normed: Tensor, out: Tensor, name: str) -> Tensor:
        """Add a block's output [B, S, H] to every stream, each with its own scalar per token."""
        net = self.net
        logits = net.cast(linear(net, normed, f"{name}.inject", self.streams), "float32")
        scalars = net.mul(net.sigmoid(net.mul(logits, 1.0 / self.streams)), 2.0)
        added = net.mul(net.unsqueeze(net.cast(out, "float32"), [2]), net.unsqueeze(scalars, [3]))
        return net.cast(net.add(net.cast(bundle, "float32"), added), self.dtype)

    def _stream_norm(self, bundle: Tensor, name: str, dtype: str | None = None) -> Tensor:
        """Centred norm of every stream of [B, S, n, H] with its own weights."""
        weight = self._weight(name, (self.streams * self.hidden,))
        weight = self.net.reshape(weight, [self.streams, self.hidden])
        return rms_norm(self.net, bundle, weight, self.eps, centered=True, dtype=dtype)

    # -- Gated DeltaNet ------------------------------------------------------------------------

    def _gated_delta_net(self, layer: int, name: str, x: Tensor) -> Tensor:
        net, family = self.net, self.family
        key_heads, heads = family.linear_num_key_heads, family.linear_num_value_heads
        width, depth = family.linear_key_head_dim, family.linear_value_head_dim
        keys, values = key_heads * width, heads * depth
        channels, taps = 2 * keys + values, family.linear_conv_kernel_dim

        mixed = linear(net, x, f"{name}.in_proj_qkv", channels)
        kernel = self._weight(f"{name}.conv1d", (channels, 1, taps))
        conv_name = f"conv_state.{layer}"
        conv_state = self.engine.state(conv_name, self.dtype, (channels, taps - 1))
        convolved, conv_state = causal_conv(net, mixed, conv_state, kernel, self.engine.new)
        self.engine.next_state(conv_name, conv_state)
        convolved = net.silu(convolved)

        def key_like(start: int, scale: float) -> Tensor:
            part = self._heads(net.narrow(convolved, -1, start, keys), key_heads, width)
            part = net.unsqueeze(l2_normalize(net, part, _L2_EPS, scale), [3])
            repeated = net.expand(part, [-1, -1, -1, heads // key_heads, -1])
            return net.reshape(repeated, [self.batch, self.count, heads, width])

        query = key_like(0, width**-0.5)
        key = key_like(keys, 1.0)
        value = self._heads(net.narrow(convolved, -1, 2 * keys, values), heads, depth)
        gamma, beta = self._decay_and_strength(name, x, heads)

        state_name = f"recurrent_state.{layer}"
        state = self.engine.state(state_name, "float32", (heads, width, depth))
        recurrence = delta_rule_chunks if self.engine.context else delta_rule_steps
        out, state = recurrence(net, query, key, value, gamma, beta, state)
        self.engine.next_state(state_name, state)

        scale = stored_weight(net, f"{name}.norm.weight", self.dtype, (depth,))
        out = rms_norm(net, out, scale, self.eps, centered=False)
        z = self._heads(linear(net, x, f"{name}.in_proj_z", values), heads, depth)
        z = net.cast(z, "float32")
        gate = net.sigmoid(z) if family.output_gate_type == "sigmoid" else net.silu(z)
        gated = net.cast(net.mul(out, gate), self.dtype)
        gated = net.reshape(gated, [self.batch, self.count, values])
        return linear(net, gated, f"{name}.out_proj", self.hidden)

    def _decay_and_strength(self, name: str, x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """Log decay and write strength per token and head, [B, S, heads]; zero for padding."""
        net = self.net

        def per_head(weight: str) -> Tensor:
            stored = stored_weight(net, f"{name}.{weight}", self.dtype, (heads,))
            return net.unsqueeze(net.cast(stored, "float32"), [0, 1])

        def projected(weight: str) -> Tensor:
            return net.cast(linear(net, x, f"{name}.{weight}", heads), "float32")

        rate = net.neg(net.exp(per_head("A_log")))
        step = net.softplus(net.add(projected("in_proj_a"), per_head("dt_bias")))
        real = net.unsqueeze(self.engine.valid, [2])
        gamma = net.select(real, net.mul(rate, step), 0.0)
        return gamma, net.select(real, net.sigmoid(projected("in_proj_b")), 0.0)

    def _heads(self, x: Tensor, heads: int, width: int) -> Tensor:
        """[B, S, heads * width] to [B, S, heads, width]."""
        return self.net.reshape(x, [self.batch, self.count, heads, width])

    # -- QSA -----------------------------------------------------------------------------------

    def _sparse_attention(self, layer: int, name: str, x: Tensor) -> Tensor:
        net, site = self.net, self._site(name)
        g = site.geometry
        index = f"{name}.indexer"
        projections = Projections(
            q_gate=linear(net, x, f"{name}.q", g.heads * 2 * g.width),
            key=linear(net, x, f"{name}.k", g.kv_heads * g.width),
            value=linear(net, x, f"{name}.v", g.kv_heads * g.width),
            index_qk=linear(net, x, f"{index}.qk", (g.index_heads + 1) * g.index_width),
        )
        norms = Norms(
            query=self._weight(f"{name}.q_layernorm", (g.width,)),
            key=self._weight(f"{name}.k_layernorm", (g.width,)),
            index_query=self._weight(f"{index}.q_layernorm", (g.index_width,)),
            index_key=self._weight(f"{index}.k_layernorm", (g.index_width,)),
        )
        state = f"index_key_state.{layer}"
        blocks = self.limits.cache_rows // g.ratio
        memory = Memory(
            keys=self._cache(f"key_cache.{layer}", g),
            values=self._cache(f"value_cache.{layer}", g),
            block_keys=self.engine.cache_input(
                f"index_key_cache.{layer}", 1, g.index_width, blocks
            ),
            state=self.engine.state(state, self.dtype, (g.ratio - 1, g.index_width)),
        )
        ready = qsa.prepare(site, projections, norms, memory)
        self.engine.next_state(state, ready.memory.state)
        with net.scope("indexer"):
            chosen = qsa.select(site, ready.index_query, ready.memory.block_keys)
            net.tap(chosen, f"layers.{layer}.selected_blocks")
        mixed = qsa.attend(
            site, ready.query, ready.memory.keys, ready.memory.values, chosen, projections.q_gate
        )
        return linear(net, mixed, f"{name}.dense", self.hidden)

    def _site(self, attention: str) -> Site:
        """The site of one layer: scales of FP8 caches are constants of its kernels."""
        if not self.fp8_caches:
            return self.site
        key, value = kv_cache.stored_scales(self.net.source, attention)
        geometry = replace(
            self.site.geometry, cache_dtype="float8_e4m3fn", k_scale=key, v_scale=value
        )
        return Site(self.site.calls, geometry)

    def _cache(self, name: str, g: Geometry) -> Tensor:
        return self.engine.cache_input(name, g.kv_heads, g.width, dtype=g.cache_dtype)

    # -- PLE -----------------------------------------------------------------------------------

    def _ple(self, layer: int, name: str, bundle: Tensor) -> Tensor:
        """Hashed n-gram features for every stream, [B, S, n, H]; rows come from the host."""
        net, family, width = self.net, self.family, self.streams * self.hidden
        per_stream = [self.batch, self.count, self.streams, self.hidden]
        embedded = self.engine.per_token(f"ple_embeddings.{layer}", family.ple_embed_dim)
        key = net.reshape(linear(net, embedded, f"{name}.key", width), per_stream)
        key = self._stream_norm(key, f"{name}.norm_key", "float32")
        query = self._stream_norm(bundle, f"{name}.norm_query", "float32")
        dots = net.reduce_sum(net.mul(key, query), axes=[3])
        dots = net.mul(dots, 1.0 / math.sqrt(self.hidden))
        root = net.sqrt(net.maximum(net.abs(dots), _LEAST_GATE))
        gate = net.sigmoid(net.mul(net.sign(dots), root))
        value = net.cast(linear(net, embedded, f"{name}.value", self.hidden), "float32")
        gated = net.mul(gate, net.unsqueeze(value, [2]))
        normed = self._stream_norm(gated, f"{name}.norm_conv", self.dtype)

        taps, dilation = family.ple_conv_kernel_size, family.ngram_size
        state_name = f"ple_conv_state.{layer}"
        state = self.engine.state(state_name, self.dtype, (width, (taps - 1) * dilation))
        convolved, state = causal_conv(
            net,
            net.reshape(normed, [self.batch, self.count, width]),
            state,
            self._weight(f"{name}.conv1d", (width, 1, taps)),
            self.engine.new,
            dilation=dilation,
        )
        self.engine.next_state(state_name, state)
        local = net.reshape(net.silu(convolved), per_stream)
        return net.tap(net.cast(net.add(gated, local), self.dtype), f"layers.{layer}.ple")

    # -- experts -------------------------------------------------------------------------------

    def _experts(self, name: str, x: Tensor) -> Tensor:
        net, family = self.net, self.family
        pairs = net.dim_mul(self.batch, self.count)
        flat = net.reshape(x, [pairs, self.hidden])
        experts = Experts(
            name=f"{name}.experts",
            count=family.num_experts,
            chosen=family.num_experts_per_tok,
            hidden=self.hidden,
            intermediate=family.moe_intermediate_size,
        )
        ids, weights = softmax_router(
            net, flat, f"{name}.router", experts, normalize=family.norm_topk_prob
        )
        slots = self.limits.max_batch_size
        routed = run_experts(
            net,
            flat,
            ids,
            weights,
            experts,
            valid=net.reshape(self.engine.valid, [pairs]),
            max_tokens=None if self.engine.context else slots * self.limits.step_tokens,
        )
        width = family.shared_expert_intermediate_size
        gate = linear(net, flat, f"{name}.shared_expert.gate", width)
        up = linear(net, flat, f"{name}.shared_expert.up", width)
        down = linear(net, swiglu(net, gate, up), f"{name}.shared_expert.down", self.hidden)
        share = net.sigmoid(net.cast(linear(net, flat, f"{name}.shared_expert_gate", 1), "float32"))
        total = net.add(routed, net.mul(share, net.cast(down, "float32")))
        return net.reshape(net.cast(total, self.dtype), [self.batch, self.count, self.hidden])
