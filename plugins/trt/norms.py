"""RMS norm out of native layers: TensorRT has none. The compiler makes one kernel of it."""

from __future__ import annotations

from plugins.trt.network import Network
from plugins.trt.types import Tensor


def rms_norm(
    net: Network,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    centered: bool,
    dtype: str | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) times the weight, or times 1 + weight if `centered`.

    Args:
        x: [..., D]; the mean is taken over the last dimension.
        weight: any float type; trailing dimensions of x, so [D], or [G, D] where x is
            [..., G, D] and every group has its own weights.
        eps: added to the mean square.
        centered: the stored weight lies around zero.
        dtype: of the result; default: of x.

    Returns:
        Same shape as x.
    """
    wide = net.cast(x, "float32")
    mean = net.reduce_mean(net.mul(wide, wide), axes=[-1])
    normed = net.mul(wide, net.recip(net.sqrt(net.add(mean, eps))))
    factor = net.cast(weight, "float32")
    if centered:
        factor = net.add(factor, 1.0)
    missing = net.rank(x) - net.rank(weight)
    if missing:
        factor = net.unsqueeze(factor, list(range(missing)))
    return net.cast(net.mul(normed, factor), dtype or net.dtype(x))
