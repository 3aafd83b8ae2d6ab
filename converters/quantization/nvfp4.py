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
# Values at a time: so many that threads seldom meet at the interpreter's lock.
_STRIP = 512 * 1024
# Of the buffers of a strip and its blocks.
BUFFER_BYTES = _STRIP * 9
# Values by their bits: looking them up is seven times as fast as torch's conversion.
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
# Bits of float32: exponent, and the exponent of 1.0.
_EXPONENT, _ONE = 0x7F80_0000, 0x3F80_0000

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
        values: [..., columns] in float32, bfloat16 or float16, columns a multiple of 16.
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
        self._scratch = torch.empty(size)

    def run(
        self,
        piece: torch.Tensor,
        scale: torch.Tensor,
        divisor: torch.Tensor,
        packed: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        count = piece.numel()
        values, scratch = self._values[:count], self._scratch[:count]
        block = _largest_of_blocks(piece, scratch).div_(divisor)
        # A block of zeros has scale 1; one far below the matrix' largest value becomes zeros.
        block.masked_fill_(block == 0, 1.0).clamp_(_E4M3_SMALLEST, E4M3_MAX)
        scales.copy_(block)
        torch.index_select(_E4M3, 0, scales.view(torch.uint8).int(), out=block).mul_(scale)
        source = piece if piece.dtype == torch.float32 else values.copy_(piece)
        torch.div(source.view(-1, BLOCK), block.unsqueeze(1), out=values.view(-1, BLOCK))
        _pack(values, scratch, packed)


def _largest_of_blocks(piece: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block, float32.

    Magnitudes are ordered as their bits are, and integers are reduced three times as fast.
    """
    integer = torch.int32 if piece.element_size() == 4 else torch.int16
    bits = scratch.view(integer)[: piece.numel()]
    torch.bitwise_and(piece.view(integer), torch.iinfo(integer).max, out=bits)
    return bits.view(-1, BLOCK).amax(dim=1).view(piece.dtype).float()


def _pack(values: torch.Tensor, scratch: torch.Tensor, packed: torch.Tensor) -> None:
    """Write the codes of the nearest magnitudes, half to even, into `packed`; changes `values`.

    With p the largest of 1, 2 and 4 that is not above |v|, 1 below that, magnitudes are p/2 apart
    and the index of |v| is n + 2 log2(p), n = |v| / (p/2) rounded. Added to 2^22 p, float32 rounds
    |v| to multiples of p/2, half to even, and the sum's bits are: sign, 149 + log2(p), n.
    """
    # Minus zero becomes zero and gets code 0; a small negative value gets code 8.
    values.add_(0.0).clamp_(-E2M1_MAX, E2M1_MAX)
    power = scratch.view(torch.int32)
    torch.bitwise_and(values.view(torch.int32), _EXPONENT, out=power)
    power.clamp_(min=_ONE)
    # One p more adds 2 to n, so that constants vanish below; the product is exact.
    sums = values.add_(scratch.copysign_(values), alpha=2.0**22 + 1).view(torch.int32)
    # Modulo 2^32 the upper four bits become 8 sign + 4 + 2 (149 + log2(p)) + n + 2, the code:
    # 4 is what the exponent's upper three bits add in its own place.
    sums.mul_(2**28 + 2**6 + 1).bitwise_right_shift_(24)
    codes = scratch.view(torch.uint8)[: values.numel()].copy_(sums)
    # Two codes as one little-endian integer, each in the upper half of its byte (0xF0F0): the
    # even one moves from bit 4 to bit 8, below the odd one.
    pairs = codes.view(torch.int16).bitwise_and_(-0x0F10).mul_(17)
    packed.copy_(pairs.bitwise_right_shift_(8))


def dequantize(packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 values of codes [..., columns / 2] with their scales, [..., columns]."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    blocks = table[codes.int()].unflatten(-1, (-1, BLOCK))
    return (blocks * (scales.float() * scale).unsqueeze(-1)).flatten(-2)
