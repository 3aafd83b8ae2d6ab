"""Prepared runs: closures over registers, recorded while a program runs for the first time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        host_reads: layers that look at computed values to know what to do next.
    """

    steps: list[Step]
    names: list[str]
    template: Registers
    host_reads: tuple[str, ...]

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


class Site:
    """A node with its names resolved, once for all call shapes.

    Attributes:
        node: the node.
        prepare: the function of its kind; None for a loop.
        reads, writes: registers of inputs (None: absent) and outputs.
        names, out_names: declared dtypes of inputs and outputs.
        out_dtypes: torch types of the outputs.
        dead: registers that no later node of the same context reads.
        body: the sites of a loop.
    """

    __slots__ = (
        "body",
        "dead",
        "names",
        "node",
        "out_dtypes",
        "out_names",
        "prepare",
        "reads",
        "writes",
    )

    def __init__(
        self,
        node: Node,
        tensors: Mapping[str, TensorInfo],
        slots: Mapping[str, int],
        promote: bool,
    ) -> None:
        self.node = node
        self.prepare = KINDS.get(node.kind)
        self.reads = tuple(None if n is None else slots[n] for n in node.inputs)
        self.writes = tuple(slots[n] for n in node.outputs)
        self.names: list[str | None] = [
            None if n is None else tensors[n].dtype for n in node.inputs
        ]
        self.out_names: list[str] = [tensors[n].dtype for n in node.outputs]
        self.out_dtypes = [torch_dtype(name, promote) for name in self.out_names]
        self.dead: tuple[int, ...] = ()
        self.body = resolve(node.loop.nodes, tensors, slots, promote) if node.loop else []


def resolve(
    nodes: Sequence[Node],
    tensors: Mapping[str, TensorInfo],
    slots: Mapping[str, int],
    promote: bool,
) -> list[Site]:
    """Sites of one context, in order."""
    sites = [Site(node, tensors, slots, promote) for node in nodes]
    last: dict[int, int] = {}
    for index, site in enumerate(sites):
        for slot in (*site.reads, *site.writes):
            if slot is not None:
                last[slot] = index
    dead: list[list[int]] = [[] for _ in sites]
    for slot, index in last.items():
        dead[index].append(slot)
    for site, slots_of_site in zip(sites, dead, strict=True):
        site.dead = tuple(slots_of_site)
    return sites


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
    _host_reads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._accelerated = self.device.type != "cpu"

    def run(self, sites: Sequence[Site]) -> None:
        """Execute and record nodes."""
        for site in sites:
            self._prepare(site, site.dead)

    def finish(self) -> Plan:
        """The recorded plan."""
        template: Registers = [None] * len(self.registers)
        for slot in self.constant:
            template[slot] = self.registers[slot]
        return Plan(self._steps, self._names, template, tuple(self._host_reads))

    # -- one node ------------------------------------------------------------------------------

    def _prepare(self, site: Site, dead: Sequence[int]) -> None:
        before = len(self._steps)
        widened: list[int] = []
        try:
            if site.prepare is None:
                self._loop(site)
            else:
                reads = self._widened(site, widened) if self.promote else site.reads
                self._record(site, reads, site.prepare(self._call(site, reads)))
        except ToolchainError:
            raise
        except _ERRORS as error:
            raise _failure(site.node.name, error) from error
        constant, keep = self.constant, self.keep
        freed = tuple([s for s in (*dead, *widened) if s not in constant and s not in keep])
        for slot in freed:
            self.registers[slot] = None
        if freed and len(self._steps) > before:
            self._steps[-1] = _freeing(self._steps[-1], freed)

    def _call(self, site: Site, reads: tuple[int | None, ...]) -> Call:
        registers, constant = self.registers, self.constant
        return Call(
            node=site.node,
            values=[None if s is None else registers[s] for s in reads],
            constant=[s in constant for s in reads],
            names=site.names,
            out_dtypes=site.out_dtypes,
            out_names=site.out_names,
            device=self.device,
            plugin_ops=self.plugin_ops,
        )

    def _value(self, slot: int) -> torch.Tensor:
        value = self.registers[slot]
        assert value is not None
        return value

    def _record(self, site: Site, inputs: tuple[int | None, ...], bound: Bound) -> None:
        node, writes, function = site.node, site.writes, bound.function
        reads = tuple([slot for slot in [inputs[i] for i in bound.arguments] if slot is not None])
        static = node.kind != "kv_cache_update" and self.constant.issuperset(reads)
        if self._accelerated:
            on_host = static and all(self._value(s).device.type == "cpu" for s in reads)
            if not on_host:
                reads = tuple(self._on_device(s) for s in reads)
        if self.promote and node.kind == "gather":
            function = _promoted(function)
        result = function(*[self.registers[s] for s in reads])
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
        if static and sum([r.nbytes for r in results]) <= _STATIC_BYTES:
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

    def _widened(self, site: Site, temporary: list[int]) -> tuple[int | None, ...]:
        """The inputs of a node as float32. Only large weights are still in 16 bits; views of
        them stay so, and rows gathered from them are promoted afterwards.
        """
        if site.node.kind in VIEWS or site.node.kind == "gather":
            return site.reads
        reads = list(site.reads)
        for index, slot in enumerate(reads):
            if slot is not None and self._value(slot).dtype in _HALVES:
                slot = self._on_device(slot)
                wide = self._private(self._value(slot).float())
                self._steps.append(_step(lambda x: x.float(), (slot,), (wide,)))
                self._names.append(site.node.name)
                temporary.append(wide)
                reads[index] = wide
        return tuple(reads)

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

    def _loop(self, site: Site) -> None:
        node, loop = site.node, site.node.loop
        if loop is None:
            raise InputError("the interpreter does not know a layer kind", where=node.name)
        slots = self.slots
        if loop.trip_count is None or slots[loop.trip_count] not in self.constant:
            self._host_reads.append(node.name)
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
        inner = {slot for inside in site.body for slot in inside.writes}
        # Body values that the loop itself reads at the end of an iteration.
        used = {slots[r.next] for r in loop.recurrences} | {slots[o.source] for o in loop.outputs}
        used |= {slots[loop.condition]} if loop.condition is not None else set()
        mortal = inner - used
        head: list[Step] = []
        for index, inside in enumerate(site.body):
            if index == loop.condition_nodes:
                head, self._steps = self._steps, []
            self._prepare(inside, [s for s in inside.dead if s in mortal])
        if loop.condition_nodes == len(site.body):
            head, self._steps = self._steps, []
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
