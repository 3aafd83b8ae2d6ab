"""A mistake made on purpose: what `verify` applies to see that its comparison notices it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
HostInput = dict[str, Any]


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
    scales = (f"{module}.weights_scaling_factor_2", f"{module}.weights_scaling_factor")
    changed = next((scale for scale in scales if scale in weights), name)
    return {changed: weights[changed] * factor}


def magnitudes(x: Tensor) -> Tensor:
    """Absolute values of a weight, or of the codes of a quantised one."""
    if x.dtype == torch.uint8:
        return x & 0x77
    if x.dtype == torch.float8_e4m3fn:
        return (x.view(torch.uint8) & 0x7F).view(x.dtype)
    return x.abs()
