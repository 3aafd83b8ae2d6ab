"""Quantised tables give exactly the values that their codes and scales mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from plugins.support.errors import InputError
from runtime.host_inputs.table import StoredTable

ROWS = np.array([2, 0, 2, 7])
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def finite_codes(rows: int, width: int) -> torch.Tensor:
    """All e4m3 codes but NaN, several times over."""
    codes = torch.arange(rows * width, dtype=torch.int64) % 256
    codes[(codes & 127) == 127] = 5
    return codes.to(torch.uint8).view(rows, width).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("scale", [torch.tensor([0.37]), torch.tensor([3.0]).bfloat16()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8(tmp_path: Path, scale: torch.Tensor, dtype: torch.dtype) -> None:
    codes = finite_codes(8, 64)
    tensors = {"t.weight": codes, "t.weights_scaling_factor": scale}
    save_file(tensors, tmp_path / "weights")
    found = StoredTable(tmp_path / "weights", "t.weight").gather(ROWS, dtype)
    expected = (codes.float() * scale.float()).to(dtype)[ROWS]
    assert torch.equal(found, expected)
    # Codes without their scale are something else.
    assert not torch.equal(found, codes.to(dtype)[ROWS])


def nvfp4_table(path: Path) -> tuple[StoredTable, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (8, 64), generator=generator)
    scales = (torch.rand(8, 4, generator=generator) * 100 + 0.01).to(torch.float8_e4m3fn)
    factor = torch.tensor([0.013])
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    tensors = {
        "t.weight": packed,
        "t.weights_scaling_factor": scales,
        "t.weights_scaling_factor_2": factor,
    }
    save_file(tensors, path)
    signs = torch.where(codes > 7, -1.0, 1.0)
    blocks = (scales.float() * factor).repeat_interleave(16, dim=1)
    return StoredTable(path, "t.weight"), signs * MAGNITUDES[codes & 7] * blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4(tmp_path: Path, dtype: torch.dtype) -> None:
    table, expected = nvfp4_table(tmp_path / "weights")
    assert (table.rows, table.width) == (8, 64)
    assert torch.equal(table.gather(ROWS, dtype), expected.to(dtype)[ROWS])


def test_missing_and_unfit_scales_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_file({"t.weight": finite_codes(8, 64)}, path)
    with pytest.raises(InputError, match="the scale of the n-gram table"):
        StoredTable(path, "t.weight")
    packed = torch.zeros(8, 32, dtype=torch.uint8)
    scales = torch.ones(8, 3).to(torch.float8_e4m3fn)
    save_file({"t.weight": packed, "t.weights_scaling_factor": scales}, path)
    with pytest.raises(InputError, match="do not fit"):
        StoredTable(path, "t.weight")
    save_file({"t.weight": torch.zeros(8, 32, dtype=torch.int32)}, path)
    with pytest.raises(InputError, match="no way to read"):
        StoredTable(path, "t.weight")
