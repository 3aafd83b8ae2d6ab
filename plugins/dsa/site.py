"""Where DSA stands in a network."""

from __future__ import annotations

from dataclasses import dataclass

from plugins.dsa.geometry import Geometry
from plugins.trt.network import Dim, Network
from plugins.trt.types import Tensor


@dataclass(frozen=True)
class Site:
    """Where DSA stands: one engine's calls.

    Attributes:
        net: the network.
        geometry: of the layer.
        expanded: many queries per slot, any number of them; else a fixed few.
        past, new: int32 [B], cached tokens before the call and valid ones in it.
        visible: int32 [B, S], tokens that a query sees, 0 for padding.
        span: cache rows that a call looks at.
        rows: most tokens of a sequence.
        slots, steps: slots and queries per slot of the largest call.
    """

    net: Network
    geometry: Geometry
    expanded: bool
    past: Tensor
    new: Tensor
    visible: Tensor
    span: Dim
    rows: int
    slots: int
    steps: int

    @property
    def plugins(self) -> bool:
        """Whether attention is done by plugin layers."""
        return self.net.capability.has_plugins
