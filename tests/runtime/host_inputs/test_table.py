"""Quantised tables give exactly the values that their codes and scales mean."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from plugins.support.errors import InputError
from runtime.host_inputs.table import StoredTable

ROWS = np.array([2, 0, 2, 7])
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def gathered(table: StoredTable, rows: np.ndarray = ROWS) -> torch.Tensor:
    out = torch.full((len(rows), table.width), torch.nan, dtype=table.dtype)
    table.gather(rows, out)
    return out


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
    found = gathered(StoredTable(tmp_path / "weights", "t.weight", dtype))
    expected = (codes.float() * scale.float()).to(dtype)[ROWS]
    assert torch.equal(found, expected)
    # Codes without their scale are something else.
    assert not torch.equal(found, codes.to(dtype)[ROWS])


def nvfp4_table(path: Path, dtype: torch.dtype) -> tuple[StoredTable, torch.Tensor]:
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
    return StoredTable(path, "t.weight", dtype), signs * MAGNITUDES[codes & 7] * blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4(tmp_path: Path, dtype: torch.dtype) -> None:
    table, expected = nvfp4_table(tmp_path / "weights", dtype)
    assert (table.rows, table.width) == (8, 64)
    assert torch.equal(gathered(table), expected.to(dtype)[ROWS])
    # The other half of every byte first is something else.
    swapped = expected.unflatten(1, (-1, 2)).flip(2).flatten(1)
    assert not torch.equal(gathered(table), swapped.to(dtype)[ROWS])


def test_fp8_rows_of_odd_width(tmp_path: Path) -> None:
    codes = finite_codes(8, 7)
    tensors = {"t.weight": codes, "t.weights_scaling_factor": torch.tensor([0.5])}
    save_file(tensors, tmp_path / "weights")
    table = StoredTable(tmp_path / "weights", "t.weight", torch.float32)
    assert torch.equal(gathered(table), codes.float()[ROWS] * 0.5)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_many_rows(tmp_path: Path, stored: torch.dtype) -> None:
    """More rows than are decoded at a time, the last time fewer."""
    values = torch.randn(900, 16, generator=torch.Generator().manual_seed(4)).to(stored)
    save_file({"t.weight": values, "t.weights_scaling_factor": torch.ones(1)}, tmp_path / "weights")
    table = StoredTable(tmp_path / "weights", "t.weight", torch.bfloat16)
    rows = np.random.default_rng(5).permutation(900)
    assert torch.equal(gathered(table, rows), values.bfloat16()[rows])


def test_rows_behind_one_that_was_waited_for_are_requested_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the disk is, the values are right and every row is requested at most once."""
    table, expected = nvfp4_table(tmp_path / "weights", torch.float32)
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr("runtime.host_inputs.table._WAITED_NS", -1)
    monkeypatch.setattr("runtime.host_inputs.table._PROBE", 2)
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, at, size, _how: advised.append((at, size)))
    rows = np.array([1, 0, 7, 3, 4])
    assert torch.equal(gathered(table, rows), expected[rows])
    # Codes of the three rows after the first two; then the scales, of which none is known.
    sizes = [size for _, size in advised]
    assert sizes.count(32) == 3
    assert sizes.count(4) >= 5
    header = table._codes._begin
    assert [at for at, size in advised if size == 32] == [header + 32 * row for row in (7, 3, 4)]


def test_warm_rows_are_not_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ = nvfp4_table(tmp_path / "weights", torch.float32)
    monkeypatch.setattr("runtime.host_inputs.table._WAITED_NS", 10**12)
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: pytest.fail("asked for a row"))
    gathered(table)


def test_missing_and_unfit_scales_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_file({"t.weight": finite_codes(8, 64)}, path)
    with pytest.raises(InputError, match="the scale of the n-gram table"):
        StoredTable(path, "t.weight", torch.float32)
    packed = torch.zeros(8, 32, dtype=torch.uint8)
    scales = torch.ones(8, 3).to(torch.float8_e4m3fn)
    save_file({"t.weight": packed, "t.weights_scaling_factor": scales}, path)
    with pytest.raises(InputError, match="do not fit"):
        StoredTable(path, "t.weight", torch.float32)
    save_file({"t.weight": torch.zeros(8, 32, dtype=torch.int32)}, path)
    with pytest.raises(InputError, match="no way to read"):
        StoredTable(path, "t.weight", torch.float32)
