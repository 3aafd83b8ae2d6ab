"""Defines a small network and runs it on the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from plugins.support.dtypes import BY_TORCH
from plugins.trt.backend import load_backend
from plugins.trt.network import Network
from plugins.trt.weights import TensorSource, WeightPolicy
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.trace import trace

Outputs = Mapping[str, object]


def evaluate(
    build: Callable[..., Outputs],
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None = None,
    *,
    dynamic: Mapping[str, Sequence[int]] | None = None,
    targets: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Run `build(net, **tensors)`, which returns its outputs by name.

    Args:
        inputs: values; all dimensions static but those in `dynamic` (input name -> axes).
        weights: checkpoint tensors.
        targets: compute capabilities that the network is for.
    """
    backend = load_backend()
    source = TensorSource(weights or {})
    net = Network(backend, backend.capability(targets), source, WeightPolicy("inputs"))
    tensors = {}
    for name, value in inputs.items():
        axes = (dynamic or {}).get(name, ())
        shape = [-1 if axis in axes else size for axis, size in enumerate(value.shape)]
        tensors[name] = net.input(name, BY_TORCH[value.dtype].name, shape)
    for name, tensor in build(net, **tensors).items():
        if name not in net.outputs:
            net.output(tensor, name)
    return Interpreter(trace(net), weights or {}).run(dict(inputs))
