"""Runs the networks of a converted Voxtral on the interpreter, one slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from converters.checkpoint.convert import convert
from converters.definition import EngineLimits, Phase
from converters.registry import read_checkpoint_config
from converters.voxtral.config import VoxtralCheckpointConfig
from converters.voxtral.network import define
from tests.converters import driver

LIMITS = EngineLimits(
    max_batch_size=2, max_seq_len=512, chunk_size=448, max_logits_tokens=448, hidden_states=True
)


def converted(hf_dir: Path, work: Path) -> tuple[VoxtralCheckpointConfig, dict[str, Tensor]]:
    """Configuration and weights of a checkpoint, which is converted into a directory in `work`."""
    checkpoint = work / f"{hf_dir.name}-converted"
    convert(hf_dir, checkpoint)
    config = read_checkpoint_config(checkpoint)
    assert isinstance(config, VoxtralCheckpointConfig)
    return config, load_file(checkpoint / "rank0.safetensors")


@dataclass
class Driver(driver.Driver):
    """With the audio engine; its states are those of one stream."""

    define = staticmethod(define)

    limits: EngineLimits = LIMITS
    phases: Sequence[Phase] = ("audio", "context", "generation")
    frames: int = 0

    def reset(self, slots: int | None = None) -> None:
        """Forget every sequence."""
        super().reset(slots)
        self.frames = 0

    def hear(self, mel: Tensor) -> dict[str, Tensor]:
        """Audio rows (and "audio.encoded") of chunks, or of the next piece of a stream."""
        inputs: dict[str, Tensor] = {"input_features": mel}
        if self.config.voxtral.realtime:
            inputs["past_frames"] = torch.tensor([self.frames], dtype=torch.int32)
            self.frames += mel.shape[2] // 2
        return self.run("audio", inputs, 1, ["audio.encoded"])

    def read(
        self, ids: Sequence[int], rows: Tensor, phase: Phase = "context", **rest: Any
    ) -> dict[str, Tensor]:
        """Logits [len(ids), vocab] and more of the next ids; rows [n, H] go where they belong.

        Rows are the audio of the placeholders among `ids`, or of every position (realtime).
        """
        most = self.limits.chunk_size
        if len(ids) > most:
            parts = self._split(ids, rows, most, phase, rest)
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        size = -(-len(ids) // 64) * 64 if phase == "context" else 1
        embedded = torch.zeros(1, size, self.config.hidden_size)
        placeholder = self.config.voxtral.audio_token_id
        where = torch.arange(len(ids))
        if placeholder is not None:
            where = where[torch.tensor(list(ids)) == placeholder]
        embedded[0, where] = rows
        return self.call(phase, [ids], more={"audio_embeddings": embedded}, **rest)[0]

    def _split(
        self, ids: Sequence[int], rows: Tensor, most: int, phase: Phase, rest: Mapping[str, Any]
    ) -> list[dict[str, Tensor]]:
        parts, used = [], 0
        placeholder = self.config.voxtral.audio_token_id
        for start in range(0, len(ids), most):
            piece = ids[start : start + most]
            count = len(piece) if placeholder is None else list(piece).count(placeholder)
            parts.append(self.read(piece, rows[used : used + count], phase, **rest))
            used += count
        return parts
