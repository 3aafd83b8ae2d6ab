"""Word lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.support.errors import UsageError
from triton_repo.frontend import words
from triton_repo.frontend.tokenizer import ByteTokenizer, open_with_transformers

BYTES = ByteTokenizer()


def test_layout() -> None:
    sequences = words.stop_sequences(BYTES, ["ab", "c"])
    assert words.to_word_list(sequences).tolist() == [[97, 98, 99], [2, 3, -1]]
    assert words.to_word_list(None).shape == (2, 0)
    assert words.to_word_list([]).tolist() == [[0], [-1]]
    assert words.to_word_list([[]]).tolist() == [[0], [-1]]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=5))
def test_round_trip(sequences: list[list[int]]) -> None:
    assert words.from_word_list("x", words.to_word_list(sequences)) == sequences


@pytest.mark.parametrize("array", [[[1, 2], [3, -1]], [[1, 2, 3], [2, 1, -1]], [[1, 2]], [1, 2]])
def test_bad_layout_is_refused(array: list[list[int]]) -> None:
    with pytest.raises(UsageError) as caught:
        words.from_word_list("stop_words_list", np.array(array, dtype=np.int32))
    assert caught.value.where == "stop_words_list"


def test_a5_12_bad_words_cover_the_middle_of_a_sentence() -> None:
    assert words.bad_sequences(BYTES, ["ab"]) == [[97, 98], [32, 97, 98]]
    # A word that begins with a space has one form.
    assert words.bad_sequences(BYTES, [" a"]) == [[32, 97]]


def test_a5_12_both_forms_of_a_word_where_a_space_is_part_of_it(pieces_tokenizer: Path) -> None:
    # A5.12: in front of "London" stands a space, in a sentence and at its beginning, or none.
    tokenizer = open_with_transformers(pieces_tokenizer)
    ids = [tokenizer.token_id(p) for p in ("▁London", "London")]
    assert words.bad_sequences(tokenizer, ["London"]) == [[ids[0]], [ids[1]]]
    # A word that is several pieces in one of its forms.
    assert words.bad_sequences(tokenizer, ["are"]) == [
        [tokenizer.token_id("▁are")],
        [*tokenizer.encode("\nare", False, False).ids[2:]],
    ]


@pytest.mark.parametrize("word", [" ", "\n", "\t "])
def test_a5_13_white_space_cannot_be_banned(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        words.bad_sequences(BYTES, [word])
    assert caught.value.where == "bad_words"


def test_a5_11_newlines_and_commas_are_kept() -> None:
    assert words.check_words("stop_words", ["\n", "a,b", "", "\n"]) == ("\n", "a,b")
    assert words.stop_sequences(BYTES, ["\n"]) == [[10]]


def test_limits() -> None:
    with pytest.raises(UsageError, match="too many"):
        words.check_words("stop_words", [str(i) for i in range(1000)])
    with pytest.raises(UsageError, match="too long"):
        words.check_words("stop_words", ["x" * 5000])


def test_a5_11_words_have_no_special_tokens(character_tokenizer: Path) -> None:
    tokenizer = open_with_transformers(character_tokenizer)
    assert tokenizer.encode("ab", True, False).ids == [1, 10, 11, 2]
    assert words.stop_sequences(tokenizer, ["ab", "c"]) == [[10, 11], [12]]
    banned = words.bad_sequences(tokenizer, ["ab"])
    assert banned[0] == [10, 11]
    assert not any(special in ids for ids in banned for special in (1, 2))
