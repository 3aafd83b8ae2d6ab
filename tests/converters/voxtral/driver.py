"""Runs the networks of a converted Voxtral on the interpreter, one slot, as a runtime would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from converters.checkpoint.convert import convert
from converters.definition import Definition, EngineLimits, Phase
from converters.registry import read_checkpoint_config
from converters.voxtral.config import VoxtralCheckpointConfig
from converters.voxtral.network import define
from plugins.trt.backend import load_backend
from plugins.trt.network import Network
from plugins.trt.weights import TensorSource
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.trace import trace

LIMITS = EngineLimits(
    max_batch_size=2, max_seq_len=512, chunk_size=448, max_logits_tokens=448, hidden_states=True
)


class Driver:
    """All engines of one checkpoint.

    Args:
        hf_dir: source checkpoint, either layout.
        work: an empty directory for the converted one.
    """

    def __init__(self, hf_dir: Path, work: Path) -> None:
        checkpoint = work / f"{hf_dir.name}-converted"
        convert(hf_dir, checkpoint)
        config = read_checkpoint_config(checkpoint)
        assert isinstance(config, VoxtralCheckpointConfig)
        self.config = config
        self.weights: dict[str, Tensor] = load_file(checkpoint / "rank0.safetensors")
        self.networks: dict[Phase, tuple[Network, Definition]] = {}
        self.runs: dict[Phase, Interpreter] = {}
        phases: tuple[Phase, ...] = ("audio", "context", "generation")
        for phase in phases:
            net = Network(load_backend(), source=TensorSource(self.weights))
            self.networks[phase] = net, define(net, config, phase, LIMITS)
        self.bind(self.weights)

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Run with other values of the same tensors."""
        self.runs = {
            phase: Interpreter(trace(net), weights, strict=True)
            for phase, (net, _) in self.networks.items()
        }
        self.reset()

    def reset(self) -> None:
        """Forget every sequence."""
        self.memory = self._zeros("context", "cache")
        self.states = self._zeros("audio", "state")
        self.length = self.frames = 0

    def _zeros(self, phase: Phase, kind: str) -> dict[str, Tensor]:
        net, definition = self.networks[phase]
        return {
            name: torch.zeros(1, *net.shape(net.inputs[name])[1:])
            for name, found in definition.kinds.items()
            if found == kind
        }

    def hear(self, mel: Tensor) -> dict[str, Tensor]:
        """Audio rows (and "audio.encoded") of chunks, or of the next piece of a stream."""
        inputs = {"input_features": mel, **self.states}
        if self.config.voxtral.realtime:
            inputs["past_frames"] = torch.tensor([self.frames], dtype=torch.int32)
            self.frames += mel.shape[2] // 2
        out = self.runs["audio"].run(inputs, fetch=["audio.encoded"])
        for name in self.states:
            self.states[name] = out[f"{name}.next"]
        return out

    def read(self, ids: Sequence[int], rows: Tensor, phase: Phase = "context") -> Tensor:
        """Logits [len(ids), vocab] of the next ids; `rows` [n, H] go to where they belong.

        Rows are the audio of the placeholders among `ids`, or of every position (realtime).
        """
        count = len(ids)
        size = -(-count // 64) * 64 if phase == "context" else 1
        tokens = torch.zeros(1, size, dtype=torch.int32)
        tokens[0, :count] = torch.tensor(list(ids), dtype=torch.int32)
        embedded = torch.zeros(1, size, self.config.hidden_size)
        placeholder = self.config.voxtral.audio_token_id
        if placeholder is None:
            embedded[0, :count] = rows
        else:
            embedded[0, tokens[0] == placeholder] = rows
        inputs = {
            "input_ids": tokens,
            "past_lengths": torch.tensor([self.length], dtype=torch.int32),
            "new_lengths": torch.tensor([count], dtype=torch.int32),
            "logits_positions": torch.arange(count, dtype=torch.int32)[None],
            "audio_embeddings": embedded,
            **self.memory,
        }
        if phase == "context":
            span = -(-(self.length + count) // 64) * 64
            inputs["attention_span"] = torch.zeros(span, dtype=torch.int32)
        self.length += count
        out = self.runs[phase].run(inputs)
        if phase == "context":
            self.hidden = out["hidden_states"][0, :count]
        return out["logits"][0]
