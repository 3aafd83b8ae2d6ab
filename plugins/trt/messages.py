"""What TensorRT's error texts mean."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MEANINGS = (
    (r"HW-specific datatypes?.*\bb16", "a target GPU is too old for bfloat16"),
    (r"HW-specific datatypes?.*fp8", "a target GPU is too old for FP8"),
    (r"HW-specific datatypes?.*fp4", "a target GPU is too old for FP4"),
    (r"no runners that implement it", "no kernel exists for a layer (NonZero has none)"),
    (r"only allowed before DQ", "a quantized constant may only feed a dequantize layer"),
    (r"is not consumed by", "an FP8 or FP4 tensor may only feed a dequantize layer"),
    (r"Cannot decompose operation.*moe", "the mixture-of-experts layer has no kernel here"),
    (
        r"not supported by a dedicated kernel|is_decomposable\(\)",
        "no fused attention kernel fits; it must be decomposable",
    ),
    (r"packed \(NHD\) inputs", "packed attention has no kernel on this target"),
    (r"must have same input types", "the operands have different element types"),
    (r"nbDims ==", "the operands have different ranks"),
    (r"same head dimension", "query, key and value must share the head dimension"),
    (r"number of heads must be divisible", "query heads must be a multiple of key heads"),
    (r"static sequence length", "the cache must have a static length"),
    (r"must be a network output", "the updated cache must be a network output"),
    (r"Write indices must be of type int32", "cache write indices must be int32"),
    (r"Valid range of TopK K|smaller than K", "k is outside what top-k can do"),
    (r"only allowed in the top-level scope", "data-dependent shapes cannot be in a loop"),
    (r"missing dimensions in profile", "the profile lacks an input"),
    (r"no optimization profile", "a network with dynamic inputs needs a profile"),
    (r"constant weights has count", "a constant has another number of elements than its shape"),
    (r"BuildCanceled", "the build was cancelled"),
    (r"graph_jit.*CUDA_SUCCESS", "the build needs a CUDA driver for a refittable plan"),
)


def translate(errors: Sequence[str]) -> str:
    """One sentence for a list of logged errors: the first known meaning, else the first text."""
    for pattern, meaning in _MEANINGS:
        if any(re.search(pattern, error, re.DOTALL) for error in errors):
            return meaning
    first = errors[0].strip().splitlines()[0]
    return re.sub(r"\s*In \S+ at \S+\)?$", "", first)
