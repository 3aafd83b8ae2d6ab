"""The language that a model may write in front of a transcription, as text and not for anybody."""

from __future__ import annotations

import re

_WHOLE = re.compile("lang:[a-z]{2}")
_LENGTH = len("lang:xx")
# For every length the text that may still become the mark.
_BEGINNING = re.compile("lang:[a-z]{0,2}|lang|lan|la|l|")


class LanguageMark:
    """Drops a leading `lang:xx` of a text that comes in pieces."""

    def __init__(self) -> None:
        self._held: str | None = ""

    def feed(self, piece: str) -> str:
        """What is certain of the text now; held back while it may be the mark."""
        if self._held is None:
            return piece
        self._held += piece
        if len(self._held) < _LENGTH and _BEGINNING.fullmatch(self._held):
            return ""
        return self._release()

    def flush(self) -> str:
        """What is left at the end."""
        return self._release() if self._held else ""

    def _release(self) -> str:
        text, self._held = self._held or "", None
        return text[_LENGTH:] if _WHOLE.match(text) else text
