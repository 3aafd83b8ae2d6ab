"""Golden bytes, edge cases and the inverse of the quantisers."""

from __future__ import annotations

import pytest
import torch

from converters.quantization import fp8, nvfp4

_ROW_0 = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -6]
_ROW_0 += [-0.0, -0.25, -0.5, -0.75, -1, -1.25, -1.5, -1.75, -2, -2.5, -3, -3.5, -4, -5, -0.2, 0.1]
_ROW_1 = [0.01 * k for k in range(-8, 8)] + [0.0] * 16
GOLDEN = torch.tensor([_ROW_0, _ROW_1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_golden_nvfp4(dtype: torch.dtype):
    values = GOLDEN.to(dtype)
    scale = nvfp4.global_scale(values.abs().max())
    packed, scales = nvfp4.quantize(values, scale)
    assert [bytes(row.numpy()).hex() for row in packed] == [
        "00212243446566f790a9bacbdcedfe08",
        "ffeecd9b104365760000000000000000",
    ]
    assert scales.view(torch.uint8).tolist() == [[0x7E, 0x7C], [0x4C, 0x38]]
    assert float(scale) == 0.0022321429569274187
    restored = nvfp4.dequantize(packed, scales, scale)
    expected = [0, 0, 0.5, 1, 1, 1, 1.5, 2, 2, 2, 3, 4, 4, 4, 6, -6]
    assert torch.allclose(restored[0, :16], torch.tensor(expected), atol=1e-6)


def test_golden_fp8():
    scale = fp8.matrix_scale(GOLDEN.abs().max())
    assert float(scale) == 0.013392857275903225
    assert [bytes(row.view(torch.uint8).numpy()).hex() for row in fp8.quantize(GOLDEN, scale)] == [
        "00596166696c6e7071747678797c7efe80d9e1e6e9eceef0f1f4f6f8f9fcd74f",
        "cccac9c7c4c1bcb400343c414447494a" + "00" * 16,
    ]


def test_codes_of_the_released_layout():
    """The published check vectors: low half first, scales multiplied."""
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    one = torch.tensor([[1.0]]).to(torch.float8_e4m3fn)
    values = nvfp4.dequantize(packed, one, torch.tensor(0.5))
    positive = [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3]
    assert values.tolist() == [positive + [-value for value in positive]]
    swapped = nvfp4.dequantize((packed >> 4) | (packed << 4), one, torch.tensor(0.5))
    assert swapped.tolist() != values.tolist()

    weights = torch.tensor([[0.03 * ((7 * i) % 11 - 5) for i in range(32)]])
    scale = nvfp4.global_scale(weights.abs().max())
    packed, scales = nvfp4.quantize(weights, scale)
    assert packed.tolist() == [
        [79, 124, 226, 6, 110, 250, 196, 39, 110, 224, 166, 79, 124, 226, 6, 110]
    ]
    assert scales.view(torch.uint8).tolist() == [[126, 126]]
    assert float(scale) == 5.580357537837699e-05


def test_zeros_are_not_nan():
    zeros = torch.zeros(2, 32)
    scale = nvfp4.global_scale(zeros.abs().max())
    packed, scales = nvfp4.quantize(zeros, scale)
    assert (float(scale), packed.any(), scales.float().unique().tolist()) == (1.0, False, [1.0])
    assert float(fp8.matrix_scale(zeros.abs().max())) == 1.0
    assert not fp8.quantize(zeros, torch.tensor(1.0)).float().any()


def _blocks_with_scale_one(magnitudes: torch.Tensor) -> torch.Tensor:
    """Blocks of 6 and 15 of the values each, so that the matrix' scale of 1 makes theirs 1."""
    fill = -magnitudes.numel() % 15
    rows = torch.cat([magnitudes, torch.zeros(fill)]).view(-1, 15)
    return torch.cat([torch.full((len(rows), 1), 6.0), rows], dim=1)


def _nearest(magnitudes: torch.Tensor) -> torch.Tensor:
    """Index of the nearest magnitude; of two that are as near, the even one. float64 -> int32."""
    distance = (magnitudes.unsqueeze(-1) - torch.tensor(nvfp4.MAGNITUDES)).abs()
    nearest = distance == distance.amin(dim=-1, keepdim=True)
    indices = torch.arange(8)
    preferred = torch.where(nearest, indices + 8 * (indices % 2), 99).amin(dim=-1)
    return (preferred % 8).int()


def test_nearest_magnitude_up_to_the_last_bit():
    """Values around every tie, by one unit in the last place, and the ends of the range."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, *nvfp4.MAGNITUDES[1:-1]])
    steps = torch.arange(-3, 4, dtype=torch.int32)
    near = (ties.view(torch.int32).unsqueeze(1) + steps).view(torch.float32).flatten()
    near = torch.cat([near, torch.tensor([0.0, 1e-45, 1e-38, 1e-8, 5.9999995])])
    values = _blocks_with_scale_one(torch.cat([near, -near]))
    packed, scales = nvfp4.quantize(values, torch.tensor(1.0))
    assert bool((scales.float() == 1.0).all())
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(values.shape)

    sign = 8 * (values < 0)
    assert torch.equal(codes.int(), _nearest(values.double().abs()) + sign)
    # Added to 1, values near 1/4 and 3/4 lose the bit that decides.
    assert not torch.equal(codes.int(), _nearest(((values.abs() + 1) - 1).double()) + sign)


def test_magnitudes_beyond_the_largest_and_signs_of_zero():
    values = torch.tensor([[6.0, 6.4, 7.0, 9.0, 1e5, 3e38, -9.0, -1e30, -0.0, 0.0] + [0.0] * 6])
    # The block's scale is limited to 448, so quotients go far beyond 6.
    packed, scales = nvfp4.quantize((values * 448).clamp(max=3.4e38), torch.tensor(1.0))
    assert float(scales) == 448.0
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten().tolist()
    assert codes == [7, 7, 7, 7, 7, 7, 15, 15] + [0] * 8


def test_every_block_scale():
    """Blocks whose scales are all e4m3 numbers above zero, subnormal ones included."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    magnitudes = torch.tensor(nvfp4.MAGNITUDES)
    values = scales.float().unsqueeze(1) * torch.cat([magnitudes, -magnitudes])
    packed, found = nvfp4.quantize(values, torch.tensor(1.0))
    assert found.flatten().view(torch.uint8).tolist() == list(range(1, 127))
    row = [0x10, 0x32, 0x54, 0x76, 0x90, 0xBA, 0xDC, 0xFE]
    assert packed.tolist() == [row] * 126


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_matrices_are_their_rows(dtype: torch.dtype):
    """More values than are worked on at a time, and a last piece that is shorter."""
    values = torch.randn(1041, 528, generator=torch.Generator().manual_seed(3)).to(dtype)
    scale = nvfp4.global_scale(values.abs().max())
    packed, scales = nvfp4.quantize(values, scale)
    rows = [nvfp4.quantize(part, scale) for part in values.split(97)]
    assert torch.equal(packed, torch.cat([codes for codes, _ in rows]))
    bits = torch.cat([blocks.view(torch.uint8) for _, blocks in rows])
    assert torch.equal(scales.view(torch.uint8), bits)
    assert not torch.equal(packed[:97], packed[97:194])


def test_quantising_the_dequantised_changes_nothing():
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    scale = nvfp4.global_scale(values.abs().max())
    packed, scales = nvfp4.quantize(values, scale)
    restored = nvfp4.dequantize(packed, scales, scale)
    again, _ = nvfp4.quantize(restored, scale)
    assert torch.equal(nvfp4.dequantize(again, scales, scale), restored)
    error = (restored - values).abs().max()
    assert 0 < float(error) < 0.5


def test_block_fp8_with_partial_last_blocks():
    values = torch.randn(130, 200, generator=torch.Generator().manual_seed(2))
    values[128:, 128:] *= 1000
    scales = fp8.block_scales(values)
    restored = fp8.dequantize_blocks(fp8.quantize_blocks(values, scales), scales)
    assert torch.allclose(restored, values, rtol=0.07, atol=float(values.abs().max()) * 2**-10)
    # Scales of the neighbour block would be far off.
    wrong = fp8.dequantize_blocks(fp8.quantize_blocks(values, scales), scales.flip(0))
    assert not torch.allclose(wrong, values, rtol=0.07, atol=float(values.abs().max()) * 2**-10)
