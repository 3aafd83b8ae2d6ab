"""Runs an engine's programs for `verify`: one slot, in float32 if asked for, intermediates kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from build_scripts.scores import LOGITS
from runtime.contract import EngineConfig, Phase, TensorSpec
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.program import Program
from runtime.slots import SlotMemory

_CPU = torch.device("cpu")


class TapExecutor:
    """`runtime.executors.OutputExecutor` for one slot that also keeps the taps of the last call.

    Args:
        config: of the engine directory.
        programs: per phase.
        weights: tensors by checkpoint name.
        promote: compute and store in float32.
    """

    name = "interpreter"
    device = _CPU
    generation_widths: Sequence[int] = (1,)
    supports_outputs: Literal[True] = True

    def __init__(
        self,
        config: EngineConfig,
        programs: Mapping[Phase, Program],
        weights: Mapping[str, torch.Tensor],
        promote: bool,
    ) -> None:
        self._config, self.programs = config, programs
        self._interpreters = {
            phase: Interpreter(program, weights, promote_floats=promote)
            for phase, program in programs.items()
        }
        self._promote = promote
        self.taps: dict[str, torch.Tensor] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self.begin(0)

    def begin(self, slot: int) -> None:
        """Forget the sequence: caches and states zero."""
        self._memory: dict[str, SlotMemory] = {}
        for phase in ("context", "draft"):
            if phase not in self._config.engines:
                continue
            specs = self._config.engines[phase].of_kind("cache", "state")
            if self._promote:
                specs = [_in_float32(spec) for spec in specs]
            self._memory[phase] = SlotMemory(specs, 1, _CPU)
            self._memory[phase].begin(slot)

    def end(self, slot: int, poisoned: bool = False) -> None:
        """See `Executor.end`."""
        for memory in self._memory.values():
            memory.end(slot, poisoned)

    @torch.inference_mode()
    def step(self, phase: Phase, first: int, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `Executor.step`; the taps are in `taps` afterwards, [B, S, ...] each."""
        wanted = [t.name for t in self._config.engines[phase].of_kind("token", "host")]
        bound = {name: inputs[name] for name in wanted}
        if self._promote:
            bound = {n: t.float() if t.is_floating_point() else t for n, t in bound.items()}
        memory = self._memory["draft" if phase == "draft" else "context"]
        bound |= memory.inputs(first, 1)
        taps = tuple(self.programs[phase].taps)
        results = self._interpreters[phase].run(bound, fetch=taps)
        for name, tensor in memory.next_states(first, 1).items():
            tensor.copy_(results[f"{name}.next"])
        memory.commit(first, 1)
        self.taps = {tap: results[tap] for tap in taps}
        self._outputs = results
        return results[LOGITS]

    def output(self, name: str) -> torch.Tensor:
        """See `OutputExecutor.output`."""
        return self._outputs[name]

    @torch.inference_mode()
    def encode(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `HearingExecutor.encode`; the taps are in `taps` afterwards."""
        taps = tuple(self.programs["audio"].taps)
        results = self._interpreters["audio"].run(inputs, fetch=taps)
        self.taps = {tap: results[tap] for tap in taps}
        return results

    def close(self) -> None:
        """Nothing to free."""


def _in_float32(spec: TensorSpec) -> TensorSpec:
    narrow = spec.dtype in ("float16", "bfloat16") or spec.kind == "cache"
    return spec.model_copy(update={"dtype": "float32"}) if narrow else spec
