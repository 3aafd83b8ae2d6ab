"""All plugin operations of the project by name, and how to run one on torch tensors.

On a CUDA device a plugin layer is run by the very kernel, launch and integers that TensorRT would
use; on a CPU by its definition in torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plugins.aot.launch import launch as launch_kernel
from plugins.aot.quick import Operation
from plugins.aot.spec import KernelSpec
from plugins.dsa import plugin as dsa
from plugins.dsa import stages as dsa_stages
from plugins.mtp import plugin as mtp
from plugins.mtp import stages as mtp_stages
from plugins.qsa import plugin as qsa
from plugins.qsa import stages as qsa_stages
from plugins.support.dtypes import BY_NAME
from plugins.support.errors import CapabilityError

Attributes = Mapping[str, Any]
# Input tensors by name, attributes -> outputs by name; outputs that alias an input are left out.
Definition = Callable[[Mapping[str, Tensor], Attributes], dict[str, Tensor]]

OPERATIONS: dict[str, Operation] = {
    operation.id: operation for operation in (*qsa.OPERATIONS, *dsa.OPERATIONS, *mtp.OPERATIONS)
}
DEFINITIONS: dict[str, Definition] = {
    **{f"{qsa.NAMESPACE}::{name}": run for name, run in qsa_stages.DEFINITIONS.items()},
    **{f"{dsa.NAMESPACE}::{name}": run for name, run in dsa_stages.DEFINITIONS.items()},
    **{f"{mtp.NAMESPACE}::{name}": run for name, run in mtp_stages.DEFINITIONS.items()},
}


@functools.cache
def digests() -> dict[str, str]:
    """Per operation a hash of its name, arguments and attributes.

    Programs name operations; equal digests mean that they are called in the same way.
    """
    found = {}
    for name, operation in OPERATIONS.items():
        spec = operation.arguments()
        record = {
            "name": name,
            "inputs": [argument.name for argument in spec.inputs],
            "outputs": [argument.name for argument in spec.outputs],
            "aliases": dict(spec.aliases),
            "attributes": {key: kind.__name__ for key, kind in operation.attributes.items()},
        }
        found[name] = hashlib.sha256(json.dumps(record).encode()).hexdigest()
    return found


def implementation(
    name: str, attributes: Attributes
) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor, ...]]:
    """How to run a plugin layer.

    Args:
        name: of the operation.
        attributes: all of its attributes.

    Returns:
        A function from the layer's inputs in order, all on one device, to its outputs. An output
        that aliases an input is that tensor, updated in place.

    Raises:
        CapabilityError: there is no such operation, or it has other attributes.
    """
    operation = OPERATIONS.get(name)
    if operation is None:
        raise CapabilityError(
            "there is no such plugin operation", found=name, expected=", ".join(sorted(OPERATIONS))
        )
    if set(attributes) != set(operation.attributes):
        raise CapabilityError(
            "a plugin operation has other attributes",
            where=name,
            expected=", ".join(operation.attributes),
            found=", ".join(attributes),
        )
    spec = operation.spec(attributes)
    names = [argument.name for argument in spec.inputs]
    types = [BY_NAME[argument.dtype].torch for argument in spec.inputs]

    def run(inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        given = {n: t for n, t in zip(names, inputs, strict=True) if t is not None}
        # Values that are computed more precisely than declared are not what the kernel takes.
        declared = all(given[n].dtype == dtype for n, dtype in zip(names, types, strict=True))
        if declared and all(tensor.is_cuda for tensor in given.values()):
            made = _launched(operation, spec, given, attributes)
        else:
            made = DEFINITIONS[name](given, attributes)
        made |= {output: given[before] for output, before in spec.aliases.items()}
        return tuple(made[argument.name] for argument in spec.outputs)

    return run


def launch(
    operation: Operation, tensors: Mapping[str, Tensor], attributes: Attributes
) -> dict[str, Tensor]:
    """Run an operation's kernel on torch tensors.

    Args:
        operation: what to run.
        tensors, attributes: as its definition takes them.

    Returns:
        The outputs by name; those that alias an input are left out.
    """
    return _launched(operation, operation.spec(attributes), tensors, attributes)


def _launched(
    operation: Operation, spec: KernelSpec, tensors: Mapping[str, Tensor], attributes: Attributes
) -> dict[str, Tensor]:
    given = {}
    for argument in spec.inputs:
        tensor = tensors[argument.name]
        if argument.name in spec.aliases.values() and not tensor.is_contiguous():
            raise CapabilityError(
                "a tensor that is updated in place must be contiguous",
                where=f"{operation.id}, {argument.name}",
                found=str(tensor.stride()),
            )
        given[argument.name] = tensor.contiguous()
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    sizes = operation.outputs(shapes, attributes)
    device = next(iter(given.values())).device
    made = {
        argument.name: torch.empty(
            sizes[argument.name], dtype=BY_NAME[argument.dtype].torch, device=device
        )
        for argument in spec.outputs
        if argument.name not in spec.aliases
    }
    same = {output: given[before] for output, before in spec.aliases.items()}
    launch_kernel(spec, {**given, **made, **same}, operation.values(shapes, attributes))
    return made
