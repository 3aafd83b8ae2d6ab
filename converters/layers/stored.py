"""The values of a stored matrix: plain, FP8 or NVFP4, decided from what the checkpoint holds.

Plain: `X.weight` in a float type.
FP8: `X.weight` float8_e4m3fn [..., out, in] and `X.weights_scaling_factor`, which is [1], or [E]
for stacked matrices, or one value per block of 128 x 128, [..., out / 128, in / 128] rounded up.
NVFP4: `X.weight` uint8 [..., out, in / 2], low nibble first; `X.weights_scaling_factor`
float8_e4m3fn [..., out, in / 16], one value per 16 columns; `X.weights_scaling_factor_2` float32,
which is [1], or [E, P] where every matrix has a value for each P-th part of its rows.
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


def stored_matrix(net: Network, name: str, shape: Shape, dtype: str) -> Tensor:
    """`{name}.weight` of logical shape [out, in] or stacked [E, out, in], in the type `dtype`.

    Raises:
        InputError: the tensors beside it do not fit any form of a quantised matrix.
        BuildError: a tensor is missing or has another shape.
    """
    return _read(net, name, shape, dtype, lambda x: x)


def gathered_matrices(net: Network, name: str, shape: Shape, dtype: str, ids: Tensor) -> Tensor:
    """Some of the stacked matrices of `stored_matrix`: [N, K, out, in] for ids int32 [N, K]."""
    return _read(net, name, shape, dtype, lambda x: net.gather(x, ids, 0))


def _read(net: Network, name: str, shape: Shape, dtype: str, pick: Pick) -> Tensor:
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
    form = (_Fp8 if info.dtype == FP8 else _Nvfp4)(net, name, shape)
    with net.scope("decode"):
        needed = (FP8,) if info.dtype == FP8 else (FP8, FLOAT4)
        if all(supports(t, d) for t in net.capability.targets for d in needed):
            return pick(net.cast(form.by_layers(), dtype))
        return net.cast(form.by_tables(pick), dtype)


class _Fp8:
    """FP8 codes and their scales."""

    def __init__(self, net: Network, name: str, shape: Shape) -> None:
        self.net, self.name, self.shape = net, f"{name}.weight", shape
        scale_name = f"{name}.weights_scaling_factor"
        self.blocks = (*shape[:-2], *(-(-n // FP8_BLOCK) for n in shape[-2:]))
        info = net.source.info(scale_name)
        found = info.shape if info is not None else None
        if info is None or found not in (self.blocks, shape[:-2], (1,), ()):
            expected = f"{list(self.blocks)} (blocks), {list(shape[:-2])} or [1]"
            raise _unfit(scale_name, expected, found)
        self.blockwise = found == self.blocks
        stored = "bfloat16" if info.dtype == "bfloat16" else "float32"
        self.scale = net.cast(net.weight(scale_name, stored, info.shape), "float32")

    def by_layers(self) -> Tensor:
        """float32 values, by dequantise layers."""
        net, shape = self.net, self.shape
        codes = net.weight(self.name, FP8, shape)
        if not self.blockwise:
            if math.prod(net.shape(self.scale)) == 1:
                return net.dequantize(codes, net.reshape(self.scale, []), "float32")
            return net.dequantize(codes, self.scale, "float32", axis=0)
        if min(shape[-2:]) >= FP8_BLOCK and math.prod(self.blocks) > 1:
            block = (*(1 for _ in shape[:-2]), FP8_BLOCK, FP8_BLOCK)
            return net.dequantize(codes, self.scale, "float32", block_shape=block)
        # TensorRT refuses blocks larger than the matrix, and a single one; this is the same.
        return net.mul(_unscaled(net, codes), self._spread())

    def by_tables(self, pick: Pick) -> Tensor:
        """float32 values of the picked matrices, by table."""
        net = self.net
        codes = pick(net.cast(net.weight(self.name, "uint8", self.shape), "int32"))
        scale = self._spread()
        return net.mul(_e4m3(net, codes), pick(scale) if len(self.shape) > 2 else scale)

    def _spread(self) -> Tensor:
        """The scales repeated to the shape of the matrix, or broadcasting to it."""
        net, shape = self.net, self.shape
        stacked = list(shape[:-2])
        if not self.blockwise:
            count = math.prod(net.shape(self.scale))
            wide = net.reshape(self.scale, [count if stacked else 1, *(1 for _ in shape[1:])])
            return net.expand(wide, [stacked[0], -1, -1]) if stacked and count == 1 else wide
        rows, columns = self.blocks[-2:]
        wide = net.unsqueeze(self.scale, [-3, -1])
        wide = net.expand(wide, [*stacked, rows, FP8_BLOCK, columns, FP8_BLOCK])
        wide = net.reshape(wide, [*stacked, rows * FP8_BLOCK, columns * FP8_BLOCK])
        return net.slice(wide, [0] * len(shape), shape)


class _Nvfp4:
    """FP4 codes, their block scales and the global ones."""

    def __init__(self, net: Network, name: str, shape: Shape) -> None:
        self.net, self.name, self.shape = net, name, shape
        self.blocks = (*shape[:-1], shape[-1] // NVFP4_BLOCK)
        self.factor = self._global()

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
        factor = self.factor
        if len(self.shape) > 2:
            factor = pick(net.expand(factor, [self.shape[0], -1, -1]))
        scales = net.unsqueeze(net.mul(scales, factor), [-1])
        leading: list[Dim] = [net.dim(codes, axis) for axis in range(net.rank(codes) - 1)]
        count = self.blocks[-1]
        values = net.reshape(
            net.gather(net.literal(_byte_values()), codes, 0), [*leading, count, NVFP4_BLOCK]
        )
        return net.reshape(net.mul(values, scales), [*leading, self.shape[-1]])

    def _global(self) -> Tensor:
        """The global scales as float32 tensor that broadcasts to [..., out, in / 16]."""
        net, shape, name = self.net, self.shape, f"{self.name}.weights_scaling_factor_2"
        info = net.source.info(name)
        found = info.shape if info is not None else None
        if found in ((), (1,)):
            return net.reshape(net.weight(name, "float32", found or ()), [1 for _ in shape])
        stacked, rows = shape[0], shape[-2]
        fits = len(shape) == 3 and found is not None and len(found) == 2 and found[0] == stacked
        if found is None or not fits or rows % found[1]:
            raise _unfit(name, f"[1] or [{stacked}, parts of the {rows} rows]", found)
        scale = net.unsqueeze(net.weight(name, "float32", found), [2])
        spread = net.expand(scale, [stacked, found[1], rows // found[1]])
        return net.reshape(spread, [stacked, rows, 1])


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


def _unfit(name: str, expected: str, found: Shape | None) -> InputError:
    return InputError(
        "the scales do not fit the quantised weight",
        where=name,
        expected=expected,
        found=str(list(found)) if found is not None else "no such tensor",
        fix="convert the checkpoint again",
    )
