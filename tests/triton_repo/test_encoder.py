"""The faster encoder gives the ids of the `tokenizers` library, or is not used."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from triton_repo.frontend import encoder
from triton_repo.frontend import tokenizer as frontend_tokenizer
from triton_repo.frontend.encoder import (
    agreeing_version,
    installed_version,
    open_encoder,
    plain_ids,
)
from triton_repo.frontend.options import FrontEnd
from triton_repo.frontend.pipeline import prepare
from triton_repo.frontend.tokenizer import (
    FACTS_FILE,
    Encoding,
    FastTokenizer,
    open_with_transformers,
)
from triton_repo.generation.base import GenerationCall, call_from_prepared
from triton_repo.models.preprocessing import prompt_tensors

DATA = Path(__file__).parents[1] / "fixtures" / "data"
PROSE = Path(random.__file__).read_text()
ALPHABETS = (
    "abc ABC'stre",
    "  \t\n\r\x0b\x0c\u00a0\u2003\u3000\x85\u2028",
    "0123456789٣४五Ⅷ½",
    "éèüßçñIİıſKÅ\u0301\u0308\u0323",
    "日本語中文한국어ไทยहिन्दीعربى",
    "😀👨‍👩‍👧🏽🇩🇪\u200d\ufe0f",
    "!?.,;:-_(){}[]\"'`~@#$%^&*+=|\\/<>",
)


def trained(model: Any, alphabet: list[str], more: list[str], **parts: Any) -> Tokenizer:
    """A tokenizer of 600 ids learned from `PROSE`."""
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", "<unk>", *more],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROSE.splitlines(), trainer)
    return tokenizer


def byte_level(**parts: Any) -> Tokenizer:
    return trained(
        models.BPE(),
        sorted(pre_tokenizers.ByteLevel.alphabet()),
        [],
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
        **parts,
    )


def with_flags() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens(
        [
            AddedToken("<l>", lstrip=True),
            AddedToken("<r>", rstrip=True),
            AddedToken("word", single_word=True),
            AddedToken("Üx", normalized=True),
        ]
    )
    return tokenizer


def with_byte_fallback() -> Tokenizer:
    return trained(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        [],
        [f"<0x{i:02X}>" for i in range(256)],
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        ),
        post_processor=processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
    )


def with_ends() -> Tokenizer:
    return byte_level(
        post_processor=processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    )


def released(family: str) -> Tokenizer:
    tokenizer: Tokenizer = Tokenizer.from_file(str(DATA / f"{family}_trained" / "tokenizer.json"))
    return tokenizer


KINDS = {
    "qwen38": lambda: released("qwen38"),
    "dots3": lambda: released("dots3"),
    "byte-level": with_ends,
    "added-tokens": with_flags,
    "byte-fallback": with_byte_fallback,
    "lower-case": lambda: byte_level(normalizer=normalizers.Lowercase()),
}


def saved(tokenizer: Tokenizer, directory: Path) -> Path:
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def texts(tokenizer: Tokenizer, count: int) -> Iterator[str]:
    """Prose, all alphabets, tokens whole and in part, anything; some go on where the last began."""
    choose = random.Random(7)
    added = [t.content for t in tokenizer.get_added_tokens_decoder().values()]

    def part() -> str:
        kind = choose.randrange(6)
        if kind == 0:
            start = choose.randrange(len(PROSE))
            return PROSE[start : start + choose.choice([5, 60, 900])]
        if kind == 1 and added:
            token = choose.choice(added)
            return token[: choose.randint(1, len(token))]
        if kind == 2 and added:
            return choose.choice(added)
        if kind == 3:
            codes = (choose.choice([0x80, 0x3000, 0x110000]) for _ in range(8))
            drawn = (choose.randrange(c) for c in codes)
            return "".join(chr(c) for c in drawn if not 0xD800 <= c < 0xE000)
        if kind == 4:
            return choose.choice([" ", "\n", "\t", "a", "é", " \n", "1"]) * choose.choice([3, 90])
        return "".join(choose.choices(choose.choice(ALPHABETS), k=choose.randint(1, 15)))

    last = ""
    for _ in range(count):
        kept = last[: choose.randrange(len(last) + 1)] if choose.random() < 0.3 else ""
        last = kept + "".join(part() for _ in range(choose.randrange(9)))
        yield last


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_same(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    faster = open_encoder(saved(tokenizer, tmp_path))
    for text in texts(tokenizer, 1500):
        right = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        assert plain_ids(faster, text).tolist() == right.ids, text
        right = tokenizer.encode_batch_fast([text], add_special_tokens=True)[0]
        found = faster.encode(text, add_special_tokens=True)
        assert found.ids == right.ids, text
        assert found.special_tokens_mask == right.special_tokens_mask, text


def test_ids_do_not_depend_on_the_text_before(tmp_path: Path) -> None:
    # Where a run of white space ends depends on what follows it: a text that shares its first
    # kilobytes with the one before must not take over where that one was split.
    tokenizer = released("qwen38")
    faster = open_encoder(saved(tokenizer, tmp_path))

    def same(text: str) -> bool:
        right = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return bool(plain_ids(faster, text).tolist() == right)

    for length in (50, 5000, 40000):
        shared = PROSE[:length] + " " * 700
        for following in (" ", "\n", "\tx", "y", "  z", "\u3000", "é"):
            assert same(shared + "x" + PROSE[:2000])
            assert same(shared + following)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_of_a_known_kind_is_encoded_faster(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    assert agreeing_version(tokenizer, saved(tokenizer, tmp_path)) == installed_version()
    assert installed_version() is not None


class OneCharacterWrong:
    """An encoder that gets one character wrong, without added tokens or with them."""

    def __init__(self, right: Any, character: str, special: bool) -> None:
        self._right, self._character, self._special = right, character, special

    def encode(self, text: str, add_special_tokens: bool = False) -> Any:
        wrong = text.replace(self._character, "?") if self._special else text
        return self._right.encode(wrong, add_special_tokens)

    def encode_batch_flat(self, texts: list[str]) -> Any:
        wrong = [t if self._special else t.replace(self._character, "?") for t in texts]
        return self._right.encode_batch_flat(wrong)


@pytest.mark.parametrize(
    ("character", "special"),
    [*((c, False) for c in ("e", "ß", "\u0323", "ก", "😀", "\u3000", "\x85")), ("|", True)],
)
def test_one_wrong_character_is_noticed(
    character: str, special: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = released("qwen38")
    wrong = OneCharacterWrong(open_encoder(saved(tokenizer, tmp_path)), character, special)
    monkeypatch.setattr(encoder, "open_encoder", lambda _: wrong)
    assert agreeing_version(tokenizer, tmp_path / "tokenizer.json") is None


def test_other_kinds_are_left_to_the_library(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert agreeing_version(words, saved(words, tmp_path)) is None
    # Dropout draws: no encoder agrees with it.
    document = json.loads(byte_level().to_str())
    document["model"]["dropout"] = 0.5
    draws: Tokenizer = Tokenizer.from_str(json.dumps(document))
    assert agreeing_version(draws, saved(draws, tmp_path)) is None


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The trained tokenizer as a model repository has it."""
    source = tmp_path / "source"
    source.mkdir()
    saved(released("qwen38"), source)
    (source / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
    target = tmp_path / "target"
    target.mkdir()
    opened = open_with_transformers(source)
    assert isinstance(opened, FastTokenizer)
    opened.save(target)
    return target


def test_a_repository_knows_the_version_it_was_compared_with(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        json.loads((directory / FACTS_FILE).read_text())["encoder_version"] == installed_version()
    )
    opened: list[Path] = []

    def counted(path: Path) -> Any:
        opened.append(path)
        return open_encoder(path)

    monkeypatch.setattr(frontend_tokenizer, "open_encoder", counted)
    text = "<|im_start|>user\nTwo  words<|im_end|>"
    right = FastTokenizer.load(directory).encode(text, False, False)
    assert opened == [directory / "tokenizer.json"]
    assert list(right.ids) == released("qwen38").encode(text, add_special_tokens=False).ids

    for version in ("99.0", None):
        monkeypatch.setattr(frontend_tokenizer, "installed_version", lambda v=version: v)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            again = FastTokenizer.load(directory).encode(text, False, False)
            assert list(again.ids) == list(right.ids)
        assert (version or "not installed") in caplog.text
    assert len(opened) == 1


def test_special_tokens_are_counted(tmp_path: Path) -> None:
    tokenizer = with_ends()
    fields = {
        "vocab_size": 600,
        "bos_id": None,
        "eos_ids": [],
        "pad_id": None,
        "truncation_side": "right",
        "max_chars_per_token": 20,
        "chat_template": None,
        "special_tokens": {},
    }
    saved(tokenizer, tmp_path)
    for version in (None, installed_version()):
        (tmp_path / FACTS_FILE).write_text(json.dumps(fields | {"encoder_version": version}))
        loaded = FastTokenizer.load(tmp_path)
        ids = tokenizer.encode("a b", add_special_tokens=False).ids
        assert loaded.encode("a b", True, False) == Encoding([0, *ids, 1], None, (1, 1))
        assert loaded.encode("", True, False) == Encoding([0, 1], None, (2, 0))


def test_ids_reach_the_engine_whichever_encoder_made_them(directory: Path) -> None:
    tokenizer = FastTokenizer.load(directory)
    front_end = FrontEnd(tokenizer, 1024, tokenizer.vocab_size)
    for body in ({"text_input": "Two  words"}, {"text_input": "Two", "add_special_tokens": False}):
        text = str(body["text_input"])
        right = released("qwen38").encode(text, add_special_tokens=False).ids
        for cut in (None, 1):
            row = body | {"max_tokens": 4, "truncate_prompt_tokens": cut}
            prepared = prepare(row, front_end)
            kept = right[:cut]
            call = call_from_prepared(prepared, {})
            sent = GenerationCall.from_json(json.loads(json.dumps(call.to_json())))
            assert sent.prompt_ids == kept
            assert sent.echo["input_ids"] == kept
            assert prompt_tensors([prepared])["INPUT_ID"].tolist() == [kept]
