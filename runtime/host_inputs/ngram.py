"""Rows of the hashed n-gram table, gathered from the weights file per call.

The table of a released checkpoint may be larger than the memory of the machine, so it is mapped: a
call touches the pages of the rows that its tokens name. Servers bring all of it into memory where
it fits. The rows depend on token ids alone, hence nothing is carried between calls but the few ids
before a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from plugins.ngram import NgramConstants, row_ids
from plugins.support.dtypes import BY_NAME
from plugins.support.errors import InputError
from runtime.contract import TOKEN_BLOCK, NgramEmbedding, TensorSpec
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
        self._dtype = BY_NAME[tensor.dtype].torch
        self._table = StoredTable(weights, spec.table, self._dtype)
        self._constants = NgramConstants(
            spec.multipliers, spec.sizes, spec.offsets, self._table.rows
        )
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

        needed = max(o + s for o, s in zip(spec.offsets, spec.sizes, strict=True))
        if needed > self._table.rows:
            raise InputError(
                "the n-gram table is too short for the hash heads",
                where=f"{weights}: {spec.table}",
                expected=f"at least {needed} rows",
                found=str(self._table.rows),
            )
        self._reader = ThreadPoolExecutor(1, "ngram-prefetch")
        self._reading: Future[None] | None = None

    def __call__(
        self, tokens: Int64, context: Int64, lengths: Int64, rows: Sequence[Row | None] = ()
    ) -> torch.Tensor:
        """[B, S, heads * width]; equal rows of one call are read once.

        The rows of the same number of prompt tokens after these are read in the background, while
        the engine works on what is returned.
        """
        batch, columns = tokens.shape
        ids = row_ids(tokens, self._constants, self.fill, context)
        valid = np.arange(columns) < lengths[:, None]
        if valid.all():
            result = torch.empty(batch, columns, self._width, dtype=self._dtype)
            self._gather(ids.reshape(-1), result.view(-1, self._table.width))
        else:
            result = torch.zeros(batch, columns, self._width, dtype=self._dtype)
            wanted = ids[valid]
            if wanted.size:
                found = torch.empty(wanted.size, self._table.width, dtype=self._dtype)
                self._gather(wanted.reshape(-1), found)
                result[torch.from_numpy(valid)] = found.view(-1, self._width)
        if columns >= TOKEN_BLOCK:
            self._prefetch([row for row in rows if row is not None])
        return result

    def preload(self) -> str:
        """Bring the table into memory where it fits; one line that says what was done."""
        return self._table.preload()

    def _gather(self, wanted: Int64, out: torch.Tensor) -> None:
        """Rows int64 [n] to `out` [n, row width]."""
        ordered = np.sort(wanted)
        if (ordered[1:] != ordered[:-1]).all():
            self._table.gather(wanted, out)
            return
        distinct, inverse = np.unique(wanted, return_inverse=True)
        found = torch.empty(len(distinct), self._table.width, dtype=self._dtype)
        self._table.gather(distinct, found)
        torch.index_select(found, 0, torch.from_numpy(inverse.reshape(-1)), out=out)

    def _prefetch(self, rows: Sequence[Row]) -> None:
        if self._reading is not None and not self._reading.done():
            return
        upcoming = []
        for row in rows:
            end = row.start + row.count
            known = np.array(row.sequence[max(0, end - self.context_tokens) : end + row.count])
            before = min(end, self.context_tokens)
            if len(known) > before:
                upcoming.append(row_ids(known, self._constants, self.fill)[before:].reshape(-1))
        if upcoming:
            distinct = np.unique(np.concatenate(upcoming))
            self._reading = self._reader.submit(self._table.prefetch, distinct)
