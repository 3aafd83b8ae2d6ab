"""Reads the fenced blocks of the project's documents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its document, language and text."""

    document: str
    line: int
    language: str
    text: str

    def commands(self) -> list[str]:
        """Command lines, continued lines joined, comments dropped."""
        joined = self.text.replace("\\\n", " ")
        lines = (line.strip() for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks(path: Path) -> list[Block]:
    """All fenced blocks of a document, in order."""
    text = path.read_text()
    return [
        Block(path.name, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for match in _FENCE.finditer(text)
    ]
