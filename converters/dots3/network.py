"""The networks of Dots3 NOTE as TensorRT layers: text model and draft layer.

Latent attention comes in two forms: `context` expands the cached latents to keys and values,
`generation` takes the queries into the latent space instead and reads nothing but latents. Full
layers choose tokens with an indexer and keep every latent; sliding layers carry the latents of
their window as a state. Norms, scores, routing and gates are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from converters.definition import Definition, EngineLimits, Phase
from converters.dots3.config import Dots3CheckpointConfig, Mla
from converters.layers.embedding import replicated_embed
from converters.layers.linear import linear, swiglu
from converters.layers.moe import Experts, run_experts, sigmoid_router
from converters.layers.stored import stored_matrix
from converters.layers.text_engine import TextEngine
from plugins.dsa import layer as dsa
from plugins.dsa import lowering
from plugins.dsa.geometry import Geometry
from plugins.dsa.site import Site
from plugins.mtp import layer as mtp
from plugins.trt.network import Network
from plugins.trt.norms import rms_norm
from plugins.trt.rope import RotaryTable
from plugins.trt.types import Tensor

# LayerNorm of the index keys, whatever the model's own epsilon.
_INDEX_EPS = 1e-6
_DRAFT_TABLE = "mtp.vocab_embedding"


def define(
    net: Network, config: Dots3CheckpointConfig, phase: Phase, limits: EngineLimits
) -> Definition:
    """Add one engine's network to `net`.

    Raises InputError for limits that the model cannot have, BuildError from the facade.
    """
    if phase == "draft":
        return _DraftNetwork(net, config, limits).run()
    return _TextNetwork(net, config, phase, limits).run()


@dataclass(frozen=True)
class _Kind:
    """One kind of attention: its geometry, where it stands and the rotation of the positions."""

    mla: Mla
    site: Site
    rotary: RotaryTable
    angles: tuple[Tensor, Tensor]


class _Layers:
    """Decoder layers over the inputs of one engine.

    Args:
        engine: its inputs.
        expanded: whether attention expands the latents (many queries) or absorbs (few).
    """

    def __init__(
        self, engine: TextEngine, config: Dots3CheckpointConfig, *, expanded: bool
    ) -> None:
        self.net, self.engine, self.config = engine.net, engine, config
        self.block, self.expanded = config.dots3, expanded
        self.dtype, self.eps, self.hidden = config.dtype, config.norm_epsilon, config.hidden_size
        self.visible = lowering.visible_counts(self.net, engine.past, engine.new, engine.count)

    def kind(self, mla: Mla) -> _Kind:
        """Rotation tables of one geometry; float32, so that no angle is rounded."""
        engine, block = self.engine, self.block
        rows = engine.limits.cache_rows
        rotary = RotaryTable(self.net, rows, mla.rope, mla.rotary_base, "float32")
        sliding = mla is block.sliding
        geometry = Geometry(
            heads=mla.heads,
            latent=mla.kv_rank,
            rope=mla.rope,
            nope=mla.nope,
            value=mla.value,
            index_heads=0 if sliding else block.index_n_heads,
            index_width=0 if sliding else block.index_head_dim,
            kept=0 if sliding else block.index_topk,
            window=block.sliding_window if sliding else 0,
            dtype=self.dtype,
        )
        slots, steps = engine.largest_call
        site = Site(
            net=self.net,
            geometry=geometry,
            expanded=self.expanded,
            past=engine.past,
            new=engine.new,
            visible=self.visible,
            span=engine.span,
            rows=engine.limits.visible_rows,
            slots=slots,
            steps=steps,
        )
        return _Kind(mla, site, rotary, rotary.at(engine.positions))

    def norm(self, x: Tensor, name: str, width: int) -> Tensor:
        """RMS norm with the weight `{name}.weight`."""
        weight = self.net.weight(f"{name}.weight", self.dtype, (width,))
        return rms_norm(self.net, x, weight, self.eps, centered=False)

    def layer(self, name: str, label: str, x: Tensor, kind: _Kind, *, dense: bool) -> Tensor:
        """One decoder layer; `label` ends the names of its caches, states and taps."""
        net = self.net
        with net.scope("attention"):
            normed = self.norm(x, f"{name}.input_layernorm", self.hidden)
            attend = self._sliding if kind.mla is self.block.sliding else self._full
            out = attend(f"{name}.attention", label, normed, kind)
            x = net.add(x, net.tap(out, f"layers.{label}.mixer"))
        with net.scope("mlp"):
            normed = self.norm(x, f"{name}.post_layernorm", self.hidden)
            out = (
                self._mlp(f"{name}.mlp", normed, self.block.intermediate_size)
                if dense
                else (self._experts(f"{name}.mlp", normed))
            )
            return net.tap(
                net.add(x, net.tap(out, f"layers.{label}.mlp")), f"layers.{label}.hidden"
            )

    # -- attention -----------------------------------------------------------------------------

    def _rotated(self, x: Tensor, kind: _Kind) -> Tensor:
        """Rotate [B, S, H, R] in adjacent pairs, in float32."""
        return kind.rotary.rotate_neighbours(x, kind.angles)

    def _latents(self, name: str, x: Tensor, kind: _Kind) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query latent [B, S, Rq], query heads (nope, rope) and the row to cache [B, S, L + R]."""
        net, mla, engine = self.net, kind.mla, self.engine
        latent = self.norm(
            linear(net, x, f"{name}.q_a", mla.q_rank), f"{name}.q_a_layernorm", mla.q_rank
        )
        latent = lowering.scaled(net, latent, (self.hidden / mla.q_rank) ** 0.5)
        head = mla.nope + mla.rope
        query = linear(net, latent, f"{name}.q_b", mla.heads * head)
        query = net.reshape(query, [engine.batch, engine.count, mla.heads, head])
        q_nope = net.narrow(query, -1, 0, mla.nope)
        q_rope = self._rotated(net.narrow(query, -1, mla.nope, mla.rope), kind)

        joined = linear(net, x, f"{name}.kv_a", mla.kv_rank + mla.rope)
        compressed = self.norm(
            net.narrow(joined, -1, 0, mla.kv_rank), f"{name}.kv_a_layernorm", mla.kv_rank
        )
        compressed = lowering.scaled(net, compressed, (self.hidden / mla.kv_rank) ** 0.5)
        key = self.norm(
            net.narrow(joined, -1, mla.kv_rank, mla.rope), f"{name}.k_rope_layernorm", mla.rope
        )
        key = net.squeeze(self._rotated(net.unsqueeze(key, [2]), kind), [2])
        return latent, q_nope, q_rope, net.concat([compressed, key], 2)

    def _up_projection(self, name: str, mla: Mla) -> Tensor:
        """The joined up-projection of keys and values by head, [H, nope + value, L]."""
        shape = (mla.heads * (mla.nope + mla.value), mla.kv_rank)
        joined = stored_matrix(self.net, f"{name}.kv_b", shape, self.dtype)
        return self.net.reshape(joined, [mla.heads, mla.nope + mla.value, mla.kv_rank])

    def _out(self, name: str, mixed: Tensor, mla: Mla) -> Tensor:
        """[B, S, H, value] through the output projection."""
        net, engine = self.net, self.engine
        joined = net.reshape(mixed, [engine.batch, engine.count, mla.heads * mla.value])
        return linear(net, joined, f"{name}.dense", self.hidden)

    def _full(self, name: str, label: str, x: Tensor, kind: _Kind) -> Tensor:
        net, engine, mla = self.net, self.engine, kind.mla
        latent, q_nope, q_rope, row = self._latents(name, x, kind)
        cache = engine.cache(f"latent_cache.{label}", net.unsqueeze(row, [1]), engine.token_row)
        chosen = self._selection(f"{name}.indexer", label, x, latent, kind)
        up = self._up_projection(name, mla)
        gate = linear(net, x, f"{name}.gate", mla.heads)
        mixed = dsa.attend(kind.site, q_nope, q_rope, cache, chosen, up, gate)
        return self._out(name, mixed, mla)

    def _selection(self, name: str, label: str, x: Tensor, latent: Tensor, kind: _Kind) -> Tensor:
        """The tokens that each query of a full layer attends to, int32 [B, S, K]."""
        net, engine, block = self.net, self.engine, self.block
        heads, width = block.index_n_heads, block.index_head_dim
        query = linear(net, latent, f"{name}.q_b", heads * width)
        query = net.reshape(query, [engine.batch, engine.count, heads, width])
        key = linear(net, x, f"{name}.k", width)

        def norm_weight(kind: str) -> Tensor:
            stored = net.weight(f"{name}.k_layernorm.{kind}", self.dtype, (width,))
            return net.reshape(stored, [1, 1, width])

        key = net.layer_norm(key, norm_weight("weight"), norm_weight("bias"), [2], _INDEX_EPS)
        key = self._index_rotated(net.unsqueeze(key, [2]), kind)
        cache = engine.cache(
            f"index_key_cache.{label}", net.transpose(key, (0, 2, 1, 3)), engine.token_row
        )
        chosen = dsa.select(
            kind.site,
            self._index_rotated(query, kind),
            cache,
            linear(net, x, f"{name}.weights", heads),
        )
        return net.tap(chosen, f"layers.{label}.selected_tokens")

    def _index_rotated(self, x: Tensor, kind: _Kind) -> Tensor:
        """Rotate the rotary lanes of index heads [B, S, H, Di], wherever the file keeps them."""
        net, width, rope = self.net, self.block.index_head_dim, kind.mla.rope
        first = 0 if self.block.index_rope == "leading" else width - rope
        turned = self._rotated(net.narrow(x, -1, first, rope), kind)
        if rope == width:
            return turned
        if self.block.index_rope == "leading":
            return net.concat([turned, net.narrow(x, -1, rope, width - rope)], 3)
        return net.concat([net.narrow(x, -1, 0, first), turned], 3)

    def _sliding(self, name: str, label: str, x: Tensor, kind: _Kind) -> Tensor:
        net, engine, mla = self.net, self.engine, kind.mla
        window = self.block.sliding_window
        _, q_nope, q_rope, row = self._latents(name, x, kind)
        rows = engine.window(f"window_state.{label}", row, window)
        up = self._up_projection(name, mla)
        gate = linear(net, x, f"{name}.gate", mla.heads)
        rows = net.unsqueeze(rows, [1])
        mixed = dsa.attend_window(kind.site, q_nope, q_rope, rows, up, gate)
        return self._out(name, mixed, mla)

    # -- MLP -----------------------------------------------------------------------------------

    def _mlp(self, name: str, x: Tensor, width: int) -> Tensor:
        net, inner = self.net, self.config.mlp_width(width)
        both = linear(net, x, f"{name}.gate_up", 2 * inner, pieces=2)
        hidden = swiglu(net, net.narrow(both, -1, 0, inner), net.narrow(both, -1, inner, inner))
        return linear(net, hidden, f"{name}.down", self.hidden)

    def _experts(self, name: str, x: Tensor) -> Tensor:
        net, engine, block = self.net, self.engine, self.block
        tokens = net.dim_mul(engine.batch, engine.count)
        flat = net.reshape(x, [tokens, self.hidden])
        experts = Experts(
            f"{name}.experts",
            block.n_routed_experts,
            block.num_experts_per_tok,
            self.hidden,
            block.moe_intermediate_size,
        )
        ids, weights = sigmoid_router(
            net,
            flat,
            f"{name}.router",
            experts,
            normalize=block.norm_topk_prob,
            scaling=block.routed_scaling_factor,
        )
        limits = engine.limits
        most = None if self.expanded else limits.max_batch_size * limits.step_tokens
        valid = net.reshape(engine.valid, [tokens])
        routed = run_experts(net, flat, ids, weights, experts, valid=valid, max_tokens=most)
        shared = self._mlp(f"{name}.shared_expert", flat, block.shared_intermediate_size)
        total = net.cast(net.add(routed, net.cast(shared, "float32")), self.dtype)
        return net.reshape(total, [engine.batch, engine.count, self.hidden])


