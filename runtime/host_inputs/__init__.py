"""Engine inputs that are computed on the host because they do not fit an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from runtime.contract import EngineConfig, NgramEmbedding
from runtime.host_inputs.audio import AudioPlacement
from runtime.host_inputs.ngram import NgramGather
from runtime.rows import Row

Int64 = npt.NDArray[np.int64]


class HostInput(Protocol):
    """One input computed from token ids, or from what comes with them.

    Attributes:
        name: engine input.
        context_tokens: how many ids before the call's own it looks at.
        fill: id that stands for "before the sequence began".
    """

    name: str
    context_tokens: int
    fill: int

    def __call__(
        self, tokens: Int64, context: Int64, lengths: Int64, rows: Sequence[Row | None]
    ) -> torch.Tensor:
        """Compute the input of one call.

        Args:
            tokens: ids [B, S], valid up to `lengths`.
            context: the ids before them, oldest first, [B, context_tokens].
            lengths: valid tokens per row, [B].
            rows: what the slots contribute, for inputs that depend on more than ids.

        Returns:
            [B, S, ...] in the engine's dtype, zero at padding tokens.
        """


def preload_tables(inputs: Sequence[HostInput]) -> list[str]:
    """Bring tables into memory where they fit; per table one line that says what was done."""
    return [host.preload() for host in inputs if isinstance(host, NgramGather)]


def open_host_inputs(config: EngineConfig, engine_dir: Path) -> list[HostInput]:
    """The host inputs of an engine directory. Raises InputError when a table does not fit."""
    entry = config.engines["context"]
    opened: list[HostInput] = []
    for spec in config.host_inputs:
        tensor = next(t for t in entry.of_kind("host") if t.name == spec.name)
        if isinstance(spec, NgramEmbedding):
            opened.append(NgramGather(spec, tensor, engine_dir / config.weights.file))
        else:
            opened.append(AudioPlacement(spec, tensor))
    return opened
