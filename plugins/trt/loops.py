"""Loops of the network facade."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from plugins.trt.quantization import QuantizationLayers
from plugins.trt.shapes import Dim
from plugins.trt.types import Tensor


class Loop:
    """One loop under construction; made by `LoopLayers.loop`."""

    def __init__(self, net: LoopLayers, loop: Any, count: Tensor) -> None:
        self._net, self._loop, self._count = net, loop, count
        self._pending: dict[str, Any] = {}
        self._recurrences: dict[str, Any] = {}

    def iterate(self, x: Tensor, axis: int, reverse: bool = False) -> Tensor:
        """The slice of x along `axis` that belongs to this iteration."""
        net = self._net
        axis = net._axis(x, axis, "iterate")
        return net._one(self._loop.add_iterator(x, axis, reverse), "iterate")

    def carry(self, initial: Tensor) -> Tensor:
        """A value that lives from iteration to iteration; `update` must set the next one."""
        layer = self._loop.add_recurrence(initial)
        value = self._net._one(layer, "carry")
        self._pending[value.name] = layer
        self._recurrences[value.name] = layer
        return value

    def update(self, carried: Tensor, value: Tensor) -> None:
        """Set what `carried` will be in the next iteration: same type and shape."""
        net = self._net
        layer = self._pending.pop(carried.name, None)
        if layer is None:
            raise net._fail("not a carried value, or updated twice", "update", found=carried.name)
        if net.dtype(carried) != net.dtype(value) or net.rank(carried) != net.rank(value):
            raise net._fail(
                "the next value has another type or rank",
                "update",
                expected=f"{net.dtype(carried)} {list(net.shape(carried))}",
                found=f"{net.dtype(value)} {list(net.shape(value))}",
            )
        layer.set_input(1, value)
        net._check_log(carried.name)
        net._register(carried, carried.name)

    def last(self, carried: Tensor) -> Tensor:
        """The carried value after the last iteration, usable outside the loop."""
        net = self._net
        if carried.name not in self._recurrences:
            raise net._fail("not a carried value", "last", found=carried.name)
        layer = self._loop.add_loop_output(carried, net.trt.LoopOutput.LAST_VALUE, 0)
        return net._one(layer, "last")

    def stack(self, x: Tensor, axis: int) -> Tensor:
        """x of all iterations, joined along a new dimension at `axis`, usable outside."""
        net = self._net
        layer = self._loop.add_loop_output(x, net.trt.LoopOutput.CONCATENATE, axis)
        layer.set_input(1, self._count)
        return net._one(layer, "stack")


class LoopLayers(QuantizationLayers):
    """The loop construct. Raises BuildError."""

    @contextmanager
    def loop(self, count: Dim) -> Iterator[Loop]:
        """Repeat what is added inside `count` times (an int or an INT64 tensor [1])."""
        made = self.raw.add_loop()
        made.name = self._unique("loop")
        self._claim(made.name)
        if isinstance(count, int):
            trips = self._scalar(count, "int64", 0)
            limit = made.add_trip_limit(trips, self.trt.TripLimit.COUNT)
        else:
            # A counted loop whose count is not a constant crashes the compiler of
            # tensorrt_rtx 1.7 when the network also has fused attention; the same loop with a
            # counter and a condition builds.
            trips = self.squeeze(self._dim_vector(count), (0,))
            counter = made.add_recurrence(self._scalar(0, "int64", 0))
            done = self._one(counter, "iteration")
            counter.set_input(1, self.add(done, 1))
            limit = made.add_trip_limit(self.less(done, trips), self.trt.TripLimit.WHILE)
        self._check_log(made.name)
        limit.name = f"{made.name}.trip_limit"
        limit.metadata = self.scope_name
        loop = Loop(self, made, trips)
        yield loop
        if loop._pending:
            raise self._fail(
                "a carried value is never updated", "loop", found=", ".join(loop._pending)
            )
