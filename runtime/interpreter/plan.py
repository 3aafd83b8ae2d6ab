"""Prepared runs: closures over registers, recorded while a program runs for the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from plugins.support.errors import InputError, ToolchainError
from runtime.interpreter.kinds import KINDS, VIEWS, Bound, Call, PluginOp
from runtime.interpreter.kinds.quantization import FLOAT4
from runtime.interpreter.program import LoopBody, Node, TensorInfo

Registers = list[torch.Tensor | None]
Step = Callable[[Registers], None]

# Larger values that follow from shapes alone are computed again in each run.
_STATIC_BYTES = 16 << 20
_HALVES = (torch.float16, torch.bfloat16)
_ERRORS = (RuntimeError, IndexError, ValueError, TypeError, AttributeError, KeyError)


def torch_dtype(name: str, promote: bool = False) -> torch.dtype:
    """The torch type a tensor of our dtype name is held in; FP4 is held as uint8 codes."""
    if name == FLOAT4:
        return torch.uint8
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return torch.float32 if promote and dtype in _HALVES else dtype


@dataclass
class Plan:
    """Steps for one combination of input shapes.

    Attributes:
        steps: what a run executes, in order.
        names: the layer each step belongs to.
        template: registers with everything that is the same in every run.
    """

    steps: list[Step]
    names: list[str]
    template: Registers

    def run(self, registers: Registers) -> None:
        """Execute. Raises InputError naming the layer that fails."""
        index = 0
        try:
            for index, step in enumerate(self.steps):  # noqa: B007
                step(registers)
        except ToolchainError:
            raise
        except _ERRORS as error:
            raise _failure(self.names[index], error) from error


def _failure(name: str, error: Exception) -> InputError:
    text = str(error).strip().splitlines()
    return InputError(
        "a layer cannot be executed", where=name, found=text[0] if text else type(error).__name__
    )


def last_uses(nodes: Sequence[Node]) -> list[tuple[str, ...]]:
    """For each node, the tensors that no later node reads."""
    last: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in (*node.inputs, *node.outputs):
            if name is not None:
                last[name] = index
    dead: list[list[str]] = [[] for _ in nodes]
    for name, index in last.items():
        dead[index].append(name)
    return [tuple(names) for names in dead]


@dataclass
class Preparation:
    """Runs nodes and records how to run them again.

    Attributes:
        tensors: declared types and shapes.
        slots: tensor name -> register.
        registers: values of this first run; private registers are appended.
        constant: registers with the same value in every run.
        keep: registers that must survive the run.
        device, promote, strict, plugin_ops: see `Interpreter`.
    """

    tensors: Mapping[str, TensorInfo]
    slots: Mapping[str, int]
    registers: Registers
    constant: set[int]
    keep: set[int]
    device: torch.device
    promote: bool
    strict: bool
    plugin_ops: Mapping[str, PluginOp]
    _steps: list[Step] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _moved: dict[int, int] = field(default_factory=dict)

    def run(self, nodes: Sequence[Node], dead: Sequence[Sequence[str]]) -> None:
        """Execute and record nodes; `dead` as from `last_uses`."""
        for node, names in zip(nodes, dead, strict=True):
            self._prepare(node, [self.slots[name] for name in names])

    def finish(self) -> Plan:
        """The recorded plan."""
        template: Registers = [None] * len(self.registers)
        for slot in self.constant:
            template[slot] = self.registers[slot]
        return Plan(self._steps, self._names, template)

    # -- one node ------------------------------------------------------------------------------

    def _prepare(self, node: Node, dead: Iterable[int]) -> None:
        before = len(self._steps)
        try:
            if node.loop is not None:
                self._loop(node, node.loop)
            else:
                self._record(node, KINDS[node.kind](self._call(node)))
        except ToolchainError:
            raise
        except _ERRORS as error:
            raise _failure(node.name, error) from error
        freed = tuple(s for s in dead if s not in self.constant and s not in self.keep)
        for slot in freed:
            self.registers[slot] = None
        if freed and len(self._steps) > before:
            self._steps[-1] = _freeing(self._steps[-1], freed)

    def _call(self, node: Node) -> Call:
        slots = [None if n is None else self.slots[n] for n in node.inputs]
        infos = [self.tensors[n] for n in node.outputs]
        return Call(
            node=node,
            values=[None if s is None else self.registers[s] for s in slots],
            constant=[s is not None and s in self.constant for s in slots],
            names=[None if n is None else self.tensors[n].dtype for n in node.inputs],
            out_dtypes=[torch_dtype(info.dtype, self.promote) for info in infos],
            out_names=[info.dtype for info in infos],
            device=self.device,
            plugin_ops=self.plugin_ops,
        )

    def _value(self, slot: int) -> torch.Tensor:
        value = self.registers[slot]
        assert value is not None
        return value

    def _record(self, node: Node, bound: Bound) -> None:
        reads = tuple(self.slots[n] for n in map(node.inputs.__getitem__, bound.arguments) if n)
        writes = tuple(self.slots[name] for name in node.outputs)
        function = bound.function
        static = node.kind != "kv_cache_update" and all(s in self.constant for s in reads)
        on_host = all(self._value(s).device.type == "cpu" for s in reads)
        if not (static and on_host):
            reads = tuple(self._on_device(s) for s in reads)
        if self.promote and node.kind not in VIEWS:
            if node.kind == "gather":
                function = _promoted(function)
            else:
                reads = tuple(self._promote(s, node.name) for s in reads)
        result = function(*map(self._value, reads))
        results = result if isinstance(result, tuple) else (result,)
        if len(results) != len(writes):
            raise InputError(
                "a layer returns another number of tensors than the program declares",
                where=node.name,
                expected=str(len(writes)),
                found=str(len(results)),
            )
        if self.strict:
            self._check(node, results)
        for slot, value in zip(writes, results, strict=True):
            self.registers[slot] = value
        if static and sum(r.nbytes for r in results) <= _STATIC_BYTES:
            self.constant.update(writes)
            return
        self._steps.append(_step(function, reads, writes))
        self._names.append(node.name)

    def _private(self, value: torch.Tensor) -> int:
        self.registers.append(value)
        return len(self.registers) - 1

    def _on_device(self, slot: int) -> int:
        """The register of a value on the device; constants may live on the host."""
        if slot not in self.constant or self._value(slot).device == self.device:
            return slot
        if slot not in self._moved:
            self._moved[slot] = self._private(self._value(slot).to(self.device))
            self.constant.add(self._moved[slot])
        return self._moved[slot]

    def _promote(self, slot: int, name: str) -> int:
        """The register of a value as float32; only large weights are still in 16 bits."""
        if self._value(slot).dtype not in _HALVES:
            return slot
        wide = self._private(self._value(slot).float())
        self._steps.append(_step(lambda x: x.float(), (slot,), (wide,)))
        self._names.append(name)
        return wide

    def _check(self, node: Node, results: Sequence[torch.Tensor]) -> None:
        for name, value in zip(node.outputs, results, strict=True):
            info = self.tensors[name]
            dtype = torch_dtype(info.dtype, self.promote)
            lazy = self.promote and value.dtype in _HALVES
            shape_fits = len(info.shape) == value.dim() and all(
                want in (-1, got) for want, got in zip(info.shape, value.shape, strict=True)
            )
            if not shape_fits or (value.dtype != dtype and not lazy):
                raise InputError(
                    "a layer's result is not what TensorRT inferred",
                    where=f"{node.name} ({node.kind})",
                    expected=f"{dtype} {list(info.shape)}",
                    found=f"{value.dtype} {list(value.shape)}",
                )

    # -- loops ---------------------------------------------------------------------------------

    def _loop(self, node: Node, loop: LoopBody) -> None:
        slots = self.slots
        outer_steps, outer_names = self._steps, self._names
        self._steps, self._names = [], []
        starts = [self._on_device(slots[r.initial]) for r in loop.recurrences]
        sources = [self._on_device(slots[i.source]) for i in loop.iterations]
        carried = [slots[r.output] for r in loop.recurrences]
        for target, start in zip(carried, starts, strict=True):
            self.registers[target] = self.registers[start]
        for iteration, source in zip(loop.iterations, sources, strict=True):
            position = -1 if iteration.reverse else 0
            value = self._value(source).select(iteration.axis, position)
            self.registers[slots[iteration.output]] = value
        dead = last_uses(loop.nodes)
        inner = {slots[n] for body in loop.nodes for n in body.outputs}
        # Body values that the loop itself reads at the end of an iteration.
        used = {slots[r.next] for r in loop.recurrences} | {slots[o.source] for o in loop.outputs}
        used |= {slots[loop.condition]} if loop.condition is not None else set()
        mortal = [[n for n in d if slots[n] in inner - used] for d in dead]
        split = loop.condition_nodes
        self.run(loop.nodes[:split], mortal[:split])
        head, self._steps = self._steps, []
        self.run(loop.nodes[split:], mortal[split:])
        body, names = self._steps, self._names
        self._steps, self._names = outer_steps, outer_names
        leftovers = tuple(
            s
            for s in (*inner, *carried, *(slots[i.output] for i in loop.iterations))
            if s not in self.constant
        )
        step = _loop_step(loop, slots, starts, sources, head, body, names, leftovers)
        step(self.registers)
        self._steps.append(step)
        self._names.append(node.name)


def _promoted(function: Callable[..., object]) -> Callable[..., torch.Tensor]:
    def run(*values: torch.Tensor) -> torch.Tensor:
        result = function(*values)
        assert isinstance(result, torch.Tensor)
        return result.float() if result.dtype in _HALVES else result

    return run


def _freeing(step: Step, dead: tuple[int, ...]) -> Step:
    if len(dead) == 1:
        only = dead[0]

        def free_one(r: Registers) -> None:
            step(r)
            r[only] = None

        return free_one

    def free(r: Registers) -> None:
        step(r)
        for slot in dead:
            r[slot] = None

    return free


def _step(function: Callable[..., object], reads: tuple[int, ...], writes: tuple[int, ...]) -> Step:
    """A closure for one node; the common arities avoid building argument lists."""
    f: Callable[..., torch.Tensor] = function  # type: ignore[assignment]
    if len(writes) == 1 and len(reads) == 1:
        (out,), (a,) = writes, reads

        def one(r: Registers) -> None:
            r[out] = f(r[a])

        return one
    if len(writes) == 1 and len(reads) == 2:
        (out,), (a, b) = writes, reads

        def two(r: Registers) -> None:
            r[out] = f(r[a], r[b])

        return two
    if len(writes) == 1:
        (out,) = writes

        def many(r: Registers) -> None:
            r[out] = f(*[r[i] for i in reads])

        return many

    def several(r: Registers) -> None:
        for out, value in zip(writes, f(*[r[i] for i in reads]), strict=True):
            r[out] = value

    return several


def _loop_step(
    loop: LoopBody,
    slots: Mapping[str, int],
    starts: Sequence[int],
    sources: Sequence[int],
    head: Sequence[Step],
    body: Sequence[Step],
    names: Sequence[str],
    leftovers: Sequence[int],
) -> Step:
    carried = [slots[r.output] for r in loop.recurrences]
    following = [slots[r.next] for r in loop.recurrences]
    windows = [
        (source, i.axis, i.reverse, slots[i.output])
        for source, i in zip(sources, loop.iterations, strict=True)
    ]
    stacked = [slots[o.source] for o in loop.outputs if o.mode != "last"]
    results = [(o.mode, slots[o.source], o.axis, slots[o.output]) for o in loop.outputs]
    trip = None if loop.trip_count is None else slots[loop.trip_count]
    condition = None if loop.condition is None else slots[loop.condition]

    def goes_on(r: Registers, index: int) -> bool:
        for step in head:
            step(r)
        value = r[trip if trip is not None else condition]  # type: ignore[index]
        assert value is not None
        return index < int(value) if trip is not None else bool(value)

    def run(r: Registers) -> None:
        rows: dict[int, list[torch.Tensor]] = {slot: [] for slot in stacked}
        for target, start in zip(carried, starts, strict=True):
            r[target] = r[start]
        index = 0
        while goes_on(r, index):
            for source, axis, reverse, out in windows:
                value = r[source]
                assert value is not None
                r[out] = value.select(axis, value.shape[axis] - 1 - index if reverse else index)
            for position, step in enumerate(body):
                try:
                    step(r)
                except ToolchainError:
                    raise
                except _ERRORS as error:
                    raise _failure(names[len(head) + position], error) from error
            for slot, kept in rows.items():
                row = r[slot]
                assert row is not None
                kept.append(row)
            values = [r[slot] for slot in following]
            for target, next_value in zip(carried, values, strict=True):
                r[target] = next_value
            index += 1
        if index == 0 and rows:
            raise ValueError("a loop that collects values runs zero times")
        for mode, source, axis, out in results:
            if mode == "last":
                r[out] = r[source]
                continue
            parts = rows[source]
            r[out] = torch.stack(parts[::-1] if mode == "reverse" else parts, axis)
        for slot in leftovers:
            r[slot] = None

    return run
