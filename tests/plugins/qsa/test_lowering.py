"""The native lowering of QSA, on the interpreter, against the torch definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plugins.qsa import lowering, reference
from plugins.trt.backend import load_backend
from plugins.trt.network import Network
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.trace import trace

BATCH, HEADS, KV_HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH, ROWS = 3, 6, 2, 16, 8, 16, 64
SELECTION = reference.Selection(ratio=4, blocks=5)
SCALE = 0.3


def _inputs(queries: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(queries)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    # With eight index heads no score is exactly zero, hence no ties.
    positions = torch.randint(0, ROWS - queries, (BATCH, 1), generator=g) + torch.arange(queries)
    positions[0] = torch.arange(queries)
    positions[1] += ROWS - queries - positions[1, 0]
    positions[2, queries // 2 :] = -1
    return {
        "query": normal(BATCH, HEADS, queries, WIDTH),
        "keys": normal(BATCH, KV_HEADS, ROWS, WIDTH),
        "values": normal(BATCH, KV_HEADS, ROWS, WIDTH),
        "index_query": normal(BATCH, INDEX_HEADS, queries, INDEX_WIDTH),
        "block_keys": normal(BATCH, 1, ROWS // 4, INDEX_WIDTH),
        "positions": positions.int(),
    }


def _run(inputs: dict[str, Tensor], phase: str, blocks: int = SELECTION.blocks) -> Tensor:
    net = Network(load_backend())
    context = phase == "context"
    tensors = {}
    for name, value in inputs.items():
        shape = [-1, *value.shape[1:]]
        if context and name in ("query", "index_query"):
            shape[2] = -1
        if context and name == "positions":
            shape[1] = -1
        tensors[name] = net.input(name, str(value.dtype).removeprefix("torch."), shape)
    visible = lowering.visible_blocks(net, tensors["positions"], SELECTION.ratio)
    chosen = lowering.select_blocks(
        net, tensors["index_query"], tensors["block_keys"], visible, blocks
    )
    attend = lowering.attend_context if context else lowering.attend_generation
    mixed = attend(
        net,
        tensors["query"],
        tensors["keys"],
        tensors["values"],
        chosen,
        tensors["positions"],
        ratio=SELECTION.ratio,
        scale=SCALE,
    )
    net.output(mixed, "mixed")
    return Interpreter(trace(net), {}).run(inputs)["mixed"]


def _expected(inputs: dict[str, Tensor]) -> Tensor:
    return reference.sparse_attention(
        inputs["query"],
        inputs["keys"],
        inputs["values"],
        inputs["index_query"],
        inputs["block_keys"][:, 0],
        inputs["positions"].long(),
        selection=SELECTION,
        scale=SCALE,
    )


@pytest.mark.parametrize(
    ("phase", "queries"), [("context", 40), ("generation", 1), ("generation", 4)]
)
def test_equals_the_definition(phase: str, queries: int) -> None:
    inputs = _inputs(queries)
    expected = _expected(inputs)
    torch.testing.assert_close(_run(inputs, phase), expected, atol=1e-5, rtol=1e-5)
    if queries > 1:
        assert torch.equal(
            expected[2, queries // 2 :], torch.zeros_like(expected[2, queries // 2 :])
        )
    # One block more or less is far outside the tolerance.
    wrong = _run(inputs, phase, SELECTION.blocks - 1)
    assert (wrong - expected).abs().max() > 1e-2


@pytest.mark.parametrize("phase", ["context", "generation"])
def test_invisible_rows_do_not_matter(phase: str) -> None:
    """What lies beyond a query in the caches is left over from other sequences."""
    inputs = _inputs(4)
    expected = _run(inputs, phase)
    last = int(inputs["positions"][0].max())
    for name in ("keys", "values"):
        inputs[name][0, :, last + 1 :] = 1e4
    inputs["block_keys"][0, :, (last + 1) // 4 :] = 1e4
    torch.testing.assert_close(_run(inputs, phase), expected)
    inputs["values"][0, :, 0] = 1e4
    assert (_run(inputs, phase) - expected).abs().max() > 1.0


@pytest.mark.parametrize("phase", ["context", "generation"])
def test_bf16(phase: str) -> None:
    inputs = _inputs(4, torch.bfloat16)
    expected = _expected(inputs)
    found = _run(inputs, phase)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)
