"""A faster encoder for tokenizers of the `tokenizers` library, used where its ids are the same.

`fastokens` encodes a short chat in a tenth of the time. Whether it gives the same ids is found out
for each tokenizer when a model repository is written; the outcome holds for that version only.
"""

from __future__ import annotations

import random
import unicodedata
from array import array
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

# Code points in the middle of these ranges behave alike; every 16th is enough.
UNIFORM_RANGES = (range(0x3400, 0xA000), range(0xAC00, 0xD7A4), range(0x20000, 0x110000))
# Texts that letters, combining marks and line ends are tried in.
CONTEXTS = ("a{}", "{} ", " {}e\u0301", "1{}\n")


class Encoded(Protocol):
    """Ids, and 1 for each that was added in front or behind."""

    ids: list[int]
    special_tokens_mask: list[int]


class Encoder(Protocol):
    """Text to ids, without offsets."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> Encoded:
        """Ids of `text`."""

    def encode_batch_flat(self, texts: list[str]) -> tuple[bytes, bytes]:
        """Ids of all texts as little-endian uint32, and where each begins; nothing is added."""


def installed_version() -> str | None:
    """The version of `fastokens`; None where it is not installed."""
    try:
        return version("fastokens")
    except PackageNotFoundError:
        return None


def open_encoder(vocabulary: Path) -> Encoder:
    """The encoder for a `tokenizer.json`. Raises ValueError for a kind that it does not know."""
    from fastokens import Tokenizer

    # As text: from a file it would also read the settings that lie beside it.
    encoder: Encoder = Tokenizer.from_json_str(vocabulary.read_text("utf-8"))
    return encoder


def plain_ids(encoder: Encoder, text: str) -> array[int]:
    """Ids of `text` with nothing added, without an object for each: to make those, and an array of
    them again, takes longer than to encode a short chat.
    """
    return array("i", encoder.encode_batch_flat([text])[0])


def agreeing_version(backend: Any, vocabulary: Path) -> str | None:
    """The version of `fastokens` that encodes as `backend` does; None when there is none.

    `backend` is a `tokenizers.Tokenizer`, `vocabulary` the file it was saved to.
    """
    found = installed_version()
    if found is None:
        return None
    try:
        encoder = open_encoder(vocabulary)
    except ValueError:
        return None
    for text in chain(_texts(backend), _special_texts(backend)):
        other = backend.encode_batch_fast([text], add_special_tokens=False)[0]
        if plain_ids(encoder, text).tolist() != other.ids:
            return None
    for text in _special_texts(backend):
        one = encoder.encode(text, add_special_tokens=True)
        other = backend.encode_batch_fast([text], add_special_tokens=True)[0]
        if one.ids != other.ids or one.special_tokens_mask != other.special_tokens_mask:
            return None
    return found


def _texts(backend: Any) -> Iterator[str]:
    """Tokens alone and side by side, every character, long runs."""
    ids = sorted(backend.get_vocab().values())
    for token in ids:
        yield backend.decode([token], skip_special_tokens=False)
    random.Random(0).shuffle(ids)
    for start in range(0, len(ids), 32):
        yield backend.decode(ids[start : start + 32], skip_special_tokens=False)
    characters = _characters()
    for context in CONTEXTS:
        for start in range(0, len(characters), 64):
            yield "".join(context.format(c) for c in characters[start : start + 64])
    for run in (" ", "\n", "\t", " \n", "a", "1", "é", "ab", "!"):
        yield from (run * 7, f"x{run * 70}x", run * 700)


def _special_texts(backend: Any) -> Iterator[str]:
    """Tokens that are cut out of a text before all else, whole and in part."""
    yield from ("", " ", "a b")
    for token in backend.get_added_tokens_decoder().values():
        text = token.content
        yield from (f"a{text}b", f" {text} \n{text}{text}", text[:-1], text.upper(), f"{text[1:]}.")


def _characters() -> list[str]:
    """All characters that Python knows, fewer of the uniform ranges."""
    sparse = {c for uniform in UNIFORM_RANGES for c in uniform if c % 16}
    known = (c for c in range(0x110000) if c not in sparse)
    return [chr(c) for c in known if unicodedata.category(chr(c)) not in ("Cn", "Co", "Cs")]
