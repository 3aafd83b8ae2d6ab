"""Sizes of a QSA layer; needs no compiler of kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """Sizes of a QSA layer, all known at build time.

    Attributes:
        heads, kv_heads, width: attention query heads, key heads, channels per head.
        index_heads, index_width: index query heads and channels.
        ratio: tokens per block.
        blocks: blocks that a query keeps.
        dtype: activation type.
        cache_dtype: element type of the key and value caches: `dtype` or float8_e4m3fn.
        k_scale, v_scale: factors from a stored float8 value to the real one.
    """

    heads: int = 24
    kv_heads: int = 2
    width: int = 256
    index_heads: int = 4
    index_width: int = 128
    ratio: int = 4
    blocks: int = 512
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def fp8(self) -> bool:
        """Whether the caches hold float8."""
        return self.cache_dtype == "float8_e4m3fn"
