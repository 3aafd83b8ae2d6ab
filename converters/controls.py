"""A mistake made on purpose: what `verify` applies to see that its comparison notices it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """

    name: str
    weights: Callable[[Weights], dict[str, Tensor]] = lambda weights: {}
    host_inputs: Callable[[Sequence[HostInput]], list[HostInput]] = list
