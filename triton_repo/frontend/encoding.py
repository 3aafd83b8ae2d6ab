"""What tokenizers make of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triton_repo.frontend.limits import Offset


# Made for each request, as others with slots: freezing them costs 1 us each.
@dataclass(slots=True)
class Encoding:
    """Ids of one text.

    Attributes:
        ids: token ids.
        offsets: per id the character range in the text, (0, 0) for special tokens; None when the
            tokenizer has none or none were asked for.
        specials: special tokens added in front and behind.
    """

    ids: Sequence[int]
    offsets: list[Offset] | None
    specials: tuple[int, int]
