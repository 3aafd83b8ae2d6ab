"""Element-wise kinds against numpy."""

from __future__ import annotations

from math import erf

import numpy as np
import pytest
import torch

from tests.runtime.interpreter.harness import run

_erf = np.vectorize(erf)


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)


_UNARY = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "recip": lambda x: 1.0 / x,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "sin": np.sin,
    "cos": np.cos,
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0.0),
    "tanh": np.tanh,
    "softplus": _softplus,
    "gelu_erf": lambda x: 0.5 * x * (1.0 + _erf(x / np.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
}


def test_unary_operations_match_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, generator=generator) * 3
    positive = x.abs() + 0.1
    names = list(_UNARY)

    def definition(net, a, b):
        return [getattr(net, n)(b if n in ("log", "sqrt", "recip") else a) for n in names]

    results = run(definition, {"a": x, "b": positive})
    for name, result in zip(names, results, strict=True):
        source = positive if name in ("log", "sqrt", "recip") else x
        expected = _UNARY[name](source.double().numpy())
        np.testing.assert_allclose(result.numpy(), expected, rtol=2e-5, atol=2e-6, err_msg=name)


def test_softplus_is_exact_where_torch_would_switch_to_the_identity() -> None:
    x = torch.tensor([20.5, 30.0, 50.0, -30.0])
    (result,) = run(lambda net, a: net.softplus(a), {"a": x}, compile_engine=False)
    np.testing.assert_allclose(result.numpy(), _softplus(x.double().numpy()), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_binary_operations_match_numpy(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-9, 9, (4, 3), generator=generator).to(dtype)
    b = torch.randint(1, 5, (4, 1), generator=generator).to(dtype)
    table = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "maximum": np.maximum,
        "minimum": np.minimum,
        "floor_div": np.floor_divide,
        "greater": np.greater,
        "less": np.less,
        "equal": np.equal,
        "greater_equal": np.greater_equal,
        "less_equal": np.less_equal,
    }
    if dtype.is_floating_point:
        table |= {"div": np.divide}
    results = run(lambda net, x, y: [getattr(net, n)(x, y) for n in table], {"a": a, "b": b})
    for (name, reference), result in zip(table.items(), results, strict=True):
        np.testing.assert_allclose(
            result.numpy(), reference(a.numpy(), b.numpy()), rtol=1e-6, err_msg=name
        )


def test_numbers_take_the_rank_and_type_of_the_other_operand() -> None:
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    results = run(
        lambda net, a: [
            net.mul(a, 0.5),
            net.sub(1, a),
            net.pow(a, 2.0),
            net.select(net.greater(a, 2), a, -1.0),
        ],
        {"a": x},
    )
    wide = x.float()
    expected = [wide * 0.5, 1 - wide, wide**2, torch.where(wide > 2, wide, -1.0)]
    for result, want in zip(results, expected, strict=True):
        assert result.dtype == torch.bfloat16
        assert torch.equal(result.float(), want)


def test_logic_and_select() -> None:
    a = torch.tensor([[True, True, False, False]])
    b = torch.tensor([[True, False, True, False]])
    x, y = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 6, 7, 8]])
    both, either, neither, chosen = run(
        lambda net, a, b, x, y: [
            net.logical_and(a, b),
            net.logical_or(a, b),
            net.logical_not(a),
            net.select(a, x, y),
        ],
        {"a": a, "b": b, "x": x, "y": y},
    )
    assert both.tolist() == [[True, False, False, False]]
    assert either.tolist() == [[True, True, True, False]]
    assert neither.tolist() == [[False, False, True, True]]
    assert chosen.tolist() == [[1, 2, 7, 8]]


def test_cast_truncates_and_rounds() -> None:
    x = torch.tensor([1.7, -1.7, 2.00390625])
    ints, half, flags = run(
        lambda net, a: [net.cast(a, "int32"), net.cast(a, "bfloat16"), net.cast(a, "bool")],
        {"a": x},
    )
    assert ints.tolist() == [1, -1, 2]
    assert half.dtype == torch.bfloat16 and half[2].item() == 2.0
    assert flags.tolist() == [True, True, True]
