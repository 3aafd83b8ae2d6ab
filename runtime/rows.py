"""What one slot contributes to an engine call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.audio_rows import AudioRows


@dataclass(frozen=True)
class Row:
    """What one slot contributes to a call.

    Attributes:
        sequence: all ids of the slot's sequence so far.
        start: ids already cached; the call begins there.
        count: ids of this call.
        logits: which of them want logits, as indices into the call's ids.
        audio: rows of the audio engine, for engines that take them.
        rejected: ids at the end of the slot's call before that did not become part of the sequence.
    """

    sequence: Sequence[int]
    start: int
    count: int
    logits: Sequence[int] = ()
    audio: AudioRows | None = None
    rejected: int = 0
