"""NVFP4: 4-bit floating point codes, one e4m3 scale per 16 columns, one float32 scale per matrix.

    value = sign · magnitude(code) · float32(block scale) · global scale

Two codes share a byte, the even column in the low half. All arithmetic is float32 in the order of
NVIDIA Model Optimizer 0.47, so that codes and scales are its codes and scales, bit for bit.
"""

from __future__ import annotations

import torch

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
_E4M3_SMALLEST = 2.0**-9
# Values at a time: so many that threads seldom meet at the interpreter's lock, and the caches help.
_STRIP = 256 * 1024
# Of the buffers of a strip.
BUFFER_BYTES = _STRIP * 18

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def global_scale(amax: torch.Tensor) -> torch.Tensor:
    """The matrix' scale from its largest magnitude, float32 0-d; 1 for a matrix of zeros.

    A magnitude too small to divide counts as zero: Model Optimizer writes NaN there.
    """
    scale = amax.float() / (E2M1_MAX * E4M3_MAX)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantize(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales of finite values.

    Args:
        values: [..., columns] in a floating type, columns a multiple of 16.
        scale: the matrix' `global_scale`, float32 0-d.

    Returns:
        packed codes uint8 [..., columns / 2] and block scales float8_e4m3fn [..., columns / 16].
    """
    flat = values.reshape(-1)
    packed = torch.empty(flat.numel() // 2, dtype=torch.uint8)
    scales = torch.empty(flat.numel() // BLOCK, dtype=torch.float8_e4m3fn)
    strip = _Strip(min(_STRIP, flat.numel()))
    divisor = E2M1_MAX * scale
    for start in range(0, flat.numel(), _STRIP):
        piece = flat[start : start + _STRIP]
        end = start + piece.numel()
        strip.run(
            piece,
            scale,
            divisor,
            packed[start // 2 : end // 2],
            scales[start // BLOCK : end // BLOCK],
        )
    columns = values.shape[-1]
    return (
        packed.reshape(*values.shape[:-1], columns // 2),
        scales.reshape(*values.shape[:-1], columns // BLOCK),
    )


def vanished_blocks(packed: torch.Tensor, scales: torch.Tensor) -> int:
    """Blocks of `quantize` that are zeros only because their scale would have been too small.

    A block of zeros has scale 1, so these are the ones with the smallest scale and no code.
    """
    smallest = scales.view(torch.uint8).flatten() == 1
    if not bool(smallest.any()):
        return 0
    magnitudes = packed.reshape(-1, BLOCK // 2)[smallest] & 0x77
    return int((magnitudes == 0).all(dim=1).sum())


class _Strip:
    """Buffers for one strip of values, used again for the next."""

    def __init__(self, size: int) -> None:
        self._values = torch.empty(size)
        self._rounded = torch.empty(size)
        self._more = torch.empty(size)
        self._middle = torch.empty(size)
        self._codes = torch.empty(size, dtype=torch.uint8)
        self._shifted = torch.empty(size // 2, dtype=torch.int16)

    def run(
        self,
        piece: torch.Tensor,
        scale: torch.Tensor,
        divisor: torch.Tensor,
        packed: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        count = piece.numel()
        values, rounded, more = self._values[:count], self._rounded[:count], self._more[:count]
        codes = self._codes[:count]
        values.copy_(piece)
        torch.abs(values, out=rounded)
        # Magnitudes are ordered as their bits are, and integers are reduced three times as fast.
        bits = rounded.view(torch.int32).view(-1, BLOCK).amax(dim=1)
        block = bits.view(torch.float32).div_(divisor)
        # A block of zeros has scale 1; one far below the matrix' largest value becomes zeros.
        block.masked_fill_(block == 0, 1.0).clamp_(_E4M3_SMALLEST, E4M3_MAX)
        scales.copy_(block)
        block.copy_(scales).mul_(scale)
        values.view(-1, BLOCK).div_(block.unsqueeze(1))
        _magnitude_codes(values, rounded, more, self._middle[:count])
        # Minus zero is not below zero and gets code 0; a small negative value gets code 8.
        torch.lt(values, 0, out=more)
        codes.copy_(rounded.add_(more, alpha=8.0))
        # Two codes as one little-endian integer: the odd one moves from bit 8 to bit 4.
        pairs = codes.view(torch.int16)
        shifted = self._shifted[: pairs.numel()]
        torch.bitwise_right_shift(pairs, 4, out=shifted)
        packed.copy_(shifted.bitwise_or_(pairs))


def _magnitude_codes(
    scaled: torch.Tensor, codes: torch.Tensor, scratch: torch.Tensor, middle: torch.Tensor
) -> None:
    """Write the nearest magnitude's index (0..7) of each value into `codes`, as float32.

    The magnitudes go in halves up to 2, in ones up to 4, then to 6. Each stretch is rounded by
    itself, half to even, which is half to the even index because every stretch begins at one.
    """
    torch.abs(scaled, out=scratch)
    torch.clamp(scratch, max=2.0, out=codes)
    codes.mul_(2.0).round_()
    scratch.sub_(2.0)
    # From here on: what lies above 2, in ones; then what lies above 4, in twos.
    torch.clamp(scratch, min=0.0, max=2.0, out=middle)
    codes.add_(middle.round_())
    torch.sub(scratch, 2.0, out=scratch)
    codes.add_(scratch.clamp_(min=0.0, max=2.0).mul_(0.5).round_())


def dequantize(packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 values of codes [..., columns / 2] with their scales, [..., columns]."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    blocks = table[codes.int()].unflatten(-1, (-1, BLOCK))
    return (blocks * (scales.float() * scale).unsqueeze(-1)).flatten(-2)
