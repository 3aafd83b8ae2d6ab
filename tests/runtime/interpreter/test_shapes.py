"""Kinds that move values, against numpy, on random shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.support.errors import InputError
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.trace import trace
from tests.runtime.interpreter.harness import define, new_network, run

_FEW = settings(max_examples=15, deadline=None)
_SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def _values(sizes: list[int]) -> torch.Tensor:
    return torch.arange(int(np.prod(sizes)), dtype=torch.float32).reshape(sizes)


@_FEW
@given(_SIZES, st.randoms(use_true_random=False))
def test_transpose(sizes: list[int], random) -> None:
    x = _values(sizes)
    perm = list(range(len(sizes)))
    random.shuffle(perm)
    (result,) = run(lambda net, a: net.transpose(a, perm), {"a": x}, compile_engine=False)
    assert np.array_equal(result.numpy(), x.numpy().transpose(perm))


@_FEW
@given(_SIZES, st.data())
def test_slice(sizes: list[int], data) -> None:
    x = _values(sizes)
    start = [data.draw(st.integers(0, n - 1)) for n in sizes]
    stride = [data.draw(st.integers(1, 3)) for _ in sizes]
    size = [
        data.draw(st.integers(1, (n - 1 - f) // s + 1))
        for n, f, s in zip(sizes, start, stride, strict=True)
    ]
    (result,) = run(
        lambda net, a: net.slice(a, start, size, stride),
        {"a": x},
        static=True,
        compile_engine=False,
    )
    index = tuple(
        slice(f, f + (n - 1) * s + 1, s) for f, n, s in zip(start, size, stride, strict=True)
    )
    assert np.array_equal(result.numpy(), x.numpy()[index])


@_FEW
@given(_SIZES, st.data())
def test_gather_along_an_axis(sizes: list[int], data) -> None:
    x = _values(sizes)
    axis = data.draw(st.integers(0, len(sizes) - 1))
    shape = data.draw(st.lists(st.integers(1, 3), min_size=0, max_size=2))
    index = np.random.default_rng(0).integers(0, sizes[axis], shape)
    (result,) = run(
        lambda net, a, i: net.gather(a, i, axis),
        {"a": x, "i": torch.from_numpy(np.asarray(index)).int()},
        compile_engine=False,
    )
    assert np.array_equal(result.numpy(), np.take(x.numpy(), index, axis))


@_FEW
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_gather_with_a_batch(b: int, mid: int, n: int, row: int, contiguous: bool) -> None:
    x = _values([b, mid, n, row])
    if not contiguous:
        x = x.flip(3).transpose(2, 3).contiguous().transpose(2, 3)
    index = torch.from_numpy(np.random.default_rng(0).integers(0, n, (b, 3))).int()
    (result,) = run(
        lambda net, a, i: net.gather(a, i, 2, elementwise_dims=1),
        {"a": x, "i": index},
        compile_engine=False,
    )
    expected = np.stack([np.take(x[j].numpy(), index[j].numpy(), 1) for j in range(b)])
    assert np.array_equal(result.numpy(), expected)


@_FEW
@given(_SIZES, st.data())
def test_concat_unsqueeze_squeeze(sizes: list[int], data) -> None:
    x = _values(sizes)
    axis = data.draw(st.integers(0, len(sizes) - 1))
    new = data.draw(st.integers(0, len(sizes)))
    joined, wide, back = run(
        lambda net, a, b: [
            net.concat([a, b, a], axis),
            net.unsqueeze(a, (new,)),
            net.squeeze(net.unsqueeze(a, (new,)), (new,)),
        ],
        {"a": x, "b": -x},
        compile_engine=False,
    )
    assert np.array_equal(joined.numpy(), np.concatenate([x, -x, x], axis))
    assert np.array_equal(wide.numpy(), np.expand_dims(x.numpy(), new))
    assert torch.equal(back, x)


def test_reshape_by_dimensions_of_the_call() -> None:
    x = _values([2, 3, 8])

    def definition(net, a):
        rows = net.dim_mul(net.dim(a, 0), net.dim(a, 1))
        return [net.reshape(a, (rows, 8)), net.reshape(a, (net.dim(a, 0), -1, 4))]

    flat, split = run(definition, {"a": x})
    assert torch.equal(flat, x.reshape(6, 8)) and torch.equal(split, x.reshape(2, 6, 4))


def test_expand_repeats_only_dimensions_of_one() -> None:
    x, other = _values([1, 3, 1]), torch.zeros(5)
    net = new_network()
    a = net.input("a", "float32", (1, 3, 1))
    b = net.input("b", "float32", (-1,))
    net.output(net.expand(a, (net.dim(b, 0), -1, 4)), "y0")
    result = Interpreter(trace(net), {}, strict=True).run({"a": x, "b": other})["y0"]
    assert torch.equal(result, x.expand(5, 3, 4))


def test_iota_and_dimension_arithmetic() -> None:
    x = torch.zeros(2, 7)

    def definition(net, a):
        n = net.dim(a, 1)
        total = net.dim_add(net.dim_floor_div(n, 2), 1)
        capped = net.dim_min(net.dim_max(total, 3), net.dim_sub(n, 1))
        return [net.iota(n), net.iota(capped, 5), net.iota(3)]

    full, part, static = run(definition, {"a": x})
    assert full.tolist() == list(range(7)) and full.dtype == torch.int32
    assert part.tolist() == [5, 6, 7, 8]
    assert static.tolist() == [0, 1, 2]


def test_narrow_keeps_other_dimensions() -> None:
    x = _values([2, 6, 3])
    (result,) = run(lambda net, a: net.narrow(a, 1, net.dim_sub(net.dim(a, 1), 2), 2), {"a": x})
    assert torch.equal(result, x[:, 4:])


def test_gather_elements_and_coordinates() -> None:
    x = _values([2, 3, 4])
    index = torch.tensor([[[0, 2, 1, 0]], [[2, 0, 0, 1]]], dtype=torch.int32)
    points = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32)
    rows = torch.tensor([[[2], [0]], [[1], [1]]], dtype=torch.int32)
    elements, coordinates, batched = run(
        lambda net, a, i, p, r: [
            net.gather_elements(a, i, 1),
            net.gather_nd(a, p),
            net.gather_nd(a, r, elementwise_dims=1),
        ],
        {"a": x, "i": index, "p": points, "r": rows},
        static=True,
    )
    assert np.array_equal(elements.numpy(), np.take_along_axis(x.numpy(), index.numpy(), 1))
    assert torch.equal(coordinates, torch.stack((x[0, 2], x[1, 0])))
    assert torch.equal(batched, torch.stack((x[0, [2, 0]], x[1, [1, 1]])))


def test_scatter_elements_and_rows() -> None:
    x = torch.zeros(2, 5)
    index = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32)
    updates = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rows = torch.tensor([[1]], dtype=torch.int32)
    row = torch.tensor([[9.0, 8.0, 7.0, 6.0, 5.0]])
    elements, whole = run(
        lambda net, a, i, u, r, w: [net.scatter_elements(a, i, u, 1), net.scatter_nd(a, r, w)],
        {"a": x, "i": index, "u": updates, "r": rows, "w": row},
        static=True,
    )
    assert elements.tolist() == [[0, 2, 0, 0, 1], [3, 0, 4, 0, 0]]
    assert whole.tolist() == [[0] * 5, row[0].tolist()]


@pytest.mark.parametrize("bad", [4, -1])
@pytest.mark.parametrize("batch", [0, 1])
def test_an_index_outside_is_an_error_that_names_the_layer(bad: int, batch: int) -> None:
    x = _values([2, 4, 3])
    net = new_network()
    index = torch.tensor([[bad, 0], [1, 2]], dtype=torch.int32)
    with net.scope("lookup"):
        define(
            net,
            lambda net, a, i: net.gather(a, i, 1, elementwise_dims=batch),
            {"a": x, "i": index},
        )
    interpreter = Interpreter(trace(net), {})
    with pytest.raises(InputError) as caught:
        interpreter.run({"a": x, "i": index})
    assert "lookup.gather" in str(caught.value)
