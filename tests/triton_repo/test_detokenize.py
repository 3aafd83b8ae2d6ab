"""Incremental text equals the text of all ids at once, and never shows half a character."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from tests.triton_repo.tables import rows
from triton_repo.frontend.detokenize import LONG_WINDOW, Detokenizer, decode_all
from triton_repo.frontend.tokenizer import (
    ByteTokenizer,
    FastTokenizer,
    Tokenizer,
    open_with_transformers,
)

BYTES = ByteTokenizer()


@pytest.mark.parametrize("row", rows("detokeniser"))
def test_vectors(row: dict[str, Any]) -> None:
    detokenizer = Detokenizer(BYTES, row.get("prompt", []))
    assert [detokenizer.feed(i) or None for i in row["bytes"]] == row["emitted"]
    assert detokenizer.flush() == row["tail"]


def test_a5_1_decoding_each_token_alone_is_wrong() -> None:
    # Negative control: the classic postprocessing.
    ids = list("héllo".encode())
    assert "".join(BYTES.decode([i], True) for i in ids) != "héllo"
    assert decode_all(BYTES, ids) == "héllo"


byte_ids = st.lists(
    st.one_of(
        st.integers(0, 256),
        st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE4, 0xBD, 0xA0, 0xC3, 0xA9, 0xEF, 0xBF, 0xBD]),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(byte_ids)
def test_streaming_equals_decoding_at_once(ids: list[int]) -> None:
    assert decode_all(BYTES, ids) == BYTES.decode(ids, True)


@settings(max_examples=150, deadline=None)
@example("\ufffd", "0")
@example("a\ufffd\ufffd", "\ufffdé")
@example("\ufffd" * 9, "é")
@given(st.text(max_size=12), st.text(max_size=12))
def test_prompt_and_answer_join_to_the_whole_text(prompt: str, answer: str) -> None:
    ids = list((prompt + answer).encode("utf-8", "replace"))
    cut = len(prompt.encode("utf-8", "replace"))
    assert decode_all(BYTES, ids[cut:], ids[:cut]) == answer.encode("utf-8", "replace").decode()


def test_a_long_window_behind_half_a_character() -> None:
    prompt, rest = list("Hi 🌶".encode()[:-1]), "🌶".encode()[-1:]
    assert decode_all(BYTES, [*rest, *[0x80] * 200], prompt) == "🌶" + "\ufffd" * 200


def test_long_undecodable_output_stays_cheap_and_exact() -> None:
    class Counting(ByteTokenizer):
        longest = 0

        def decode(self, ids: Any, skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids, skip_special_tokens)

    tokenizer = Counting()
    ids = [0x80] * 1000 + list("é".encode())
    assert decode_all(tokenizer, ids) == "\ufffd" * 1000 + "é"
    assert tokenizer.longest < 2 * LONG_WINDOW


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose decoder drops the leading space of a text, and that falls back to bytes."""
    words = ["▁Hello", "▁world", "▁how", "s", "▁", ".", "▁are"]
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    raw = RawTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("tokenizers") / "pieces"
    PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(str(directory))
    return open_with_transformers(directory)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a5_27_spaces_survive(sentencepiece_like: Tokenizer, data: st.DataObject) -> None:
    # Whole characters only: byte fallback turns a run with one bad byte into U+FFFD altogether,
    # also what came before it and was shown long ago.
    size = sentencepiece_like.vocab_size
    piece = st.integers(size - 7, size - 1).map(lambda i: [i])
    character = st.characters(codec="utf-8").map(lambda c: [2 + b for b in c.encode()])
    groups = data.draw(st.lists(st.one_of(piece, character), max_size=12))
    ids = [i for group in groups for i in group]
    assert decode_all(sentencepiece_like, ids) == sentencepiece_like.decode(ids, True)


def test_a5_5_bytes_that_are_no_character_take_nothing_back(sentencepiece_like: Tokenizer) -> None:
    # A5.5: with one bad byte behind it, this decoder turns the whole run into U+FFFD.
    def pieces(*names: str) -> list[int]:
        return [sentencepiece_like.token_id(name) or 0 for name in names]

    ids = pieces("▁Hello", "<0xC3>", "<0xA9>", "<0xFF>", "▁world", "s")
    assert sentencepiece_like.decode(ids, True) == "Hello\ufffd\ufffd\ufffd worlds"
    detokenizer = Detokenizer(sentencepiece_like)
    assert [detokenizer.feed(i) for i in ids] == ["Hello", "", "é", "", "\ufffd world", "s"]
    assert detokenizer.flush() == ""
    # Negative control: the library's own stream gives up.
    assert isinstance(sentencepiece_like, FastTokenizer)
    stream = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        for i in ids:
            stream.step(sentencepiece_like._backend, i)


def test_a5_4_a_prompt_is_not_said_again(sentencepiece_like: Tokenizer) -> None:
    # A5.4: the prompt ends inside a character, which the first token completes.
    assert isinstance(sentencepiece_like, FastTokenizer)
    prompt = [sentencepiece_like.token_id("▁Hello") or 0, *(2 + b for b in "🌶".encode()[:3])]
    last = 2 + "🌶".encode()[3]
    assert Detokenizer(sentencepiece_like, prompt).feed(last) == "🌶"
    # Negative control: a stream that begins with the ids of the prompt.
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    assert stream.step(sentencepiece_like._backend, last) == "Hello🌶"


def test_a5_27_decoding_pieces_alone_loses_spaces(sentencepiece_like: Tokenizer) -> None:
    ids = [sentencepiece_like.token_id(p) or 0 for p in ("▁Hello", "▁world", "s", "▁are", ".")]
    assert decode_all(sentencepiece_like, ids) == "Hello worlds are."
    alone = "".join(sentencepiece_like.decode([i], True) for i in ids)
    assert alone == "Helloworldsare."
    # After a prompt the first word keeps its space.
    assert decode_all(sentencepiece_like, ids[1:], ids[:1]) == " worlds are."
