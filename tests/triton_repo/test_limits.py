"""One truncation decision and one padding decision for ids and every parallel array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugins.support.errors import UsageError
from tests.triton_repo.tables import rows
from triton_repo.frontend.limits import (
    Limits,
    Prompt,
    TokenizeOptions,
    check_media_truncation,
    resolve_padding,
    resolve_truncation,
    select,
    truncation_slice,
)


@pytest.mark.parametrize("row", rows("truncation_slices"))
def test_truncation_slice(row: dict[str, Any]) -> None:
    def cut() -> list[int]:
        limits = Limits(row["context"], row["output"])
        kept = truncation_slice(
            row["length"], row["truncate"], row["side"], row["tokenizer_side"], limits
        )
        positions = range(row["length"])
        return list(positions if kept is None else positions[kept])

    if row["kept"] == "error":
        with pytest.raises(UsageError):
            cut()
    else:
        assert cut() == list(range(*row["kept"]))


# Text "abcdef" with [CLS] = 1 in front and [SEP] = 2 behind, four ids kept.
IDS = [1, 10, 11, 12, 13, 14, 15, 2]
OFFSETS = [(0, 0), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (0, 0)]


@pytest.mark.parametrize(
    ("side", "default", "keep", "kept"),
    [
        (None, "right", None, IDS),
        ("right", "right", 4, [1, 10, 11, 12]),
        ("left", "right", 4, [13, 14, 15, 2]),
        (None, "right", 4, [1, 10, 11, 2]),
        (None, "left", 4, [1, 14, 15, 2]),
        (None, "left", 5, [1, 13, 14, 15, 2]),
        (None, "left", 2, [1, 2]),
        # Fewer than the specials: a plain cut; nothing longer than asked for.
        (None, "left", 1, [2]),
        (None, "right", 0, []),
    ],
)
def test_special_tokens(side: Any, default: str, keep: int | None, kept: list[int]) -> None:
    options = TokenizeOptions(truncate=keep, side=side)
    selection = select(len(IDS), options, default, Limits(100), (1, 1))
    prompt = Prompt(IDS, {"offsets": OFFSETS}).truncated(selection)
    assert prompt.ids == kept
    assert prompt.arrays["offsets"] == [OFFSETS[IDS.index(i)] for i in kept]


@pytest.mark.parametrize("row", rows("paddings"))
def test_truncate_then_pad(row: dict[str, Any]) -> None:
    limits = Limits(row["context"], row["output"])
    options = TokenizeOptions(truncate=row["truncate"], side=row["side"], pad=row["pad"])

    def run() -> Prompt:
        ids = row["ids"]
        arrays = {
            "offsets": [(i, i + 1) for i in range(len(ids))],
        }
        selection = select(len(ids), options, row["tokenizer_side"], limits)
        prompt = Prompt(ids, arrays).truncated(selection).padded(options.pad, 99, limits)
        prompt.check_length(limits)
        return prompt

    if isinstance(row["result"], str):
        with pytest.raises(UsageError) as caught:
            run()
        assert row["result"].removeprefix("error: ") in str(caught.value)
        return
    prompt = run()
    assert prompt.ids == row["result"]
    pads = prompt.ids.count(99)
    assert prompt.real_length == len(prompt.ids) - pads
    assert prompt.attention_mask == [1] * prompt.real_length + [0] * pads
    # Offsets are padded too, and still belong to their ids.
    assert prompt.arrays["offsets"][prompt.real_length :] == [(0, 0)] * pads
    for token, (start, _) in zip(prompt.ids, prompt.arrays["offsets"], strict=True):
        assert token == 99 or row["ids"][start] == token


def test_padding_the_wrong_way_round_is_all_padding() -> None:
    # Negative control: pad, then cut, as the known bug does.
    limits = Limits(8)
    padded = Prompt([1, 2, 3]).padded(-1, 99, limits)
    cut = select(len(padded.ids), TokenizeOptions(truncate=2, side="left"), "right", limits)
    assert padded.truncated(cut).ids == [99, 99]


def test_arrays_of_another_length_raise() -> None:
    with pytest.raises(UsageError, match="one entry per prompt token"):
        Prompt([1, 2, 3, 4], {"offsets": [(0, 1), (1, 2), (2, 3)]})


def test_t11_t12_client_arrays_follow_the_ids() -> None:
    # T11, T12: ids or rows of the client, with arrays of the client.
    prompt = Prompt(
        [5, 6, 7, 8],
        {"offsets": [(0, 1), (1, 2), (2, 3), (3, 4)], "is_token_mask": [True, False, False, True]},
    )
    selection = select(4, TokenizeOptions(truncate=2, side="left"), "right", Limits(100))
    cut = prompt.truncated(selection)
    assert (cut.ids, cut.arrays["offsets"]) == ([7, 8], [(2, 3), (3, 4)])
    assert cut.arrays["is_token_mask"] == [False, True]


@pytest.mark.parametrize("row", rows("media_truncations"))
def test_media_spans(row: dict[str, Any]) -> None:
    length = row["length"]
    options = TokenizeOptions(truncate=row["limit"], side=row["side"])
    selection = select(length, options, "right", Limits(row["context"]))
    cut = None if selection is None else selection.slices[0]
    if row["result"] == "error":
        with pytest.raises(UsageError, match="media item"):
            check_media_truncation(cut, length, [row["span"]])
    else:
        kept, offset = row["result"]
        assert check_media_truncation(cut, length, [row["span"]]) == [(offset, row["span"][1])]
        assert (length if cut is None else cut.stop - cut.start) == kept


def test_copies_keep_every_flag() -> None:
    options = TokenizeOptions(want_offsets=True, lowercase=True, add_special_tokens=False)
    copy = options.replace(truncate=3)
    assert (copy.want_offsets, copy.lowercase, copy.add_special_tokens) == (True, True, False)


@pytest.mark.parametrize(
    ("padding", "max_length", "target"),
    [
        (None, None, None), (None, 5, None), (False, None, False), ("false", 5, False),
        ("do_not_pad", None, False), ("max_length", None, -1), ("max_length", 5, 5), ("7", None, 7),
        ("-1", None, -1),
    ],
)  # fmt: skip
def test_padding_names(padding: Any, max_length: int | None, target: Any) -> None:
    assert resolve_padding(padding, max_length) is target or (
        resolve_padding(padding, max_length) == target
    )


@pytest.mark.parametrize("padding", [True, "longest", "-2", "sometimes"])
def test_padding_that_is_not_supported(padding: Any) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_padding(padding, None)
    assert caught.value.where == "padding"


@pytest.mark.parametrize(
    ("value", "max_length", "limit"),
    [(None, 5, None), (False, 5, False), ("do_not_truncate", 5, False), (True, None, -1),
     ("longest_first", 5, 5)],
)  # fmt: skip
def test_truncation_names(value: Any, max_length: int | None, limit: Any) -> None:
    assert resolve_truncation(value, max_length) == limit


@pytest.mark.parametrize("value", ["only_first", "only_second", "maybe"])
def test_truncation_that_is_not_supported(value: str) -> None:
    with pytest.raises(UsageError):
        resolve_truncation(value, None)


def test_a_full_context_leaves_no_room_for_output() -> None:
    limits = Limits(4, output=None)
    Prompt([1, 2, 3]).check_length(limits)
    with pytest.raises(UsageError, match="no room"):
        Prompt([1, 2, 3, 4]).check_length(limits)
    Prompt([1, 2, 3, 4]).check_length(Limits(4, output=0))


def test_the_longest_prompt_may_be_shorter_than_the_context() -> None:
    limits = Limits(10, output=2, prompt=4)
    assert truncation_slice(9, -1, "left", "right", limits) == slice(5, 9)
    Prompt([1] * 4).check_length(limits)
    with pytest.raises(UsageError, match="at most 4 tokens"):
        Prompt([1] * 5).check_length(limits)


@pytest.mark.parametrize(
    ("text", "limit", "side", "target"),
    [("abcdef", None, None, 10), ("abcdef", 5, "left", 5), ("ab", 6, None, 6),
     ("abcdef", 4, None, 9)],
)  # fmt: skip
def test_as_transformers_cuts_and_pads(
    character_tokenizer: Path, text: str, limit: int | None, side: str | None, target: int
) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(str(character_tokenizer))
    theirs.truncation_side = side or "right"
    full = theirs(text, return_offsets_mapping=True)
    cut = theirs(
        text, truncation=limit is not None, max_length=limit, return_offsets_mapping=True,
        return_attention_mask=True,
    )  # fmt: skip
    want = theirs.pad(cut, padding="max_length", max_length=target)
    offsets = [tuple(pair) for pair in full["offset_mapping"]]
    # Without a side of the request's own special tokens stay, as in transformers.
    selection = select(
        len(full["input_ids"]),
        TokenizeOptions(truncate=limit),
        side or "right",
        Limits(100),
        (1, 1),
    )
    prompt = Prompt(full["input_ids"], {"offsets": offsets}).truncated(selection)
    prompt = prompt.padded(target, theirs.pad_token_id, Limits(100))
    assert prompt.ids == want["input_ids"]
    assert prompt.attention_mask == want["attention_mask"]
    mapping = [tuple(pair) for pair in cut["offset_mapping"]]
    assert prompt.arrays["offsets"] == mapping + [(0, 0)] * (target - len(mapping))


def test_padding_without_a_pad_token_or_a_context() -> None:
    with pytest.raises(UsageError, match="needs a pad token"):
        Prompt([1, 2]).padded(4, None, Limits(8))
    with pytest.raises(UsageError, match="needs a context length"):
        Prompt([1, 2]).padded(-1, 0, Limits(None))
    # Where nothing is missing nothing is needed.
    assert Prompt([1, 2]).padded(2, None, Limits(8)).ids == [1, 2]
