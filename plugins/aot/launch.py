"""Launch a kernel on torch tensors, in whichever way it needs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plugins.aot.compile import CompiledKernel, compile_kernel, installed_ptx
from plugins.aot.driver import LoadedKernel, driver_cuda
from plugins.aot.spec import KernelSpec

_PROVIDED: dict[str, CompiledKernel] = {}
_LOADED: dict[tuple[str, int], LoadedKernel] = {}


def provide(kernels: Mapping[str, CompiledKernel]) -> None:
    """Launch these, by `KernelSpec.key`, where this process would compile them.

    For machines whose Triton is too old for a kernel.
    """
    _PROVIDED.update(kernels)


def launch(spec: KernelSpec, tensors: Mapping[str, Tensor], values: Mapping[str, int]) -> None:
    """Run a kernel on the tensors' device, or in Triton's interpreter.

    Where `KernelSpec.as_compiled` says so the kernel is compiled as for TensorRT, once per process
    and GPU, and launched through the driver; elsewhere by Triton.

    Raises CapabilityError when the tensors' GPU lacks the kernel's instructions, or the installed
    Triton is too old for it.
    """
    device = next(iter(tensors.values())).device
    if device.type != "cuda" or not spec.as_compiled(torch.cuda.get_device_capability(device)):
        spec.launch(tensors, values)
        return
    with torch.cuda.device(device):
        _loaded(spec).run(spec, tensors, values)


def _loaded(spec: KernelSpec) -> LoadedKernel:
    """The kernel in the current device's context."""
    key = spec.key, torch.cuda.current_device()
    if key not in _LOADED:
        kernel = _PROVIDED.get(spec.key)
        if kernel is None:
            capability = "{}.{}".format(*torch.cuda.get_device_capability())
            kernel = compile_kernel(spec, capability, installed_ptx(driver_cuda()))
        _LOADED[key] = LoadedKernel(kernel)
    return _LOADED[key]
