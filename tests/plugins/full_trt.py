"""A stand-in of full TensorRT: TensorRT for RTX, with plugin layers that are noted and not built.

What it does with a plugin was read off version 11.4 of the Python bindings, which import without
their libraries: the checks of a registration and of a call, that shapes are asked for with
attributes by keyword and kernels with attributes by position, that shape functions run with nothing
known before they run with sizes, and that a symbolic size has +, -, * and // with itself on the
left. The tensors that a plugin layer gives are further inputs of the network underneath, so its
shapes are inferred by TensorRT all the way.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import typing
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

from plugins.trt.backend import Backend, load_backend
from plugins.trt.capability import Capability

_NAME = "stand_in_tensorrt"
_RTX = load_backend("tensorrt_rtx").trt
VERSION = "11.4.0"


class Expr:
    """A symbolic 32-bit integer: records arithmetic, evaluated by substituting sizes."""

    def __init__(self, value: Any) -> None:
        self.text = value.text if isinstance(value, Expr) else str(value)

    def _join(self, sign: str, other: Any) -> Expr:
        assert isinstance(other, (int, Expr))
        return Expr(f"({self.text} {sign} {Expr(other).text})")

    def __add__(self, other: Any) -> Expr:
        return self._join("+", other)

    def __sub__(self, other: Any) -> Expr:
        return self._join("-", other)

    def __mul__(self, other: Any) -> Expr:
        return self._join("*", other)

    def __floordiv__(self, other: Any) -> Expr:
        return self._join("//", other)


def value(expression: Any, **sizes: int) -> int:
    """What an expression is for given sizes. Raises NameError for one that is missing."""
    found: int = eval(Expr(expression).text, {"__builtins__": {}}, sizes)
    return found


class Desc:
    """A tensor descriptor: size expressions, which can only be indexed and counted, and a type."""

    def __init__(self, shape: Any, dtype: Any = None, of: Desc | None = None) -> None:
        self.shape_expr, self.dtype, self.aliases = shape, dtype, of

    def aliased(self) -> Desc:
        return Desc(self.shape_expr, self.dtype, self)


class Launch:
    """Launch parameters; every one is turned into an expression."""

    def __setattr__(self, name: str, given: Any) -> None:
        assert name in {f"{a}_{b}" for a in ("grid", "block") for b in "xyz"} | {"shared_mem"}
        self.__dict__[name] = Expr(given)


class SymExprs(list[Any]):
    """A list of expressions of fixed length."""

    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


_ATTRIBUTES = (int, float, bytes, bool, str)


class _Operation:
    """A registered plugin; calling it checks the call and gives what `add_plugin` takes."""

    def __init__(self, name: str, describe: Any) -> None:
        self.name, self.describe, self.implement = name, describe, None
        parameters = inspect.signature(describe).parameters.values()
        kinds = [p.annotation is Desc for p in parameters]
        if kinds != sorted(kinds, reverse=True) or not kinds[0]:
            raise ValueError("tensors come first, then attributes")
        for parameter in parameters:
            if parameter.default is not inspect.Parameter.empty:
                raise ValueError(f"Argument {parameter.name} has a default value")
        self.tensors = [p.name for p in parameters if p.annotation is Desc]
        self.attributes = {p.name: p.annotation for p in parameters if p.annotation is not Desc}
        for attribute, kind in self.attributes.items():
            if attribute in ("outputs", "stream", "tactic") or kind not in _ATTRIBUTES:
                raise ValueError(f"attribute {attribute} of type {kind}")
        returns = inspect.signature(describe).return_annotation
        args = typing.get_args(returns)
        if typing.get_origin(returns) is not tuple or any(arg is not Desc for arg in args):
            raise ValueError(f"Return argument is of type {returns}")
        self.outputs = len(args)

    def __call__(self, *tensors: Any, **attributes: Any) -> Any:
        for name, given in attributes.items():
            if self.attributes.get(name) is not type(given):
                raise ValueError(f"Unexpected type {type(given)} for attribute {name}")
        if len(tensors) != len(self.tensors) or list(attributes) != list(self.attributes):
            raise ValueError("Unexpected schema received")
        return SimpleNamespace(operation=self, tensors=tensors, attributes=attributes)

    def shapes(self, call: Any) -> list[Desc]:
        """Output descriptors: first for unknown sizes, then for those of the call."""
        dummies = [Desc([Expr("unknown") for _ in t.shape], t.dtype) for t in call.tensors]
        types = [d.dtype for d in self.describe(*dummies, **call.attributes)]
        descs = [
            Desc([Expr(n if n >= 0 else "dynamic") for n in t.shape], t.dtype) for t in call.tensors
        ]
        found: list[Desc] = list(self.describe(*descs, **call.attributes))
        assert [d.dtype for d in found] == types and len(found) == self.outputs
        for desc in found:
            assert desc.aliases is None or any(desc.aliases is d for d in descs)
        return found


def plugin_module(trt: Any) -> Any:
    """The module `tensorrt.plugin` of a TensorRT module."""
    module: Any = ModuleType(f"{_NAME}.plugin")
    known: dict[str, _Operation] = {}

    def register(name: str) -> Any:
        def keep(describe: Any) -> Any:
            space, _, short = name.partition("::")
            if name in known:
                raise ValueError(f"already has a definition for {short}")
            known[name] = _Operation(name, describe)
            spaces = module.op.__dict__.setdefault(space, SimpleNamespace())
            setattr(spaces, short, known[name])
            return describe

        return keep

    def aot_impl(name: str) -> Any:
        def keep(implement: Any) -> Any:
            operation, signature = known[name], inspect.signature(implement)
            expected = [*operation.tensors, *operation.attributes, "outputs", "tactic"]
            if list(signature.parameters) != expected:
                raise ValueError("the signature does not match the expected input arg schema")
            returns = typing.get_args(signature.return_annotation)
            if returns[2:] != (Launch, SymExprs):
                raise ValueError(f"Return annotation is {returns}")
            operation.implement = implement
            return implement

        return keep

    module.__dict__.update(
        TensorDesc=Desc,
        KernelLaunchParams=Launch,
        SymExprs=SymExprs,
        SymIntExprs=SymExprs,
        SymInt32=Expr,
        from_shape_expr=Desc,
        register=register,
        aot_impl=aot_impl,
        op=SimpleNamespace(),
        trt=trt,
        known=known,
    )
    return module


class PluginLayer:
    """A plugin layer; it tells of itself what TensorRT's does."""

    def __init__(self, call: Any, outputs: list[Any]) -> None:
        self.type, self.name, self.metadata = _RTX.LayerType.PLUGIN_V3, "", ""
        self._inputs, self.outputs = call.tensors, outputs
        self.num_inputs, self.num_outputs = len(call.tensors), len(outputs)

    def get_input(self, index: int) -> Any:
        return self._inputs[index]

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class _Names(type):
    """Answers for the names of TensorRT's own network class."""

    def __getattr__(cls, name: str) -> Any:
        return getattr(_RTX.INetworkDefinition, name)


