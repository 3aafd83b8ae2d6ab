"""Reductions, products, selection and convolution of the network facade."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.trt.shapes import Dim, ShapeLayers
from plugins.trt.types import FLOATS, Tensor

# Larger k makes add_topk return nothing.
MAX_TOPK = 3840


class AlgebraLayers(ShapeLayers):
    """Layers that combine values. All raise BuildError."""

    def _reduce(self, x: Tensor, axes: Sequence[int], keepdims: bool, member: str) -> Tensor:
        op = f"reduce_{member.lower()}"
        mask = 0
        for axis in axes:
            mask |= 1 << self._axis(x, axis, op)
        kind = getattr(self.trt.ReduceOperation, member)
        return self._one(self.raw.add_reduce(x, kind, mask, keepdims), op)

    def reduce_sum(self, x: Tensor, axes: Sequence[int], keepdims: bool = True) -> Tensor:
        """Sum over axes."""
        return self._reduce(x, axes, keepdims, "SUM")

    def reduce_mean(self, x: Tensor, axes: Sequence[int], keepdims: bool = True) -> Tensor:
        """Mean over axes."""
        return self._reduce(x, axes, keepdims, "AVG")

    def reduce_max(self, x: Tensor, axes: Sequence[int], keepdims: bool = True) -> Tensor:
        """Maximum over axes."""
        return self._reduce(x, axes, keepdims, "MAX")

    def reduce_prod(self, x: Tensor, axes: Sequence[int], keepdims: bool = True) -> Tensor:
        """Product over axes."""
        return self._reduce(x, axes, keepdims, "PROD")

    def matmul(
        self, a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False
    ) -> Tensor:
        """Batched matrix product over the last two dimensions; leading dimensions of 1 repeat.

        Both operands have the same rank (at least 2) and element type.
        """
        if self.rank(a) != self.rank(b) or self.rank(a) < 2 or self.dtype(a) != self.dtype(b):
            raise self._fail(
                "matrix product needs two tensors of one rank and element type",
                "matmul",
                expected=f"{self.dtype(a)} {list(self.shape(a))} ({a.name})",
                found=f"{self.dtype(b)} {list(self.shape(b))} ({b.name})",
            )
        inner_a = self.shape(a)[-2 if transpose_a else -1]
        inner_b = self.shape(b)[-1 if transpose_b else -2]
        if inner_a != inner_b and -1 not in (inner_a, inner_b):
            raise self._fail(
                "the inner dimensions differ",
                "matmul",
                expected=f"{inner_a} ({a.name} {list(self.shape(a))})",
                found=f"{inner_b} ({b.name} {list(self.shape(b))})",
            )
        ops = self.trt.MatrixOperation
        layer = self.raw.add_matrix_multiply(
            a,
            ops.TRANSPOSE if transpose_a else ops.NONE,
            b,
            ops.TRANSPOSE if transpose_b else ops.NONE,
        )
        return self._one(layer, "matmul")

    def softmax(self, x: Tensor, axis: int) -> Tensor:
        """exp(x) / sum(exp(x)) along one axis; floating point."""
        layer = self.raw.add_softmax(x)
        if layer is not None:
            layer.axes = 1 << self._axis(x, axis, "softmax")
        return self._one(layer, "softmax")

    def topk(self, x: Tensor, k: Dim, axis: int, largest: bool = True) -> tuple[Tensor, Tensor]:
        """The k largest (smallest) values along an axis, sorted, and their int32 indices.

        Ties come in any order. `k` is at most 3840 and at most the axis; an INT64 tensor [1]
        where the axis is dynamic. The axis is among the last four.
        """
        axis = self._axis(x, axis, "topk")
        size = self.shape(x)[axis]
        if axis < self.rank(x) - 4:
            raise self._fail(
                "top-k works on the last four dimensions", "topk", found=f"axis {axis}"
            )
        if isinstance(k, int):
            limit = min(MAX_TOPK, size) if size >= 0 else MAX_TOPK
            if not 1 <= k <= limit:
                raise self._fail(
                    "k is out of range",
                    "topk",
                    expected=f"1..{limit}",
                    found=str(k),
                )
        kind = self.trt.TopKOperation.MAX if largest else self.trt.TopKOperation.MIN
        layer = self.raw.add_topk(
            x, kind, k if isinstance(k, int) else 1, 1 << axis, self.trt.int32
        )
        if layer is not None and not isinstance(k, int):
            scalar = self.squeeze(self.cast(self._dim_vector(k), "int32"), (0,))
            layer.set_input(1, scalar)
        values, indices = self._done(layer, "topk", 2)
        return values, indices

    def cumsum(self, x: Tensor, axis: int, exclusive: bool = False) -> Tensor:
        """Running sum along an axis; `exclusive` leaves the own value out."""
        axis = self._axis(x, axis, "cumsum")
        layer = self.raw.add_cumulative(
            x, self._scalar(axis, "int32", 0), self.trt.CumulativeOperation.SUM, exclusive, False
        )
        return self._one(layer, "cumsum")

    def convolution(
        self,
        x: Tensor,
        kernel: Tensor,
        *,
        stride: Sequence[int] = (1, 1),
        padding: Sequence[int] = (0, 0),
        dilation: Sequence[int] = (1, 1),
        groups: int = 1,
    ) -> Tensor:
        """Two-dimensional convolution without bias.

        A one-dimensional one is written with height 1, because TensorRT refuses rank 3.

        Args:
            x: `[B, C, H, W]`.
            kernel: `[M, C/groups, kh, kw]`, from `weight` or `literal`.
            stride, padding, dilation: (height, width).
            groups: C for a depthwise convolution.
        """
        if self.rank(x) != 4 or self.rank(kernel) != 4 or -1 in self.shape(kernel):
            raise self._fail(
                "convolution needs rank 4 (height 1 for one dimension) and a static kernel",
                "convolution",
                found=f"{list(self.shape(x))} and {list(self.shape(kernel))}",
            )
        maps, depth, height, width = self.shape(kernel)
        if self.shape(x)[1] != depth * groups:
            raise self._fail(
                "channels, groups and kernel do not fit",
                "convolution",
                expected=f"{depth * groups} channels",
                found=str(self.shape(x)[1]),
            )
        empty = self.trt.Weights(kernel.dtype)
        layer = self.raw.add_convolution_nd(x, maps, (height, width), empty, empty)
        if layer is not None:
            layer.num_groups = groups
            layer.stride_nd = tuple(stride)
            layer.padding_nd = tuple(padding)
            layer.dilation_nd = tuple(dilation)
            layer.set_input(1, kernel)
        return self._one(layer, "convolution")

    def layer_norm(
        self, x: Tensor, scale: Tensor, bias: Tensor, axes: Sequence[int], eps: float
    ) -> Tensor:
        """Normalise over axes with the mean subtracted, then scale and shift.

        scale and bias have the rank and element type of x, 1 outside the axes.
        """
        if self.dtype(x) not in FLOATS:
            raise self._fail("normalisation needs floating point", "layer_norm")
        mask = 0
        for axis in axes:
            mask |= 1 << self._axis(x, axis, "layer_norm")
        layer = self.raw.add_normalization_v2(x, scale, bias, mask)
        if layer is not None:
            layer.epsilon = eps
        return self._one(layer, "layer_norm")
