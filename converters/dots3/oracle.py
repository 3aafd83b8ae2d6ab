"""The transformers implementation as reference for Dots3 NOTE.

`Oracle` runs the text model in float32 on the CPU and returns the values of the network's taps.
`DraftOracle` does the same for the draft layer (MTP), which transformers does not have: its decoder
layer is one of the text model's own classes, and what stands before and after it is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from converters.checkpoint.source import SourceCheckpoint
from converters.dots3.config import canonical_name, index_rope
from converters.reference import TEXT_MODEL

SELECTED_TOKENS = "selected_tokens"


class LowestIdWins(TorchFunctionMode):
    """Gives the indexer's top-k the tie rule of `plugins.dsa.reference`.

    The reference implementation leaves the order of equal index scores open, and a rectified score
    is exactly zero about once in 2^heads.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # The indexer's scores are [B, S, T]; the router's top-k has no such call.
        if func is torch.Tensor.topk and args[0].dim() == 3 and kwargs.get("dim") == -1:
            scores, count = args
            values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
            return torch.return_types.topk((values[..., :count], order[..., :count]))
        return func(*args, **kwargs)


class Oracle:
    """One checkpoint in transformers, float32.

    Args:
        hf_dir: the Hugging Face checkpoint.
        dtype: type that the converted weights have. The reference computes in float32 with
            weights rounded to it, so that a comparison is of the definition alone.

    Attributes:
        model: `Dots3NoteForCausalLM` in evaluation mode.
    """

    def __init__(self, hf_dir: Path, dtype: str = "float32") -> None:
        from transformers import Dots3NoteForCausalLM

        loaded = Dots3NoteForCausalLM.from_pretrained(
            hf_dir, dtype=torch.float32, attn_implementation="eager"
        )
        self.model = TEXT_MODEL.require(loaded).eval()
        # Correction biases of the routers are buffers: they stay float32, as in the conversion.
        _round(self.model, dtype)
        if index_rope(SourceCheckpoint.open(hf_dir)) == "tail":
            _lead_index_rope(self.model)

    def sample_ids(self, limit: int) -> list[int]:
        """At most `limit` ids that reach every branch as far as `limit` allows: more tokens than
        the indexer keeps and than the window holds.
        """
        config = self.model.config
        length = min(limit, max(96, config.index_topk + 65, config.sliding_window + 65))
        return [3 + (37 * i * i + 11 * i + 7) % (config.vocab_size - 3) for i in range(length)]

    def run(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Run one sequence without cache.

        Returns:
            "logits" float32 [n, vocab] and every tap of the network with the batch dimension
            removed, for example "layers.3.mixer" [n, hidden]; selections in the form of
            `canonical`.
        """
        captured: dict[str, Tensor] = {}
        with torch.no_grad(), LowestIdWins(), self._hooks(captured):
            logits = self.model(input_ids=torch.tensor([list(ids)])).logits[0]
        return captured | {"logits": logits.float()}

    @contextmanager
    def _hooks(self, captured: dict[str, Tensor]) -> Iterator[None]:
        text = self.model.model

        def keep(name: str) -> Callable[..., None]:
            def hook(_module: Any, _args: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) else output
                captured[name] = canonical(
                    name, _visible(first[0]) if SELECTED_TOKENS in name else first[0]
                )

            return hook

        with ExitStack() as stack:

            def watch(module: Any, name: str) -> None:
                stack.callback(module.register_forward_hook(keep(name)).remove)

            for number, layer in enumerate(text.layers):
                watch(layer, f"layers.{number}.hidden")
                watch(layer.self_attn, f"layers.{number}.mixer")
                watch(layer.mlp, f"layers.{number}.mlp")
                if layer.self_attn.indexer is not None:
                    watch(layer.self_attn.indexer, f"layers.{number}.{SELECTED_TOKENS}")
            watch(text.norm, "final_hidden")
            yield


class DraftOracle:
    """The draft layer of one checkpoint, float32.

    Args:
        hf_dir: the Hugging Face checkpoint; must hold the draft layer.
        text: the text model of the same checkpoint, whose head the drafts share.
        dtype: as for `Oracle`.
    """

    def __init__(self, hf_dir: Path, text: Oracle, dtype: str = "float32") -> None:
        from transformers.models.dots3_note import modeling_dots3_note as modeling

        config = text.model.config
        extended = draft_config(config)
        self._window = config.sliding_window
        tensors = _draft_tensors(hf_dir, config.num_hidden_layers, dtype)
        self.layer = modeling.Dots3NoteTextDecoderLayer(extended, config.num_hidden_layers).eval()
        own_names = self.layer.state_dict()
        self.layer.load_state_dict({name: tensors.pop(name) for name in own_names})
        self._rotary = modeling.Dots3NoteTextRotaryEmbedding(extended)
        self._norm = lambda x, name: torch.nn.functional.rms_norm(
            x, x.shape[-1:], tensors[name], config.rms_norm_eps
        )
        self._tensors, self._head = tensors, text.model.lm_head

    @torch.no_grad()
    def run(self, next_ids: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over a sequence from position 0.

        Args:
            next_ids: at index i the token of position i + 1.
            hidden: [n, H], the text model's normed output of position i.

        Returns:
            Logits [n, vocab] for the token of position i + 2, and the hidden states [n, H] that a
            further draft step takes.
        """
        count = len(next_ids)
        embedded = self._tensors["embed_tokens.weight"][torch.tensor(list(next_ids))]
        embedded[0] = 0.0
        joined = torch.cat(
            [self._norm(embedded, "enorm.weight"), self._norm(hidden, "hnorm.weight")], dim=-1
        )
        x = (joined @ self._tensors["eh_proj.weight"].T)[None]
        positions = torch.arange(count)
        behind = positions[:, None] - positions
        hidden_scores = torch.finfo(torch.float32).min
        mask = torch.where((behind >= 0) & (behind < self._window), 0.0, hidden_scores)
        angles = self._rotary(x, positions[None], "sliding_attention")
        x = self.layer(x, attention_mask=mask[None, None], position_embeddings=angles)[0]
        x = self._norm(x, "shared_head.norm.weight")
        return self._head(x), x


def draft_config(config: Any) -> Any:
    """The text configuration with one more layer: a sliding one with a dense MLP."""
    own = config.to_dict()
    sliding = own["per_layer_config"][str(own["layer_types"].index("sliding_attention"))]
    own["per_layer_config"] = {**own["per_layer_config"], str(own["num_hidden_layers"]): sliding}
    own["num_hidden_layers"] += 1
    own["layer_types"] = [*own["layer_types"], "sliding_attention"]
    own["mlp_layer_types"] = [*own["mlp_layer_types"], "dense"]
    extended = type(config)(**own)
    extended._attn_implementation = "eager"
    return extended


def _draft_tensors(hf_dir: Path, index: int, dtype: str) -> dict[str, Tensor]:
    """Tensors of the draft layer by their names within it, rounded to `dtype`."""
    found = {}
    for path in sorted(hf_dir.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                for prefix in (f"layers.{index}.", "mtp."):
                    if (own := canonical_name(name)).startswith(prefix):
                        tensor = file.get_tensor(name).to(getattr(torch, dtype)).float()
                        found[own.removeprefix(prefix)] = tensor
    return found


@torch.no_grad()
def _lead_index_rope(model: Any) -> None:
    """Move the rotary lanes of the index heads to where transformers rotates: to the front."""
    for layer in model.model.layers:
        indexer = layer.self_attn.indexer
        if indexer is None:
            continue
        width, rope = indexer.head_dim, model.config.qk_rope_head_dim
        for tensor in (
            indexer.wq_b.weight,
            indexer.wk.weight,
            indexer.k_norm.weight,
            indexer.k_norm.bias,
        ):
            tensor.copy_(tensor.unflatten(0, (-1, width)).roll(rope, dims=1).flatten(0, 1))


@torch.no_grad()
def _round(module: torch.nn.Module, dtype: str) -> None:
    for parameter in module.parameters():
        parameter.copy_(parameter.to(getattr(torch, dtype)).float())


def _visible(chosen: Tensor) -> Tensor:
    """Chosen ids [n, K] with those behind the query, which its causal mask removes, as -1."""
    query = torch.arange(chosen.shape[0])[:, None]
    return chosen.masked_fill(chosen > query, -1)


def canonical(tap: str, value: Tensor) -> Tensor:
    """The comparable form of a tap.

    Selections [n, K] become int64 [n, 2]: how many tokens were chosen and a hash of which, whatever
    their order and however many places are unused. Anything else is unchanged.
    """
    if not tap.endswith(SELECTED_TOKENS):
        return value
    used = value >= 0
    # Adding up well-mixed numbers forgets the order and nothing else (modulo 2^64).
    mixed = torch.where(used, _mixed(value.long()), 0)
    return torch.stack([used.sum(-1), mixed.sum(-1)], dim=-1)


def _mixed(x: Tensor) -> Tensor:
    """Spread small integers over 64 bits; multiplications wrap around."""
    for factor in (-7046029254386353131, -4417276706812531889, 1609587929392839161):
        x = (x + 1) * factor
        x = x ^ ((x >> 29) & 0x7FFFFFFFF)
    return x
