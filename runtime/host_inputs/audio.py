"""Rows of the audio engine, placed at the tokens they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from plugins.support.dtypes import BY_NAME
from runtime.contract import AudioEmbedding, TensorSpec
from runtime.rows import Row

Int64 = npt.NDArray[np.int64]


class AudioPlacement:
    """The host input `audio_embedding` (see `runtime.host_inputs.HostInput`).

    Args:
        spec: name of the input.
        tensor: the engine input, [B, S, H].
    """

    context_tokens = 0
    fill = 0

    def __init__(self, spec: AudioEmbedding, tensor: TensorSpec) -> None:
        self.name = spec.name
        self._width = tensor.shape[-1]
        self._dtype = BY_NAME[tensor.dtype].torch

    def __call__(
        self, tokens: Int64, context: Int64, lengths: Int64, rows: Sequence[Row | None]
    ) -> torch.Tensor:
        """[B, S, H], zero where a token has no row."""
        heard = [(i, row.start, row.count, row.audio) for i, row in enumerate(rows) if row]
        # An executor that computes in a wider type than the engine's gets its own rows back as
        # they are: rounded here, a comparison in that type would be one of the rounding.
        dtype = next((audio.all().dtype for *_, audio in heard if audio), self._dtype)
        placed = torch.zeros(*tokens.shape, self._width, dtype=dtype)
        for index, start, count, audio in heard:
            if audio is not None:
                audio.place(start, placed[index, :count])
        return placed
