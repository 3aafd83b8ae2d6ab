"""Launch a kernel on torch tensors, in whichever way it needs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plugins.aot.compile import compile_kernel
from plugins.aot.driver import LoadedKernel
from plugins.aot.spec import OLDEST_TRITON, KernelSpec

_LOADED: dict[tuple[str, int], LoadedKernel] = {}


def launch(spec: KernelSpec, tensors: Mapping[str, Tensor], values: Mapping[str, int]) -> None:
    """`KernelSpec.launch`, also for kernels whose programs form clusters.

    Those, and kernels that not every Triton compiles right, are compiled as for TensorRT, once per
    process and GPU, and launched through the driver.

    Raises CapabilityError when the tensors' GPU lacks the kernel's instructions, or the installed
    Triton is too old for it.
    """
    if spec.cluster == 1 and spec.needs_triton == OLDEST_TRITON:
        spec.launch(tensors, values)
        return
    device = next(iter(tensors.values())).device
    with torch.cuda.device(device):
        _loaded(spec).run(spec, tensors, values)


def _loaded(spec: KernelSpec) -> LoadedKernel:
    """The kernel in the current device's context."""
    key = spec.key, torch.cuda.current_device()
    if key not in _LOADED:
        capability = "{}.{}".format(*torch.cuda.get_device_capability())
        _LOADED[key] = LoadedKernel(compile_kernel(spec, capability))
    return _LOADED[key]
