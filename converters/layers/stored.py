"""The values of a stored matrix: plain, FP8 or NVFP4, decided from what the checkpoint holds.

Plain: `X.weight` in a float type.
FP8: `X.weight` float8_e4m3fn [..., out, in] and `X.weights_scaling_factor`, which is [1], or [E]
for stacked matrices, or one value per block of 128 x 128, [..., out / 128, in / 128] rounded up.
NVFP4: `X.weight` uint8 [..., out, in / 2], low nibble first; `X.weights_scaling_factor`
float8_e4m3fn [..., out, in / 16], one value per 16 columns; `X.weights_scaling_factor_2` float32,
which is [1], or [E, P] where every matrix has a value for each P-th part of its rows.
A value is code * scale, and for NVFP4 code * (scale * global scale).

Everything is decoded to float32 and rounded once, to the type the network computes in. The
compiler fuses the decoding with what reads it; where that is a gather of a few experts, only
these are decoded.
"""

from __future__ import annotations

import math

import torch

from plugins.support.errors import InputError
from plugins.trt.network import Network
from plugins.trt.types import FLOAT4, FLOATS, Tensor

Shape = tuple[int, ...]

FP8 = "float8_e4m3fn"
FP8_BLOCK = 128
NVFP4_BLOCK = 16


def stored_matrix(net: Network, name: str, shape: Shape, dtype: str) -> Tensor:
    """`{name}.weight` of logical shape [out, in] or stacked [E, out, in], in the type `dtype`.

    Raises:
        InputError: the tensors beside it do not fit any row of the table above.
        BuildError: a tensor is missing or has another shape.
    """
    info = net.source.info(f"{name}.weight")
    if info is None or info.dtype in FLOATS:
        return net.weight(f"{name}.weight", dtype, shape)
    with net.scope("decode"):
        if info.dtype == FP8:
            return net.cast(_fp8(net, name, shape), dtype)
        if info.dtype == "uint8":
            return net.cast(_nvfp4(net, name, shape), dtype)
    raise InputError(
        "no way to read a weight of this type",
        where=f"{name}.weight",
        expected=f"{', '.join(FLOATS)}, {FP8} or uint8 (NVFP4)",
        found=info.dtype,
    )


def _fp8(net: Network, name: str, shape: Shape) -> Tensor:
    codes = net.weight(f"{name}.weight", FP8, shape)
    scale_name = f"{name}.weights_scaling_factor"
    blocks = (*shape[:-2], *(-(-n // FP8_BLOCK) for n in shape[-2:]))
    info = net.source.info(scale_name)
    found = info.shape if info is not None else None
    stacked = shape[:-2]
    if found == blocks:
        stored = "bfloat16" if info is not None and info.dtype == "bfloat16" else "float32"
        scale = net.cast(net.weight(scale_name, stored, blocks), "float32")
        if min(shape[-2:]) >= FP8_BLOCK and math.prod(blocks) > 1:
            block_shape = (*(1 for _ in stacked), FP8_BLOCK, FP8_BLOCK)
            return net.dequantize(codes, scale, "float32", block_shape=block_shape)
        # TensorRT refuses blocks larger than the matrix, and a single one; this is the same.
        spread = _spread(net, scale, shape, (FP8_BLOCK, FP8_BLOCK))
        return net.mul(_unscaled(net, codes), spread)
    if found in ((1,), stacked, ()):
        scale = net.weight(scale_name, "float32", found)
        if found and found != (1,):
            return net.dequantize(codes, scale, "float32", axis=0)
        return net.dequantize(codes, net.reshape(scale, []), "float32")
    raise _unfit(scale_name, f"{list(blocks)} (blocks), {list(stacked)} or [1]", found)


def _nvfp4(net: Network, name: str, shape: Shape) -> Tensor:
    codes = net.weight(f"{name}.weight", FLOAT4, shape)
    blocks = (*shape[:-1], shape[-1] // NVFP4_BLOCK)
    scales = net.weight(f"{name}.weights_scaling_factor", FP8, blocks)
    factor = _global_scale(net, f"{name}.weights_scaling_factor_2", shape)
    scales = net.mul(_unscaled(net, scales), factor)
    block_shape = (*(1 for _ in shape[:-1]), NVFP4_BLOCK)
    return net.dequantize(codes, scales, "float32", block_shape=block_shape)


def _global_scale(net: Network, name: str, shape: Shape) -> Tensor:
    """The second NVFP4 scale as float32 tensor that broadcasts to [..., out, in / 16]."""
    info = net.source.info(name)
    found = info.shape if info is not None else None
    rank, rows = len(shape), shape[-2]
    if found in ((), (1,)):
        return net.reshape(net.weight(name, "float32", found), [1] * rank)
    if rank == 3 and found is not None and len(found) == 2 and found[0] == shape[0]:
        parts = found[1]
        if rows % parts == 0:
            scale = net.weight(name, "float32", found)
            spread = net.expand(net.unsqueeze(scale, [2]), [shape[0], parts, rows // parts])
            return net.reshape(spread, [shape[0], rows, 1])
    raise _unfit(name, f"[1] or [{shape[0]}, parts of the {rows} rows]", found)


def _unscaled(net: Network, codes: Tensor) -> Tensor:
    """FP8 codes as float32 values."""
    return net.dequantize(codes, net.literal(torch.tensor(1.0)), "float32")


def _spread(net: Network, scale: Tensor, shape: Shape, block: tuple[int, int]) -> Tensor:
    """Block scales [..., n, m] repeated to the matrix [..., out, in]."""
    stacked = list(shape[:-2])
    rows, columns = net.shape(scale)[-2:]
    wide = net.unsqueeze(scale, [-3, -1])
    wide = net.expand(wide, [*stacked, rows, block[0], columns, block[1]])
    wide = net.reshape(wide, [*stacked, rows * block[0], columns * block[1]])
    return net.slice(wide, [0] * len(shape), shape)


def _unfit(name: str, expected: str, found: Shape | None) -> InputError:
    return InputError(
        "the scales do not fit the quantised weight",
        where=name,
        expected=expected,
        found=str(list(found)) if found is not None else "no such tensor",
        fix="convert the checkpoint again",
    )
