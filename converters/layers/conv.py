"""Causal depthwise convolution over a batch of sequences that carry a state."""

from __future__ import annotations

from plugins.trt.network import Network
from plugins.trt.rows import last_rows
from plugins.trt.types import Tensor


def causal_conv(
    net: Network,
    x: Tensor,
    state: Tensor,
    kernel: Tensor,
    new_lengths: Tensor,
    *,
    dilation: int = 1,
) -> tuple[Tensor, Tensor]:
    """y[t] = sum_j kernel[j] * x[t - dilation * (K - 1 - j)] per channel, in float32.

    Written as K shifted products: they fuse into one pointwise kernel, and time stays the second
    dimension, so that no activation is transposed.

    Args:
        x: [B, S, C].
        state: [B, C, (K - 1) * dilation], the inputs before x, oldest first.
        kernel: [C, 1, K], the last tap belongs to the current token.
        new_lengths: int32 [B], real tokens of x per sequence.

    Returns:
        y float32 [B, S, C], and the next state, shaped and typed as `state`.
    """
    channels, _, taps = net.shape(kernel)
    past = (taps - 1) * dilation
    rows = net.concat([net.transpose(state, (0, 2, 1)), x], axis=1)
    wide = net.cast(rows, "float32")
    by_tap = net.transpose(net.cast(kernel, "float32"), (2, 1, 0))
    total = None
    for tap in range(taps):
        shifted = net.narrow(wide, 1, tap * dilation, net.dim(x, 1))
        product = net.mul(shifted, net.slice(by_tap, (tap, 0, 0), (1, 1, channels)))
        total = product if total is None else net.add(total, product)
    following = net.transpose(last_rows(net, rows, new_lengths, past), (0, 2, 1))
    return total, following
