"""What this machine can execute, and why not, before anything is deserialized."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from plugins.support.errors import CapabilityError, ToolchainError
from plugins.trt.backend import load_backend
from plugins.trt.types import Flavor
from runtime.contract import EngineConfig


@dataclass(frozen=True)
class Gpu:
    """One CUDA device: torch's index, its name and its compute capability such as "8.9"."""

    index: int
    name: str
    target: str


@dataclass(frozen=True)
class Machine:
    """What matters here of a machine.

    Attributes:
        libraries: version per importable TensorRT flavour.
        gpus: CUDA devices that torch sees, by index.
        operations: digest per custom operation that the interpreter can execute here. Serialized
            engines carry their kernels and need none.
    """

    libraries: Mapping[Flavor, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    operations: Mapping[str, str] = field(default_factory=dict)


def probe(flavor: Flavor) -> Machine:
    """This machine, as far as engines of `flavor` are concerned. Imports that flavour."""
    libraries: dict[Flavor, str] = {}
    with suppress(CapabilityError):
        libraries[flavor] = load_backend(flavor).version
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            gpus.append(Gpu(index, about.name, f"{about.major}.{about.minor}"))
    return Machine(libraries, tuple(gpus))


def obstacle(config: EngineConfig, machine: Machine, index: int = 0) -> ToolchainError | None:
    """Why TensorRT cannot run these engines on GPU `index` of `machine`; None when it can."""
    if index >= len(machine.gpus):
        return CapabilityError(
            "TensorRT engines need a GPU and there is none",
            expected=f"a GPU of compute capability {_targets(config)}",
            found="no CUDA device" if not machine.gpus else f"{len(machine.gpus)} CUDA devices",
            fix="use the interpreter: --executor interpreter",
        )
    gpu = machine.gpus[index]
    if config.targets and gpu.target not in config.targets:
        return CapabilityError(
            "the engines were built for other GPUs",
            expected=f"compute capability {_targets(config)}",
            found=f"{gpu.name} with {gpu.target}",
            fix=f"rebuild them: build-engine build CKPT_DIR ENGINE_DIR --target {gpu.target}",
        )
    version = machine.libraries.get(config.flavor)
    if version != config.tensorrt_version:
        wanted = f"{config.flavor} {config.tensorrt_version}"
        return CapabilityError(
            "the engines were built with another TensorRT",
            expected=wanted,
            found=f"{config.flavor} {version}" if version else f"no {config.flavor}",
            fix=f"pip install {config.flavor}=={config.tensorrt_version}, or rebuild: "
            f"build-engine build CKPT_DIR ENGINE_DIR --flavor {config.flavor}",
        )
    return None


def interpreter_obstacle(config: EngineConfig, machine: Machine) -> ToolchainError | None:
    """Why the interpreter cannot run these networks on `machine`; None when it can."""
    for plugin in config.plugins:
        found = machine.operations.get(plugin.name)
        if found != plugin.digest:
            return CapabilityError(
                "the networks have a custom operation that this installation does not have"
                if found is None
                else "the networks were built with another version of a custom operation",
                where=plugin.name,
                expected=plugin.digest[:12],
                found=found[:12] if found else "no such operation",
                fix="use the version of the tool that built the engine directory, or rebuild it",
            )
    return None


def _targets(config: EngineConfig) -> str:
    return ", ".join(config.targets) or "of the machine they were built on"
