"""The one table of element types: our name, the safetensors code, torch's dtype, bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.support.errors import InputError


@dataclass(frozen=True, eq=False)
class DType:
    """One element type; there is one object of each.

    Attributes:
        name: the name used in every config file and signature of this project.
        safetensors: the code in a safetensors header.
        torch: the torch dtype of the same layout.
        bits: size of one element.
    """

    name: str
    safetensors: str
    torch: torch.dtype
    bits: int

    def nbytes(self, elements: int) -> int:
        """Bytes that `elements` values take."""
        return elements * self.bits // 8


_TABLE = (
    DType("float32", "F32", torch.float32, 32),
    DType("float16", "F16", torch.float16, 16),
    DType("bfloat16", "BF16", torch.bfloat16, 16),
    DType("float64", "F64", torch.float64, 64),
    DType("float8_e4m3fn", "F8_E4M3", torch.float8_e4m3fn, 8),
    DType("float8_e8m0fnu", "F8_E8M0", torch.float8_e8m0fnu, 8),
    DType("uint8", "U8", torch.uint8, 8),
    DType("int8", "I8", torch.int8, 8),
    DType("int32", "I32", torch.int32, 32),
    DType("int64", "I64", torch.int64, 64),
    DType("bool", "BOOL", torch.bool, 8),
)
BY_NAME = {d.name: d for d in _TABLE}
BY_SAFETENSORS = {d.safetensors: d for d in _TABLE}
BY_TORCH = {d.torch: d for d in _TABLE}

# Types a network computes in; everything else is storage.
COMPUTE_DTYPES = ("float32", "float16", "bfloat16")


def dtype(name: str, where: str | None = None) -> DType:
    """Look a dtype up by our name. Raises InputError naming `where` when there is none."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise InputError(
            "unknown dtype", where=where, expected=", ".join(BY_NAME), found=name
        ) from None
