"""Executes the engines' networks with torch, on any machine."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from runtime.contract import EngineConfig, Phase
from runtime.executors.graphs import RepeatedCalls
from runtime.executors.stream import CudaStream, Stream, graph_widths
from runtime.executors.weights import MappedWeights
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.program import Program
from runtime.slots import open_memory


class InterpreterExecutor:
    """`runtime.executors.Executor` over the network interpreter.

    Args:
        config: of the engine directory.
        engine_dir: has the programs and the weights.
        device: CPU or CUDA device. On CUDA, uniform generation calls become CUDA graphs.
        stream: where generation calls are queued; None = a new CUDA stream.
    """

    supports_outputs: Literal[True] = True
    name = "interpreter"

    def __init__(
        self,
        config: EngineConfig,
        engine_dir: Path,
        device: torch.device,
        stream: Stream | None = None,
    ) -> None:
        self.device = device
        slots = config.build_config.max_batch_size
        self.generation_widths: Sequence[int] = range(1, slots + 1)
        self._repeated: RepeatedCalls | None = None
        if stream is not None or device.type == "cuda":
            self._repeated = RepeatedCalls(stream or CudaStream(device), device)
            self.generation_widths = graph_widths(slots)
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
        self._outputs: Mapping[str, torch.Tensor] = {}

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
        interpreter = self._interpreters[phase]
        memory = self._memory["draft" if phase == "draft" else "context"]
        given = {name: inputs[name] for name in self._inputs[phase]}

        def work(bound: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            outputs = interpreter.run({**bound, **memory.inputs(first, count)})
            for name, tensor in memory.next_states(first, count).items():
                tensor.copy_(outputs[f"{name}.next"])
            return outputs

        # A range that does not start at slot 0 has other addresses, hence no graph.
        if self._repeated is not None and phase == "generation" and first == 0:
            form = count, memory.swapped
            self._outputs = self._repeated.run(
                form, given, work, capturable=lambda: not interpreter.host_reads
            )
        else:
            self._outputs = work({name: t.to(self.device) for name, t in given.items()})
        memory.commit(first, count)
        return self._outputs["logits"]

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
        self._repeated = None
        self._interpreters.clear()
        self._memory.clear()
        self._outputs = {}