class _TextNetwork:
    """Embedding, decoder layers, head."""

    def __init__(
        self, net: Network, config: Dots3CheckpointConfig, phase: Phase, limits: EngineLimits
    ) -> None:
        self.net, self.config, self.limits = net, config, limits
        self.engine = TextEngine(net, config, phase, limits)
        self.layers = _Layers(self.engine, config, expanded=phase == "context")

    def run(self) -> Definition:
        """Ids to logits."""
        net, config, engine, layers = self.net, self.config, self.engine, self.layers
        vocab = (config.vocab_size, config.hidden_size)
        table = net.weight("transformer.vocab_embedding.weight", config.dtype, vocab)
        x = net.gather(table, engine.ids, 0)
        block = config.dots3
        kinds = {
            "full_attention": layers.kind(block.full),
            "sliding_attention": layers.kind(block.sliding),
        }
        for layer, kind in enumerate(block.layer_types):
            with net.scope(f"layers.{layer}"):
                name, dense = f"transformer.layers.{layer}", layer < block.dense_layers
                x = layers.layer(name, str(layer), x, kinds[kind], dense=dense)
        with net.scope("head"):
            hidden = engine.head_rows(
                x, lambda rows: layers.norm(rows, "transformer.ln_f", config.hidden_size)
            )
            net.tap(hidden, "final_hidden")
            logits = linear(net, hidden, "lm_head", config.vocab_size)
            net.output(net.cast(logits, "float32"), "logits")
        return engine.definition()


