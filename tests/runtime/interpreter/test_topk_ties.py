"""Equal scores at the edge of a top-k are decided as on a row without its masked end."""

from __future__ import annotations

import pytest
import torch

from plugins.trt.backend import load_backend
from plugins.trt.network import Network
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.trace import trace


def _chosen(rows: torch.Tensor, k: int) -> torch.Tensor:
    net = Network(load_backend())
    x = net.input("x", "float32", (-1, rows.shape[1]))
    _, indices = net.topk(x, k, 1)
    net.output(indices, "indices")
    return Interpreter(trace(net), {}).run({"x": rows})["indices"]


@pytest.mark.parametrize("width", [40, 80, 600])
def test_masked_rows_choose_as_short_rows(width: int) -> None:
    g = torch.Generator().manual_seed(width)
    lengths = torch.randint(4, 36, (50,), generator=g).tolist()
    rows = torch.full((50, width), -1e30)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.randint(0, 3, (length,), generator=g).float()
    found = _chosen(rows, 4)
    plain = rows.topk(4).indices
    differs = 0
    for row, length, chosen, other in zip(rows, lengths, found, plain, strict=True):
        expected = row[:length].topk(4).indices
        assert set(chosen.tolist()) == set(expected.tolist())
        differs += set(other.tolist()) != set(expected.tolist())
    # Otherwise the rule would not be needed and this test would show nothing.
    assert differs > 5


def test_rows_without_ties_or_mask_are_left_alone() -> None:
    rows = torch.randn(20, 30, generator=torch.Generator().manual_seed(2))
    rows[10:, 20:] = -1e30
    assert torch.equal(_chosen(rows, 5).long(), rows.topk(5).indices)


def test_rows_with_fewer_scores_than_places() -> None:
    rows = torch.full((2, 12), -1e30)
    rows[0, :2] = 0.0
    found = _chosen(rows, 4)
    assert {0, 1} <= set(found[0].tolist())
    assert len(set(found[1].tolist())) == 4
