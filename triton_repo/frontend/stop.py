"""Stop strings: matched on decoded text, held back while they may still match."""

from __future__ import annotations

from collections.abc import Sequence


def without_partial(text: str, marker: str) -> str:
    """The text without the longest end of it that begins the marker."""
    sizes = (n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n]))
    return text[: len(text) - next(sizes, 0)]


class StopMatcher:
    """Finds the first stop string to complete in a text that comes in pieces.

    Among matches in one piece the earliest end wins; ties go to the order of the list.

    Args:
        stops: stop strings, none empty.
        include: keep the stop string itself in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Text that may be shown now. After a match `matched` is set and nothing follows."""
        if self.matched is not None or not piece:
            return ""
        text = self._held + piece
        first: tuple[int, int] | None = None
        for order, stop in enumerate(self._stops):
            start = text.find(stop)
            if start >= 0 and (first is None or (start + len(stop), order) < first):
                first = (start + len(stop), order)
        if first is not None:
            end, order = first
            self.matched = self._stops[order]
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        keep = self._longest_partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Text that was held back in vain; call it once at the end."""
        held, self._held = self._held, ""
        return held

    def _longest_partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = max((len(s) for s in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - size :]
            if any(s.startswith(tail) for s in self._stops):
                return size
        return 0


class IdStopMatcher:
    """Finds id sequences at the end of the generated ids."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = [list(s) for s in sequences if s]
        self._longest = max(map(len, self._sequences), default=0)
        self._tail: list[int] = []

    def feed(self, token_id: int) -> bool:
        """Whether some sequence is complete with this id."""
        if not self._longest:
            return False
        self._tail = [*self._tail, token_id][-self._longest :]
        return any(self._tail[-len(s) :] == s for s in self._sequences)
