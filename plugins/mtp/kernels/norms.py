"""RMS norm of rows, with and without the embedding lookup before it.

Both kernels normalise by the same function on the same lanes, so that their results are equal to
the last bit, whichever of them a network is built with.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed(x, weight, D: tl.constexpr, EPS: tl.constexpr):
    """x / sqrt(mean(x^2) + EPS) * weight in float32; lanes behind D are zero."""
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / D
    # Rounded as IEEE asks: the native layers do the same.
    return wide * tl.div_rn(1.0, tl.sqrt_rn(mean + EPS)) * weight.to(tl.float32)


@triton.jit
def embed_norms(
    ids,
    positions,
    table,
    hidden,
    embed_weight,
    hidden_weight,
    V,
    joined,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
):
    """Grid (rows, 2): one half of a row each."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    if half == 0:
        index = tl.minimum(tl.load(ids + row), V - 1).to(tl.int64)
        # The first token of a sequence has no embedding here: nothing is read.
        width = tl.where(tl.load(positions + row) == 0, 0, D)
        x = tl.load(table + index * D + lane, mask=lane < width, other=0.0)
        weight = tl.load(embed_weight + lane, mask=lane < D, other=0.0)
    else:
        x = tl.load(hidden + row * D + lane, mask=lane < D, other=0.0)
        weight = tl.load(hidden_weight + lane, mask=lane < D, other=0.0)
    normed = _normed(x, weight, D, EPS).to(joined.dtype.element_ty)
    tl.store(joined + (row * 2 + half) * D + lane, normed, mask=lane < D)


@triton.jit
def rms_norm(x, weight, normed, D: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr):
    """Grid (rows): one row each."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    values = tl.load(x + row * D + lane, mask=lane < D, other=0.0)
    factor = tl.load(weight + lane, mask=lane < D, other=0.0)
    result = _normed(values, factor, D, EPS).to(normed.dtype.element_ty)
    tl.store(normed + row * D + lane, result, mask=lane < D)
