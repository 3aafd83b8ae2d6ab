"""The draft layer's input on tensors, by the kernels.

Tensors are contiguous and on one device (a CPU only under Triton's interpreter). Sizes and meaning
as in `reference.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.mtp import plan
from plugins.mtp.plan import Width


def _width(rows: Tensor, eps: float) -> Width:
    return Width(rows.shape[-1], eps, str(rows.dtype).removeprefix("torch."))


def embed_norms(
    ids: Tensor,
    positions: Tensor,
    table: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
) -> Tensor:
    """As `reference.embed_norms`, in one launch."""
    joined = hidden.new_empty(*hidden.shape[:-1], 2 * hidden.shape[-1])
    tensors = {
        "ids": ids,
        "positions": positions,
        "table": table,
        "hidden": hidden,
        "embed_weight": embed_weight,
        "hidden_weight": hidden_weight,
        "joined": joined,
    }
    plan.embed_norms(_width(hidden, eps)).launch(
        tensors, {"V": table.shape[0], "rows": ids.numel()}
    )
    return joined


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`, equal to the last bit to a half of `embed_norms`."""
    normed = torch.empty_like(x)
    tensors = {"x": x, "weight": weight, "normed": normed}
    plan.rms_norm(_width(x, eps)).launch(tensors, {"rows": x.numel() // x.shape[-1]})
    return normed
