"""Quantize and dequantize layers of the network facade."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.trt.attention import AttentionLayers
from plugins.trt.types import FLOAT4, FLOATS, Tensor, to_trt

QUANTIZED = ("float8_e4m3fn", FLOAT4, "int8")


class QuantizationLayers(AttentionLayers):
    """Conversions between scaled low-precision and floating-point tensors."""

    def quantize(
        self,
        x: Tensor,
        scale: Tensor,
        dtype: str,
        *,
        axis: int | None = None,
        block_shape: Sequence[int] | None = None,
    ) -> Tensor:
        """round(x / scale) in `dtype` (float8_e4m3fn or int8), saturating.

        The scale is a scalar, one value per entry of `axis`, or one per block of `block_shape`.
        """
        layer = self.raw.add_quantize(x, scale, to_trt(self.trt, dtype))
        self._set_granularity(layer, x, axis, block_shape, "quantize")
        return self._one(layer, "quantize")

    def dequantize(
        self,
        x: Tensor,
        scale: Tensor,
        dtype: str,
        *,
        axis: int | None = None,
        block_shape: Sequence[int] | None = None,
    ) -> Tensor:
        """x * scale in the floating-point type `dtype`.

        The scale is a scalar, one value per entry of `axis`, or one per block of `block_shape`
        (`[N/bn, K/bk]` for an `[N, K]` weight).
        """
        if self.dtype(x) not in QUANTIZED or dtype not in FLOATS:
            raise self._fail(
                "only FP8, FP4 and INT8 can be dequantized, to a floating-point type",
                "dequantize",
                found=f"{self.dtype(x)} to {dtype}",
            )
        if block_shape is not None:
            blocks = tuple(-(-n // b) for n, b in zip(self.shape(x), block_shape, strict=True))
            if self.shape(scale) != blocks:
                raise self._fail(
                    "the block scales do not fit the tensor",
                    "dequantize",
                    expected=str(list(blocks)),
                    found=str(list(self.shape(scale))),
                )
        layer = self.raw.add_dequantize(x, scale, to_trt(self.trt, dtype))
        self._set_granularity(layer, x, axis, block_shape, "dequantize")
        return self._one(layer, "dequantize")

    def _set_granularity(
        self,
        layer: object,
        x: Tensor,
        axis: int | None,
        block_shape: Sequence[int] | None,
        op: str,
    ) -> None:
        if layer is None:
            return
        if axis is not None:
            layer.axis = self._axis(x, axis, op)  # type: ignore[attr-defined]
        if block_shape is not None:
            layer.block_shape = tuple(block_shape)  # type: ignore[attr-defined]

    def dynamic_quantize(
        self,
        x: Tensor,
        axis: int,
        global_scale: Tensor,
        *,
        block_size: int = 16,
        dtype: str = FLOAT4,
        scale_dtype: str = "float8_e4m3fn",
    ) -> tuple[Tensor, Tensor]:
        """Quantize activations block by block with scales computed from the values.

        Args:
            x: floating point, rank 2 or 3.
            axis: dimension the blocks lie along.
            global_scale: float32 rank 0; block scales are stored divided by it.
            block_size: 16 for FP4.

        Returns the FP4 data and the block scales.
        """
        layer = self.raw.add_dynamic_quantize(
            x,
            self._axis(x, axis, "dynamic_quantize"),
            block_size,
            to_trt(self.trt, dtype),
            to_trt(self.trt, scale_dtype),
        )
        if layer is not None:
            layer.set_input(1, global_scale)
        data, scales = self._done(layer, "dynamic_quantize", 2)
        return data, scales
