"""Sizes of an MLA layer; needs no compiler of kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """Sizes of an MLA layer, all known at build time. The defaults are Dots3's full layers.

    Attributes:
        heads: attention heads.
        latent, rope: widths of a cached row's two parts.
        nope, value: expanded head widths, keys without the rotary part and values.
        index_heads, index_width, kept: the indexer and the tokens a query keeps; kept 0 = none.
        window: tokens a query sees, itself included; 0 = all.
        dtype: activation and cache type.
    """

    heads: int = 128
    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    index_heads: int = 64
    index_width: int = 128
    kept: int = 2048
    window: int = 0
    dtype: str = "bfloat16"

    @property
    def scale(self) -> float:
        """Softmax scale: that of the expanded head, never of the latent."""
        return float((self.nope + self.rope) ** -0.5)
