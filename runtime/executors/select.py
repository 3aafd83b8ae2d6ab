"""Picks the executor: TensorRT where this machine can run the engines, else the interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from plugins.support.errors import CapabilityError, UsageError
from runtime.contract import EngineConfig
from runtime.executors import Executor
from runtime.machine import Machine, interpreter_obstacle, obstacle, probe

NAMES = ("auto", "tensorrt", "interpreter")


@dataclass(frozen=True)
class Choice:
    """Which executor on which device, and why, in one sentence."""

    name: Literal["tensorrt", "interpreter"]
    device: torch.device
    reason: str


def choose(config: EngineConfig, machine: Machine, executor: str, device: str) -> Choice:
    """Decide without opening anything.

    Raises UsageError for an unknown executor or device, CapabilityError when the wish cannot be
    granted on this machine.
    """
    if executor not in NAMES:
        raise UsageError(
            "unknown executor", where="executor", expected=", ".join(NAMES), found=executor
        )
    wanted = _device(device, machine)
    if executor == "interpreter":
        return _interpreter(config, machine, wanted, f"the interpreter on {wanted} as asked")
    if wanted.type == "cpu" and device != "auto":
        if executor == "tensorrt":
            raise UsageError(
                "TensorRT does not run on the CPU", where="device", expected="cuda", found=device
            )
        reason = "the interpreter, because the CPU was asked for"
        return _interpreter(config, machine, wanted, reason)
    problem = obstacle(config, machine, wanted.index or 0)
    if problem is None:
        name = machine.gpus[wanted.index or 0].name
        return Choice("tensorrt", wanted, f"TensorRT on {name}, which the engines were built for")
    if executor == "tensorrt":
        raise problem
    facts = f" ({problem.found}; needs {problem.expected})"
    reason = f"the interpreter on {wanted}: {problem.what}{facts}"
    return _interpreter(config, machine, wanted, reason)


def _interpreter(
    config: EngineConfig, machine: Machine, device: torch.device, reason: str
) -> Choice:
    problem = interpreter_obstacle(config, machine)
    if problem is not None:
        raise problem
    return Choice("interpreter", device, reason)


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


def open_executor(
    config: EngineConfig, engine_dir: Path, executor: str, device: str
) -> tuple[Executor, str]:
    """Open the executor that `choose` picks on this machine; returns it and the reason."""
    choice = choose(config, probe(config.flavor), executor, device)
    # Only the chosen one is imported: each brings libraries the other does not need.
    if choice.name == "tensorrt":
        from runtime.executors.tensorrt import TensorRTExecutor

        return TensorRTExecutor(config, engine_dir, choice.device), choice.reason
    from runtime.executors.interpreter import InterpreterExecutor

    return InterpreterExecutor(config, engine_dir, choice.device), choice.reason
