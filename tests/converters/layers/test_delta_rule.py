"""The chunked gated delta rule against the token recurrence, also where powers would explode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from converters.layers import delta_rule
from tests.converters.layers.evaluate import evaluate

HEADS, WIDTH, DEPTH = 3, 16, 24


def _inputs(tokens: int, batch: int = 2, repeated: bool = False) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    key = normal(batch, tokens, HEADS, WIDTH)
    if repeated:
        key = key[:, :1].expand(-1, tokens, -1, -1).contiguous()
    gamma = -torch.rand(batch, tokens, HEADS, generator=g) * (1e-4 if repeated else 1.5)
    beta = torch.rand(batch, tokens, HEADS, generator=g)
    return {
        "query": torch.nn.functional.normalize(normal(batch, tokens, HEADS, WIDTH), dim=-1),
        "key": torch.nn.functional.normalize(key, dim=-1),
        "value": normal(batch, tokens, HEADS, DEPTH),
        "gamma": gamma,
        "beta": beta * 0.01 + 0.99 if repeated else beta,
        "state": normal(batch, HEADS, WIDTH, DEPTH),
    }


def _recurrence(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Token by token in float64."""
    q, k, v, gamma, beta, state = (x.double() for x in inputs.values())
    rows = []
    for t in range(q.shape[1]):
        state = state * gamma[:, t, :, None, None].exp()
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        error = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * error[:, :, None]
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(rows, 1), state


def _run(inputs: dict[str, Tensor], chunked: bool) -> tuple[Tensor, Tensor]:
    form = delta_rule.delta_rule_chunks if chunked else delta_rule.delta_rule_steps
    names = ("query", "key", "value", "gamma", "beta")
    dynamic = {name: (0, 1) if chunked else (0,) for name in names} | {"state": (0,)}

    def build(net, **t):
        out, state = form(net, **t)
        return {"out": out, "final": state}

    result = evaluate(build, inputs, dynamic=dynamic)
    return result["out"], result["final"]


@pytest.mark.parametrize("tokens", [64, 192])
@pytest.mark.parametrize("repeated", [False, True])
def test_chunks_equal_the_recurrence(tokens: int, repeated: bool) -> None:
    inputs = _inputs(tokens, repeated=repeated)
    out, state = _run(inputs, chunked=True)
    expected, expected_state = _recurrence(inputs)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(state.double(), expected_state, atol=2e-5, rtol=1e-5)


def test_powers_of_the_system_would_not_do() -> None:
    """Why the inverse is merged from blocks: equal keys make powers cancel in float32."""
    inputs = _inputs(64, repeated=True)
    key = inputs["key"][0, :, 0]
    system = (inputs["beta"][0, :, :1] * (key @ key.T)).tril(-1)
    product, power = torch.eye(64), -system
    for _ in range(6):
        product, power = product @ (torch.eye(64) + power), power @ power
    exact = torch.linalg.inv(torch.eye(64).double() + system.double())
    assert (product - exact).abs().max() > 1.0


@pytest.mark.parametrize("tokens", [1, 3])
def test_steps_equal_the_recurrence(tokens: int) -> None:
    inputs = _inputs(tokens)
    out, state = _run(inputs, chunked=False)
    expected, expected_state = _recurrence(inputs)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(state.double(), expected_state, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunked", [True, False])
def test_neutral_tokens_leave_the_state_alone(chunked: bool) -> None:
    inputs = _inputs(64 if chunked else 2)
    inputs["gamma"].zero_()
    inputs["beta"].zero_()
    _, state = _run(inputs, chunked)
    assert torch.equal(state, inputs["state"])
