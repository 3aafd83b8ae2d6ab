"""Widths of dense MLPs that every rank of tensor parallelism can cut at FP8 block borders.

A rank's share of a block-quantised MLP must consist of whole blocks, scales included. Widths are
therefore rounded up to a multiple of 128 per rank; gate and up get zero rows, down zero columns.
The result is the same: silu(0) * 0 = 0, and it meets a zero column.

With one rank only a partial last block is filled up, so that gate above up is a matrix of whole
blocks. Routed experts are never padded: they are spread over ranks whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from converters.checkpoint.header import Shape, TensorEntry
from converters.quantization.fp8 import BLOCK

_TENSOR = re.compile(r"\.mlp\.(?:shared_experts\.)?(gate|up|down)_proj\.(weight|weight_scale_inv)$")
_SCALE = re.compile(r"\.mlp\.(?:shared_experts\.)?(?:gate|up|down)_proj\.weight_scale(?:_inv)?$")


def padded_width(width: int, tp_size: int) -> int:
    """The inner width of a dense or shared MLP as it is built for `tp_size` ranks."""
    per_rank = -(-math.ceil(width / BLOCK) // tp_size)
    return per_rank * BLOCK * tp_size


def padded_shape(name: str, shape: Shape, tp_size: int) -> Shape:
    """The shape of a tensor of a block-quantised checkpoint after padding.

    Args:
        name: on disk; decides whether it belongs to a dense or shared MLP (of the text model or of
            its draft layer), and whether it counts weights or their block scales.
        shape: on disk, [rows, columns] for the tensors that are padded.
        tp_size: ranks.

    Returns:
        The same shape for every other tensor, routed experts among them.
    """
    found = _TENSOR.search(name)
    if found is None:
        return shape
    multiple = tp_size * BLOCK if found[2] == "weight" else tp_size
    axis = 1 if found[1] == "down" else 0
    return tuple(
        -(-size // multiple) * multiple if at == axis else size for at, size in enumerate(shape)
    )


def has_block_scales(tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether dense or shared MLPs of a checkpoint are FP8 with a scale per block."""
    return any(
        len(entry.shape) > 1 and (name.endswith("_inv") or math.prod(entry.shape) > 1)
        for name, entry in tensors.items()
        if _SCALE.search(name) and entry.dtype.name in ("float32", "bfloat16")
    )
