"""Rows of the hashed n-gram table, gathered from the weights file per call.

The table of a released checkpoint is larger than the memory of most machines, so it is mapped and
never read as a whole: a call touches the pages of the rows that its tokens name. The rows depend on
token ids alone, hence nothing is carried between calls but the few ids before a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from plugins.ngram import NgramConstants, row_ids
from plugins.support.dtypes import BY_NAME
from plugins.support.errors import InputError
from runtime.contract import NgramEmbedding, TensorSpec
from runtime.host_inputs.table import StoredTable
from runtime.rows import Row

Int64 = npt.NDArray[np.int64]


class NgramGather:
    """The host input `ngram_embedding` (see `runtime.host_inputs.HostInput`).

    Args:
        spec: constants and table name.
        tensor: the engine input, [B, S, heads * row width].
        weights: safetensors file with the table.
    """

    def __init__(self, spec: NgramEmbedding, tensor: TensorSpec, weights: Path) -> None:
        self.name = spec.name
        self._table = StoredTable(weights, spec.table)
        self._constants = NgramConstants(
            spec.multipliers, spec.sizes, spec.offsets, self._table.rows
        )
        self._dtype = BY_NAME[tensor.dtype].torch
        self.context_tokens = self._constants.ngram_size - 1
        self.fill = spec.eos_token_id
        self._width = len(spec.sizes) * self._table.width
        if tensor.shape[-1] != self._width:
            raise InputError(
                "the n-gram table does not fit the engine",
                where=f"{weights}: {spec.table}",
                expected=f"{spec.name} of width {tensor.shape[-1]}",
                found=f"{len(spec.sizes)} heads of width {self._table.width}",
            )

    def __call__(
        self, tokens: Int64, context: Int64, lengths: Int64, rows: Sequence[Row | None] = ()
    ) -> torch.Tensor:
        """[B, S, heads * width]; equal rows of one call are read once."""
        batch, columns = tokens.shape
        result = torch.zeros(batch, columns, self._width, dtype=self._dtype)
        valid = np.arange(columns) < lengths[:, None]
        if not valid.any():
            return result
        wanted = row_ids(tokens, self._constants, self.fill, context)[valid]
        distinct, inverse = np.unique(wanted, return_inverse=True)
        gathered = self._table.gather(distinct, self._dtype)
        picked = gathered[torch.from_numpy(inverse.reshape(-1))]
        result[torch.from_numpy(valid)] = picked.reshape(-1, self._width)
        return result
