"""Both forms of the experts against a loop over tokens, with loads that need several rounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from converters.layers.moe import Experts, capacity_experts, gather_experts, softmax_router
from tests.converters.layers.evaluate import evaluate

EXPERTS = Experts(name="mlp.experts", count=16, chosen=4, hidden=12, intermediate=8)


def _weights() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    return {
        "mlp.experts.gate_up.weight": torch.randn(16, 16, 12, generator=g) * 0.3,
        "mlp.experts.down.weight": torch.randn(16, 12, 8, generator=g) * 0.3,
        "mlp.router.weight": torch.randn(16, 12, generator=g),
    }


def _expected(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    stored = _weights()
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            gate, up = (stored["mlp.experts.gate_up.weight"][expert] @ x[token]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            out[token] += weight * (stored["mlp.experts.down.weight"][expert] @ hidden)
    return out


def _inputs(tokens: int, spread: bool) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, 16, generator=g)
    if not spread:
        # Expert 3 is everybody's choice: many rounds.
        scores[:, 3] += 2
    return {
        "x": torch.randn(tokens, 12, generator=g),
        "ids": scores.topk(4).indices.int(),
        "weights": torch.rand(tokens, 4, generator=g),
    }


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize(
    ("tokens", "max_tokens"), [(1, None), (64, None), (200, None), (1, 40), (40, 40)]
)
def test_capacity_form_drops_no_token(tokens: int, max_tokens: int | None, spread: bool) -> None:
    inputs = _inputs(tokens, spread)
    valid = torch.arange(tokens) % 7 != 5

    def build(net, x, ids, weights, valid):
        return {
            "out": capacity_experts(net, x, ids, weights, EXPERTS, valid, max_tokens=max_tokens)
        }

    dynamic = {name: (0,) for name in ("x", "ids", "weights", "valid")}
    out = evaluate(build, {**inputs, "valid": valid}, _weights(), dynamic=dynamic)["out"]
    expected = _expected(**inputs) * valid[:, None]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_gather_form() -> None:
    inputs = _inputs(9, spread=True)

    def build(net, x, ids, weights):
        return {"out": gather_experts(net, x, ids, weights, EXPERTS)}

    dynamic = {name: (0,) for name in inputs}
    out = evaluate(build, inputs, _weights(), dynamic=dynamic)["out"]
    torch.testing.assert_close(out, _expected(**inputs), atol=1e-5, rtol=1e-5)
    swapped = torch.cat(_weights()["mlp.experts.gate_up.weight"].chunk(2, 1)[::-1], 1)
    wrong = evaluate(
        build, inputs, _weights() | {"mlp.experts.gate_up.weight": swapped}, dynamic=dynamic
    )["out"]
    assert (wrong - out).abs().max() > 1e-2


@pytest.mark.parametrize("normalize", [True, False])
def test_router(normalize: bool) -> None:
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(1))

    def build(net, x):
        ids, weights = softmax_router(net, x, "mlp.router", EXPERTS, normalize=normalize)
        return {"ids": ids, "shares": weights}

    out = evaluate(build, {"x": x}, _weights(), dynamic={"x": (0,)})
    values, ids = torch.softmax(x @ _weights()["mlp.router.weight"].T, -1).topk(4)
    if normalize:
        values = values / values.sum(-1, keepdim=True)
    assert torch.equal(out["ids"].long(), ids)
    torch.testing.assert_close(out["shares"], values)
