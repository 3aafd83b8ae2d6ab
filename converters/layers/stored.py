"""The values of a stored matrix: plain, FP8 or NVFP4, decided from what the checkpoint holds.

Plain: `X.weight` in a float type.
FP8: `X.weight` float8_e4m3fn [..., out, in] and `X.weights_scaling_factor`: one value per piece,
[P] for a linear and [E, P] for stacked matrices, or one value per block of 128 x 128,
[..., P * (out / P / 128), in / 128], rounded up.
NVFP4: `X.weight` uint8 [..., out, in / 2], low nibble first; `X.weights_scaling_factor`
float8_e4m3fn [..., out, in / 16], one value per 16 columns; `X.weights_scaling_factor_2` float32,
[P] for a linear and [E, P] for stacked matrices.
P counts pieces that were quantised apart and lie one above the other: gate and up.
A value is code * scale, and for NVFP4 code * (scale * global scale), in float32, rounded once to
the type the network computes in.

Where all targets know the types, codes are decoded by dequantise layers, which the compiler fuses
with what reads them: of experts that are gathered only the chosen ones are decoded. Elsewhere the
codes are bytes, looked up in tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from plugins.support.errors import InputError
from plugins.trt.capability import supports
from plugins.trt.network import Dim, Network
from plugins.trt.types import FLOAT4, FLOATS, Tensor

Shape = tuple[int, ...]
# Picks some of stacked matrices: [E, ...] to [N, K, ...].
Pick = Callable[[Tensor], Tensor]

FP8 = "float8_e4m3fn"
FP8_BLOCK = 128
NVFP4_BLOCK = 16
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def stored_matrix(net: Network, name: str, shape: Shape, dtype: str, *, pieces: int = 1) -> Tensor:
    """`{name}.weight` of logical shape [out, in] or stacked [E, out, in], in the type `dtype`.

    `pieces` is the number of equal parts of the rows that may have scales of their own.

    Raises:
        InputError: the tensors beside it do not fit any form of a quantised matrix.
        BuildError: a tensor is missing or has another shape.
    """
    return _read(net, name, shape, dtype, pieces, lambda x: x)


def gathered_matrices(
    net: Network, name: str, shape: Shape, dtype: str, ids: Tensor, *, pieces: int = 1
) -> Tensor:
    """Some of the stacked matrices of `stored_matrix`: [N, K, out, in] for ids int32 [N, K]."""
    return _read(net, name, shape, dtype, pieces, lambda x: net.gather(x, ids, 0))


def _read(net: Network, name: str, shape: Shape, dtype: str, pieces: int, pick: Pick) -> Tensor:
    info = net.source.info(f"{name}.weight")
    if info is None or info.dtype in FLOATS:
        return pick(net.weight(f"{name}.weight", dtype, shape))
    if info.dtype not in (FP8, "uint8"):
        raise InputError(
            "no way to read a weight of this type",
            where=f"{name}.weight",
            expected=f"{', '.join(FLOATS)}, {FP8} or uint8 (NVFP4)",
            found=info.dtype,
        )
    with net.scope("decode"):
        form = (_Fp8 if info.dtype == FP8 else _Nvfp4)(net, name, shape, pieces)
        needed = (FP8,) if info.dtype == FP8 else (FP8, FLOAT4)
        if all(supports(t, d) for t in net.capability.targets for d in needed):
            return pick(net.cast(form.by_layers(), dtype))
        return net.cast(form.by_tables(pick), dtype)


class _Fp8:
    """FP8 codes and their scales."""

    def __init__(self, net: Network, name: str, shape: Shape, pieces: int) -> None:
        self.net, self.name, self.shape, self.pieces = net, f"{name}.weight", shape, pieces
        scale_name = f"{name}.weights_scaling_factor"
        self.rows = shape[-2] // pieces
        row_blocks = pieces * -(-self.rows // FP8_BLOCK)
        self.blocks = (*shape[:-2], row_blocks, -(-shape[-1] // FP8_BLOCK))
        info = net.source.info(scale_name)
        found = info.shape if info is not None else None
        self.blockwise = found == self.blocks
        if not self.blockwise:
            self.scale = _matrix_scale(net, scale_name, shape, pieces, str(list(self.blocks)))
            return
        stored = info.dtype if info is not None and info.dtype in FLOATS else "float32"
        self.scale = net.cast(net.weight(scale_name, stored, self.blocks), "float32")

    def by_layers(self) -> Tensor:
        """float32 values, by dequantise layers."""
        net, shape = self.net, self.shape
        codes = net.weight(self.name, FP8, shape)
        # TensorRT refuses blocks larger than the matrix, a single one, and has no pieces.
        whole = self.rows % FP8_BLOCK == 0 or self.pieces == 1
        if self.blockwise and whole and min(shape[-2:]) >= FP8_BLOCK and math.prod(self.blocks) > 1:
            block = (*(1 for _ in shape[:-2]), FP8_BLOCK, FP8_BLOCK)
            return net.dequantize(codes, self.scale, "float32", block_shape=block)
        return net.mul(_unscaled(net, codes), self._spread())

    def by_tables(self, pick: Pick) -> Tensor:
        """float32 values of the picked matrices, by table."""
        net = self.net
        codes = pick(net.cast(net.weight(self.name, "uint8", self.shape), "int32"))
        scale = self._spread()
        return net.mul(_e4m3(net, codes), pick(scale) if len(self.shape) > 2 else scale)

    def _spread(self) -> Tensor:
        """The scales repeated to the shape of the matrix, or broadcasting to it."""
        if not self.blockwise:
            return self.scale
        net, stacked = self.net, list(self.shape[:-2])
        rows, columns = self.blocks[-2] // self.pieces, self.blocks[-1]
        wide = net.reshape(self.scale, [*stacked, self.pieces, rows, 1, columns, 1])
        wide = net.expand(wide, [*stacked, -1, rows, FP8_BLOCK, columns, FP8_BLOCK])
        wide = net.reshape(wide, [*stacked, self.pieces, rows * FP8_BLOCK, columns * FP8_BLOCK])
        wanted = [*stacked, self.pieces, self.rows, self.shape[-1]]
        return net.reshape(net.slice(wide, [0] * len(wanted), wanted), self.shape)


class _Nvfp4:
    """FP4 codes, their block scales and the global ones."""

    def __init__(self, net: Network, name: str, shape: Shape, pieces: int) -> None:
        self.net, self.name, self.shape = net, name, shape
        self.blocks = (*shape[:-1], shape[-1] // NVFP4_BLOCK)
        self.factor = _matrix_scale(net, f"{name}.weights_scaling_factor_2", shape, pieces)

    def by_layers(self) -> Tensor:
        """float32 values, by dequantise layers."""
        net = self.net
        codes = net.weight(f"{self.name}.weight", FLOAT4, self.shape)
        stored = net.weight(f"{self.name}.weights_scaling_factor", FP8, self.blocks)
        scales = net.mul(_unscaled(net, stored), self.factor)
        block = (*(1 for _ in self.shape[:-1]), NVFP4_BLOCK)
        return net.dequantize(codes, scales, "float32", block_shape=block)

    def by_tables(self, pick: Pick) -> Tensor:
        """float32 values of the picked matrices, by table."""
        net = self.net
        packed = (*self.shape[:-1], self.shape[-1] // 2)
        codes = pick(net.cast(net.weight(f"{self.name}.weight", "uint8", packed), "int32"))
        stored = net.weight(f"{self.name}.weights_scaling_factor", "uint8", self.blocks)
        scales = _e4m3(net, pick(net.cast(stored, "int32")))
        factor = pick(self.factor) if len(self.shape) > 2 else self.factor
        scales = net.unsqueeze(net.mul(scales, factor), [-1])
        leading: list[Dim] = [net.dim(codes, axis) for axis in range(net.rank(codes) - 1)]
        count = self.blocks[-1]
        values = net.reshape(
            net.gather(net.literal(_byte_values()), codes, 0), [*leading, count, NVFP4_BLOCK]
        )
        return net.reshape(net.mul(values, scales), [*leading, self.shape[-1]])


def _matrix_scale(
    net: Network, name: str, shape: Shape, pieces: int, otherwise: str | None = None
) -> Tensor:
    """One scale per piece as float32 tensor that broadcasts to [..., out, in].

    Raises InputError when the tensor has another shape; `otherwise` is a shape to mention.
    """
    info = net.source.info(name)
    expected: Shape = (*shape[:-2], pieces)
    if info is None or info.shape != expected:
        raise InputError(
            "the scales do not fit the quantised weight",
            where=name,
            expected=str(list(expected)) + (f" or {otherwise}" if otherwise else ""),
            found=str(list(info.shape)) if info is not None else "no such tensor",
            fix="convert the checkpoint again",
        )
    stored = info.dtype if info.dtype in FLOATS else "float32"
    scale = net.cast(net.weight(name, stored, expected), "float32")
    if expected == (1,):
        return net.reshape(scale, [1, 1])
    rows = shape[-2] // pieces
    wide = net.expand(net.unsqueeze(scale, [-1]), [*(-1 for _ in expected), rows])
    return net.reshape(wide, [*shape[:-1], 1])


def _unscaled(net: Network, codes: Tensor) -> Tensor:
    """FP8 codes as float32 values."""
    return net.dequantize(codes, net.literal(torch.tensor(1.0)), "float32")


def _e4m3(net: Network, codes: Tensor) -> Tensor:
    """The float32 values of e4m3 bytes in int32."""
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return net.gather(net.literal(torch.nan_to_num(table)), codes, 0)


def _byte_values() -> Tensor:
    """The two FP4 values of every byte, low nibble first: float32 [256, 2]."""
    values = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)])
    byte = torch.arange(256)
    return torch.stack([values[byte % 16], values[byte // 16]], dim=1)
