"""The checked core of the network facade: names, scopes, inputs, outputs, constants, weights.

The TensorRT API reports misuse in its log and hands out objects that only fail at build time, or
never. Every method here therefore ends in `_done`, which turns a logged error, a missing layer or
an unusable shape into a BuildError at the line that caused it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from plugins.support.dtypes import BY_TORCH
from plugins.support.errors import BuildError, CapabilityError
from plugins.trt.backend import Backend
from plugins.trt.capability import Capability
from plugins.trt.logger import no_collection
from plugins.trt.messages import translate
from plugins.trt.types import FLOAT4, Tensor, from_trt, is_known, readable_as, stored_form, to_trt
from plugins.trt.weights import TensorSource, WeightInfo, WeightPolicy, WeightSource

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Constant:
    """A constant of the network.

    Attributes:
        array: the values; four-bit types as packed uint8.
        dtype: project name of the element type.
        shape: logical shape.
        weight: name of the checkpoint tensor it is, None for a literal.
    """

    array: torch.Tensor
    dtype: str
    shape: Shape
    weight: str | None = None


@dataclass(frozen=True)
class PluginCall:
    """What a plugin layer is, which TensorRT does not tell of one.

    Attributes:
        op: name of the operation, "namespace::name".
        attributes: the operation's attributes.
        updates: positions of the inputs that it writes in place.
    """

    op: str
    attributes: dict[str, Any]
    updates: tuple[int, ...] = ()


class NetworkCore:
    """State and checks shared by the layer mixins; use `plugins.trt.network.Network`.

    Args:
        backend: the TensorRT module.
        capability: what may be used; default: the backend's for its default targets.
        source: the checkpoint's tensors; None: the network uses no weights.
        policy: which weights become inputs.

    Attributes:
        raw: the INetworkDefinition, for the builder and the tracer.
        logger: the recording logger.
        constants: constant tensor name -> Constant.
        weight_inputs: names of network inputs that are checkpoint tensors, in order.
        taps: verification name -> tensor.
        aliases: cache output name -> cache input name, updated in place.
        plugins: plugin layer name -> what it is.
        dtypes: every element type used so far.
    """

    def __init__(
        self,
        backend: Backend,
        capability: Capability | None = None,
        source: WeightSource | None = None,
        policy: WeightPolicy | None = None,
    ) -> None:
        self.backend = backend
        self.trt = backend.trt
        self.capability = capability or backend.capability()
        self.source: WeightSource = source if source is not None else TensorSource({})
        self.policy = policy or WeightPolicy()
        self.logger = backend.logger()
        with no_collection():
            self.builder = self.trt.Builder(self.logger)
        flags = 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        if self.capability.has_plugins:
            flags |= 1 << int(self.trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS)
        self.raw = self.builder.create_network(flags)
        self.constants: dict[str, Constant] = {}
        self.weight_inputs: list[str] = []
        self.taps: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.plugins: dict[str, PluginCall] = {}
        self.dtypes: set[str] = set()
        self._weights: dict[str, Tensor] = {}
        self._scope: list[str] = []
        self._counts: Counter[str] = Counter()
        self._names: set[str] = set()
        self._shapes: dict[str, Shape] = {}
        self._scalars: dict[tuple[float, str, int], Tensor] = {}
        self._vectors: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
        self._shape_tensors: dict[str, Tensor] = {}
        self._dims: dict[tuple[str, int], Tensor] = {}
        self._buffers: list[torch.Tensor] = []
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] | None = None
        self._dtypes: dict[str, str] = {}
        self._check_log("creating the network")

    # -- names ---------------------------------------------------------------------------------

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of everything added inside; nests with dots."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    @property
    def scope_name(self) -> str:
        """The current scope, "" at the top."""
        return ".".join(self._scope)

    def _unique(self, op: str) -> str:
        base = f"{self.scope_name}.{op}" if self._scope else op
        while True:
            number = self._counts[base]
            self._counts[base] += 1
            name = base if number == 0 else f"{base}_{number}"
            if name not in self._names:
                return name

    def _claim(self, name: str) -> None:
        if name in self._names:
            raise BuildError(
                "the tensor name is already in use",
                where=name,
                fix="give every input, output and weight its own name",
            )
        self._names.add(name)

    # -- checks --------------------------------------------------------------------------------

    def _fail(self, what: str, op: str, **details: Any) -> BuildError:
        where = f"{self.scope_name}.{op}" if self._scope else op
        return BuildError(what, where=where, **details)

    def _check_log(self, where: str) -> None:
        errors = self.logger.take_errors()
        if errors:
            raise BuildError(
                f"TensorRT refused: {translate(errors)}", where=where, found=errors[0].strip()
            )

    def _done(self, layer: Any, op: str, outputs: int = 1) -> tuple[Tensor, ...]:
        """Name a new layer and its outputs; raise unless it is whole."""
        where = f"{self.scope_name}.{op}" if self._scope else op
        self._check_log(where)
        if layer is None:
            raise BuildError("TensorRT did not add the layer and gave no reason", where=where)
        name = self._unique(op)
        self._claim(name)
        layer.name = name
        layer.metadata = self.scope_name
        tensors = []
        for index in range(outputs):
            tensor = layer.get_output(index)
            if index > 0:
                output_name = f"{name}:{index}"
                self._claim(output_name)
            else:
                output_name = name
            tensor.name = output_name
            self._register(tensor, output_name)
            tensors.append(tensor)
        return tuple(tensors)

    def _one(self, layer: Any, op: str) -> Tensor:
        return self._done(layer, op)[0]

    def _register(self, tensor: Tensor, name: str) -> None:
        """Ask for the shape now: an invalid layer shows itself only when somebody asks."""
        try:
            shape = tuple(tensor.shape)
        except (RuntimeError, ValueError) as error:
            errors = self.logger.take_errors()
            raise BuildError(
                f"the layer has no valid output: {translate(errors) if errors else error}",
                where=name,
                found=errors[0].strip() if errors else str(error),
            ) from None
        self._check_log(name)
        if tensor.name != name:
            raise BuildError("TensorRT kept another tensor name", where=name, found=tensor.name)
        self._shapes[name] = shape
        self._dtypes[name] = from_trt(tensor.dtype)
        self.dtypes.add(self._dtypes[name])

    def shape(self, x: Tensor) -> Shape:
        """Shape of a tensor, -1 for dynamic dimensions (cached; `x.shape` re-infers)."""
        return self._shapes[x.name]

    def dtype(self, x: Tensor) -> str:
        """Project name of a tensor's element type (cached like its shape)."""
        return self._dtypes[x.name]

    def rank(self, x: Tensor) -> int:
        """Number of dimensions."""
        return len(self._shapes[x.name])

    def _axis(self, x: Tensor, axis: int, op: str) -> int:
        """Normalise a possibly negative axis."""
        rank = self.rank(x)
        if not -rank <= axis < rank:
            raise self._fail(
                "axis out of range", op, expected=f"-{rank}..{rank - 1}", found=str(axis)
            )
        return axis % rank

    # -- inputs and outputs --------------------------------------------------------------------

    def input(self, name: str, dtype: str, shape: Sequence[int]) -> Tensor:
        """Add a network input; -1 marks a dynamic dimension. Raises BuildError."""
        self._claim(name)
        self._drop_spare(name)
        tensor = self.raw.add_input(name, to_trt(self.trt, dtype, name), tuple(shape))
        self._check_log(name)
        if tensor is None:
            raise BuildError("TensorRT did not add the input and gave no reason", where=name)
        self._register(tensor, name)
        self._inputs[name] = tensor
        return tensor

    def output(self, t: Tensor, name: str) -> Tensor:
        """Make `t` a network output called `name` and return the output tensor.

        Network inputs, constants and tensors that are an output already get an identity layer,
        because their own name must stay. Raises BuildError for a name in use.
        """
        self._claim(name)
        old = t.name
        if old in self._inputs or old in self._outputs or old in self.constants:
            t = self.raw.add_identity(t).get_output(0)
            t.name = name
            self._register(t, name)
        else:
            self._rename(t, name)
        self.raw.mark_output(t)
        self._check_log(name)
        self._outputs[name] = t
        return t

    def _rename(self, t: Tensor, name: str) -> None:
        old = t.name
        t.name = name
        self._check_log(name)
        if t.name != name:
            raise BuildError("TensorRT kept another tensor name", where=name, found=t.name)
        self._shapes[name] = self._shapes.pop(old)
        self._dtypes[name] = self._dtypes.pop(old)

    def tap(self, t: Tensor, name: str) -> Tensor:
        """Name an intermediate for verification; the network itself does not change."""
        if name in self.taps:
            raise BuildError("the tap name is already in use", where=name)
        self.taps[name] = t
        return t

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Network inputs by name, weights included, in order of definition."""
        return dict(self._inputs)

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Network outputs by name, in order of definition."""
        return dict(self._outputs)

    # -- constants and weights -----------------------------------------------------------------

    def literal(
        self,
        array: np.ndarray | torch.Tensor,
        name: str | None = None,
        *,
        dtype: str | None = None,
    ) -> Tensor:
        """Add a constant.

        Args:
            array: values; torch carries the types numpy lacks. For packed FP4 give uint8
                `[..., K/2]` (low nibble first) and dtype="float4_e2m1fn"; the constant is
                `[..., K]`.
            name: tensor name; default: from the scope.
            dtype: only for FP4.

        Raises BuildError for element types TensorRT takes no constants of.
        """
        tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(_whole(array))
        where = name or self._unique("literal")
        return self._constant(tensor.detach().cpu(), where, dtype, None)

    def _constant(
        self, values: torch.Tensor, name: str, dtype: str | None, weight: str | None
    ) -> Tensor:
        values = values.contiguous()
        if dtype == FLOAT4:
            if values.dtype != torch.uint8 or values.dim() == 0:
                raise BuildError(
                    "packed FP4 values must be uint8",
                    where=name,
                    expected="uint8 [..., K/2]",
                    found=str(values.dtype),
                )
            shape = (*values.shape[:-1], values.shape[-1] * 2)
        else:
            dtype = BY_TORCH[values.dtype].name if values.dtype in BY_TORCH else str(values.dtype)
            shape = tuple(values.shape)
            if dtype == "uint8":
                raise BuildError(
                    "TensorRT takes no uint8 constants",
                    where=name,
                    fix="use int32 values, or give the bytes as a network input",
                )
        count = prod(shape)
        if count == 0:
            raise BuildError("a constant cannot be empty", where=name, found=str(shape))
        pointer = values.data_ptr()
        if values.element_size() > 1 and pointer % values.element_size():
            # A tensor in a mapped file may start at any byte; the builder would read it wrongly
            # or slowly without a word.
            values = values.clone()
            pointer = values.data_ptr()
        self._claim(name)
        self._buffers.append(values)
        layer = self.raw.add_constant(
            shape, self.trt.Weights(to_trt(self.trt, dtype, name), pointer, count)
        )
        self._check_log(name)
        if layer is None:
            raise BuildError("TensorRT did not add the constant", where=name)
        layer.name = name
        layer.metadata = self.scope_name
        tensor = layer.get_output(0)
        tensor.name = name
        self._register(tensor, name)
        self.constants[name] = Constant(values, dtype, shape, weight)
        return tensor

    def _scalar(self, value: float, dtype: str, rank: int) -> Tensor:
        """A constant of one value and the given rank; shared between uses."""
        key = (value, dtype, rank)
        found = self._scalars.get(key)
        if found is None:
            torch_dtype = getattr(torch, dtype)
            array = torch.full((1,) * rank, value, dtype=torch_dtype)
            if not torch_dtype.is_floating_point and array.reshape(-1)[0].item() != value:
                raise self._fail(
                    f"the number is no {dtype}", "constant", expected=dtype, found=str(value)
                )
            name = f"scalar.{dtype}.r{rank}.{value!r}"
            found = self._constant(array, name, None, None)
            self._scalars[key] = found
        return found

    def weight(self, name: str, dtype: str, shape: Sequence[int]) -> Tensor:
        """A checkpoint tensor as network input or constant, as the weight policy says.

        Asking again for the same name returns the same tensor.

        Args:
            name: checkpoint name, also the tensor's name in the network.
            dtype: declared element type. "float4_e2m1fn" is stored as packed uint8; "uint8" also
                reads the bytes of a stored float8_e4m3fn tensor.
            shape: declared logical shape.

        Raises BuildError when the checkpoint lacks the tensor or declares another dtype or
        shape, naming all of them.
        """
        declared = (dtype, tuple(shape))
        known = self._weights.get(name)
        if known is not None:
            if declared != (self.dtype(known), self.shape(known)):
                raise BuildError(
                    "the weight is used with two declarations",
                    where=name,
                    expected=f"{self.dtype(known)} {list(self.shape(known))}",
                    found=f"{dtype} {list(shape)}",
                )
            return known
        stored_dtype, stored_shape = stored_form(dtype, tuple(shape))
        info = self.source.info(name)
        if info is None:
            raise BuildError(
                "the checkpoint has no such tensor",
                where=name,
                expected=f"{stored_dtype} {list(stored_shape)}",
                fix="convert the checkpoint again with this version of the tool",
            )
        if not readable_as(info.dtype, stored_dtype) or info.shape != stored_shape:
            raise BuildError(
                "the checkpoint's tensor is not what the network needs",
                where=name,
                expected=f"{stored_dtype} {list(stored_shape)}",
                found=f"{info.dtype} {list(info.shape)}",
            )
        bits = 4 if dtype == FLOAT4 else getattr(torch, dtype).itemsize * 8
        count = prod(shape)
        if self.policy.is_input(count * bits // 8) or dtype == "uint8":
            tensor = self._take_spare(name, dtype, tuple(shape))
            if tensor is None:
                tensor = self.input(name, dtype, shape)
            self.weight_inputs.append(name)
        else:
            packed = FLOAT4 if dtype == FLOAT4 else None
            tensor = self._constant(self.source.tensor(name), name, packed, name)
        self._weights[name] = tensor
        return tensor

    def _take_spare(self, name: str, dtype: str, shape: Shape) -> Tensor | None:
        """The input made for a weight in advance.

        Each new network input makes TensorRT infer all shapes again, so that a network whose
        inputs come one by one takes quadratic time. The first weight therefore brings the
        inputs of all others along; `finish` removes those that nobody asked for.
        """
        if self._spare is None:
            self._spare = {}
            for other in self.source.names():
                info = self.source.info(other)
                if info is None or other in self._names or not self._can_be_spare(info):
                    continue
                tensor = self.raw.add_input(other, to_trt(self.trt, info.dtype, other), info.shape)
                self._check_log(other)
                self._spare[other] = tensor
        tensor = self._spare.get(name)
        if tensor is None or from_trt(tensor.dtype) != dtype or tuple(tensor.shape) != shape:
            return None
        del self._spare[name]
        self._claim(name)
        self._register(tensor, name)
        self._inputs[name] = tensor
        return tensor

    def _can_be_spare(self, info: WeightInfo) -> bool:
        count = prod(info.shape)
        # Tables beyond 32-bit indexing stay outside engines; packed bytes are declared otherwise.
        known = info.dtype != "uint8" and is_known(info.dtype) and 0 < count < 1 << 31
        return known and self.policy.is_input(count * getattr(torch, info.dtype).itemsize)

    def _drop_spare(self, name: str) -> None:
        spare = self._spare.pop(name, None) if self._spare else None
        if spare is not None:
            # TensorRT does not free the name of a removed tensor.
            spare.name = f"unused:{name}"
            self.raw.remove_tensor(spare)
            self._check_log(name)

    def finish(self) -> None:
        """Leave exactly the inputs that were asked for; the builder and the tracer call it."""
        for name in list(self._spare or ()):
            self._drop_spare(name)

    # -- plugins -------------------------------------------------------------------------------

    def plugin(
        self,
        op: str,
        inputs: Sequence[Tensor],
        attributes: Mapping[str, Any],
        outputs: Sequence[tuple[str, int]],
        in_place: Mapping[int, int] | None = None,
    ) -> tuple[Tensor, ...]:
        """Add a plugin layer.

        Args:
            op: "namespace::name" as registered with tensorrt.plugin.
            inputs: input tensors in the order of registration.
            attributes: attribute name -> value, in the order of registration.
            outputs: element type and rank of every output.
            in_place: position of an output -> that of the input whose memory it is. Where that
                is a network input X, the output becomes the network output `X.updated`, which
                must be bound to the same memory.

        Raises:
            CapabilityError: the flavour has no plugins, or this one is not registered.
            BuildError: TensorRT refused, its outputs are not the declared ones, or an input is
                updated twice.
        """
        self.capability.require(
            "has_plugins",
            f"plugin layers, which {op} needs",
            fix="use the native lowering for this flavour",
        )
        label = op.replace("::", "_")
        namespace, _, name = op.partition("::")
        registered = getattr(self.backend.plugin_module().op, namespace, None)
        registered = getattr(registered, name, None)
        if registered is None:
            raise CapabilityError(
                "the plugin is not registered", where=op, fix="register it first: plugins.aot.quick"
            )
        try:
            call = registered(*inputs, **attributes)
        except ValueError as error:
            raise self._fail("TensorRT refused the plugin call", label, found=str(error)) from error
        layer = self.raw.add_plugin(call, aot=True)
        results = self._done(layer, label, len(outputs))
        same = dict(in_place or {})
        self.plugins[results[0].name] = PluginCall(op, dict(attributes), tuple(same.values()))
        for result, (dtype, rank) in zip(results, outputs, strict=True):
            if self.dtype(result) != dtype or self.rank(result) != rank:
                raise BuildError(
                    "the plugin's output is not the declared one",
                    where=result.name,
                    expected=f"{dtype} of rank {rank}",
                    found=f"{self.dtype(result)} {list(self.shape(result))}",
                )
        return tuple(
            self._updated(inputs[same[position]], result)
            if position in same and inputs[same[position]].name in self._inputs
            else result
            for position, result in enumerate(results)
        )

    def _updated(self, cache: Tensor, result: Tensor) -> Tensor:
        """Make `result`, which is the memory of the network input `cache`, its output."""
        if cache.name in self.aliases.values():
            raise BuildError("the cache is updated twice", where=cache.name)
        output = self.output(result, f"{cache.name}.updated")
        self.aliases[output.name] = cache.name
        return output


def _whole(array: np.ndarray) -> np.ndarray:
    # numpy's ascontiguousarray would turn a scalar into a vector.
    return np.asarray(array, order="C")
