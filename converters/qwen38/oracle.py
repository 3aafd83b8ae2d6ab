"""The transformers implementation as reference for Qwen3.8-Flash-Next, and mistakes to catch.

`Oracle` runs the reference in float32 on the CPU and returns the values of the network's taps.
`negative_controls` lists typical conversion mistakes as transformations of the bound weights or of
the host inputs: a comparison that does not notice one of them is worth nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from converters.reference import TEXT_MODEL

SELECTED_BLOCKS = "selected_blocks"


class LowestIdWins(TorchFunctionMode):
    """Gives the indexer's top-k the tie rule of `plugins.qsa.reference`.

    The reference implementation leaves the order of equal block scores open, and a rectified score
    is exactly zero about once in 2^heads. Selections by the plugin kernels follow the rule; those
    of native layers follow torch on the interpreter, so that the oracle is left as it is.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.topk and kwargs.get("dim") == 0:
            scores, count = args
            values, order = torch.sort(scores, dim=0, descending=True, stable=True)
            return torch.return_types.topk((values[:count], order[:count]))
        return func(*args, **kwargs)


class Oracle:
    """One checkpoint in transformers, float32.

    Args:
        hf_dir: the Hugging Face checkpoint.
        dtype: type that the converted weights have. The reference computes in float32 with
            weights rounded to it, so that a comparison is of the definition alone.
        lowest_id_wins: whether equal block scores are decided as the plugin kernels decide them.

    Attributes:
        model: `Qwen4ExpForCausalLM` in evaluation mode.
    """

    def __init__(
        self, hf_dir: Path, dtype: str = "float32", *, lowest_id_wins: bool = False
    ) -> None:
        from transformers import Qwen4ExpForCausalLM

        self._tie_rule: Callable[[], AbstractContextManager[Any]] = (
            LowestIdWins if lowest_id_wins else nullcontext
        )
        loaded = Qwen4ExpForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
        self.model = TEXT_MODEL.require(loaded).eval()
        if dtype != "float32":
            kept = _float32_names(hf_dir)
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if not name.endswith(kept):
                        parameter.copy_(parameter.to(getattr(torch, dtype)).float())

    def sample_ids(self, limit: int) -> list[int]:
        """At most `limit` ids that reach every branch as far as `limit` allows: more tokens than
        the index budget, an open last block, end ids inside.
        """
        config = self.model.config
        ratio = config.indexer_compress_ratio
        length = min(limit, max(150, config.indexer_budget + 8 * ratio + 1))
        if length > ratio and length % ratio == 0:
            length -= 1
        ends = config.eos_token_id
        end = ends[0] if isinstance(ends, list) else ends
        ids = [3 + (37 * i * i + 11 * i + 7) % (config.vocab_size - 3) for i in range(length)]
        for place in (length // 3, length // 2, length // 2 + 1):
            ids[place] = end
        return ids

    def run(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Run one sequence without cache.

        Returns:
            "logits" float32 [n, vocab] and every tap of the network with the batch dimension
            removed, for example "layers.3.mixer" [n, hidden] and "layers.3.bundle"
            [n, streams, hidden]; selections in the form of `canonical`.
        """
        captured: dict[str, Tensor] = {}
        with torch.no_grad(), self._tie_rule(), self._hooks(captured):
            logits = self.model(input_ids=torch.tensor([list(ids)])).logits[0]
        return captured | {"logits": logits.float()}

    @contextmanager
    def _hooks(self, captured: dict[str, Tensor]) -> Iterator[None]:
        text = self.model.model
        streams = text.config.hc_count

        def keep(name: str, shape: Callable[[Tensor], Tensor]) -> Callable[..., None]:
            def hook(_module: Any, _args: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) else output
                captured[name] = shape(first[0])

            return hook

        def plain(x: Tensor) -> Tensor:
            return x

        def per_stream(x: Tensor) -> Tensor:
            return x.unflatten(-1, (streams, -1))

        with ExitStack() as stack:

            def watch(module: Any, name: str, shape: Callable[[Tensor], Tensor] = plain) -> None:
                handle = module.register_forward_hook(keep(name, shape))
                stack.callback(handle.remove)

            for number, layer in enumerate(text.layers):
                watch(layer, f"layers.{number}.bundle", per_stream)
                watch(layer.mlp, f"layers.{number}.mlp")
                if layer.ple is not None:
                    watch(layer.ple, f"layers.{number}.ple", per_stream)
                if layer.layer_type == "linear_attention":
                    watch(layer.linear_attn, f"layers.{number}.mixer")
                    continue
                watch(layer.self_attn, f"layers.{number}.mixer")
                indexer = layer.self_attn.indexer
                chosen = partial(
                    _blocks_of_mask, ratio=indexer.compress_ratio, budget=indexer.block_topk
                )
                watch(indexer, f"layers.{number}.{SELECTED_BLOCKS}", chosen)
            watch(text.hyper_connection_mixer, "final_hidden")
            yield


def _float32_names(hf_dir: Path) -> tuple[str, ...]:
    """Ends of the names of small tensors that conversion leaves in float32 when stored so."""
    for path in sorted(hf_dir.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.endswith(".A_log"):
                    found = file.get_slice(name).get_dtype() == "F32"
                    return (".A_log", ".dt_bias") if found else ()
    return ()


def _blocks_of_mask(mask: Tensor, *, ratio: int, budget: int) -> Tensor:
    """Selected complete blocks of a token mask [1, S, T]: int32 [S, budget] as in `canonical`."""
    mask = mask[0]
    queries, tokens = mask.shape
    blocks = tokens // ratio
    whole = mask[:, : blocks * ratio].unflatten(-1, (blocks, ratio)).all(-1)
    ids = torch.arange(blocks).expand(queries, -1).masked_fill(~whole, -1)
    ids = torch.nn.functional.pad(ids, (0, max(0, budget - blocks)), value=-1)
    return canonical(f"layers.0.{SELECTED_BLOCKS}", ids)[:, :budget]


def canonical(tap: str, value: Tensor) -> Tensor:
    """The comparable form of a tap: selections ascending with -1 last, anything else unchanged."""
    if not tap.endswith(SELECTED_BLOCKS):
        return value
    last = torch.iinfo(torch.int32).max
    ordered = value.masked_fill(value < 0, last).sort(dim=-1).values
    return ordered.masked_fill(ordered == last, -1).to(torch.int32)
