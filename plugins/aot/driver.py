"""Launch compiled kernels through the CUDA driver, with the arguments that TensorRT passes.

Arguments are the device addresses of the inputs, 32-bit integers and the device addresses of the
outputs, nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plugins.aot.compile import CompiledKernel, runs_on
from plugins.aot.spec import KernelSpec
from plugins.support.errors import CapabilityError, InputError, ToolchainError, UsageError


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CapabilityError(
            "the CUDA driver bindings are not installed", fix="pip install cuda-bindings"
        ) from error
    return driver


def _check(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if int(status) != 0:
        raise ToolchainError(what, found=str(status))
    return values[0] if values else None


def driver_cuda() -> int:
    """The newest CUDA version that the installed driver knows, e.g. 12040 for 12.4.

    Raises CapabilityError when the driver bindings are missing.
    """
    return int(_check(_driver().cuDriverGetVersion(), "the driver does not tell its version"))


class LoadedKernel:
    """A compiled kernel in the current device's context.

    Raises CapabilityError when the kernel was compiled for another GPU or the driver bindings are
    missing, and ToolchainError when the driver refuses the PTX.
    """

    def __init__(self, kernel: CompiledKernel) -> None:
        kernel.check()
        gpu = torch.cuda.get_device_capability()
        if not runs_on(kernel.capability, gpu):
            raise CapabilityError(
                "a kernel was compiled for another GPU",
                where=kernel.name,
                expected=f"compute capability {kernel.capability}",
                found="{}.{}".format(*gpu),
                fix="compile it for this GPU",
            )
        self.kernel = kernel
        self._driver = driver = _driver()
        torch.cuda.current_stream()  # creates the context that the module is loaded into
        module = _check(
            driver.cuModuleLoadData(kernel.ptx.encode() + b"\0"),
            f"the driver refuses the kernel {kernel.name}",
        )
        self._module = module
        self._function = _check(
            driver.cuModuleGetFunction(module, kernel.name.encode()), "no such kernel"
        )
        attribute = driver.CUfunction_attribute
        _check(
            driver.cuFuncSetAttribute(
                self._function,
                attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                kernel.shared_bytes,
            ),
            f"not enough shared memory for the kernel {kernel.name}",
        )
        ids = driver.CUlaunchAttributeID
        self._early = driver.CUlaunchAttribute()
        self._early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._early.value.programmaticStreamSerializationAllowed = 1
        self.registers = _check(
            driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, self._function),
            "no attribute",
        )
        self.local_bytes = _check(
            driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, self._function),
            "no attribute",
        )

    def launch(
        self, grid: Sequence[int], arguments: Sequence[Tensor | int], early: bool = False
    ) -> None:
        """Launch on torch's current stream; tensors give their address.

        With `early` the kernel may start before its predecessor on the stream has ended
        (programmatic dependent launch), also in a CUDA graph that is captured from the stream.

        Raises UsageError when the kernel does not wait for its predecessor itself.
        """
        if early and not self.kernel.waits:
            raise UsageError(
                "a kernel that does not wait for its predecessor cannot be started early",
                where=self.kernel.name,
                fix="compile it with plugins.aot.compile for compute capability 9.0 or newer",
            )
        driver = self._driver
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
        types = tuple(
            ctypes.c_void_p if isinstance(a, Tensor) else ctypes.c_int32 for a in arguments
        )
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = self.kernel.threads, 1, 1
        config.sharedMemBytes = self.kernel.shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        if early:
            config.attrs, config.numAttrs = [self._early], 1
        _check(
            driver.cuLaunchKernelEx(config, self._function, (values, types), 0),
            f"the launch of {self.kernel.name} failed",
        )

    def run(
        self,
        spec: KernelSpec,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, int],
        early: bool = True,
    ) -> None:
        """Launch with the grid and the argument order of `spec`; early where the spec says so and
        the kernel waits itself, unless `early` is false.

        Raises InputError when the kernel was compiled for other arguments.
        """
        if self.kernel.parameters != spec.parameters:
            raise InputError(
                "a kernel was compiled from another version of its source",
                where=self.kernel.name,
                expected=", ".join(spec.parameters),
                found=", ".join(self.kernel.parameters),
                fix="compile it again",
            )
        grid = spec.grid(values)
        if all(extent > 0 for extent in grid):
            early = early and spec.early and self.kernel.waits
            self.launch(grid, spec.arguments(tensors, values), early)
