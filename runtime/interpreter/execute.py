"""Runs a program with torch.

Engines see shapes first and values later, and so does this: for each combination of input shapes
the program is prepared once, during its first run. Everything that follows from shapes, literals
and weights alone is computed then; what remains is a flat list of closures over registers, in
which every tensor is dropped after its last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from plugins.support.dtypes import BY_TORCH
from plugins.support.errors import CapabilityError, InputError
from plugins.trt.types import stored_form
from runtime.interpreter.kinds import KINDS, SHAPE_OPERANDS, VIEWS, PluginOp
from runtime.interpreter.kinds.quantization import FLOAT4, unpack_float4
from runtime.interpreter.plan import Plan, Preparation, Registers, Site, resolve, torch_dtype
from runtime.interpreter.program import Node, Program, walk

# Prepared programs kept; a context engine meets one per chunk length and cache span.
_MAX_PLANS = 64
# Larger results of constant inputs are computed again in each run instead of being kept.
_FOLD_BYTES = 1 << 20
# Larger weights are promoted where they are used instead of being kept twice.
_PROMOTE_BYTES = 16 << 20

_HALVES = ("float16", "bfloat16")
# All but cuDNN's, which gives other last bits from one call to the next (seen on an H200).
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Interpreter:
    """Executes a program on a device.

    Args:
        program: the network.
        weights: checkpoint tensors by name; only those the program names are used.
        device: "cpu" or a CUDA device.
        promote_floats: compute and store float16 and bfloat16 as float32, to check a network's
            definition without its rounding. Inputs are converted, except caches, which are
            updated in place and must be float32.
        strict: compare the type and shape of every result with what TensorRT inferred.
        plugin_ops: implementations of plugin operations by name.

    Attributes:
        plans: prepared runs by call shapes, least recently used first.
        host_reads: layers of the last run that looked at computed values to know what to do next;
            a run without any can be captured as a CUDA graph once it is prepared.

    Raises:
        InputError: a weight is missing or not as declared.
        CapabilityError: the program has a layer kind that is not known.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, torch.Tensor],
        device: str | torch.device = "cpu",
        promote_floats: bool = False,
        strict: bool = False,
        plugin_ops: Mapping[str, PluginOp] | None = None,
    ) -> None:
        self.program = program
        self.device = torch.device(device)
        self._promote = promote_floats
        self._strict = strict
        self._plugin_ops = dict(plugin_ops or {})
        for node in walk(program.nodes):
            if node.kind not in KINDS and node.kind != "loop":
                raise CapabilityError(
                    "the interpreter does not know a layer kind of the program",
                    where=node.name,
                    found=node.kind,
                    fix="use the version of the tool that built the engine directory",
                )
        self._slots = {name: index for index, name in enumerate(program.tensors)}
        self._constants: dict[int, torch.Tensor] = {}
        for name, value in program.literals.items():
            self._set_constant(name, value)
        for name, key in program.weights.items():
            self._set_constant(name, self._weight(name, key, weights))
        self._shape_inputs = _shape_inputs(program)
        self._aliased = set(program.aliases.values())
        self._sites = self._fold()
        self.plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
        self.host_reads: tuple[str, ...] = ()

    # -- constants -----------------------------------------------------------------------------

    def _weight(self, name: str, key: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        info = self.program.tensors[name]
        stored, shape = stored_form(info.dtype, info.shape)
        dtype = torch_dtype(stored)
        value = weights.get(key)
        if value is not None and stored == "uint8" and value.dtype == torch.float8_e4m3fn:
            value = value.view(torch.uint8)
        if value is None:
            raise InputError(
                "a weight of the program is missing",
                where=key,
                expected=f"{info.dtype} {list(shape)}",
            )
        if value.dtype != dtype or tuple(value.shape) != shape:
            raise InputError(
                "a weight is not what the program declares",
                where=key,
                expected=f"{dtype} {list(shape)}",
                found=f"{value.dtype} {list(value.shape)}",
            )
        return value

    def _set_constant(self, name: str, value: torch.Tensor) -> None:
        info = self.program.tensors[name]
        if info.dtype == FLOAT4:
            value = unpack_float4(value)
        large = name in self.program.weights and value.nbytes > _PROMOTE_BYTES
        if self._promote and info.dtype in _HALVES and not large:
            value = value.float()
        # Shape arithmetic stays on the host, whatever the device.
        if value.dtype not in (torch.int32, torch.int64) or value.numel() > 64:
            value = value.to(self.device)
        self._constants[self._slots[name]] = value

    def _fold(self) -> list[Site]:
        """Compute what needs no input, once and for all; return the remaining nodes."""
        kept: list[Node] = []
        preparation = self._preparation()
        for node in self.program.nodes:
            foldable = node.kind in KINDS and node.kind not in ("kv_cache_update", "shape")
            if foldable and all(
                n is None or self._slots[n] in self._constants for n in node.inputs
            ):
                size = sum(self._static_bytes(name) for name in node.outputs)
                if node.kind in VIEWS or size <= _FOLD_BYTES:
                    site = Site(node, self.program.tensors, self._slots, self._promote)
                    preparation.run((site,))
                    for name in node.outputs:
                        slot = self._slots[name]
                        value = preparation.registers[slot]
                        assert value is not None
                        self._constants[slot] = value
                    continue
            kept.append(node)
        return resolve(kept, self.program.tensors, self._slots, self._promote)

    def _static_bytes(self, name: str) -> int:
        info = self.program.tensors[name]
        if -1 in info.shape:
            return _FOLD_BYTES + 1
        count = 1
        for size in info.shape:
            count *= size
        return count * torch_dtype(info.dtype, self._promote).itemsize

    def _preparation(self, outputs: Sequence[str] = ()) -> Preparation:
        registers: Registers = [None] * len(self._slots)
        for slot, value in self._constants.items():
            registers[slot] = value
        return Preparation(
            tensors=self.program.tensors,
            slots=self._slots,
            registers=registers,
            constant=set(self._constants),
            keep={self._slots[name] for name in outputs},
            device=self.device,
            promote=self._promote,
            strict=self._strict,
            plugin_ops=self._plugin_ops,
        )

    # -- running -------------------------------------------------------------------------------

    def input_info(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Torch type and shape (-1: free) in which input `name` is taken."""
        info = self.program.tensors[name]
        if self._promote and name in self._aliased:
            return torch.float32, info.shape
        return torch_dtype(info.dtype, self._promote), info.shape

    def run(
        self, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Run once.

        Args:
            inputs: every program input by name. Caches are updated in place.
            fetch: taps, or any tensor names, to return besides the outputs.

        Returns outputs and fetched tensors by the names asked for. An in-place output is the
        input tensor itself.

        Raises:
            InputError: an input is missing, unknown or of another type or shape; a name to
                fetch does not exist; an index is out of range.
            CapabilityError: a layer needs something the interpreter does not do.
        """
        bound = self._bind(inputs)
        wanted = {name: name for name in self.program.outputs}
        wanted.update({name: self._resolve(name) for name in fetch})
        signature: tuple[object, ...] = (
            *(tuple(value.shape) for value in bound.values()),
            *(tuple(bound[name].reshape(-1).tolist()) for name in self._shape_inputs),
            tuple(sorted(set(fetch))),
        )
        # cuDNN's convolutions round float32 to TF32 unless told otherwise.
        exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with torch.no_grad(), exact, sdpa_kernel(_ATTENTION):
            plan = self.plans.get(signature)
            if plan is None:
                registers, plan = self._prepare(bound, list(wanted.values()))
                self.plans[signature] = plan
                if len(self.plans) > _MAX_PLANS:
                    self.plans.popitem(last=False)
            else:
                self.plans.move_to_end(signature)
                registers = plan.template.copy()
                for name, value in bound.items():
                    registers[self._slots[name]] = value
                plan.run(registers)
        self.host_reads = plan.host_reads
        return {name: self._result(registers, plan, source) for name, source in wanted.items()}

    def _result(self, registers: Registers, plan: Plan, name: str) -> torch.Tensor:
        slot = self._slots[name]
        value = registers[slot]
        assert value is not None
        # A value that is kept for later runs must not be handed out for writing.
        return value.clone().to(self.device) if plan.template[slot] is not None else value

    def _resolve(self, name: str) -> str:
        source = self.program.taps.get(name, name)
        inside = {n for node in self.program.nodes for n in node.outputs}
        if source not in inside and source not in self.program.inputs:
            raise InputError(
                "the program has no such tap or tensor",
                where=name,
                expected=", ".join(list(self.program.taps)[:20]) or "no taps",
            )
        return source

    def _bind(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        bound: dict[str, torch.Tensor] = {}
        if inputs.keys() != set(self.program.inputs):
            raise InputError(
                "the inputs are not those of the program",
                expected=", ".join(self.program.inputs),
                found=", ".join(inputs),
            )
        for name in self.program.inputs:
            value = inputs[name]
            info = self.program.tensors[name]
            dtype = self.input_info(name)[0]
            fits = len(info.shape) == value.dim() and all(
                want in (-1, got) for want, got in zip(info.shape, value.shape, strict=True)
            )
            convertible = (
                self._promote and info.dtype in _HALVES and name not in self._aliased
            ) and value.dtype == torch_dtype(info.dtype)
            if not fits or (value.dtype != dtype and not convertible):
                raise InputError(
                    "an input is not what the program takes",
                    where=name,
                    expected=f"{BY_TORCH[dtype].name} {list(info.shape)}",
                    found=f"{value.dtype} {list(value.shape)}",
                )
            if name in self._aliased and value.device != self.device:
                raise InputError(
                    "a cache lies on another device",
                    where=name,
                    expected=str(self.device),
                    found=str(value.device),
                )
            bound[name] = value if value.dtype == dtype else value.to(dtype)
            if name not in self._shape_inputs:
                bound[name] = bound[name].to(self.device)
        return bound

    def _prepare(
        self, bound: Mapping[str, torch.Tensor], outputs: list[str]
    ) -> tuple[Registers, Plan]:
        preparation = self._preparation(outputs)
        for name, value in bound.items():
            slot = self._slots[name]
            preparation.registers[slot] = value
            if name in self._shape_inputs:
                preparation.constant.add(slot)
        preparation.run(self._sites)
        return preparation.registers, preparation.finish()


def _shape_inputs(program: Program) -> tuple[str, ...]:
    """Program inputs whose values shape results."""
    producer = {name: node for node in walk(program.nodes) for name in node.outputs}
    pending = [
        name
        for node in walk(program.nodes)
        for index in SHAPE_OPERANDS.get(node.kind, ())
        if index < len(node.inputs)
        for name in [node.inputs[index]]
        if name is not None
    ]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        node = producer.get(name)
        if node is not None and node.kind != "shape":
            pending.extend(n for n in node.inputs if n is not None)
    return tuple(name for name in program.inputs if name in seen)
