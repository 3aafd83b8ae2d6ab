"""Executes the engines' networks with torch, on any machine."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from runtime.contract import EngineConfig, Phase
from runtime.executors.weights import MappedWeights
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.program import Program
from runtime.slots import open_memory


class InterpreterExecutor:
    """`runtime.executors.Executor` over the network interpreter.

    Args:
        config: of the engine directory.
        engine_dir: has the programs and the weights.
        device: CPU or CUDA device.
    """

    supports_outputs: Literal[True] = True
    name = "interpreter"

    def __init__(self, config: EngineConfig, engine_dir: Path, device: torch.device) -> None:
        self.device = device
        slots = config.build_config.max_batch_size
        self.generation_widths: Sequence[int] = range(1, slots + 1)
        weights = MappedWeights(engine_dir / config.weights.file, device)
        self._interpreters = {
            phase: Interpreter(
                Program.load(engine_dir / entry.program), weights, device=str(device)
            )
            for phase, entry in config.engines.items()
        }
        self._encoding = threading.Lock()
        self._inputs = {
            phase: [tensor.name for tensor in entry.of_kind("token", "host")]
            for phase, entry in config.engines.items()
        }
        self._memory = open_memory(config, device)
        self._outputs: dict[str, torch.Tensor] = {}

    def begin(self, slot: int) -> None:
        """See `Executor.begin`."""
        for memory in self._memory.values():
            memory.begin(slot)

    def end(self, slot: int, poisoned: bool = False) -> None:
        """See `Executor.end`."""
        for memory in self._memory.values():
            memory.end(slot, poisoned)

    @torch.inference_mode()
    def step(self, phase: Phase, first: int, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `Executor.step`."""
        count = inputs["input_ids"].shape[0]
        bound = {name: inputs[name].to(self.device) for name in self._inputs[phase]}
        memory = self._memory["draft" if phase == "draft" else "context"]
        bound |= memory.inputs(first, count)
        outputs = self._interpreters[phase].run(bound)
        for name, tensor in memory.next_states(first, count).items():
            tensor.copy_(outputs[f"{name}.next"])
        memory.commit(first, count)
        self._outputs = outputs
        return outputs["logits"]

    def output(self, name: str) -> torch.Tensor:
        """See `OutputExecutor.output`."""
        return self._outputs[name]

    @torch.inference_mode()
    def encode(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `HearingExecutor.encode`."""
        bound = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        with self._encoding:
            outputs = self._interpreters["audio"].run(bound)
            return {name: tensor.clone() for name, tensor in outputs.items()}

    def close(self) -> None:
        """Drop programs, weights and memory."""
        self._interpreters.clear()
        self._memory.clear()
        self._outputs = {}
