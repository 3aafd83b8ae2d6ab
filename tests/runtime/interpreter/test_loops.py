"""Loops against python loops."""

from __future__ import annotations

import pytest
import torch

from runtime.interpreter.program import kinds
from tests.runtime.interpreter.harness import program_of, run


def _decay(net, x, count):
    """s <- s / 2 + x[:, t]; all s and the last one."""
    with net.loop(count) as loop:
        token = loop.iterate(x, 1)
        state = loop.carry(net.reduce_sum(net.mul(x, 0.0), (1,), False))
        following = net.add(net.mul(state, 0.5), token)
        loop.update(state, following)
        rows = loop.stack(following, 1)
        last = loop.last(state)
    return [rows, last]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_recurrence_with_stacked_outputs(dynamic: bool) -> None:
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    rows, last = run(
        lambda net, a: _decay(net, a, net.dim(a, 1) if dynamic else 5), {"x": x}, static=not dynamic
    )
    state = torch.zeros(2, 3)
    for t in range(5):
        state = state / 2 + x[:, t]
        assert torch.allclose(rows[:, t], state)
    assert torch.allclose(last, state)


def test_reverse_iteration_and_two_carried_values_swap() -> None:
    x = torch.arange(6.0).reshape(3, 2)

    def definition(net, x):
        with net.loop(3) as loop:
            row = loop.iterate(x, 0, reverse=True)
            a = loop.carry(net.literal(torch.tensor([1.0, 1.0])))
            b = loop.carry(net.literal(torch.tensor([0.0, 0.0])))
            loop.update(a, net.add(b, row))
            loop.update(b, a)
            return [loop.last(a), loop.last(b), loop.stack(row, 0)]

    a, b, rows = run(definition, {"x": x}, static=True)
    left, right = torch.ones(2), torch.zeros(2)
    for t in (2, 1, 0):
        left, right = right + x[t], left
    assert torch.equal(a, left) and torch.equal(b, right) and torch.equal(rows, x.flip(0))


def test_what_does_not_change_is_computed_once_outside() -> None:
    def definition(net, x, y):
        with net.loop(net.dim(x, 0)) as loop:
            row = loop.iterate(x, 0)
            constant = net.exp(y)
            return loop.stack(net.mul(row, constant), 0)

    x, y = torch.ones(3, 2), torch.ones(2)
    program = program_of(definition, {"x": x, "y": y})
    (loop,) = [node.loop for node in program.nodes if node.loop is not None]
    assert "unary" not in {node.kind for node in loop.nodes}
    assert kinds(program)["unary"] == 1
    (result,) = run(definition, {"x": x, "y": y}, compile_engine=False)
    assert torch.allclose(result, torch.full((3, 2), 2.718281828))


def test_nested_loops() -> None:
    x = torch.arange(12.0).reshape(3, 4)

    def definition(net, x):
        with net.loop(3) as outer:
            row = outer.iterate(x, 0)
            total = outer.carry(net.literal(torch.tensor([0.0])))
            start = net.mul(total, 1.0)
            with net.loop(4) as inner:
                cell = inner.iterate(row, 0)
                partial = inner.carry(start)
                inner.update(partial, net.add(partial, net.reshape(cell, (1,))))
                done = inner.last(partial)
            outer.update(total, net.mul(done, 2.0))
            return outer.last(total)

    (result,) = run(definition, {"x": x}, static=True, compile_engine=False)
    total = 0.0
    for row in x.tolist():
        total = (total + sum(row)) * 2
    assert result.item() == total
