"""Runs the networks of a Dots3 NOTE on the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from converters.definition import Phase
from converters.dots3.network import define
from tests.converters import driver
from tests.converters.driver import Pieces


@dataclass
class Driver(driver.Driver):
    """With the hidden states that the draft engine takes."""

    define = staticmethod(define)

    def call(
        self, phase: Phase, pieces: Pieces, *, hidden: Sequence[Tensor] | None = None, **rest: Any
    ) -> list[dict[str, Tensor]]:
        """See `driver.Driver.call`; `hidden` [len(piece), H] per slot is for the draft phase."""
        if hidden is None:
            return super().call(phase, pieces, **rest)
        longest = max(1, *map(len, pieces))
        padded = torch.zeros(len(pieces), longest, self.config.hidden_size, dtype=hidden[0].dtype)
        for slot, rows in enumerate(hidden):
            padded[slot, : len(rows)] = rows
        return super().call(phase, pieces, more={"hidden_states": padded}, **rest)
