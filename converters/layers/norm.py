"""The normalisation of the recurrence's queries and keys, computed in float32."""

from __future__ import annotations

from plugins.trt.network import Network
from plugins.trt.types import Tensor


def l2_normalize(net: Network, x: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """x / sqrt(sum(x^2) + eps) * scale over the last dimension; float32 in and out."""
    total = net.reduce_sum(net.mul(x, x), axes=[-1])
    inverse = net.recip(net.sqrt(net.add(total, eps)))
    if scale != 1.0:
        inverse = net.mul(inverse, scale)
    return net.mul(x, inverse)