class _DraftNetwork:
    """The MTP layer: from a token and the hidden state before it to the token after it.

    `input_ids` are the tokens one position on, `hidden_states` the text model's output at the
    position itself. The layer is a sliding one with a window of its own; its output after the last
    norm is what the next draft step takes as hidden state.
    """

    def __init__(self, net: Network, config: Dots3CheckpointConfig, limits: EngineLimits) -> None:
        self.net, self.config = net, config
        self.engine = TextEngine(net, config, "draft", limits)
        self.layers = _Layers(self.engine, config, expanded=True)
        table = net.source.info(f"{_DRAFT_TABLE}.weight")
        self.replicated_embed = replicated_embed(
            config.mapping, table, config.vocab_size, config.hidden_size
        )

    def run(self) -> Definition:
        """Shifted ids and hidden states to draft logits and the next hidden states."""
        net, config, engine, layers = self.net, self.config, self.engine, self.layers
        hidden = config.hidden_size
        before = engine.per_token("hidden_states", hidden)
        with net.scope("mtp.input"):
            x = linear(net, self._input(before), "mtp.eh_proj", hidden)
        with net.scope("mtp.layer"):
            kind = layers.kind(config.dots3.sliding)
            label = str(config.num_hidden_layers)
            x = layers.layer("mtp.layers.0", label, x, kind, dense=True)
        with net.scope("mtp.head"):
            x = layers.norm(x, "mtp.ln_f", hidden)
            net.output(x, "hidden_states.next_draft")
            logits = linear(net, engine.wanted_rows(x), "lm_head", config.vocab_size)
            net.output(net.cast(logits, "float32"), "logits")
        return replace(engine.definition(), decisions={"replicated_embed": self.replicated_embed})

    def _input(self, before: Tensor) -> Tensor:
        """Normed embeddings beside normed hidden states, [B, S, 2H]."""
        net, config, engine = self.net, self.config, self.engine
        hidden = config.hidden_size
        table = stored_matrix(net, _DRAFT_TABLE, (config.vocab_size, hidden), config.dtype)
        embed_weight, hidden_weight = (
            net.weight(f"mtp.{name}.weight", config.dtype, (hidden,)) for name in ("enorm", "hnorm")
        )
        join = mtp.embed_norms if self.replicated_embed else mtp.embed_then_norms
        return join(
            net,
            engine.ids,
            engine.positions,
            table,
            before,
            embed_weight,
            hidden_weight,
            config.norm_epsilon,
        )
