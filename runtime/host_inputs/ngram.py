"""Rows of the hashed n-gram table, gathered from the weights file per call.

The table of a released checkpoint may be larger than the memory of the machine, so it is mapped: a
call touches the pages of the rows that its tokens name. Servers bring all of it into memory where
it fits. The rows depend on token ids alone, hence nothing is carried between calls but the few ids
before a chunk.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread, get_native_id

import numpy as np
import numpy.typing as npt
import torch

from plugins.ngram import NgramConstants, row_ids
from plugins.support.dtypes import BY_NAME
from plugins.support.errors import CapabilityError, InputError
from runtime.contract import TOKEN_BLOCK, NgramEmbedding, TensorSpec
from runtime.host_inputs.compiled import CompiledGather, compile_library
from runtime.host_inputs.joined import join_rows, reserve
from runtime.host_inputs.preload import available_bytes, fits
from runtime.host_inputs.table import StoredTable
from runtime.rows import Row

Int64 = npt.NDArray[np.int64]

# 128 rows from memory take a hundredth of this, on a host that takes pages away a fifth; reads of
# evicted rows from disk more.
_WAITED_NS = 1_600_000
_LOWEST_PRIORITY = 19
_NOT_USED = (
    "compiled code gives other values side by side, rows are gathered from the file as before"
)


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

        if min(spec.sizes) < 1 or min(spec.offsets) < 0:
            raise InputError(
                "the hash heads of the n-gram table are not as they must be",
                where=f"{spec.name} of the engine's configuration",
                expected="sizes from 1, offsets from 0",
                found=f"sizes from {min(spec.sizes)}, offsets from {min(spec.offsets)}",
                fix="build the engine again",
            )
        needed = max(o + s for o, s in zip(spec.offsets, spec.sizes, strict=True))
        if needed > self._table.rows:
            raise InputError(
                "the n-gram table is too short for the hash heads",
                where=f"{weights}: {spec.table}",
                expected=f"at least {needed} rows",
                found=str(self._table.rows),
            )
        self._compiled: CompiledGather | None = None
        # The same over a copy of the table, once there is one.
        self._joined: CompiledGather | None = None
        self._joining: Thread | None = None
        self._reader = ThreadPoolExecutor(1, "ngram-prefetch")
        self._reading: Future[None] | None = None

    def __call__(
        self, tokens: Int64, context: Int64, lengths: Int64, rows: Sequence[Row | None] = ()
    ) -> torch.Tensor:
        """[B, S, heads * width]; equal rows of one call are read once.

        The rows of the same number of prompt tokens after these are read in the background, while
        the engine works on what is returned, unless the table was preloaded and compiled code
        gathers from it.
        """
        batch, columns = tokens.shape
        if compiled := self._joined or self._compiled:
            result = torch.empty(batch, columns, self._width, dtype=self._dtype)
            self._gather_compiled(compiled, (tokens, context, lengths), result)
            return result
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
        said = self._table.preload()
        how = self._compile() if all(part.preloaded for part in self._table.parts) else ""
        return f"{said}; {how}" if how else said

    def _compile(self) -> str:
        """Have calls done by compiled code from now on; one line that says whether they are.

        A table whose rows are cast, or decoded to a type of 32 bits, stays with numpy: "".
        """
        table = self._table
        cast = table.meanings is None and table.parts[0].dtype.torch != table.dtype
        if cast or (table.meanings is not None and table.dtype.itemsize != 2):
            return ""
        slower = "rows are gathered by numpy, which takes up to twice as long"
        try:
            library = compile_library()
        except CapabilityError as error:
            return f"{slower}: {'; '.join([error.what, *error.details().values()])}"
        parts = [part.bytes for part in table.parts]
        found = CompiledGather(parts, table.meanings, self._constants, self.fill, library)
        if not self._agrees(found):
            return f"{slower}: compiled code gives other values here"
        self._compiled = found
        return f"rows are gathered by compiled code{self._join(library)}"

    def _agrees(self, compiled: CompiledGather) -> bool:
        """Whether it gives the values of the way in use.

        What this compiler made of it for this processor was never tried anywhere else.
        """
        numbers = np.random.default_rng(0)
        tokens = numbers.integers(0, self.fill + 1, (8, 4))
        context = numbers.integers(0, self.fill + 1, (8, self.context_tokens))
        tokens[0, 1] = context[1, -1] = self.fill
        call = tokens, context, np.arange(8) % 5
        expected = self(*call)
        result = torch.empty_like(expected)
        # All rows by compiled code, however long they take.
        compiled.gather(compiled.hash(*call), result)
        return torch.equal(result.view(torch.uint8), expected.view(torch.uint8))

    def _join(self, library: ctypes.CDLL) -> str:
        """Start to copy codes and scales of a row side by side; what is to be said of it.

        Only where table and copy both fit, and only for compiled code: numpy would copy the whole
        table to gather from rows that lie apart. Calls use the copy once it is complete.
        """
        table = self._table
        parts = [part.bytes for part in table.parts]
        total = sum(part.nbytes for part in parts)
        if len(parts) == 1 or not fits(2 * total, available_bytes()):
            return ""
        if (memory := reserve(total)) is None:
            return ""

        def join() -> None:
            # Of this thread alone. A start does not wait for it, nor does a step.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, get_native_id(), _LOWEST_PRIORITY)
            joined = join_rows(parts, memory)
            found = CompiledGather(joined, table.meanings, self._constants, self.fill, library)
            if self._agrees(found):
                self._joined = found
            else:
                print(f"n-gram table: {_NOT_USED}", file=sys.stderr, flush=True)

        self._joining = Thread(target=join, name="ngram-join", daemon=True)
        self._joining.start()
        return ", codes and scales of a row are being copied side by side"

    def _gather_compiled(
        self, compiled: CompiledGather, call: tuple[Int64, Int64, Int64], out: torch.Tensor
    ) -> None:
        """Rows of one call, zeros at padding, to `out` [B, S, heads * width].

        Equal rows are not looked for: the second time the processor's cache has them.
        """
        rows = compiled.hash(*call)
        if compiled is self._joined:
            compiled.gather(rows, out)
        elif (done := compiled.gather(rows, out, _WAITED_NS)) < len(rows):
            # Evicted since they were preloaded: have the others read side by side.
            left = rows[done:]
            self._table.request(left[left >= 0])
            compiled.gather(left, out.view(-1, self._table.width)[done:])

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
