"""Add an operation to a network as a plugin layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugins.aot import quick
from plugins.aot.quick import Operation
from plugins.support.errors import BuildError, CapabilityError
from plugins.trt.network import Network
from plugins.trt.types import Tensor


def target_of(net: Network) -> str:
    """The compute capability that plugin kernels of `net` are compiled for.

    Raises CapabilityError unless there is exactly one: an engine carries each kernel once.
    """
    targets = net.capability.targets
    if len(targets) != 1:
        raise CapabilityError(
            "plugin layers are compiled for one compute capability",
            expected="the GPU of this machine",
            found=", ".join(targets) or "no GPU",
            fix="build on the machine that will run the engines",
        )
    return targets[0]


def add(
    net: Network,
    operation: Operation,
    tensors: Mapping[str, Tensor],
    attributes: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Add one plugin layer, registering the operation first.

    Args:
        net: of a flavour that has plugins.
        operation: what the layer is.
        tensors: the operation's inputs by name.
        attributes: all of its attributes by name, of exactly the declared types.

    Returns:
        The outputs by name. One that aliases an input is that memory, written in place; where
        that is a network input X, it is the network output `X.updated`.

    Raises:
        CapabilityError: no plugins, or not exactly one target.
        BuildError: an input has another type than the kernel, or TensorRT refused.
    """
    target = target_of(net)
    spec = operation.spec(attributes)
    for argument in spec.inputs:
        found = net.dtype(tensors[argument.name])
        if found != argument.dtype:
            raise BuildError(
                "an input of a plugin has another element type than its kernel",
                where=f"{net.scope_name}: {operation.id}, {argument.name}",
                expected=argument.dtype,
                found=found,
            )
    quick.register(net.backend.plugin_module(), operation, target)
    shapes = {name: net.shape(tensor) for name, tensor in tensors.items()}
    # Sizes of dynamic dimensions mean nothing here; TensorRT infers them by the same function.
    ranks = {n: len(sizes) for n, sizes in operation.outputs(shapes, attributes).items()}
    ranks |= {name: net.rank(tensors[source]) for name, source in spec.aliases.items()}
    before = [argument.name for argument in spec.inputs]
    after = [argument.name for argument in spec.outputs]
    results = net.plugin(
        operation.id,
        [tensors[argument.name] for argument in spec.inputs],
        {name: attributes[name] for name in operation.attributes},
        [(argument.dtype, ranks[argument.name]) for argument in spec.outputs],
        {after.index(name): before.index(source) for name, source in spec.aliases.items()},
    )
    return {a.name: result for a, result in zip(spec.outputs, results, strict=True)}
