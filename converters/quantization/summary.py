"""The quantisation block of a TensorRT-LLM checkpoint, from how its matrices are stored."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from converters.checkpoint.config import Quantization
from converters.checkpoint.recipe import Module
from converters.quantization.declared import MIXED


def summarise(
    modules: Sequence[Module], kv_cache: str | None = None
) -> tuple[Quantization, dict[str, Any] | None]:
    """The block, and the content of `quant_cfg.json` where modules differ in their algorithm."""
    quantised = [module for module in modules if module.algorithm]
    kinds = {(module.algorithm, module.group_size) for module in quantised}
    if not kinds:
        return Quantization(kv_cache_quant_algo=kv_cache), None
    plain = patterns(
        [module.target for module in modules if not module.algorithm],
        [module.target for module in quantised],
    )
    if len(kinds) == 1:
        ((algorithm, group_size),) = kinds
        block = Quantization(
            quant_algo=algorithm,
            kv_cache_quant_algo=kv_cache,
            group_size=group_size,
            exclude_modules=plain,
        )
        return block, None
    layers = {
        module.target: {"quant_algo": module.algorithm, "group_size": module.group_size}
        for module in quantised
    }
    block = Quantization(quant_algo=MIXED, kv_cache_quant_algo=kv_cache, exclude_modules=plain)
    return block, {**block.model_dump(), "quantized_layers": layers}


def patterns(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Names with `*` for the layer number where no name of `others` would match too."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[_starred(name)].append(name)
    taken = {_starred(name) for name in others}
    result = []
    for pattern, members in groups.items():
        result += members if pattern in taken else [pattern]
    return sorted(result)


def _starred(name: str) -> str:
    return re.sub(r"\.layers\.\d+\.", ".layers.*.", name)
