"""Reductions, products, selection, convolution against numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.interpreter.execute import Interpreter
from runtime.interpreter.trace import trace
from tests.runtime.interpreter.harness import define, new_network, run


def _random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def test_reductions_match_numpy() -> None:
    x = _random(2, 3, 4)
    table = {
        "reduce_sum": np.sum,
        "reduce_mean": np.mean,
        "reduce_max": np.max,
        "reduce_prod": np.prod,
    }
    results = run(
        lambda net, a: [
            getattr(net, n)(a, axes, keep)
            for n in table
            for axes in ((1,), (0, 2), (-1,))
            for keep in (True, False)
        ],
        {"a": x},
    )
    it = iter(results)
    for reference in table.values():
        for axes in ((1,), (0, 2), (-1,)):
            for keep in (True, False):
                expected = reference(x.double().numpy(), axis=axes, keepdims=keep)
                np.testing.assert_allclose(next(it).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_integer_sums_keep_their_type() -> None:
    x = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    (result,) = run(lambda net, a: net.reduce_sum(a, (1,)), {"a": x})
    assert result.dtype == torch.int32 and result.item() == 6


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_matmul_matches_numpy(transpose_a: bool, transpose_b: bool, shared: bool) -> None:
    a = _random(2, 3, 5, 4) if transpose_a else _random(2, 3, 4, 5)
    lead = (1, 1) if shared else (2, 3)
    b = _random(*lead, 6, 5, seed=1) if transpose_b else _random(*lead, 5, 6, seed=1)
    (result,) = run(
        lambda net, x, y: net.matmul(x, y, transpose_a, transpose_b),
        {"x": a, "y": b},
        static=True,
        compile_engine=not shared,
    )
    left = a.double().numpy().swapaxes(-1, -2) if transpose_a else a.double().numpy()
    right = b.double().numpy().swapaxes(-1, -2) if transpose_b else b.double().numpy()
    np.testing.assert_allclose(result.numpy(), left @ right, rtol=1e-5, atol=1e-5)


def test_softmax_along_each_axis() -> None:
    x = _random(3, 4)
    results = run(lambda net, a: [net.softmax(a, 0), net.softmax(a, -1)], {"a": x})
    for axis, result in zip((0, 1), results, strict=True):
        e = np.exp(x.double().numpy())
        np.testing.assert_allclose(result.numpy(), e / e.sum(axis, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("largest", [True, False])
def test_topk_is_sorted_and_its_indices_are_int32(largest: bool) -> None:
    x = torch.randperm(24, generator=torch.Generator().manual_seed(3)).float().reshape(2, 12)
    values, indices, dynamic, _ = run(
        lambda net, a: [
            *net.topk(a, 3, 1, largest),
            *net.topk(a, net.dim_min(net.dim(a, 1), 5), 1, largest),
        ],
        {"a": x},
    )
    order = np.argsort(-x.numpy() if largest else x.numpy(), 1)
    assert np.array_equal(indices.numpy(), order[:, :3]) and indices.dtype == torch.int32
    assert np.array_equal(values.numpy(), np.take_along_axis(x.numpy(), order[:, :3], 1))
    assert np.array_equal(dynamic.numpy(), np.take_along_axis(x.numpy(), order[:, :5], 1))


def test_cumsum_inclusive_and_exclusive() -> None:
    x = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    inclusive, exclusive = run(
        lambda net, a: [net.cumsum(a, 1), net.cumsum(a, 0, exclusive=True)], {"a": x}
    )
    assert inclusive.tolist() == [[1, 3, 6], [4, 9, 15]]
    assert exclusive.tolist() == [[0, 0, 0], [1, 2, 3]]


@pytest.mark.parametrize("mode", ["inputs", "embedded"])
def test_depthwise_causal_convolution_with_dilation(mode: str) -> None:
    x, kernel = _random(2, 4, 1, 11), _random(4, 1, 1, 3, seed=1)
    net = new_network({"kernel": kernel}, mode)
    define(
        net,
        lambda net, a: net.convolution(
            a, net.weight("kernel", "float32", (4, 1, 1, 3)), groups=4, dilation=(1, 2)
        ),
        {"a": x},
        static=True,
    )
    result = Interpreter(trace(net), {"kernel": kernel}, strict=True).run({"a": x})["y0"]
    expected = np.zeros((2, 4, 7))
    for c in range(4):
        for t in range(7):
            for j in range(3):
                expected[:, c, t] += (
                    x[:, c, 0, t + 2 * j].double().numpy() * kernel[c, 0, 0, j].item()
                )
    np.testing.assert_allclose(result[:, :, 0].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_strided_and_padded_convolution() -> None:
    x, kernel = _random(1, 3, 6, 8), _random(5, 3, 3, 3, seed=1)
    (result,) = run(
        lambda net, a: net.convolution(a, net.literal(kernel), stride=(2, 2), padding=(1, 1)),
        {"a": x},
        static=True,
    )
    expected = torch.nn.functional.conv2d(x.double(), kernel.double(), stride=2, padding=1)
    np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)


def test_layer_norm() -> None:
    x, scale, bias = _random(2, 3, 8), _random(1, 1, 8, seed=1), _random(1, 1, 8, seed=2)
    (result,) = run(
        lambda net, a: net.layer_norm(a, net.literal(scale), net.literal(bias), (2,), 1e-3),
        {"a": x},
        static=True,
    )
    wide = x.double().numpy()
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3)
    expected = expected * scale.numpy() + bias.numpy()
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-5)
