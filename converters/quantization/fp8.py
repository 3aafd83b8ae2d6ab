"""FP8 (e4m3): one float32 scale per matrix, or one per block of 128 rows and 128 columns.

    value = float32(code) · scale

Scales and codes are those of NVIDIA Model Optimizer 0.47, bit for bit, except for zeros, where it
divides by zero: here zeros get code 0 and scale 1.
"""

from __future__ import annotations

import torch

BLOCK = 128
E4M3_MAX = 448.0


def matrix_scale(amax: torch.Tensor) -> torch.Tensor:
    """The scale from the largest magnitude, float32 of any shape; 1 where there are only zeros."""
    scale = amax.float() / E4M3_MAX
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes float8_e4m3fn of finite values with the matrix' scale, float32 0-d.

    The quotient has the type of the values, as Model Optimizer computes it.
    """
    return _codes(values / scale)


def block_scales(values: torch.Tensor) -> torch.Tensor:
    """Scales float32 [ceil(rows / 128), ceil(columns / 128)] of a matrix."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    return matrix_scale(blocks.abs().amax(dim=(1, 3)))


def quantize_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes float8_e4m3fn of a finite matrix with its `block_scales`."""
    rows, columns = values.shape
    wide = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return _codes(values / wide)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 values of codes with a matrix' scale."""
    return codes.float() * scale.float()


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 values of a matrix of codes with block scales."""
    rows, columns = codes.shape
    wide = scales.float().repeat_interleave(BLOCK, 0)[:rows]
    return codes.float() * wide.repeat_interleave(BLOCK, 1)[:, :columns]


def _codes(quotients: torch.Tensor) -> torch.Tensor:
    # Casts differ between libraries above 448, so nothing is left to the cast.
    return quotients.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
