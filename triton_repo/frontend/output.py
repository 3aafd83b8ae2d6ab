"""State of one generated sequence on its way to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triton_repo.frontend.detokenize import Detokenizer
from triton_repo.frontend.stop import StopMatcher
from triton_repo.frontend.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextOptions:
    """What text a client wants.

    Attributes:
        stop_words: strings that end the text.
        include_stop: keep the stop string.
        skip_special_tokens: leave special tokens out.
        end_ids: ids that end a sequence; never part of the text.
    """

    stop_words: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    end_ids: tuple[int, ...] = ()


class OutputText:
    """Turns the ids of one sequence into text pieces; one object per sequence.

    Attributes:
        stopped: whether a stop string ended the text; ids that follow are ignored.
        stop_reason: the stop string that matched.
    """

    def __init__(
        self, tokenizer: Tokenizer, context_ids: Sequence[int], options: TextOptions
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, context_ids, options.skip_special_tokens)
        self._matcher = StopMatcher(options.stop_words, options.include_stop)
        self._end_ids = frozenset(options.end_ids) if options.skip_special_tokens else frozenset()

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

    @property
    def stop_reason(self) -> str | None:
        return self._matcher.matched

    def feed(self, ids: Sequence[int]) -> tuple[str, int]:
        """Text for new ids, and how many of the ids are part of the answer."""
        text = ""
        for used, token_id in enumerate(ids):
            if self.stopped:
                return text, used
            if token_id not in self._end_ids:
                text += self._matcher.feed(self._detokenizer.feed(token_id))
        return text, len(ids)

    def finish(self) -> str:
        """The rest of the text: an incomplete character, and what was held back."""
        if self.stopped:
            return ""
        text = self._matcher.feed(self._detokenizer.flush())
        return text + ("" if self.stopped else self._matcher.flush())
