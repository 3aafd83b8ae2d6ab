"""The kernels of the draft layer's input in Triton's interpreter, against the definition.

Run by test_kernels.py in a process of its own: the interpreter must be chosen before a kernel is
imported, and other tests compile the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plugins import operations
from plugins.aot.quick import Operation
from plugins.mtp import reference
from plugins.mtp.plan import Rows
from plugins.mtp.plugin import EMBED_NORMS, RMS_NORM, row_attributes

EPS = 1e-5
VOCAB = 37


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def case(width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Two slots with four tokens; one at position 0, one id behind the table."""
    return {
        "ids": torch.tensor([[5, 0, VOCAB - 1, VOCAB + 3], [7, 7, 1, 2]], dtype=torch.int32),
        "positions": torch.tensor([[0, 1, 2, 3], [9, 10, 11, 12]], dtype=torch.int32),
        "table": torch.randn(VOCAB, width).to(dtype),
        "hidden": (3 * torch.randn(2, 4, width)).to(dtype),
        "embed_weight": (torch.rand(width) + 0.5).to(dtype),
        "hidden_weight": (torch.rand(width) + 0.5).to(dtype),
    }


def _run(operation: Operation, given: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    dtype = str(rows.dtype).removeprefix("torch.")
    attributes = row_attributes(Rows(rows.shape[-1], EPS, dtype))
    return operations.launch(operation, given, attributes)


def fused(given: dict[str, Tensor]) -> Tensor:
    return _run(EMBED_NORMS, given, given["hidden"])["joined"]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _run(RMS_NORM, {"x": x, "weight": weight}, x)["normed"]


def unfused(
    given: dict[str, Tensor], norm: Callable[[Tensor, Tensor, float], Tensor] = norm
) -> Tensor:
    """Lookup, zero, norm, norm, join: one step after the other."""
    rows = given["table"][given["ids"].clamp(max=VOCAB - 1).long()]
    rows = torch.where((given["positions"] == 0)[..., None], 0.0, rows)
    first = norm(rows, given["embed_weight"], EPS)
    return torch.cat([first, norm(given["hidden"], given["hidden_weight"], EPS)], -1)


@pytest.mark.parametrize("width", [96, 128, 320])
def test_the_kernel_is_the_definition(width: int) -> None:
    given = case(width, torch.float32)
    found = fused(given)
    wanted = reference.embed_norms(**given, eps=EPS)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=2e-7)
    assert not found[0, 0, :width].any() and found[0, 0, width:].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_and_unfused_are_equal_to_the_last_bit(dtype: torch.dtype) -> None:
    given = case(96, dtype)
    assert torch.equal(fused(given), unfused(given))
    assert torch.equal(reference.embed_norms(**given, eps=EPS), unfused(given, reference.rms_norm))


@pytest.mark.parametrize(
    "mistake", ["hidden first", "position 0 read", "norms exchanged", "hidden also zeroed"]
)
def test_mistakes_are_seen(mistake: str) -> None:
    given = case(96, torch.float32)
    wanted = reference.embed_norms(**given, eps=EPS)
    wrong = dict(given)
    if mistake == "position 0 read":
        wrong["positions"] = given["positions"] + 1
    elif mistake == "norms exchanged":
        wrong |= {"embed_weight": given["hidden_weight"], "hidden_weight": given["embed_weight"]}
    elif mistake == "hidden also zeroed":
        wrong["hidden"] = given["hidden"].clone()
        wrong["hidden"][0, 0] = 0
    found = fused(wrong)
    if mistake == "hidden first":
        found = torch.cat(found.chunk(2, -1)[::-1], -1)
    assert (found - wanted).abs().max() > 0.1
