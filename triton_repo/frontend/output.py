"""State of one generated sequence on its way to text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from triton_repo.frontend.detokenize import Detokenizer
from triton_repo.frontend.stop import StopMatcher
from triton_repo.frontend.tokenizer import Tokenizer
from triton_repo.frontend.tool_calls import ToolCallParser


@dataclass(frozen=True)
class TextOptions:
    """What text a client wants.

    Attributes:
        stop_words: strings that end the text.
        include_stop: keep the stop string.
        skip_special_tokens: leave special tokens out.
        end_ids: ids that end a sequence; never part of the text.
        tools: the functions that the model may call, as JSON text; empty when calls stay text.
    """

    stop_words: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    end_ids: tuple[int, ...] = ()
    tools: str = ""


class OutputText:
    """Turns the ids of one sequence into text pieces; one object per sequence.

    Attributes:
        stopped: whether a stop string ended the text; ids that follow are ignored.
        stop_reason: the stop string that matched.
        tool_calls: what the model called, as JSON text, after `finish`; None where calls stay text.
    """

    def __init__(
        self, tokenizer: Tokenizer, context_ids: Sequence[int], options: TextOptions
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, context_ids, options.skip_special_tokens)
        self._matcher = StopMatcher(options.stop_words, options.include_stop)
        self._end_ids = frozenset(options.end_ids) if options.skip_special_tokens else frozenset()
        self._calls = ToolCallParser(json.loads(options.tools)) if options.tools else None
        self.tool_calls: str | None = None

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

    @property
    def stop_reason(self) -> str | None:
        return self._matcher.matched

    def feed(self, ids: Sequence[int]) -> tuple[str, int]:
        """Text for new ids, and how many of the ids are part of the answer."""
        text, count = "", len(ids)
        for used, token_id in enumerate(ids):
            if self.stopped:
                count = used
                break
            if token_id not in self._end_ids:
                text += self._matcher.feed(self._detokenizer.feed(token_id))
        return (text if self._calls is None else self._calls.feed(text)), count

    def finish(self) -> str:
        """The rest of the text: an incomplete character, and what was held back."""
        text = ""
        if not self.stopped:
            text = self._matcher.feed(self._detokenizer.flush())
            text += "" if self.stopped else self._matcher.flush()
        if self._calls is None:
            return text
        text = self._calls.feed(text)
        rest, calls = self._calls.finish()
        self.tool_calls = json.dumps(calls, ensure_ascii=False)
        return text + rest
