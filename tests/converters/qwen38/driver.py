"""Runs both networks of a checkpoint on the interpreter, slot by slot, as a runtime would.

Small on purpose: the tests of the network must not depend on the runtime's scheduling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from converters.definition import Definition, EngineLimits, Phase
from converters.qwen38.network import define
from plugins.ngram import row_ids
from plugins.trt.backend import load_backend
from plugins.trt.network import Network
from plugins.trt.weights import TensorSource, WeightPolicy
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.trace import trace
from tests.plugins.full_trt import capability_for, full_backend


def defined(
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
    """Both networks of one checkpoint and the memory of its slots.

    Attributes:
        history: tokens each slot has seen.
        memory: caches and states, [slots, ...], zero at the start.
    """

    config: Any
    weights: Mapping[str, Tensor]
    limits: EngineLimits
    host_inputs: Sequence[Mapping[str, Any]]
    programs: dict[Phase, Any] = field(default_factory=dict)
    definitions: dict[Phase, Definition] = field(default_factory=dict)
    history: list[list[int]] = field(default_factory=list)
    memory: dict[str, Tensor] = field(default_factory=dict)
    promote_floats: bool = False
    targets: Sequence[str] | None = None
    plugins: bool = False

    def __post_init__(self) -> None:
        phases: tuple[Phase, ...] = ("context", "generation")
        for phase in phases:
            net, definition = defined(
                self.config,
                self.weights,
                phase,
                self.limits,
                targets=self.targets,
                plugins=self.plugins,
            )
            self.programs[phase] = trace(net)
            self.definitions[phase] = definition
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
        program = self.programs["context"]
        for name, kind in self.definitions["context"].kinds.items():
            if kind in ("cache", "state"):
                info = program.tensors[name]
                wide = self.promote_floats and info.dtype != "float32"
                dtype = torch.float32 if wide else getattr(torch, info.dtype)
                self.memory[name] = torch.zeros(count, *info.shape[1:], dtype=dtype)

    def free(self, slot: int) -> None:
        """Give a slot to a new sequence: states to zero, caches as they are."""
        self.history[slot] = []
        for name, kind in self.definitions["context"].kinds.items():
            if kind == "state":
                self.memory[name][slot] = 0

    def call(
        self,
        phase: Phase,
        pieces: Sequence[Sequence[int]],
        *,
        length: int | None = None,
        span: int | None = None,
        fetch: Sequence[str] = (),
    ) -> list[dict[str, Tensor]]:
        """One engine call over the first len(pieces) slots.

        Args:
            pieces: new tokens per slot, [] = padding slot.
            length: S; default: the longest piece, rounded up to 64 in the context phase.
            span: N; default: the smallest legal one.
            fetch: taps.

        Returns:
            Per slot "logits" and the taps, one row per new token.
        """
        slots, new = len(pieces), [len(piece) for piece in pieces]
        longest = max(new)
        if length is None:
            length = -(-longest // 64) * 64 if phase == "context" else self.limits.step_tokens
        past = [len(self.history[slot]) for slot in range(slots)]
        ids = torch.zeros(slots, length, dtype=torch.int32)
        for slot, piece in enumerate(pieces):
            ids[slot, : len(piece)] = torch.tensor(list(piece), dtype=torch.int32)
        rows = max(longest, 1) if phase == "context" else length
        inputs = {
            "input_ids": ids,
            "past_lengths": torch.tensor(past, dtype=torch.int32),
            "new_lengths": torch.tensor(new, dtype=torch.int32),
            "logits_positions": torch.arange(rows, dtype=torch.int32).expand(slots, -1),
        }
        if phase == "context":
            least = self.definitions[phase].profile["attention_span"][0][0]
            needed = max(p + n for p, n in zip(past, new, strict=True))
            span = span or max(least, -(-needed // 64) * 64)
            inputs["attention_span"] = torch.zeros(span, dtype=torch.int32)
        for host in self.host_inputs:
            inputs[str(host["name"])] = self._embed(host, pieces, length)
        for name in self.definitions[phase].kinds:
            if name in self.memory:
                inputs[name] = self.memory[name][:slots]
        out = self.runs[phase].run(inputs, fetch=list(fetch))
        for name, value in out.items():
            if name.endswith(".next"):
                self.memory[name.removesuffix(".next")][:slots] = value
        for slot, piece in enumerate(pieces):
            self.history[slot] += list(piece)
        return [
            {name: out[name][slot][: new[slot]] for name in ("logits", *fetch)}
            for slot in range(slots)
        ]

    def _embed(
        self, host: Mapping[str, Any], pieces: Sequence[Sequence[int]], length: int
    ) -> Tensor:
        constants = _Constants(host)
        table = self.weights[host["table"]]
        width = table.shape[1] * len(constants.sizes)
        out = torch.zeros(len(pieces), length, width, dtype=table.dtype)
        before = constants.ngram_size - 1
        for slot, piece in enumerate(pieces):
            if not piece:
                continue
            context = [host["eos_token_id"]] * before + self.history[slot]
            ids = row_ids(
                np.array(piece), constants, host["eos_token_id"], np.array(context[-before:])
            )
            out[slot, : len(piece)] = table[torch.from_numpy(ids)].flatten(1)
        return out


class _Constants:
    """The view of a host input that `row_ids` needs."""

    def __init__(self, host: Mapping[str, Any]) -> None:
        self.multipliers = tuple(host["multipliers"])
        self.sizes = tuple(host["sizes"])
        self.offsets = tuple(host["offsets"])
        self.ngram_size = len(self.multipliers)
        self.heads_per_ngram = len(self.sizes) // (self.ngram_size - 1)
