"""Picks the executor: TensorRT where this machine can run the engines, else the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from plugins.attention import Choice, Implementation
from plugins.support.errors import CapabilityError, ToolchainError, UsageError
from runtime.contract import EngineConfig
from runtime.executors import Executor
from runtime.machine import Machine, interpreter_obstacle, obstacle, probe

NAMES = ("auto", "tensorrt", "interpreter")


@dataclass(frozen=True)
class Pick:
    """Which executor on which device, and why, in one sentence."""

    name: Implementation
    device: torch.device
    reason: str


def choose(config: EngineConfig, machine: Machine, executor: str, device: str) -> Pick:
    """Decide without opening anything.

    The first way wins that the model permits and the machine can go.

    Raises UsageError for an unknown executor or device, CapabilityError when the wish is not
    permitted or cannot be granted on this machine.
    """
    if executor not in NAMES:
        raise UsageError(
            "unknown executor", where="executor", expected=", ".join(NAMES), found=executor
        )
    wanted = _device(device, machine)
    if executor == "tensorrt" and wanted.type == "cpu" and device != "auto":
        raise UsageError(
            "TensorRT does not run on the CPU", where="device", expected="cuda", found=device
        )
    problems: list[ToolchainError] = []
    for name, place in _ways(executor, device, wanted):
        refusal = config.attention.refusal(config.engines, _attention(config, name, place))
        problem = refusal or _obstacle(config, machine, name, place)
        if problem is None:
            return Pick(name, place, _why(name, place, machine, executor, problems))
        problems.append(problem)
    raise problems[-1]


def _ways(
    executor: str, device: str, wanted: torch.device
) -> list[tuple[Implementation, torch.device]]:
    """Executors and devices in the order of preference."""
    ways: list[tuple[Implementation, torch.device]] = []
    if executor == "tensorrt" or (executor == "auto" and device != "cpu"):
        ways.append(("tensorrt", wanted))
    if executor != "tensorrt":
        ways.append(("interpreter", wanted))
        if device == "auto" and wanted.type != "cpu":
            ways.append(("interpreter", torch.device("cpu")))
    return ways


def _attention(config: EngineConfig, name: Implementation, place: torch.device) -> Choice:
    on_gpu = name == "tensorrt" or place.type == "cuda"
    return Choice(name, "cuda" if on_gpu else "cpu", config.flavor)


def _obstacle(
    config: EngineConfig, machine: Machine, name: Implementation, place: torch.device
) -> ToolchainError | None:
    if name == "tensorrt":
        return obstacle(config, machine, place.index or 0)
    return interpreter_obstacle(config, machine)


def _why(
    name: Implementation,
    place: torch.device,
    machine: Machine,
    executor: str,
    problems: Sequence[ToolchainError],
) -> str:
    if name == "tensorrt":
        gpu = machine.gpus[place.index or 0].name
        return f"TensorRT on {gpu}, which the engines were built for"
    if problems:
        first = problems[0]
        facts = f"{first.found}; needs {first.expected}"
        return f"the interpreter on {place}: {first.what} ({facts})"
    if executor == "interpreter":
        return f"the interpreter on {place} as asked"
    return "the interpreter, because the CPU was asked for"


def _device(device: str, machine: Machine) -> torch.device:
    if device == "auto":
        return torch.device("cuda", 0) if machine.gpus else torch.device("cpu")
    try:
        wanted = torch.device(device)
    except RuntimeError:
        wanted = torch.device("meta")
    if wanted.type not in ("cpu", "cuda"):
        raise UsageError(
            "unknown device", where="device", expected="auto, cpu, cuda or cuda:N", found=device
        )
    if wanted.type == "cuda":
        wanted = torch.device("cuda", wanted.index or 0)
        if wanted.index >= len(machine.gpus):
            raise CapabilityError(
                "there is no such GPU",
                expected=device,
                found=f"{len(machine.gpus)} CUDA devices",
                fix="leave the device to the program: --device auto",
            )
    return wanted


@dataclass(frozen=True)
class Opened:
    """An opened executor.

    Attributes:
        executor: opened.
        reason: why it was picked, one sentence.
        notices: what is not known of it yet, for people; told once per process.
    """

    executor: Executor
    reason: str
    notices: list[str]


def open_executor(config: EngineConfig, engine_dir: Path, executor: str, device: str) -> Opened:
    """Open the executor that `choose` picks on this machine."""
    machine = probe(config.flavor)
    if config.plugins:
        # Only engines with plugins need the kernels and their compiler.
        from plugins.operations import digests

        machine = replace(machine, operations=digests())
    pick = choose(config, machine, executor, device)
    opened: Executor
    # Only the chosen one is imported: each brings libraries the other does not need.
    if pick.name == "tensorrt":
        from runtime.executors.tensorrt import TensorRTExecutor

        opened = TensorRTExecutor(config, engine_dir, pick.device)
    else:
        from runtime.executors.interpreter import InterpreterExecutor

        opened = InterpreterExecutor(config, engine_dir, pick.device)
    choice = _attention(config, pick.name, pick.device)
    return Opened(opened, pick.reason, config.attention.notices(config.engines, choice))
