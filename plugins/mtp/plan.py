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
class Rows:
    """What is known of the rows when an engine is built.

    Attributes:
        width: values per row, D.
        eps: added to the mean square.
        dtype: of rows and weights.
    """

    width: int = 5120
    eps: float = 1e-5
    dtype: str = "bfloat16"


def _constants(rows: Rows) -> dict[str, Any]:
    block = triton.next_power_of_2(rows.width)
    return {"D": rows.width, "BLOCK": block, "EPS": rows.eps}


def _warps(rows: Rows) -> int:
    return max(1, min(16, triton.next_power_of_2(rows.width) // (32 * _LANES)))


def embed_norms(rows: Rows) -> KernelSpec:
    """Lookup, zero at position 0, and both norms. Grid names: rows."""
    floats = ("table", "hidden", "embed_weight", "hidden_weight")
    return KernelSpec(
        name="mtp_embed_norms",
        function=norms.embed_norms,
        inputs=(
            Argument("ids", "int32"),
            Argument("positions", "int32"),
            *(Argument(name, rows.dtype) for name in floats),
        ),
        scalars=("V",),
        outputs=(Argument("joined", rows.dtype),),
        constants=_constants(rows),
        grid=lambda values: (values["rows"], 2),
        warps=_warps(rows),
    )


def rms_norm(rows: Rows) -> KernelSpec:
    """One norm. Grid names: rows."""
    return KernelSpec(
        name="mtp_rms_norm",
        function=norms.rms_norm,
        inputs=(Argument("x", rows.dtype), Argument("weight", rows.dtype)),
        scalars=(),
        outputs=(Argument("normed", rows.dtype),),
        constants=_constants(rows),
        grid=lambda values: (values["rows"],),
        warps=_warps(rows),
    )
