"""Word lists: TensorRT-LLM's `[2, n]` tensors, and how words become ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from triton_repo.frontend.problems import problem
from triton_repo.frontend.tokenizer import Tokenizer

MAX_WORDS = 256
MAX_WORD_CHARACTERS = 1024


def check_words(parameter: str, words: Sequence[str]) -> tuple[str, ...]:
    """Drop empty words; refuse words that are only white space where that can never match, and
    lists that are too long."""
    kept = tuple(dict.fromkeys(w for w in words if w))
    if len(kept) > MAX_WORDS:
        raise problem(parameter, "has too many words", expected=f"<= {MAX_WORDS}", found=len(kept))
    for word in kept:
        if len(word) > MAX_WORD_CHARACTERS:
            raise problem(
                parameter,
                "has a word that is too long",
                expected=f"<= {MAX_WORD_CHARACTERS} characters",
                found=f"{len(word)} characters",
            )
    return kept


def stop_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Ids of each stop word, without special tokens in front; empty encodings are left out."""
    encoded = [tokenizer.encode(w, False, False).ids for w in words]
    return [list(ids) for ids in encoded if ids]


def bad_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Ids of each bad word at the start of a text, after a space and after other characters,
    without duplicates. A word that begins with a space has only that form.

    Raises UsageError for a word of white space only: its variants would ban half the vocabulary.
    """
    # Where every text gets a space in front, a word has none behind the end of a line only.
    line = tokenizer.encode("\n", False, False).ids
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise problem("bad_words", "a word is only white space", found=word)
        forms = [tokenizer.encode(v, False, False).ids for v in (word, " " + word.lstrip())]
        after = tokenizer.encode("\n" + word, False, False).ids
        if line and list(after[: len(line)]) == list(line):
            forms.append(after[len(line) :])
        sequences |= dict.fromkeys(tuple(ids) for ids in forms if ids)
    return [list(s) for s in sequences]


def to_word_list(sequences: Sequence[Sequence[int]] | None) -> npt.NDArray[np.int32]:
    """`[2, n]`: all ids one after another, then cumulative ends padded with -1.

    No list is `[2, 0]`; a list whose words are all empty is `[[0], [-1]]`.
    """
    if sequences is None:
        return np.zeros((2, 0), dtype=np.int32)
    sequences = [s for s in sequences if s]
    if not sequences:
        return np.array([[0], [-1]], dtype=np.int32)
    flat = [i for s in sequences for i in s]
    ends = np.cumsum([len(s) for s in sequences])
    out = np.full((2, max(len(flat), len(ends))), -1, dtype=np.int32)
    out[0, :] = 0
    out[0, : len(flat)] = flat
    out[1, : len(ends)] = ends
    return out


def from_word_list(parameter: str, array: npt.NDArray[np.int32]) -> list[list[int]]:
    """The id sequences of a `[2, n]` word list. Raises UsageError for offsets out of range."""
    if array.ndim != 2 or array.shape[0] != 2:
        raise problem(parameter, "is not a word list", expected="[2, n]", found=array.shape)
    sequences, start = [], 0
    for end in array[1].tolist():
        if end < 0:
            continue
        if end > array.shape[1] or end < start:
            raise problem(
                parameter,
                "has an end offset out of range",
                expected=f"<= {array.shape[1]}",
                found=end,
            )
        if end > start:
            sequences.append(array[0, start:end].tolist())
        start = end
    return sequences
