"""Rotary position tables as constants."""

from __future__ import annotations

import torch

from plugins.trt.network import Network
from plugins.trt.types import Tensor


def frequencies(rotary_dim: int, theta: float) -> torch.Tensor:
    """theta^(-2i / rotary_dim), float32 [rotary_dim / 2]."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / theta**exponent


class RotaryTable:
    """cos and sin of positions 0 .. rows-1 in float32, rounded to a type where they are used.

    A table, because the reference computes position * frequency in float32 too: at large positions
    an exact angle would differ from what the model was trained with.

    Args:
        rows: positions.
        rotary_dim: rotated channels of a head.
        theta: base of the `frequencies`.
        dtype: element type of the heads that will be rotated.
    """

    def __init__(self, net: Network, rows: int, rotary_dim: int, theta: float, dtype: str) -> None:
        angles = torch.arange(rows, dtype=torch.float32)[:, None] * frequencies(rotary_dim, theta)
        self._net = net
        self._rotary_dim = rotary_dim
        self._dtype = dtype
        self._cos = net.literal(angles.cos(), f"rotary.{rotary_dim}.{theta:g}.cos")
        self._sin = net.literal(angles.sin(), f"rotary.{rotary_dim}.{theta:g}.sin")

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [B, S, rotary_dim / 2], of int32 positions [B, S] below `rows`."""
        net = self._net
        cos, sin = net.gather(self._cos, positions, 0), net.gather(self._sin, positions, 0)
        return net.cast(cos, self._dtype), net.cast(sin, self._dtype)

    def rotate(
        self, x: Tensor, angles: tuple[Tensor, Tensor], *, interleaved: bool = False
    ) -> Tensor:
        """Rotate the first channels of x [B, N, S, D].

        Pairs are (i, i + rotary_dim / 2), or (2i, 2i + 1) if `interleaved`.
        """
        return self._net.rotary_embedding(
            x, *angles, rotary_dim=self._rotary_dim, interleaved=interleaved
        )

    def rotate_neighbours(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate the pairs (2i, 2i + 1) of x [B, S, N, rotary_dim], in float32.

        The results come de-interleaved, all first lanes before all second ones: the dot product of
        two of them is the same. Written out because the compiler of TensorRT for RTX 1.7 fails on
        its own layer in this form when a loop follows.
        """
        net = self._net
        batch, count = net.dim(x, 0), net.dim(x, 1)
        heads, half = net.shape(x)[2], self._rotary_dim // 2
        wide = net.cast(x, "float32")
        size = [batch, count, heads, half]
        first = net.slice(wide, [0, 0, 0, 0], size, [1, 1, 1, 2])
        second = net.slice(wide, [0, 0, 0, 1], size, [1, 1, 1, 2])
        cos, sin = (net.unsqueeze(net.cast(angle, "float32"), [2]) for angle in angles)
        turned = net.concat(
            [
                net.sub(net.mul(first, cos), net.mul(second, sin)),
                net.add(net.mul(second, cos), net.mul(first, sin)),
            ],
            3,
        )
        return net.cast(turned, net.dtype(x))
