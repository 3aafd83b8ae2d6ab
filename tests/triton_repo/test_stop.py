"""Stop strings and stop ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_repo.frontend.output import OutputText, Piece, TextOptions
from triton_repo.frontend.stop import IdStopMatcher, StopMatcher
from triton_repo.frontend.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    shown = [matcher.feed(piece) for piece in pieces]
    return [*shown, matcher.flush()], matcher.matched


def test_a5_6_parts_of_a_stop_string_are_held_back() -> None:
    assert run(["STOP"], ["abcSTO", "Pde"]) == (["abc", "", ""], "STOP")
    assert run(["STOP"], ["abcSTO", "Pde"], include=True) == (["abc", "STOP", ""], "STOP")


def test_a5_7_what_was_held_in_vain_is_released() -> None:
    assert run(["STOP"], ["abcSTO", "X"]) == (["abc", "STOX", ""], None)
    assert run(["STOP"], ["abcSTO"]) == (["abc", "STO"], None)


def test_a_long_stop_string_does_not_hold_what_cannot_match() -> None:
    assert run(["x" * 50], ["Hello"]) == (["Hello", ""], None)


def test_a5_9_earliest_end_wins_then_list_order() -> None:
    assert run(["defg", "cd"], ["abcdefgh"])[1] == "cd"
    assert run(["bc", "abc"], ["xabc"])[1] == "bc"
    assert run(["abc", "bc"], ["xabc"]) == (["x", ""], "abc")


def test_a5_10_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("one.two") == "one"
    assert (matcher.feed("three"), matcher.flush()) == ("", "")


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab.", max_size=4), max_size=12),
    st.booleans(),
)
def test_pieces_do_not_matter(stops: list[str], pieces: list[str], include: bool) -> None:
    shown, matched = run(stops, pieces, include)
    whole, matched_at_once = run(stops, list("".join(pieces)), include)
    assert ("".join(shown), matched) == ("".join(whole), matched_at_once)


@pytest.mark.parametrize("include", [False, True])
def test_a5_9_ids_past_the_stop_are_dropped(include: bool) -> None:
    text = OutputText(BYTES, [], TextOptions(("STOP",), include_stop=include))
    piece, used = text.feed(list(b"abcSTOPde"))
    assert (piece.text, used, text.stop_reason) == ("abcSTOP" if include else "abc", 7, "STOP")
    assert text.feed(list(b"more")) == (Piece(), 0)
    assert text.finish() == Piece()


def test_a_stop_string_across_characters_of_several_bytes() -> None:
    text = OutputText(BYTES, [], TextOptions(("é!",)))
    shown = [text.feed([i])[0].text for i in "aé!b".encode()]
    assert "".join(shown) == "a"
    assert text.stopped


def test_the_end_id_is_no_text() -> None:
    text = OutputText(BYTES, [], TextOptions(end_ids=(ord("!"),)))
    assert text.feed(list(b"hi!"))[0].text == "hi"


def test_a5_3_the_tail_is_flushed_at_the_end() -> None:
    text = OutputText(BYTES, [], TextOptions(("€x",)))
    assert text.feed([0x61, 0xE2, 0x82])[0].text == "a"
    assert text.finish().text == "\ufffd"


def test_id_sequences() -> None:
    matcher = IdStopMatcher([[1, 2], [], [9]])
    assert [matcher.feed(i) for i in (1, 1, 2, 3, 9)] == [False, False, True, False, True]
    assert not IdStopMatcher([]).feed(1)
