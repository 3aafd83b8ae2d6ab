"""The language in front of a transcription, as transformers drops it, whatever the pieces are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.tekken import write_tekken
from triton_repo.frontend.detokenize import Detokenizer, decode_all
from triton_repo.frontend.language import LanguageMark
from triton_repo.frontend.tekken import TekkenTokenizer

CASES = {
    "lang:en And so": " And so",
    "lang:en": "",
    "lang:eng": "g",
    "lang:EN x": "lang:EN x",
    "lang:e": "lang:e",
    "lan": "lan",
    " lang:en": " lang:en",
    "language": "language",
    "": "",
    "l": "l",
    "lang:fr lang:en": " lang:en",
}


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("text", CASES)
@given(places=st.lists(st.integers(0, 30), max_size=6))
def test_dropped_whatever_the_pieces(text: str, places: list[int]) -> None:
    mark = LanguageMark()
    got = "".join([mark.feed(piece) for piece in cut(text, places)]) + mark.flush()
    assert got == CASES[text]


@given(text=st.text(alphabet="lang:enx ", max_size=14), places=st.lists(st.integers(0, 30)))
def test_the_rule_of_transformers(text: str, places: list[int]) -> None:
    mark = LanguageMark()
    got = "".join([mark.feed(piece) for piece in cut(text, places)]) + mark.flush()
    assert got == re.sub(r"^lang:[a-z]{2}", "", text)


def test_text_is_not_held_back_longer_than_needed() -> None:
    mark = LanguageMark()
    assert mark.feed("la") == ""
    assert mark.feed("st") == "last"
    assert mark.feed(" lang:en") == " lang:en"


def test_only_after_the_sign_of_a_transcription(tmp_path: Path) -> None:
    tokenizer = TekkenTokenizer(write_tekken(tmp_path))
    ids = tokenizer.encode("lang:en Yes", False, False).ids
    chat, transcription = [1, 3, 25, 24, 4], [1, 3, 25, 24, 4, 34]
    assert decode_all(tokenizer, ids, transcription) == " Yes"
    assert decode_all(tokenizer, ids, chat) == "lang:en Yes"
    assert decode_all(tokenizer, ids, []) == "lang:en Yes"
    # Who wants special tokens wants this as well.
    assert decode_all(tokenizer, ids, transcription, False) == "lang:en Yes"
    streamed = Detokenizer(tokenizer, transcription)
    pieces = [streamed.feed(i) for i in ids]
    assert "".join(pieces) + streamed.flush() == " Yes"
    assert pieces[:3] == ["", "", ""]
