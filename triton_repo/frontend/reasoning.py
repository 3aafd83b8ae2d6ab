"""What a model thinks before it answers: `<think>…</think>`, as Qwen3 and Dots3 models write it.

A chat template may open the section itself, leave that to the model, or close it at once because
the request does not want any (`enable_thinking` false); the rendered prompt says which. Line breaks
beside a marker belong to it, as in the templates' own rendering of earlier thoughts.
"""

from __future__ import annotations

from typing import Literal

from triton_repo.frontend.stop import without_partial

OPEN, CLOSE = "<think>", "</think>"

# How an answer begins: as content, perhaps with a section of its own, or inside one.
Reasoning = Literal["", "possible", "open"]


def reasoning_after(prompt: str) -> Reasoning:
    """How the answer to a rendered chat begins."""
    end = prompt.rstrip()
    if end.endswith(OPEN):
        return "open"
    return "" if end.endswith(CLOSE) else "possible"


class ReasoningSplitter:
    """Splits an answer that comes in pieces into its thoughts and its content; one per answer.

    An answer that ends before its thoughts do has no content.
    """

    def __init__(self, begins: Literal["possible", "open"]) -> None:
        self._state: Literal["start", "opened", "thought", "closed", "content"]
        self._state = "start" if begins == "possible" else "opened"
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str]:
        """Thoughts and content that may be shown now; what may be part of a marker is held back."""
        text, thought = self._held + piece, ""
        self._held = ""
        if self._state == "start":
            begin = text.lstrip()
            if OPEN.startswith(begin):
                self._held = text
                return "", ""
            opened = begin.startswith(OPEN)
            self._state = "opened" if opened else "content"
            text = begin.removeprefix(OPEN) if opened else text
        if self._state == "opened":
            text = text.lstrip("\n")
            self._state = "thought" if text else "opened"
        if self._state == "thought":
            before, marker, after = text.partition(CLOSE)
            if not marker:
                kept = without_partial(text, CLOSE).rstrip("\n")
                self._held = text[len(kept) :]
                return kept, ""
            thought, text = before.rstrip("\n"), after
            self._state = "closed"
        if self._state == "closed":
            text = text.lstrip("\n")
            self._state = "content" if text else "closed"
        return thought, text

    def finish(self) -> tuple[str, str]:
        """What was held back in vain, at the end."""
        held, self._held = self._held, ""
        return (held, "") if self._state == "thought" else ("", held)
