"""Define a network, build it for real, trace it, run it strictly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from plugins.support.dtypes import BY_TORCH
from plugins.trt.backend import load_backend
from plugins.trt.builder import Plan, build_serialized
from plugins.trt.network import Network, Tensor
from plugins.trt.weights import TensorSource, WeightPolicy
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.program import Program
from runtime.interpreter.trace import trace

# Gets the network and its inputs in order; returns what becomes the outputs y0, y1, …
Definition = Callable[..., Tensor | Sequence[Tensor] | None]


def new_network(
    weights: Mapping[str, torch.Tensor] | None = None,
    mode: str = "auto",
    targets: Sequence[str] | None = None,
    dtypes: Sequence[str] = (),
) -> Network:
    """An empty network over some weights."""
    backend = load_backend("tensorrt_rtx")
    return Network(
        backend,
        backend.capability(targets, dtypes),
        source=TensorSource(weights or {}),
        policy=WeightPolicy(mode),  # type: ignore[arg-type]
    )


def define(
    net: Network,
    definition: Definition,
    inputs: Mapping[str, torch.Tensor],
    static: bool = False,
    fixed: Sequence[str] = (),
) -> None:
    """Add inputs shaped like `inputs` (dynamic unless static or fixed) and the layers."""
    handles = []
    for name, value in inputs.items():
        shape = tuple(value.shape) if static or name in fixed else (-1,) * value.dim()
        handles.append(net.input(name, BY_TORCH[value.dtype].name, shape))
    results = definition(net, *handles)
    if results is None:
        return
    if not isinstance(results, list | tuple):
        results = [results]
    for index, result in enumerate(results):
        net.output(result, f"y{index}")


def build(net: Network, inputs: Mapping[str, torch.Tensor]) -> Plan:
    """Build the network for every legal target with a profile around the given shapes."""
    profile = {}
    for name, value in inputs.items():
        declared = net.shape(net.inputs[name])
        if -1 in declared:
            low = tuple(
                max(1, n - 1) if d == -1 else d for d, n in zip(declared, value.shape, strict=True)
            )
            profile[name] = (low, tuple(value.shape), tuple(value.shape))
    with TemporaryDirectory() as directory:
        return build_serialized(net, profile, Path(directory) / "test.engine")


def run(
    definition: Definition,
    inputs: Mapping[str, torch.Tensor],
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    static: bool = False,
    fixed: Sequence[str] = (),
    promote: bool = False,
    compile_engine: bool = True,
    dtypes: Sequence[str] = (),
) -> list[torch.Tensor]:
    """Outputs y0, y1, … of the interpreter, which must agree with themselves in a second run."""
    net = new_network(weights, dtypes=dtypes)
    define(net, definition, inputs, static, fixed)
    program = trace(net)
    interpreter = Interpreter(program, weights or {}, promote_floats=promote, strict=True)
    first = interpreter.run({k: v.clone() for k, v in inputs.items()})
    second = interpreter.run({k: v.clone() for k, v in inputs.items()})
    for name, value in first.items():
        assert torch.equal(value.nan_to_num(), second[name].nan_to_num()), name
    if compile_engine:
        assert build(net, inputs).nbytes > 0
    return [first[name] for name in program.outputs if name.startswith("y")]


def program_of(definition: Definition, inputs: Mapping[str, torch.Tensor]) -> Program:
    """The traced program of a definition."""
    net = new_network()
    define(net, definition, inputs)
    return trace(net)
