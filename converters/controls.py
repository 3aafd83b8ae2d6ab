"""A mistake made on purpose: what `verify` applies to see that its comparison notices it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
HostInput = dict[str, Any]

_SCALES, _GLOBAL_SCALES = ".weights_scaling_factor", ".weights_scaling_factor_2"


@dataclass(frozen=True)
class NegativeControl:
    """One mistake.

    Attributes:
        name: what was done wrong, readable in a table.
        weights: checkpoint tensors -> the tensors that the mistake changes, by name.
        host_inputs: host input descriptions -> the mistaken ones.
        phase: the engine that must notice it.
    """

    name: str
    weights: Callable[[Weights], dict[str, Tensor]] = lambda weights: {}
    host_inputs: Callable[[Sequence[HostInput]], list[HostInput]] = list
    phase: Literal["context", "draft"] = "context"


def multiplied(weights: Weights, name: str, factor: float) -> dict[str, Tensor]:
    """The change that multiplies a weight; of a quantised one the outermost scales."""
    module = name.removesuffix(".weight")
    scales = (f"{module}{_GLOBAL_SCALES}", f"{module}{_SCALES}")
    changed = next((scale for scale in scales if scale in weights), name)
    return {changed: weights[changed] * factor}


def magnitudes(x: Tensor) -> Tensor:
    """Absolute values of a weight, or of the codes of a quantised one."""
    if x.dtype == torch.uint8:
        return x & 0x77
    if x.dtype == torch.float8_e4m3fn:
        return (x.view(torch.uint8) & 0x7F).view(x.dtype)
    return x.abs()


def storage_controls(weights: Weights) -> list[NegativeControl]:
    """The mistakes in reading quantised weights that this checkpoint can suffer, of any family.

    Args:
        weights: tensors of a converted checkpoint by name. Those of a draft layer stay as they are.
    """
    names = [name for name in weights if not name.startswith("mtp.")]
    scaled = {name.removesuffix(_SCALES) for name in names if name.endswith(_SCALES)}
    four_bit = {module for module in scaled if f"{module}{_GLOBAL_SCALES}" in weights}
    tables = {module for module in scaled if module.endswith("_embedding")}
    pairs = {m for m in four_bit - tables if weights[f"{m}{_GLOBAL_SCALES}"].shape[-1] == 2}
    mistakes: list[tuple[str, set[str], str, Callable[[Tensor], Tensor]]] = [
        (
            "halves of the bytes of FP4 codes swapped",
            four_bit - tables,
            ".weight",
            lambda x: (x >> 4) | (x << 4),
        ),
        (
            "global scale of the gate used for up",
            pairs,
            _GLOBAL_SCALES,
            lambda x: x[..., :1].expand_as(x).contiguous(),
        ),
        (
            "FP8 codes without their scales",
            scaled - four_bit - tables,
            _SCALES,
            torch.ones_like,
        ),
        ("FP4 table without its global scale", tables & four_bit, _GLOBAL_SCALES, torch.ones_like),
        ("FP8 table without its scale", tables - four_bit, _SCALES, torch.ones_like),
    ]
    return [
        NegativeControl(name, _changed(modules, suffix, change))
        for name, modules, suffix, change in mistakes
        if modules
    ]


def _changed(
    modules: set[str], suffix: str, change: Callable[[Tensor], Tensor]
) -> Callable[[Weights], dict[str, Tensor]]:
    names = [f"{module}{suffix}" for module in sorted(modules)]
    return lambda weights: {name: change(weights[name]) for name in names}
