"""A network as data: what the interpreter executes and the engine directory carries.

One safetensors file holds it: the graph as JSON in the metadata entry `program`, literal constants
as tensors. Checkpoint tensors are named, never stored. Loading needs no TensorRT.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from plugins.support.errors import InputError

FORMAT_VERSION = 1

DTypeName = Literal[
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int32",
    "int64",
    "bool",
    "uint8",
    "float8_e4m3fn",
    "float8_e8m0fnu",
    "float4_e2m1fn",
]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorInfo(_Model):
    """Element type and shape (-1: differs from call to call) of a tensor."""

    dtype: DTypeName
    shape: tuple[int, ...]


class Iteration(_Model):
    """`output` is the slice of `source` along `axis` that belongs to this iteration."""

    source: str
    axis: int
    reverse: bool
    output: str


class Recurrence(_Model):
    """`output` is `initial` in the first iteration and the last `next` afterwards."""

    initial: str
    next: str
    output: str


class LoopOutput(_Model):
    """`output` is the last value of the recurrence `source`, or `source` of all iterations
    joined along a new dimension (`reverse`: last iteration first).
    """

    mode: Literal["last", "stack", "reverse"]
    source: str
    axis: int
    output: str


class LoopBody(_Model):
    """What a loop node repeats: `trip_count` times, or while `condition` is true (it is
    computed by the first `condition_nodes` nodes of the body).
    """

    trip_count: str | None
    condition: str | None
    condition_nodes: int
    iterations: tuple[Iteration, ...]
    recurrences: tuple[Recurrence, ...]
    outputs: tuple[LoopOutput, ...]
    nodes: tuple[Node, ...]


class Node(_Model):
    """One layer.

    Attributes:
        kind: layer kind, see `runtime.interpreter.kinds`.
        name: the layer's name in the network, used in error messages.
        scope: the part of the model it belongs to.
        inputs: tensor names; None for an optional input that is absent.
        outputs: tensor names.
        attributes: what the kind needs to know.
        loop: only for kind "loop".
    """

    kind: str
    name: str
    scope: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = Field(default_factory=dict)
    loop: LoopBody | None = None


class Program(_Model):
    """A network in executable order.

    Attributes:
        nodes: layers; every input is a program input, weight, literal or earlier output.
        tensors: every tensor's type and shape.
        inputs: what a call supplies, in order; weights are not among them.
        outputs: what a call returns.
        weights: tensor name -> name of the checkpoint tensor.
        literals: tensor name -> values.
        taps: verification name -> tensor name.
        aliases: output -> input that is updated in place.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    nodes: tuple[Node, ...]
    tensors: dict[str, TensorInfo]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: dict[str, str]
    literals: dict[str, torch.Tensor] = Field(exclude=True)
    taps: dict[str, str]
    aliases: dict[str, str]

    def save(self, path: Path) -> None:
        """Write the program file. Raises InputError when the file cannot be written."""
        graph = {"format_version": FORMAT_VERSION, **self.model_dump(mode="json")}
        tensors = {name: value.contiguous() for name, value in self.literals.items()}
        try:
            # Not save_file: that makes files which only their owner can read.
            path.write_bytes(
                save(tensors, metadata={"program": json.dumps(graph, separators=(",", ":"))})
            )
        except (OSError, SafetensorError) as error:
            raise InputError(
                "the program cannot be written", where=str(path), found=str(error)
            ) from error

    @classmethod
    def load(cls, path: Path) -> Program:
        """Read and check a program file.

        Raises InputError when the file is missing, damaged, of another format version, or
        describes a graph that cannot be executed in order.
        """
        try:
            with safe_open(str(path), "pt") as file:
                metadata = file.metadata() or {}
                literals = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            graph = json.loads(metadata["program"])
            version = graph.pop("format_version")
        except (OSError, SafetensorError) as error:
            raise InputError(
                "the program file cannot be read", where=str(path), found=str(error)
            ) from error
        except (KeyError, ValueError, AttributeError, RecursionError) as error:
            raise InputError(
                "the file holds no program",
                where=str(path),
                found=f"{type(error).__name__}: {error}",
                fix="build the engine directory again",
            ) from error
        if version != FORMAT_VERSION:
            raise InputError(
                "the program has another format version",
                where=str(path),
                expected=str(FORMAT_VERSION),
                found=str(version),
                fix="build the engine directory again with this version of the tool",
            )
        try:
            program = cls(literals=literals, **graph)
        except (ValidationError, TypeError, RecursionError) as error:
            raise InputError(
                "the program is malformed", where=str(path), found=str(error)[:500]
            ) from error
        program.check(str(path))
        return program

    def check(self, where: str) -> None:
        """Raise InputError unless the nodes can run in order and every tensor is declared."""

        def fail(what: str, name: str) -> InputError:
            return InputError(what, where=where, found=name)

        known: set[str] = set()
        for name in (*self.inputs, *self.weights, *self.literals):
            if name in known:
                raise fail("a tensor of the program has two origins", name)
            known.add(name)
        _check_nodes(self.nodes, known, where)
        for name in known:
            if name not in self.tensors:
                raise fail("a tensor of the program is not declared", name)
        for name in (*self.outputs, *self.taps.values(), *self.aliases):
            if name not in known:
                raise fail("the program returns a tensor that nothing computes", name)
        for name in self.aliases.values():
            if name not in self.inputs:
                raise fail("an in-place output has no such input", name)
        for name, info in self.tensors.items():
            if any(size < -1 for size in info.shape):
                raise fail("a tensor of the program has a negative dimension", name)
        for name, value in self.literals.items():
            info = self.tensors[name]
            shape = list(info.shape)
            stored = info.dtype
            if stored == "float4_e2m1fn":
                stored, shape = "uint8", [*shape[:-1], shape[-1] // 2] if shape else shape
            if value.dtype != getattr(torch, stored) or list(value.shape) != shape:
                raise InputError(
                    "a literal of the program is not what it declares",
                    where=f"{where}: {name}",
                    expected=f"{stored} {shape}",
                    found=f"{value.dtype} {list(value.shape)}",
                )


def _check_nodes(nodes: Iterable[Node], known: set[str], where: str) -> None:
    """Add what `nodes` compute to `known`; raise when one uses what is not there yet."""
    for node in nodes:
        needed: list[str | None] = list(node.inputs)
        for name in needed:
            if name is not None and name not in known:
                raise InputError(
                    "the program uses a tensor before it is computed (a cycle or a gap)",
                    where=f"{where}: layer {node.name}",
                    found=name,
                )
        if (node.kind == "loop") != (node.loop is not None):
            raise InputError(
                "a loop node needs a body, others have none", where=f"{where}: layer {node.name}"
            )
        if node.loop is not None:
            _check_loop(node, node.loop, known, where)
        for name in node.outputs:
            if name in known:
                raise InputError(
                    "a tensor of the program has two origins",
                    where=f"{where}: layer {node.name}",
                    found=name,
                )
            known.add(name)


def _check_loop(node: Node, loop: LoopBody, known: set[str], where: str) -> None:
    inner = set(known)
    outer_needs = [i.source for i in loop.iterations] + [r.initial for r in loop.recurrences]
    if loop.trip_count is not None:
        outer_needs.append(loop.trip_count)
    for name in outer_needs:
        if name not in inner:
            raise InputError(
                "a loop uses a tensor that is not computed before it",
                where=f"{where}: layer {node.name}",
                found=name,
            )
    inner |= {i.output for i in loop.iterations} | {r.output for r in loop.recurrences}
    _check_nodes(loop.nodes, inner, where)
    inner_needs = [r.next for r in loop.recurrences] + [o.source for o in loop.outputs]
    if loop.condition is not None:
        inner_needs.append(loop.condition)
    for name in inner_needs:
        if name not in inner:
            raise InputError(
                "a loop body does not compute what the loop needs",
                where=f"{where}: layer {node.name}",
                found=name,
            )
    exactly_one = (loop.trip_count is None) != (loop.condition is None)
    if not exactly_one or not 0 <= loop.condition_nodes <= len(loop.nodes):
        raise InputError("a loop has no valid trip limit", where=f"{where}: layer {node.name}")
    if tuple(o.output for o in loop.outputs) != node.outputs or (outer_reads(loop) != node.inputs):
        raise InputError("a loop's inputs or outputs disagree", where=f"{where}: layer {node.name}")
    # Values of the body are checked for declaration together with the others.
    known |= inner - known


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """All nodes, those inside loops included."""
    for node in nodes:
        yield node
        if node.loop is not None:
            yield from walk(node.loop.nodes)


def outer_reads(loop: LoopBody) -> tuple[str, ...]:
    """Names of the tensors a loop takes from outside, in order of first use."""
    reads: list[str | None] = [loop.trip_count, loop.condition]
    reads += [i.source for i in loop.iterations]
    reads += [n for r in loop.recurrences for n in (r.initial, r.next)]
    reads += [n for node in loop.nodes for n in node.inputs]
    reads += [o.source for o in loop.outputs]
    own = {n for node in loop.nodes for n in node.outputs}
    own |= {i.output for i in loop.iterations} | {r.output for r in loop.recurrences}
    return tuple(dict.fromkeys(n for n in reads if n is not None and n not in own))


def kinds(program: Program) -> Mapping[str, int]:
    """How many nodes of each kind the program has."""
    counts: dict[str, int] = {}
    for node in walk(program.nodes):
        counts[node.kind] = counts.get(node.kind, 0) + 1
    return counts