class NetworkDefinition(metaclass=_Names):
    """TensorRT's network definition, and the plugin layers beside it."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._plugins: list[PluginLayer] = []
        self.marked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    @property
    def num_layers(self) -> int:
        found: int = self._raw.num_layers + len(self._plugins)
        return found

    def get_layer(self, index: int) -> Any:
        first = self._raw.num_layers
        return self._raw.get_layer(index) if index < first else self._plugins[index - first]

    def mark_output(self, tensor: Any) -> None:
        if any(tensor is output for layer in self._plugins for output in layer.outputs):
            # Underneath it is an input, which cannot be an output too.
            self.marked.append(tensor)
        else:
            self._raw.mark_output(tensor)

    def add_plugin(self, call: Any, aot: bool) -> PluginLayer:
        if not aot or call.operation.implement is None:
            raise ValueError("there is only the implementation ahead of time")
        outputs = []
        for number, desc in enumerate(call.operation.shapes(call)):
            sizes = []
            for size in desc.shape_expr:
                try:
                    sizes.append(value(size))
                except NameError:
                    sizes.append(-1)
            name = f"plugin:{len(self._plugins)}:{number}"
            outputs.append(self._raw.add_input(name, desc.dtype, tuple(sizes)))
        layer = PluginLayer(call, outputs)
        self._plugins.append(layer)
        return layer


class Builder:
    """TensorRT's builder, with the flag that plugin networks are created with."""

    def __init__(self, logger: Any) -> None:
        self._raw = _RTX.Builder(logger)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def create_network(self, flags: int) -> NetworkDefinition:
        ahead = 1 << Flag.PREFER_AOT_PYTHON_PLUGINS
        assert flags & ahead
        return NetworkDefinition(self._raw.create_network(flags & ~ahead))


class Flag(enum.IntEnum):
    """NetworkDefinitionCreationFlag."""

    STRONGLY_TYPED = int(
        load_backend("tensorrt_rtx").trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    )
    PREFER_AOT_PYTHON_PLUGINS = 20


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(_RTX, name)


@functools.cache
def full_backend() -> Backend:
    """The flavour `tensorrt` on the stand-in."""
    module = _Module(_NAME)
    module.__dict__.update(
        __version__=VERSION,
        INetworkDefinition=NetworkDefinition,
        IBuilderConfig=type("IBuilderConfig", (), {}),
        IPluginV3Layer=PluginLayer,
        NetworkDefinitionCreationFlag=Flag,
        Builder=Builder,
    )
    sys.modules[_NAME] = module
    sys.modules[f"{_NAME}.plugin"] = plugin_module(module)
    return Backend("tensorrt", VERSION, module)


def capability_for(target: str) -> Capability:
    """What full TensorRT can do on a machine with a GPU of that compute capability."""
    return replace(full_backend().capability(), targets=(target,))
