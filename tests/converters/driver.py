"""Runs the networks of a checkpoint on the interpreter, slot by slot, as a runtime would.

Small on purpose: the tests of the networks must not depend on the runtime's scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from converters.definition import Definition, EngineLimits, Phase
from plugins.trt.backend import load_backend
from plugins.trt.network import Network
from plugins.trt.weights import TensorSource, WeightPolicy
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.trace import trace
from tests.plugins.full_trt import capability_for, full_backend

Define = Callable[[Network, Any, Phase, EngineLimits], Definition]
Pieces = Sequence[Sequence[int]]

# Outputs with a row per token, beside the logits.
_OUTPUTS = ("hidden_states", "hidden_states.next_draft")


def defined(
    define: Define,
    config: Any,
    weights: Mapping[str, Tensor],
    phase: Phase,
    limits: EngineLimits,
    policy: WeightPolicy | None = None,
    targets: Sequence[str] | None = None,
    plugins: bool = False,
) -> tuple[Network, Definition]:
    """A defined network; with `plugins` that of full TensorRT, for the first of the targets."""
    backend = full_backend() if plugins else load_backend()
    capability = capability_for((targets or ["9.0"])[0]) if plugins else backend.capability(targets)
    net = Network(backend, capability, TensorSource(weights), policy or WeightPolicy("auto"))
    return net, define(net, config, phase, limits)


@dataclass
class Driver:
    """The networks of one checkpoint and the memory of its slots; a family says how to define them.

    Attributes:
        history: tokens of each slot that stayed.
        rejected: per slot, tokens of its last call that did not stay.
        memory: caches and states, [slots, ...], zero at the start.
    """

    define: ClassVar[Define]

    config: Any
    weights: Mapping[str, Tensor]
    limits: EngineLimits
    phases: Sequence[Phase] = ("context", "generation")
    promote_floats: bool = False
    targets: Sequence[str] | None = None
    plugins: bool = False
    networks: dict[Phase, Network] = field(default_factory=dict)
    programs: dict[Phase, Any] = field(default_factory=dict)
    definitions: dict[Phase, Definition] = field(default_factory=dict)
    history: list[list[int]] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    memory: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for phase in self.phases:
            self.networks[phase], self.definitions[phase] = defined(
                type(self).define, self.config, self.weights, phase, self.limits,
                targets=self.targets, plugins=self.plugins,
            )  # fmt: skip
            self.programs[phase] = trace(self.networks[phase])
        self.bind(self.weights)
        self.reset()

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Use other weights of the same shapes."""
        self.weights = weights
        self.runs = {
            phase: Interpreter(program, weights, promote_floats=self.promote_floats)
            for phase, program in self.programs.items()
        }

    def reset(self, slots: int | None = None) -> None:
        """Forget everything; `slots` defaults to the engine's."""
        count = slots or self.limits.max_batch_size
        self.history = [[] for _ in range(count)]
        self.rejected = [0] * count
        for phase in self.phases:
            for name, kind in self.definitions[phase].kinds.items():
                if kind in ("cache", "state"):
                    info = self.programs[phase].tensors[name]
                    wide = self.promote_floats and info.dtype != "float32"
                    dtype = torch.float32 if wide else getattr(torch, info.dtype)
                    self.memory[name] = torch.zeros(count, *info.shape[1:], dtype=dtype)

    def free(self, slot: int) -> None:
        """Give a slot to a new sequence: states to zero, caches as they are."""
        self.history[slot], self.rejected[slot] = [], 0
        for phase in self.phases:
            for name, kind in self.definitions[phase].kinds.items():
                if kind == "state":
                    self.memory[name][slot] = 0

    def call(
        self,
        phase: Phase,
        pieces: Pieces,
        *,
        accept: Sequence[int] | None = None,
        past: Sequence[int] | None = None,
        length: int | None = None,
        span: int | None = None,
        fetch: Sequence[str] = (),
        more: Mapping[str, Tensor] | None = None,
    ) -> list[dict[str, Tensor]]:
        """One engine call over the first len(pieces) slots.

        Args:
            pieces: new tokens per slot, [] = padding slot.
            accept: how many of them stay; default all.
            past: tokens before the call per slot; default: the history's length.
            length: S; default: the longest piece, rounded up to 64 in the context phase.
            span: N; default: the smallest legal one.
            fetch: taps.
            more: further inputs.

        Returns:
            Per slot "logits", the outputs per token and the taps, one row per new token.
        """
        slots, new = len(pieces), [len(piece) for piece in pieces]
        longest = max(1, *new)
        if length is None:
            rounded = -(-longest // 64) * 64
            step = self.limits.step_tokens
            length = {"context": rounded, "generation": step, "draft": longest}[phase]
        ids = torch.zeros(slots, length, dtype=torch.int32)
        for slot, piece in enumerate(pieces):
            ids[slot, : len(piece)] = torch.tensor(list(piece), dtype=torch.int32)
        before = list(past or [len(self.history[slot]) for slot in range(slots)])
        rows = length if phase == "generation" else longest
        inputs = {
            "input_ids": ids,
            "past_lengths": torch.tensor(before, dtype=torch.int32),
            "new_lengths": torch.tensor(new, dtype=torch.int32),
            "logits_positions": torch.arange(rows, dtype=torch.int32).expand(slots, -1),
            **self._hosts(phase, pieces, length),
            **(more or {}),
        }
        kinds = self.definitions[phase].kinds
        if "attention_span" in kinds:
            least = self.definitions[phase].profile["attention_span"][0][0]
            needed = max(p + n for p, n in zip(before, new, strict=True))
            span = span or max(least, -(-needed // 64) * 64)
            inputs["attention_span"] = torch.zeros(span, dtype=torch.int32)
        if "rejected_lengths" in kinds:
            inputs["rejected_lengths"] = torch.tensor(self.rejected[:slots], dtype=torch.int32)
        out = self.run(phase, inputs, slots, fetch)
        if phase != "draft":
            for slot, piece in enumerate(pieces):
                kept = len(piece) if accept is None else accept[slot]
                self.history[slot] += list(piece[:kept])
                if piece:
                    self.rejected[slot] = len(piece) - kept
        shown = ("logits", *(name for name in _OUTPUTS if name in out), *fetch)
        return [{name: out[name][slot][: new[slot]] for name in shown} for slot in range(slots)]

    def run(
        self, phase: Phase, inputs: Mapping[str, Tensor], slots: int, fetch: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        """Run a network over the first slots' memory, and keep the states that it leaves."""
        kinds = self.definitions[phase].kinds
        bound = {name: self.memory[name][:slots] for name in kinds if name in self.memory}
        out = self.runs[phase].run({**inputs, **bound}, fetch=list(fetch))
        for name in bound:
            if f"{name}.next" in out:
                self.memory[name][:slots] = out[f"{name}.next"]
        return out

    def _hosts(self, phase: Phase, pieces: Pieces, length: int) -> dict[str, Tensor]:
        """Inputs that the host computes; families that have some override this."""
        return {}
