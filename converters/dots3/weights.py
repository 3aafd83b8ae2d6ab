"""Dots3 NOTE: which source tensors make which target tensors.

Apart from renaming, only joins by rows: experts that lie one by one are stacked, each one's gate
rows above its up rows, and dense and shared MLPs likewise. Values are never changed: the rescaling
of the latents and the layout of the index heads are the network's business.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

from converters.checkpoint.header import Shape
from converters.checkpoint.match import canonical_names
from converters.checkpoint.recipe import Part, Wanted, routed_experts
from converters.checkpoint.source import SourceCheckpoint
from converters.dots3.config import Dots3CheckpointConfig, Mla, canonical_name
from converters.family import TensorPlan
from converters.quantization.padding import padded_shape

EMBEDDING = "embed_tokens.weight"

_IGNORED: dict[str, str] = {
    r"vision_(encoder|tower)\..+": "vision tower, not part of the text engine",
    r"audio_(encoder|tower)\..+": "audio tower, not part of the text engine",
}
# Target name within the attention -> source name.
_ATTENTION = {
    "q_a": "q_a_proj",
    "q_a_layernorm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_a_layernorm": "kv_a_layernorm",
    "kv_b": "kv_b_proj",
    "k_rope_layernorm": "k_rope_only_layernorm",
    "gate": "g_proj",
    "dense": "o_proj",
}


def plan_tensors(source: SourceCheckpoint, config: Dots3CheckpointConfig) -> TensorPlan:
    """Name every target tensor and its sources.

    Raises InputError when two names mean the same tensor.
    """
    names, ignored = canonical_names(source, canonical_name, _IGNORED)
    return TensorPlan(names, wanted_tensors(config, names), ignored, canonical_name)


def wanted_tensors(config: Dots3CheckpointConfig, present: Container[str] = ()) -> list[Wanted]:
    """All target tensors in the order of the model.

    Args:
        config: of the checkpoint.
        present: canonical source names; decides whether the experts of a layer are stacked.
    """
    return _Plan(config, present).wanted()


class _Plan:
    """Builds the list of wanted tensors for one configuration."""

    def __init__(self, config: Dots3CheckpointConfig, present: Container[str]) -> None:
        self.config, self.block, self.present = config, config.dots3, present
        self.hidden = config.hidden_size
        self.list: list[Wanted] = []

    def wanted(self) -> list[Wanted]:
        """All target tensors in the order of the model."""
        vocab = (self.config.vocab_size, self.hidden)
        self._one("transformer.vocab_embedding.weight", EMBEDDING, vocab)
        for index, kind in enumerate(self.block.layer_types):
            target, source = f"transformer.layers.{index}.", f"layers.{index}."
            self._layer(target, source, kind, dense=index < self.block.dense_layers)
        self._one("transformer.ln_f.weight", "norm.weight", (self.hidden,), may_widen=True)
        self._one("lm_head.weight", "lm_head.weight", vocab)
        if self.block.draft_layers:
            self._draft(vocab)
        return self.list

    def _one(
        self,
        target: str,
        source: str,
        shape: Shape,
        *,
        keep_float32: bool = False,
        may_widen: bool = False,
        quantize: Literal["experts", "mlp", "all"] | None = None,
        precise: bool = False,
        fused: str | None = None,
    ) -> None:
        self.list.append(
            Wanted(
                target,
                shape,
                (Part(source, shape),),
                keep_float32=keep_float32,
                may_widen=may_widen,
                quantize=quantize,
                precise=precise,
                fused=fused,
            )
        )

    def _norm(self, target: str, source: str, width: int) -> None:
        self._one(f"{target}.weight", f"{source}.weight", (width,), may_widen=True)

    def _linear(
        self,
        target: str,
        source: str,
        rows: int,
        columns: int,
        *,
        precise: bool = False,
        fused: str | None = None,
    ) -> None:
        self._one(
            f"{target}.weight",
            f"{source}.weight",
            (rows, columns),
            quantize="all",
            precise=precise,
            fused=fused,
        )

    def _layer(
        self,
        target: str,
        source: str,
        kind: Literal["full_attention", "sliding_attention"],
        *,
        dense: bool,
    ) -> None:
        self._norm(f"{target}input_layernorm", f"{source}input_layernorm", self.hidden)
        mla = self.block.full if kind == "full_attention" else self.block.sliding
        self._attention(f"{target}attention.", f"{source}self_attn.", mla)
        if kind == "full_attention":
            self._indexer(f"{target}attention.indexer.", f"{source}self_attn.indexer.", mla)
        self._norm(f"{target}post_layernorm", f"{source}post_attention_layernorm", self.hidden)
        if dense:
            self._mlp(f"{target}mlp.", f"{source}mlp.", self.block.intermediate_size)
        else:
            self._experts(f"{target}mlp.", f"{source}mlp.")

    def _attention(self, target: str, source: str, mla: Mla) -> None:
        head, hidden = mla.nope + mla.rope, self.hidden
        linears: dict[str, Shape] = {
            "q_a": (mla.q_rank, hidden),
            "q_b": (mla.heads * head, mla.q_rank),
            "kv_a": (mla.kv_rank + mla.rope, hidden),
            "kv_b": (mla.heads * (mla.nope + mla.value), mla.kv_rank),
            "gate": (mla.heads, hidden),
            "dense": (hidden, mla.heads * mla.value),
        }
        for name, (rows, columns) in linears.items():
            self._linear(
                f"{target}{name}",
                f"{source}{_ATTENTION[name]}",
                rows,
                columns,
                precise=name == "gate",
                fused=f"{target}qkv_a" if name in ("q_a", "kv_a") else None,
            )
        for name, width in (
            ("q_a_layernorm", mla.q_rank),
            ("kv_a_layernorm", mla.kv_rank),
            ("k_rope_layernorm", mla.rope),
        ):
            self._norm(f"{target}{name}", f"{source}{_ATTENTION[name]}", width)

    def _indexer(self, target: str, source: str, mla: Mla) -> None:
        heads, width = self.block.index_n_heads, self.block.index_head_dim
        # The released FP8 checkpoint has these in FP8; a selection made with less is another one.
        for name, origin, rows, columns in (
            ("q_b", "wq_b", heads * width, mla.q_rank),
            ("k", "wk", width, self.hidden),
            ("weights", "weights_proj", heads, self.hidden),
        ):
            self._linear(f"{target}{name}", f"{source}{origin}", rows, columns, precise=True)
        for kind in ("weight", "bias"):
            self._one(
                f"{target}k_layernorm.{kind}", f"{source}k_norm.{kind}", (width,), may_widen=True
            )

    def _mlp(self, target: str, source: str, inner: int) -> None:
        """A dense or shared MLP, of the text model or of the draft layer."""
        width = self.config.mlp_width(inner)

        def part(name: str, shape: Shape) -> Part:
            disk = f"{source}{name}.weight"
            room = padded_shape(disk, shape, self.config.mapping.tp_size)
            padded = self.block.padded_mlps and room != shape
            return Part(disk, shape, room if padded else None)

        gate_up = tuple(part(name, (inner, self.hidden)) for name in ("gate_proj", "up_proj"))
        down = part("down_proj", (self.hidden, inner))
        self.list += [
            Wanted(
                f"{target}gate_up.weight",
                (2 * width, self.hidden),
                gate_up,
                pieces=2,
                quantize="mlp",
            ),
            Wanted(f"{target}down.weight", (self.hidden, width), (down,), quantize="mlp"),
        ]

    def _experts(self, target: str, source: str) -> None:
        block, hidden = self.block, self.hidden
        count, inner = block.n_routed_experts, block.moe_intermediate_size
        self._one(f"{target}router.weight", f"{source}gate.weight", (count, hidden), may_widen=True)
        self._one(
            f"{target}router.bias",
            f"{source}gate.e_score_correction_bias",
            (count,),
            keep_float32=True,
        )
        self.list += routed_experts(
            f"{target}experts",
            f"{source}experts",
            count,
            hidden,
            inner,
            lambda name: name in self.present,
        )
        self._mlp(
            f"{target}shared_expert.", f"{source}shared_experts.", block.shared_intermediate_size
        )

    def _draft(self, vocab: Shape) -> None:
        """The MTP layer: it lies behind the last layer and has an embedding of its own."""
        hidden = self.hidden
        source = f"layers.{self.config.num_hidden_layers}."
        self._one("mtp.vocab_embedding.weight", "mtp.embed_tokens.weight", vocab)
        for name in ("enorm", "hnorm"):
            self._norm(f"mtp.{name}", f"{source}{name}", hidden)
        self._linear("mtp.eh_proj", f"{source}eh_proj", hidden, 2 * hidden)
        self._layer("mtp.layers.0.", source, "sliding_attention", dense=True)
        self._norm("mtp.ln_f", f"{source}shared_head.norm", hidden)
