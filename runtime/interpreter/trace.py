"""From a TensorRT network to a `Program`: the only module of the runtime that reads TensorRT
objects.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

from plugins.support.errors import BuildError, CapabilityError
from plugins.trt.network import Network
from plugins.trt.types import from_trt
from runtime.interpreter.layers import READERS, inputs_of
from runtime.interpreter.program import (
    Iteration,
    LoopBody,
    LoopOutput,
    Node,
    Program,
    Recurrence,
    TensorInfo,
    outer_reads,
)

_LOOP_TYPES = ("TRIP_LIMIT", "ITERATOR", "RECURRENCE", "LOOP_OUTPUT")


class _Layer:
    """A layer with what the bindings only tell after naming its class."""

    def __init__(self, index: int, raw: Any, trt: Any) -> None:
        self.index = index
        # Must be read before the cast: on an activation `.type` then means the function.
        self.type: str = raw.type.name
        if self.type not in READERS and self.type not in _LOOP_TYPES:
            raise CapabilityError(
                "the interpreter does not know a layer kind",
                where=raw.name,
                found=self.type,
                expected=", ".join(sorted(READERS)),
            )
        reader = READERS.get(self.type)
        raw.__class__ = getattr(trt, reader.cls if reader else _LOOP_CLASSES[self.type])
        self.raw = raw
        self.inputs: list[Any] = inputs_of(self.type, raw)
        self.outputs: list[str] = [raw.get_output(i).name for i in range(raw.num_outputs)]
        self.loop: str | None = raw.loop.name if self.type in _LOOP_TYPES else None

    @property
    def input_names(self) -> tuple[str | None, ...]:
        return tuple(None if t is None else t.name for t in self.inputs)


_LOOP_CLASSES = {
    "TRIP_LIMIT": "ITripLimitLayer",
    "ITERATOR": "IIteratorLayer",
    "RECURRENCE": "IRecurrenceLayer",
    "LOOP_OUTPUT": "ILoopOutputLayer",
}


class _Graph:
    """Layers with producers, consumers and loop membership."""

    def __init__(self, net: Network, targets: Iterable[str]) -> None:
        layers = [
            _Layer(i, net.raw.get_layer(i), net.trt)
            for i in range(net.raw.num_layers)
            if net.raw.get_layer(i).type.name not in ("CONSTANT", "ATTENTION_INPUT")
        ]
        self.producer = {name: layer for layer in layers for name in layer.outputs}
        self.limits = {la.loop: la for la in layers if la.type == "TRIP_LIMIT"}
        self.loops: dict[str, list[_Layer]] = {}
        for layer in layers:
            if layer.loop is not None:
                self.loops.setdefault(layer.loop, []).append(layer)
        self.layers = self._reachable(targets)
        consumers: dict[str, list[_Layer]] = {}
        for layer in self.layers:
            for name in layer.input_names:
                if name is not None:
                    consumers.setdefault(name, []).append(layer)
        inside = {loop: self._inside(loop, consumers) for loop in self.loops}
        # The innermost loop of a layer is the smallest one that contains it.
        by_size = sorted(inside, key=lambda loop: len(inside[loop]))
        self.home: dict[int, str | None] = {}
        for layer in self.layers:
            self.home[layer.index] = next(
                (loop for loop in by_size if layer.index in inside[loop]), None
            )
        self.parent: dict[str, str | None] = {}
        for loop, members in self.loops.items():
            outputs = [m for m in members if m.type == "LOOP_OUTPUT" and m.index in self.home]
            if outputs:
                self.parent[loop] = self.home[outputs[0].index]

    def _reachable(self, targets: Iterable[str]) -> list[_Layer]:
        found: dict[int, _Layer] = {}
        pending = list(targets)
        while pending:
            layer = self.producer.get(pending.pop())
            if layer is None or layer.index in found:
                continue
            group = [layer]
            if layer.loop is not None:
                group += [m for m in self.loops[layer.loop] if m.type != "LOOP_OUTPUT"]
            for member in group:
                found[member.index] = member
                pending.extend(n for n in member.input_names if n is not None)
        return [found[index] for index in sorted(found)]

    def _inside(self, loop: str, consumers: Mapping[str, list[_Layer]]) -> set[int]:
        """Layers whose value differs between iterations of `loop`."""
        starts = [m for m in self.loops[loop] if m.type in ("ITERATOR", "RECURRENCE")]
        found = {m.index for m in starts}
        pending = [name for m in starts for name in m.outputs]
        while pending:
            for layer in consumers.get(pending.pop(), ()):
                ends = layer.loop == loop and layer.type in ("LOOP_OUTPUT", "TRIP_LIMIT")
                if not ends and layer.index not in found:
                    found.add(layer.index)
                    pending.extend(layer.outputs)
        return found


class _Tracer:
    def __init__(self, net: Network) -> None:
        self._net = net
        self._targets = (*net.outputs, *(t.name for t in net.taps.values()))
        self._graph = _Graph(net, self._targets)
        self._tensors: dict[str, TensorInfo] = {}

    def program(self) -> Program:
        net = self._net
        self._refuse_stale_cache_reads()
        nodes = self._order(None)
        inputs = tuple(n for n in net.inputs if n not in net.weight_inputs)
        used = {n for node in nodes for n in node.inputs if n is not None}
        used |= set(self._targets)
        weights = {n: n for n in net.weight_inputs if n in used}
        literals = {}
        for name, constant in net.constants.items():
            if name not in used:
                continue
            if constant.weight is None:
                literals[name] = constant.array
            else:
                weights[name] = constant.weight
        for name in (*inputs, *weights, *literals):
            tensor = net.inputs.get(name)
            if tensor is not None:
                self._declare(tensor)
            else:
                constant = net.constants[name]
                self._tensors[name] = TensorInfo.model_construct(
                    dtype=constant.dtype, shape=constant.shape
                )
        program = Program(
            nodes=nodes,
            tensors=self._tensors,
            inputs=inputs,
            outputs=tuple(net.outputs),
            weights=weights,
            literals=literals,
            taps={name: tensor.name for name, tensor in net.taps.items()},
            aliases=dict(net.aliases),
        )
        program.check("traced network")
        return program

    def _declare(self, tensor: Any) -> None:
        self._tensors[tensor.name] = TensorInfo.model_construct(
            dtype=from_trt(tensor.dtype), shape=self._net.shape(tensor)
        )

    def _refuse_stale_cache_reads(self) -> None:
        """A cache that is updated in place may be read only after the update."""
        caches = set(self._net.aliases.values())
        for layer in self._graph.layers:
            call = self._net.plugins.get(layer.raw.name)
            updates: tuple[int, ...] = call.updates if call else ()
            if layer.type == "KV_CACHE_UPDATE":
                updates = (0,)
            for position, name in enumerate(layer.input_names):
                if name in caches and position not in updates:
                    raise BuildError(
                        "a cache that is updated in place is read before its update",
                        where=layer.raw.name,
                        found=name,
                        fix=f"read {name}.updated",
                    )

    # -- ordering ------------------------------------------------------------------------------

    def _order(self, home: str | None) -> tuple[Node, ...]:
        """Nodes of one context (the network or a loop body) in an order that can run.

        A context's units are its own layers and the loops directly in it.
        """
        graph = self._graph
        units: dict[str, tuple[int, list[str | None], tuple[str, ...], Any]] = {}
        for layer in graph.layers:
            if graph.home[layer.index] == home and layer.loop is None:
                units[layer.raw.name] = (
                    layer.index,
                    list(layer.input_names),
                    tuple(layer.outputs),
                    layer,
                )
        for loop, parent in graph.parent.items():
            if parent == home:
                node = self._loop(loop)
                index = min(m.index for m in graph.loops[loop])
                units[loop] = (index, list(node.inputs), node.outputs, node)
        return tuple(self._emit(unit) for unit in _topological(units))

    def _emit(self, unit: Any) -> Node:
        if isinstance(unit, Node):
            return unit
        layer: _Layer = unit
        reader = READERS[layer.type]
        for index in range(layer.raw.num_outputs):
            self._declare(layer.raw.get_output(index))
        attributes = reader.read(layer.raw)
        if reader.kind == "plugin":
            call = self._net.plugins[layer.raw.name]
            attributes = {"op": call.op, "values": call.attributes}
        return Node.model_construct(
            kind=reader.kind,
            name=layer.raw.name,
            scope=layer.raw.metadata,
            inputs=layer.input_names,
            outputs=tuple(layer.outputs),
            attributes=attributes,
            loop=None,
        )

    def _loop(self, name: str) -> Node:
        graph = self._graph
        members = graph.loops[name]
        reachable = {layer.index for layer in graph.layers}
        limit = graph.limits[name]
        iterations, recurrences, outputs = [], [], []
        for member in members:
            raw = member.raw
            if member.type == "ITERATOR":
                self._declare(raw.get_output(0))
                iterations.append(
                    Iteration(
                        source=member.inputs[0].name,
                        axis=raw.axis,
                        reverse=raw.reverse,
                        output=member.outputs[0],
                    )
                )
            elif member.type == "RECURRENCE":
                self._declare(raw.get_output(0))
                recurrences.append(
                    Recurrence(
                        initial=member.inputs[0].name,
                        next=member.inputs[1].name,
                        output=member.outputs[0],
                    )
                )
            elif member.type == "LOOP_OUTPUT" and member.index in reachable:
                self._declare(raw.get_output(0))
                mode = {"LAST_VALUE": "last", "CONCATENATE": "stack", "REVERSE": "reverse"}
                outputs.append(
                    LoopOutput.model_validate(
                        {
                            "mode": mode[raw.kind.name],
                            "source": member.inputs[0].name,
                            "axis": raw.axis,
                            "output": member.outputs[0],
                        }
                    )
                )
        nodes = self._order(name)
        counted = limit.raw.kind.name == "COUNT"
        condition = None if counted else limit.inputs[0].name
        nodes, condition_nodes = _condition_first(nodes, condition)
        body = LoopBody.model_construct(
            trip_count=limit.inputs[0].name if counted else None,
            condition=condition,
            condition_nodes=condition_nodes,
            iterations=tuple(iterations),
            recurrences=tuple(recurrences),
            outputs=tuple(outputs),
            nodes=nodes,
        )
        return Node.model_construct(
            kind="loop",
            name=name,
            scope=limit.raw.metadata,
            inputs=outer_reads(body),
            outputs=tuple(o.output for o in outputs),
            attributes={},
            loop=body,
        )


def _condition_first(
    nodes: tuple[Node, ...], condition: str | None
) -> tuple[tuple[Node, ...], int]:
    """Put the nodes a condition needs in front, keeping the order otherwise."""
    if condition is None:
        return nodes, 0
    needed = {condition}
    first = []
    for node in reversed(nodes):
        if needed & set(node.outputs):
            needed |= {n for n in node.inputs if n is not None}
            first.append(node)
    first.reverse()
    chosen = {node.name for node in first}
    return (*first, *(n for n in nodes if n.name not in chosen)), len(first)


def _topological(
    units: Mapping[str, tuple[int, list[str | None], tuple[str, ...], Any]],
) -> list[Any]:
    """Order units so that each comes after what it reads, by creation where free."""
    producer = {name: key for key, unit in units.items() for name in unit[2]}
    waiting: dict[str, int] = {}
    followers: dict[str, list[str]] = {}
    for key, (_, reads, _, _) in units.items():
        sources = {producer[n] for n in reads if n is not None and n in producer} - {key}
        waiting[key] = len(sources)
        for source in sources:
            followers.setdefault(source, []).append(key)
    ready = [(units[key][0], key) for key, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, key = heapq.heappop(ready)
        ordered.append(units[key][3])
        for follower in followers.get(key, ()):
            waiting[follower] -= 1
            if waiting[follower] == 0:
                heapq.heappush(ready, (units[follower][0], follower))
    if len(ordered) != len(units):
        raise BuildError(
            "the network has a cycle",
            found=", ".join(sorted(key for key, count in waiting.items() if count)[:5]),
        )
    return ordered


def trace(net: Network) -> Program:
    """Read a defined network into a program.

    Raises CapabilityError naming a layer the interpreter has no kind for, BuildError for a
    cache that is read before its in-place update.
    """
    net.finish()
    return _Tracer(net).program()
