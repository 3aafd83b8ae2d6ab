"""Runs the networks of a Qwen3.8 on the interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from converters.definition import Phase
from converters.qwen38.network import define
from plugins.ngram import NgramConstants, row_ids
from tests.converters import driver
from tests.converters.driver import Pieces

defined = partial(driver.defined, define)


@dataclass
class Driver(driver.Driver):
    """With the n-gram embeddings that the host gathers."""

    define = staticmethod(define)

    host_inputs: Sequence[Mapping[str, Any]] = field(default_factory=list)

    def _hosts(self, phase: Phase, pieces: Pieces, length: int) -> dict[str, Tensor]:
        return {str(host["name"]): self._embed(host, pieces, length) for host in self.host_inputs}

    def _embed(self, host: Mapping[str, Any], pieces: Pieces, length: int) -> Tensor:
        sizes, offsets = tuple(host["sizes"]), tuple(host["offsets"])
        rows = offsets[-1] + sizes[-1]
        constants = NgramConstants(tuple(host["multipliers"]), sizes, offsets, rows)
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
