"""Codes and scales are those of NVIDIA Model Optimizer, bit for bit, on every finite input."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.quantization import fp8, nvfp4
from converters.quantization.magnitude import largest_magnitude

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    export = pytest.importorskip("modelopt.torch.export.quant_utils")
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
# Ties between magnitudes for a block whose scale is 1, minus zero, values that underflow, outliers.
HOSTILE = [0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0, -6.0]
HOSTILE += [1e-30, -1e-30, 1e-8, 1e-3, 60000.0, -60000.0, 2688.0, 0.01, 5.9604645e-08]
# The largest and the smallest float32, subnormals.
EXTREME = [3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 1e30]


@st.composite
def matrices(draw: st.DrawFn, column_step: int) -> torch.Tensor:
    """Random matrices of odd shapes, some elements and whole blocks replaced by hostile values."""
    rows = draw(st.one_of(st.integers(1, 9), st.integers(300, 700)))
    columns = column_step * draw(st.integers(1, 7))
    spread = draw(st.sampled_from([0.0, 1.0, 6.0]))
    size = 10.0 ** draw(st.integers(-6, 3))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = generator.standard_normal((rows, columns)) * size
    values *= np.exp(spread * generator.standard_normal((rows, columns)))
    mask = generator.random((rows, columns)) < draw(st.sampled_from([0.001, 0.1, 0.9]))
    kinds = HOSTILE + EXTREME if draw(st.booleans()) else HOSTILE
    chosen = generator.choice(kinds, (rows, columns))
    if draw(st.booleans()):
        values = np.where(mask, chosen, values)
    if draw(st.booleans()):
        values[:, :16] = draw(st.sampled_from([0.0, -0.0, 1e-12]))
    dtype = draw(DTYPES)
    limit = torch.finfo(dtype).max
    return torch.from_numpy(np.clip(values, -limit, limit)).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@settings(max_examples=200, deadline=None)
@given(matrices(column_step=16))
def test_nvfp4(values: torch.Tensor):
    scale = nvfp4.global_scale(largest_magnitude(values))
    packed, scales = nvfp4.quantize(values, scale)
    if not bool(values.float().abs().max() / 2688 > 0):
        # Model Optimizer writes NaN scales here.
        assert float(scale) == 1.0
        assert not packed.any()
        assert bool((scales.float() == 1.0).all())
        return
    expected, expected_scales, expected_scale = NVFP4QTensor.quantize(values.clone(), 16)
    assert torch.equal(bits(scale), bits(expected_scale))
    assert torch.equal(bits(scales), bits(expected_scales))
    assert torch.equal(packed, expected._quantized_data)
    restored = expected.dequantize(
        torch.float32, scale=expected_scales, double_scale=expected_scale, block_sizes={-1: 16}
    )
    assert torch.equal(nvfp4.dequantize(packed, scales, scale), restored)


@settings(max_examples=100, deadline=None)
@given(matrices(column_step=1))
def test_fp8(values: torch.Tensor):
    scale = fp8.matrix_scale(largest_magnitude(values))
    codes = fp8.quantize(values, scale)
    amax = values.abs().max().float()
    if not bool(amax / 448 > 0):
        assert float(scale) == 1.0
        return
    expected_scale = amax / 448.0
    expected = export.to_quantized_weight(values.clone(), expected_scale, "fp8")
    assert torch.equal(bits(scale), bits(expected_scale))
    assert torch.equal(bits(codes), bits(expected))


@settings(max_examples=100, deadline=None)
@given(matrices(column_step=1), st.integers(1, 40))
def test_fp8_blocks(values: torch.Tensor, repeat: int):
    values = values.repeat(repeat, 3)
    scales = fp8.block_scales(values)
    codes = fp8.quantize_blocks(values, scales)
    assert tuple(scales.shape) == (-(-values.shape[0] // 128), -(-values.shape[1] // 128))
    expected, expected_scales = FP8QTensor.quantize(values.float(), block_sizes={-1: 128, -2: 128})
    zero = expected_scales == 0
    assert torch.equal(bits(scales[~zero]), bits(expected_scales[~zero]))
    assert bool((scales[zero] == 1).all())
    kept = ~zero.repeat_interleave(128, 0)[: values.shape[0]].repeat_interleave(128, 1)
    kept = kept[:, : values.shape[1]]
    assert torch.equal(bits(codes[kept]), bits(expected._quantized_data[kept]))
    assert not codes[~kept].float().any()
