"""Text from ids as they come: complete characters only, and equal to decoding all at once."""

from __future__ import annotations

from collections.abc import Sequence

from triton_repo.frontend.tokenizer import Tokenizer

REPLACEMENT = "�"
# Enough earlier tokens for a decoder that treats the first token of a text differently.
CONTEXT_IDS = 6
# A window of undecodable ids is split above this length, so that work per token stays bounded.
LONG_WINDOW = 64


class Detokenizer:
    """Incremental decoder of one sequence.

    The text of the last decoded ids is remembered; new ids are decoded together with them and the
    difference is emitted, unless it may still change because it ends inside a character.

    Args:
        tokenizer: decodes ids.
        context_ids: the prompt; its text is never emitted, but a character that it begins and the
            first generated ids complete is.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context = list(context_ids[-CONTEXT_IDS:])
        self._pending: list[int] = []
        # An incomplete character at the end of the prompt has not been shown to anybody.
        self._shown = self._decode(self._context).rstrip(REPLACEMENT)

    def feed(self, token_id: int) -> str:
        """The text that became certain with this id; often empty."""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT):
            return self._split_long_window() if len(self._pending) > LONG_WINDOW else ""
        return self._emit(text)

    def flush(self) -> str:
        """What is left at the end; an incomplete character becomes one U+FFFD."""
        if not self._pending:
            return ""
        return self._emit(self._decode(self._context + self._pending))

    def _emit(self, text: str) -> str:
        shared = len(self._shown) if text.startswith(self._shown) else _common(self._shown, text)
        self._advance(self._pending)
        return text[shared:]

    def _advance(self, done: list[int]) -> None:
        self._context = (self._context + done)[-CONTEXT_IDS:]
        self._pending = self._pending[len(done) :]
        self._shown = self._decode(self._context)

    def _split_long_window(self) -> str:
        """Emit the front of a long undecodable window where a cut does not change the text."""
        everything = self._decode(self._context + self._pending)
        for keep in range(4, 8):
            front = self._context + self._pending[:-keep]
            text = self._decode(front)
            if text + self._decode(self._pending[-keep:]) == everything:
                emitted = text[len(self._shown) :]
                self._advance(self._pending[:-keep])
                return emitted
        return ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip) if ids else ""


def _common(a: str, b: str) -> int:
    """Length of the common prefix: text that some decoder changed after it was shown."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def decode_all(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    context_ids: Sequence[int] = (),
    skip_special_tokens: bool = True,
) -> str:
    """Text of a whole sequence, by the same path as streaming."""
    detokenizer = Detokenizer(tokenizer, context_ids, skip_special_tokens)
    return "".join([detokenizer.feed(i) for i in ids]) + detokenizer.flush()
