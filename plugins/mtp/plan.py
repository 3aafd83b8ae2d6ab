"""The operations of the draft layer's input as kernel descriptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton

from plugins.aot.spec import Argument, KernelSpec
from plugins.mtp.kernels import norms

# Lanes per thread that keep a row in registers.
_LANES = 32


@dataclass(frozen=True)
class Width:
    """What is known of the rows when an engine is built.

    Attributes:
        hidden: values per row, D.
        eps: added to the mean square.
        dtype: of rows and weights.
    """

    hidden: int = 5120
    eps: float = 1e-5
    dtype: str = "bfloat16"


def _constants(width: Width) -> dict[str, Any]:
    block = triton.next_power_of_2(width.hidden)
    return {"D": width.hidden, "BLOCK": block, "EPS": width.eps}


def _warps(width: Width) -> int:
    return max(1, min(16, triton.next_power_of_2(width.hidden) // (32 * _LANES)))


def embed_norms(width: Width) -> KernelSpec:
    """Lookup, zero at position 0, and both norms. Grid names: rows."""
    rows = ("table", "hidden", "embed_weight", "hidden_weight")
    return KernelSpec(
        name="mtp_embed_norms",
        function=norms.embed_norms,
        inputs=(
            Argument("ids", "int32"),
            Argument("positions", "int32"),
            *(Argument(name, width.dtype) for name in rows),
        ),
        scalars=("V",),
        outputs=(Argument("joined", width.dtype),),
        constants=_constants(width),
        grid=lambda values: (values["rows"], 2),
        warps=_warps(width),
    )


def rms_norm(width: Width) -> KernelSpec:
    """One norm. Grid names: rows."""
    return KernelSpec(
        name="mtp_rms_norm",
        function=norms.rms_norm,
        inputs=(Argument("x", width.dtype), Argument("weight", width.dtype)),
        scalars=(),
        outputs=(Argument("normed", width.dtype),),
        constants=_constants(width),
        grid=lambda values: (values["rows"],),
        warps=_warps(width),
    )
