"""Register operations with `tensorrt.plugin`: shapes, launch parameters, compiled kernel.

Everything is given the module `tensorrt.plugin`; nothing here imports TensorRT.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plugins.aot.compile import compile_kernel
from plugins.aot.spec import KernelSpec
from plugins.support.errors import UsageError

Attributes = Mapping[str, Any]
# Shapes by input name -> values by name; sizes are symbolic expressions.
Shapes = Mapping[str, Any]


# (module, operation) -> compute capability that it was registered for.
_registered: dict[tuple[int, str], str] = {}


@dataclass(frozen=True)
class Operation:
    """One kernel as a plugin layer.

    Attributes:
        id: "namespace::name".
        attributes: attribute name -> Python type (int, float or str), in order.
        spec: the kernel for given attributes; its arguments may depend on them in element type
            only.
        example: attributes for which `spec` names the arguments.
        outputs: shapes of the outputs that alias no input, by name.
        values: the kernel's integers and the names its grid uses, from the input shapes.
        compiled_for: compute capability -> an older one whose code that GPU runs too, where its own
            code could not be launched.
    """

    id: str
    attributes: Mapping[str, type]
    spec: Callable[[Attributes], KernelSpec]
    example: Attributes
    outputs: Callable[[Shapes, Attributes], Mapping[str, tuple[Any, ...]]]
    values: Callable[[Shapes, Attributes], Mapping[str, Any]]
    compiled_for: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> KernelSpec:
        """A spec to read argument names from."""
        return self.spec(self.example)


def _signature(
    trtp: Any, operation: Operation, tail: tuple[inspect.Parameter, ...], returns: Any
) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(argument.name, kind, annotation=trtp.TensorDesc)
        for argument in operation.arguments().inputs
    ]
    parameters += [
        inspect.Parameter(name, kind, annotation=type_)
        for name, type_ in operation.attributes.items()
    ]
    return inspect.Signature([*parameters, *tail], return_annotation=returns)


def _bind(operation: Operation, given: tuple[Any, ...]) -> tuple[dict[str, Any], Attributes]:
    """Split positional arguments in tensor descriptors and attributes, both by name.

    TensorRT gives attributes by keyword when it asks for shapes, by position when it asks for the
    kernel.
    """
    names = [argument.name for argument in operation.arguments().inputs]
    tensors = dict(zip(names, given, strict=False))
    attributes = dict(zip(operation.attributes, given[len(names) :], strict=False))
    return tensors, attributes


def describe(trtp: Any, operation: Operation) -> Callable[..., Any]:
    """The function that gives TensorRT the output descriptors.

    Outputs that alias an input are that input; the others have the element types of the spec.
    """
    count = len(operation.arguments().outputs)
    returns: Any = tuple.__class_getitem__((trtp.TensorDesc,) * count)

    def outputs(*given: Any, **named: Any) -> tuple[Any, ...]:
        tensors, attributes = _bind(operation, given)
        attributes = {**attributes, **named}
        spec = operation.spec(attributes)
        shapes = {name: desc.shape_expr for name, desc in tensors.items()}
        fresh = operation.outputs(shapes, attributes)
        return tuple(
            tensors[spec.aliases[argument.name]].aliased()
            if argument.name in spec.aliases
            else trtp.from_shape_expr(fresh[argument.name], trtp_dtype(trtp, argument.dtype))
            for argument in spec.outputs
        )

    outputs.__signature__ = _signature(trtp, operation, (), returns)  # type: ignore[attr-defined]
    return outputs


_TRT_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "fp8",
    "int32": "int32",
}


def trtp_dtype(trtp: Any, name: str) -> Any:
    """TensorRT's data type of our name, from the module that `tensorrt.plugin` belongs to."""
    return getattr(trtp.trt, _TRT_DTYPES[name])


def implement(
    trtp: Any, operation: Operation, capability: str, ptx_version: int | None
) -> Callable[..., Any]:
    """The function that gives TensorRT the kernel, its launch and its integers."""

    def kernel(*given: Any) -> tuple[Any, ...]:
        tensors, attributes = _bind(operation, given)
        spec = operation.spec(attributes)
        shapes = {name: desc.shape_expr for name, desc in tensors.items()}
        values = operation.values(shapes, attributes)
        compiled = compile_kernel(spec, capability, ptx_version)
        launch = trtp.KernelLaunchParams()
        grid = (*spec.grid(values), 1, 1)[:3]
        launch.grid_x, launch.grid_y, launch.grid_z = grid
        launch.block_x = compiled.threads
        launch.shared_mem = compiled.shared_bytes
        scalars = trtp.SymIntExprs(len(spec.scalars))
        for index, name in enumerate(spec.scalars):
            scalars[index] = trtp.SymInt32(values[name])
        return compiled.name, compiled.ptx, launch, scalars

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    tail = (
        inspect.Parameter("outputs", kind, annotation=tuple[trtp.TensorDesc]),
        inspect.Parameter("tactic", kind, annotation=int),
    )
    returns = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]
    kernel.__signature__ = _signature(trtp, operation, tail, returns)  # type: ignore[attr-defined]
    return kernel


def register(
    trtp: Any, operation: Operation, capability: str, ptx_version: int | None = None
) -> None:
    """Register one operation, once per process: TensorRT refuses a second time.

    Args:
        trtp: the module `tensorrt.plugin`, with TensorRT itself as its attribute `trt`.
        operation: what to register.
        capability: compute capability of the GPU that the engine is built on, e.g. "9.0".
        ptx_version: see `plugins.aot.compile.compile_kernel`.

    Raises:
        UsageError: an attribute has a type that TensorRT does not take or the name of a tensor, or
            the operation was registered for another GPU.
    """
    clash = {a.name for a in operation.arguments().inputs} & set(operation.attributes)
    if clash:
        raise UsageError(
            "a plugin's tensors and attributes share a name",
            where=operation.id,
            found=", ".join(sorted(clash)),
        )
    for name, type_ in operation.attributes.items():
        if type_ not in (int, float, str, bool):
            raise UsageError(
                "a plugin attribute has a type that TensorRT does not take",
                where=f"{operation.id}, {name}",
                expected="int, float, str or bool",
                found=str(type_),
            )
    key = id(trtp), operation.id
    if key in _registered:
        if _registered[key] != capability:
            raise UsageError(
                "a plugin is registered for one compute capability per process",
                where=operation.id,
                expected=_registered[key],
                found=capability,
            )
        return
    trtp.register(operation.id)(describe(trtp, operation))
    compiled_for = operation.compiled_for.get(capability, capability)
    trtp.aot_impl(operation.id)(implement(trtp, operation, compiled_for, ptx_version))
    _registered[key] = capability
