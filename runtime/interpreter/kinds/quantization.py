"""Conversions to and from scaled low-precision types.

FP4 tensors are kept as one uint8 code per value.
"""

from __future__ import annotations

import torch

from runtime.interpreter.kinds.call import Bound, Call

FLOAT4 = "float4_e2m1fn"
FP8_MAX = 448.0
FP4_MAX = 6.0
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between neighbours; a tie goes to the even code, so every second bound belongs to the upper one.
_FP4_BOUNDS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True))
_FP4_LAST = 5.0


def unpack_float4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., K/2]`, low nibble first, to codes `[..., K]`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def decode_float4(codes: torch.Tensor) -> torch.Tensor:
    """Values of E2M1 codes, float32."""
    magnitudes = torch.tensor(_FP4_VALUES, device=codes.device)
    table = torch.cat((magnitudes, -magnitudes))
    return table[codes.long()]


def encode_float4(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 codes (ties to even), saturating at 6."""
    magnitude = values.abs()
    code = (magnitude > _FP4_LAST).to(torch.uint8)
    for bound, upper in _FP4_BOUNDS:
        code += (magnitude >= bound) if upper else (magnitude > bound)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def _to_storage(values: torch.Tensor, name: str) -> torch.Tensor:
    if name == "float8_e4m3fn":
        return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    if name == "int8":
        return values.round().clamp(-128, 127).to(torch.int8)
    return encode_float4(values)


def _from_storage(values: torch.Tensor, name: str) -> torch.Tensor:
    return decode_float4(values) if name == FLOAT4 else values.float()


def _spread(call: Call) -> tuple[list[int], list[int]] | None:
    """How a scale is laid over the tensor: sizes to view it in and repeats; None: scalar."""
    x, scale = call.tensor(0), call.tensor(1)
    block = call.attribute("block")
    if block is not None:
        return list(scale.shape), list(block)
    if scale.numel() == 1:
        return None
    axis = int(call.attribute("axis"))
    sizes = [1] * x.dim()
    sizes[axis] = scale.numel()
    return sizes, [1] * x.dim()


def _apply_spread(
    scale: torch.Tensor, spread: tuple[list[int], list[int]] | None, shape: torch.Size
) -> torch.Tensor:
    scale = scale.float()
    if spread is None:
        return scale.reshape(())
    sizes, repeats = spread
    scale = scale.reshape(sizes)
    for axis, repeat in enumerate(repeats):
        if repeat > 1:
            scale = scale.repeat_interleave(repeat, axis).narrow(axis, 0, shape[axis])
    return scale


def quantize(call: Call) -> Bound:
    """round(x / scale), saturating."""
    spread, name = _spread(call), call.out_names[0]
    if name not in ("float8_e4m3fn", "int8", FLOAT4):
        raise call.unknown("quantized type", name)
    return Bound(
        lambda x, s: _to_storage(x.float() / _apply_spread(s, spread, x.shape), name), (0, 1)
    )


def dequantize(call: Call) -> Bound:
    """x * scale."""
    spread, name, dtype = _spread(call), call.names[0], call.out_dtypes[0]
    if name not in ("float8_e4m3fn", "int8", FLOAT4):
        raise call.unknown("quantized type", name)

    def run(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide = _from_storage(x, str(name))
        return (wide * _apply_spread(scale, spread, x.shape)).to(dtype)

    return Bound(run, (0, 1))


def dynamic_quantize(call: Call) -> Bound:
    """Blocks of values scaled to the FP4 range; the block scales are FP8 multiples of the
    second operand.
    """
    x = call.tensor(0)
    axis, size = int(call.attribute("axis")) % x.dim(), int(call.attribute("block_size"))
    if call.out_names != [FLOAT4, "float8_e4m3fn"] or axis != x.dim() - 1 or x.shape[-1] % size:
        raise call.unknown("dynamic quantization", f"{call.out_names} along axis {axis}")

    def run(x: torch.Tensor, unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = x.float().unflatten(-1, (-1, size))
        largest = blocks.abs().amax(-1)
        unit = unit.float().reshape(())
        scales = _to_storage(largest / FP4_MAX / unit, "float8_e4m3fn")
        step = (scales.float() * unit).unsqueeze(-1)
        # A block of zeros has scale zero; its codes are zero as well.
        ratio = torch.where(step > 0, blocks / step, torch.zeros_like(blocks))
        return encode_float4(ratio).flatten(-2), scales

    return Bound(run, (0, 1))
