"""Text from ids as they come: complete characters only, and equal to decoding all at once."""

from __future__ import annotations

from collections.abc import Sequence

from triton_repo.frontend.language import LanguageMark
from triton_repo.frontend.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# Earlier ids that are decoded together with new ones: enough for a decoder that treats the first
# token of a text differently, more where they would begin inside a character.
CONTEXT_IDS = 6
MAX_CONTEXT_IDS = 16
# A window of undecodable ids is split above this length, so that work per token stays bounded.
LONG_WINDOW = 64


class Detokenizer:
    """Incremental decoder of one sequence.

    New ids are decoded together with the piece before them, which ends and begins at a character;
    the difference is emitted, unless it may still change because it ends inside a character.

    Args:
        tokenizer: decodes ids.
        context_ids: the prompt, or at least its last 16 ids; its text is never emitted, but a
            character that it begins and the first generated ids complete is.
        skip_special_tokens: leave special tokens out of the text, and the language that a model
            may write in front of a transcription.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        marked = skip_special_tokens and tokenizer.marks_language(context_ids)
        self._mark = LanguageMark() if marked else None
        self._pending: list[int] = []
        for size in range(CONTEXT_IDS, MAX_CONTEXT_IDS + 1):
            self._context = list(context_ids[-size:])
            text = self._decode(self._context)
            if not text.startswith(REPLACEMENT):
                break
        self._shown = text
        # The prompt may end with an incomplete character; the first ids may make another of it.
        self._open = len(text) - len(text.rstrip(REPLACEMENT))

    def feed(self, token_id: int) -> str:
        """The text that became certain with this id; often empty."""
        text = self._feed(token_id)
        return self._mark.feed(text) if self._mark else text

    def flush(self) -> str:
        """What is left at the end; an incomplete character becomes U+FFFD."""
        text = ""
        if self._pending:
            everything = self._decode(self._context + self._pending)
            text = self._advance(everything, len(self._pending))
        return self._mark.feed(text) + self._mark.flush() if self._mark else text

    def _feed(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT):
            return self._split_long_window() if len(self._pending) > LONG_WINDOW else ""
        return self._advance(text, len(self._pending))

    def _advance(self, text: str, count: int) -> str:
        """The first `count` pending ids are done: what is new in `text`, which ends with them. They
        become the context of what follows.
        """
        new = self._behind_shown(text, count)
        done, self._pending = self._pending[:count], self._pending[count:]
        shown = self._decode(done)
        if shown:
            self._context, self._shown = done, shown
        else:
            # Special tokens have no text; the piece before them is still the one to join to.
            self._context = [*self._context, *done][-LONG_WINDOW:]
            self._shown = self._decode(self._context)
        self._open = 0
        return new

    def _behind_shown(self, text: str, count: int) -> str:
        for cut in range(self._open + 1):
            head = self._shown[: len(self._shown) - cut]
            if text.startswith(head):
                return text[len(head) :]
        # Some decoders take back what they said when bytes follow that are none of a character. It
        # has been shown: what follows is decoded by itself.
        return self._decode(self._pending[:count])

    def _split_long_window(self) -> str:
        """Emit the front of a long undecodable window where a cut does not change the text."""
        everything = self._decode(self._context + self._pending)
        for keep in range(4, 8):
            count = len(self._pending) - keep
            text = self._decode(self._context + self._pending[:count])
            if text + self._decode(self._pending[count:]) == everything:
                return self._advance(text, count)
        return ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip) if ids else ""


def decode_all(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    context_ids: Sequence[int] = (),
    skip_special_tokens: bool = True,
) -> str:
    """Text of a whole sequence, by the same path as streaming."""
    detokenizer = Detokenizer(tokenizer, context_ids, skip_special_tokens)
    return "".join([detokenizer.feed(i) for i in ids]) + detokenizer.flush()
