"""State of one generated sequence on its way to text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from triton_repo.frontend import reasoning, tool_calls
from triton_repo.frontend.detokenize import Detokenizer
from triton_repo.frontend.reasoning import Reasoning, ReasoningSplitter
from triton_repo.frontend.stop import StopMatcher
from triton_repo.frontend.tokenizer import Tokenizer
from triton_repo.frontend.tool_calls import ToolCallParser

_MARKERS = (reasoning.OPEN, reasoning.CLOSE, tool_calls.OPEN, tool_calls.CLOSE)


@dataclass(frozen=True)
class TextOptions:
    """What text a client wants.

    Attributes:
        stop_words: strings that end the text.
        include_stop: keep the stop string.
        skip_special_tokens: leave special tokens out.
        end_ids: ids that end a sequence; never part of the text.
        tools: the functions that the model may call, as JSON text; empty when calls stay text.
        reasoning: how thoughts that are no text begin; empty when there are none.
    """

    stop_words: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    end_ids: tuple[int, ...] = ()
    tools: str = ""
    reasoning: Reasoning = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` turns back into equal options."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TextOptions:
        """The options that `to_json` wrote."""
        lists = {name: tuple(value[name]) for name in ("stop_words", "end_ids")}
        return TextOptions(**{**value, **lists})


class Piece(NamedTuple):
    """New text of an answer, and new thoughts that are no part of it."""

    text: str = ""
    reasoning: str = ""

    def joined(self, other: Piece) -> Piece:
        """This piece and the one after it."""
        return Piece(self.text + other.text, self.reasoning + other.reasoning)


class OutputText:
    """Turns the ids of one sequence into text pieces; one object per sequence.

    Stop strings and tool calls are looked for in the answer, not in the thoughts before it.

    Attributes:
        stopped: whether a stop string ended the text; ids that follow are ignored.
        stop_reason: the stop string that matched.
        tool_calls: what the model called, as JSON text, after `finish`; None where calls stay text.
    """

    def __init__(
        self, tokenizer: Tokenizer, context_ids: Sequence[int], options: TextOptions
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, context_ids, options.skip_special_tokens)
        self._splitter = ReasoningSplitter(options.reasoning) if options.reasoning else None
        self._matcher = StopMatcher(options.stop_words, options.include_stop)
        self._end_ids = frozenset(options.end_ids) if options.skip_special_tokens else frozenset()
        self._calls = ToolCallParser(json.loads(options.tools)) if options.tools else None
        self._markers: dict[int | None, str] = {}
        if (self._calls or self._splitter) and options.skip_special_tokens:
            # Markers that the vocabulary has as special tokens would be left out of the text.
            ids = {tokenizer.token_id(marker): marker for marker in _MARKERS}
            self._markers = {
                i: m for i, m in ids.items() if i is not None and not tokenizer.decode([i], True)
            }
        self.tool_calls: str | None = None

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

    @property
    def stop_reason(self) -> str | None:
        return self._matcher.matched

    def feed(self, ids: Sequence[int]) -> tuple[Piece, int]:
        """The text of new ids, and how many of the ids are part of the answer."""
        piece, count = Piece(), len(ids)
        for used, token_id in enumerate(ids):
            if self.stopped:
                count = used
                break
            if token_id not in self._end_ids:
                decoded = self._detokenizer.feed(token_id) + self._markers.get(token_id, "")
                piece = piece.joined(self._split(decoded))
        return self._without_calls(piece), count

    def finish(self) -> Piece:
        """The rest of the text: an incomplete character, and what was held back."""
        piece = Piece()
        if not self.stopped:
            piece = self._split(self._detokenizer.flush())
            if self._splitter is not None:
                thought, content = self._splitter.finish()
                piece = piece.joined(Piece(self._matcher.feed(content), thought))
            piece = piece.joined(Piece("" if self.stopped else self._matcher.flush()))
        piece = self._without_calls(piece)
        if self._calls is not None:
            rest, calls = self._calls.finish()
            self.tool_calls = json.dumps(calls, ensure_ascii=False)
            piece = piece.joined(Piece(rest))
        return piece

    def _split(self, decoded: str) -> Piece:
        thought, content = ("", decoded) if self._splitter is None else self._splitter.feed(decoded)
        return Piece(self._matcher.feed(content), thought)

    def _without_calls(self, piece: Piece) -> Piece:
        return piece if self._calls is None else piece._replace(text=self._calls.feed(piece.text))
