"""A kernel with everything that is known when an engine is built.

One description serves the three ways in which a kernel runs: just in time on a GPU, in Triton's
interpreter on a CPU, and compiled ahead of time for TensorRT.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction

from plugins.support.errors import CapabilityError, UsageError

# Kernels in Gluon, Triton's explicit level, are written in the instructions of this compute
# capability; plain Triton compiles for any.
HOPPER = (9, 0)
# What this project supports, see `pyproject.toml`.
OLDEST_TRITON = (3, 6)

# The grid of a kernel from its integers; the values are ints or symbolic expressions.
Grid = Callable[[Mapping[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class Argument:
    """One tensor argument: its name in the kernel's signature and its element type (our name)."""

    name: str
    dtype: str


@dataclass(frozen=True)
class KernelSpec:
    """A kernel, its arguments in TensorRT's order, its constants and its launch.

    Attributes:
        name: names the operation, e.g. "qsa_attend".
        function: the `triton.jit` function; its parameters are `inputs`, `scalars`, `outputs`,
            then `constants`, in this order.
        inputs, outputs: tensor arguments.
        scalars: 32-bit integers that depend on the shapes of a call.
        constants: compile-time constants.
        grid: launch grid as a function of the scalars and of the names in `grid_names`.
        warps: warps per program.
        registers: most registers per thread, where fewer let more programs share a processor.
        cluster: programs side by side on the grid's first axis that run at the same time and may
            write to each other's shared memory. The compiled kernel says so itself and is launched
            like any other; Triton's own launcher cannot do it (`plugins.aot.launch` can).
        needs_triton: oldest Triton whose code for the kernel was seen to work. Where it is newer
            than the oldest one supported, the kernel also runs in process as it is compiled for
            TensorRT: the form that was seen.
        early: start it before its predecessor has ended, where the launcher can: on compute
            capability 9.0, and not in TensorRT. Always safe (`plugins.aot.compile.wait_first`). It
            hides the time of a launch, and costs more than that where a multiprocessor holds
            several programs: those that come early crowd on the first free ones, which then finish
            last. So this is for sums and for kernels whose programs each fill a multiprocessor.
        aliases: output -> input that is the same tensor, updated in place. TensorRT passes both
            addresses.
    """

    name: str
    function: Any
    inputs: tuple[Argument, ...]
    scalars: tuple[str, ...]
    outputs: tuple[Argument, ...]
    constants: Mapping[str, Any]
    grid: Grid
    warps: int = 4
    registers: int | None = None
    cluster: int = 1
    needs_triton: tuple[int, int] = OLDEST_TRITON
    early: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        declared = [*self.parameters, *self.constants]
        names = list(self.function.arg_names)
        if declared != names:
            raise UsageError(
                "the arguments of a kernel are not in TensorRT's order",
                where=self.name,
                expected="inputs, integers, outputs, constants: " + ", ".join(names),
                found=", ".join(declared),
            )

    @property
    def tensors(self) -> tuple[Argument, ...]:
        """All tensor arguments, inputs first."""
        return self.inputs + self.outputs

    def as_compiled(self, capability: tuple[int, int]) -> bool:
        """Whether torch launches the kernel on a GPU of that compute capability as it is compiled
        for TensorRT: on 9.0 every one, because each may then start early or let the next one do so,
        elsewhere those that Triton's launcher or an older Triton cannot do.
        """
        special = self.cluster > 1 or self.needs_triton != OLDEST_TRITON
        return special or capability == HOPPER

    def compiles(self) -> bool:
        """Whether the installed Triton makes code for the kernel that works."""
        return installed_triton() >= self.needs_triton

    def check(self, capability: tuple[int, int]) -> None:
        """Raise CapabilityError when a GPU of that compute capability cannot run the kernel, or the
        installed Triton does not compile it.
        """
        if isinstance(self.function, GluonJITFunction) and capability != HOPPER:
            raise CapabilityError(
                "a kernel uses instructions that this GPU does not have",
                where=self.name,
                expected="compute capability {}.{}".format(*HOPPER),
                found="{}.{}".format(*capability),
                fix="build the engines on this GPU: build-engine build CKPT_DIR ENGINE_DIR",
            )
        if not self.compiles():
            wanted, found = ("{}.{}".format(*v) for v in (self.needs_triton, installed_triton()))
            raise CapabilityError(
                "this Triton does not compile a kernel right",
                where=self.name,
                expected=f"Triton {wanted} or newer",
                found=found,
                fix=f'pip install "triton>={wanted}"',
            )

    @cached_property
    def key(self) -> str:
        """Name and a short hash of everything that the compiled kernel depends on."""
        parts = [self.name, self.warps, self.registers, self.cluster]
        parts += [(a.name, a.dtype) for a in self.tensors]
        parts += [(name, str(value)) for name, value in self.constants.items()]
        return f"{self.name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options: products declared float32 are meant as such, not rounded to TF32."""
        exact = self.constants.get("DOT") == tl.float32
        return {"allowed_dot_input_precisions": ("ieee",)} if exact else {}

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the run-time arguments in order."""
        return (
            *(a.name for a in self.inputs),
            *self.scalars,
            *(a.name for a in self.outputs),
        )

    def arguments(
        self, tensors: Mapping[str, Tensor], values: Mapping[str, int]
    ) -> list[Tensor | int]:
        """The run-time arguments in order. Inputs that an output aliases need not be given."""
        same = {before: tensors[after] for after, before in self.aliases.items()}
        arguments: list[Tensor | int] = [(same | dict(tensors))[a.name] for a in self.inputs]
        arguments += [values[name] for name in self.scalars]
        return arguments + [tensors[a.name] for a in self.outputs]

    def launch(self, tensors: Mapping[str, Tensor], values: Mapping[str, int]) -> None:
        """Run on the tensors' device, or in the interpreter when TRITON_INTERPRET is set.

        Args:
            tensors: every tensor argument by name, contiguous.
            values: every scalar and every further name that the grid uses.

        Raises:
            CapabilityError: the tensors' GPU lacks the kernel's instructions.
            UsageError: the kernel runs in clusters.
        """
        if self.cluster != 1:
            raise UsageError(
                "Triton cannot launch programs that form clusters",
                where=self.name,
                expected="a launch through plugins.aot.launch",
                found=f"clusters of {self.cluster}",
            )
        device = next(iter(tensors.values())).device
        if device.type == "cuda":
            self.check(torch.cuda.get_device_capability(device))
        grid = self.grid(values)
        options = {} if triton.knobs.runtime.interpret else self.options
        if all(extent > 0 for extent in grid):
            self.function[grid](
                *self.arguments(tensors, values),
                **self.constants,
                num_warps=self.warps,
                maxnreg=self.registers,
                **options,
            )


def installed_triton() -> tuple[int, int]:
    """Major and minor version."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def ceil_div(a: Any, b: Any) -> Any:
    """(a + b - 1) // b for ints and symbolic expressions alike."""
    if isinstance(a, int) and isinstance(b, int):
        return triton.cdiv(a, b)
    return (a + b - 1) // b
