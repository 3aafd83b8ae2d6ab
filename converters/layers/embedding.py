"""Whether an embedding lookup can be part of the operation behind it."""

from __future__ import annotations

from converters.checkpoint.config import Mapping
from plugins.trt.types import FLOATS
from plugins.trt.weights import WeightInfo


def replicated_embed(mapping: Mapping, table: WeightInfo | None, vocab: int, hidden: int) -> bool:
    """Whether every rank can look up a row by itself.

    A table that is spread over ranks has to be summed over them, and one that is quantised has to
    be decoded, before anything can follow.

    Args:
        mapping: of the checkpoint.
        table: how it is stored.
        vocab, hidden: the shape that it has when it is whole.
    """
    if table is None or mapping.tp_size > 1:
        return False
    return table.shape == (vocab, hidden) and table.dtype in FLOATS
