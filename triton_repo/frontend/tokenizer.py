"""Tokenizers behind one small protocol: a Hugging Face directory, or one id per byte."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from plugins.support.errors import InputError
from triton_repo.frontend.encoder import (
    Encoder,
    agreeing_version,
    installed_version,
    open_encoder,
    plain_ids,
)
from triton_repo.frontend.encoding import Encoding
from triton_repo.frontend.tekken import TekkenTokenizer, tekken_files

LOG = logging.getLogger(__name__)
BYTES = "bytes"
# Files of a compiled tokenizer.
FACTS_FILE = "front_end.json"
VOCABULARY_FILE = "tokenizer.json"
# Content of every chat template that names no other; used by the byte tokenizer.
BYTE_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Tokenizer(Protocol):
    """What the front end needs of a tokenizer."""

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    truncation_side: str
    max_chars_per_token: int
    chat_template: str | None
    special_tokens: dict[str, str]

    def encode(self, text: str, add_special_tokens: bool, want_offsets: bool) -> Encoding:
        """Ids of `text`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`; undecodable bytes become U+FFFD."""

    def token_id(self, token: str) -> int | None:
        """The id of a token by its string; None when the vocabulary has no such token."""

    def marks_language(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the answer to this prompt may begin with `lang:xx`, which is none of it."""


class ByteTokenizer:
    """One id per UTF-8 byte (0 to 255), then end, padding and one placeholder per modality."""

    EOS, PAD = 256, 257
    NAMED: ClassVar = {"<eos>": 256, "<pad>": 257, "<image>": 258, "<video>": 259, "<audio>": 260}

    def __init__(self) -> None:
        self.vocab_size = 261
        self.bos_id: int | None = None
        self.eos_ids: tuple[int, ...] = (self.EOS,)
        self.pad_id: int | None = self.PAD
        self.truncation_side = "right"
        self.max_chars_per_token = 1
        self.chat_template: str | None = BYTE_CHAT_TEMPLATE
        self.special_tokens = {"eos_token": "<eos>", "pad_token": "<pad>"}

    def encode(self, text: str, add_special_tokens: bool, want_offsets: bool) -> Encoding:
        """UTF-8 bytes of `text`; the bytes of one character share its range."""
        ids = list(text.encode("utf-8", "replace"))
        if not want_offsets:
            return Encoding(ids, None, (0, 0))
        offsets = [
            (i, i + 1) for i, c in enumerate(text) for _ in range(len(c.encode("utf-8", "replace")))
        ]
        return Encoding(ids, offsets, (0, 0))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The bytes as UTF-8; ids above 255 are special tokens."""
        if max(ids, default=0) < 256:
            return bytes(ids).decode("utf-8", "replace")
        names = {i: name.encode() for name, i in self.NAMED.items()}
        parts = []
        for i in ids:
            if i < 256:
                parts.append(bytes([i]))
            elif not skip_special_tokens:
                parts.append(names.get(i, b""))
        return b"".join(parts).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of a special token by name."""
        return self.NAMED.get(token)

    def marks_language(self, prompt_ids: Sequence[int]) -> bool:
        """Never."""
        return False


class Facts(BaseModel):
    """What a tokenizer knows besides its vocabulary; `FACTS_FILE` of a compiled tokenizer.

    Attributes:
        encoder_version: the version of the faster encoder that gave the same ids; None for none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    truncation_side: str
    max_chars_per_token: int
    chat_template: str | None
    special_tokens: dict[str, str]
    encoder_version: str | None = None


class _WithFacts:
    """What a tokenizer knows besides its vocabulary, as attributes."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.vocab_size = facts.vocab_size
        self.bos_id = facts.bos_id
        self.eos_ids = facts.eos_ids
        self.pad_id = facts.pad_id
        self.truncation_side = facts.truncation_side
        self.max_chars_per_token = facts.max_chars_per_token
        self.chat_template = facts.chat_template
        self.special_tokens = facts.special_tokens

    def marks_language(self, prompt_ids: Sequence[int]) -> bool:
        """Never."""
        return False


class FastTokenizer(_WithFacts):
    """A tokenizer of the `tokenizers` library, exactly as transformers sets it up.

    `save` writes it so that `load` needs neither transformers nor torch: a server process then
    starts in milliseconds and stays small.
    """

    def __init__(self, backend: Any, facts: Facts, vocabulary: Path | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._vocabulary = vocabulary
        super().__init__(facts)

    @staticmethod
    def load(directory: Path) -> FastTokenizer:
        """The tokenizer that `save` wrote. Raises InputError when a file is missing or damaged."""
        from tokenizers import Tokenizer as Backend

        vocabulary = directory / VOCABULARY_FILE
        try:
            facts = Facts.model_validate_json((directory / FACTS_FILE).read_text())
            backend = Backend.from_file(str(vocabulary))
        except Exception as error:
            raise InputError(
                "the tokenizer of the model repository cannot be read",
                where=str(directory),
                found=" ".join(str(error).split())[:300],
                fix="write the repository again with `build-engine repo`",
            ) from error
        return FastTokenizer(backend, facts, vocabulary)

    def save(self, directory: Path) -> None:
        """Write the tokenizer into an existing directory, and which encoder may replace it."""
        vocabulary = directory / VOCABULARY_FILE
        self._backend.save(str(vocabulary))
        encoder_version = agreeing_version(self._backend, vocabulary)
        facts = self._facts.model_copy(update={"encoder_version": encoder_version})
        (directory / FACTS_FILE).write_text(facts.model_dump_json(indent=2) + "\n")

    @cached_property
    def _encoder(self) -> Encoder | None:
        """The faster encoder; opened by the first text, for not every model encodes."""
        compared = self._facts.encoder_version
        if compared is None or self._vocabulary is None:
            return None
        found = installed_version()
        if found != compared:
            LOG.warning(
                "texts are encoded more slowly: fastokens is %s, and %s gave the right ids when "
                "the model repository was written",
                found or "not installed",
                compared,
            )
            return None
        return open_encoder(self._vocabulary)

    def encode(self, text: str, add_special_tokens: bool, want_offsets: bool) -> Encoding:
        """Ids of `text`, with offsets in code points when asked for."""
        encoding: Any
        if want_offsets:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        elif self._encoder is not None:
            if not add_special_tokens:
                return Encoding(plain_ids(self._encoder, text), None, (0, 0))
            encoding = self._encoder.encode(text, add_special_tokens=True)
        else:
            encoding = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )[0]
        specials = (0, 0)
        if add_special_tokens:
            mask = encoding.special_tokens_mask
            head = next((i for i, m in enumerate(mask) if not m), len(mask))
            tail = next((i for i, m in enumerate(reversed(mask[head:])) if not m), 0)
            specials = (head, tail)
        return Encoding(encoding.ids, encoding.offsets if want_offsets else None, specials)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token by its string."""
        found: int | None = self._backend.token_to_id(token)
        return found


class SlowTokenizer(_WithFacts):
    """A tokenizer class of transformers without a `tokenizers` backend; it has no offsets."""

    def __init__(self, tokenizer: Any, facts: Facts) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)
        super().__init__(facts)

    def encode(self, text: str, add_special_tokens: bool, want_offsets: bool) -> Encoding:
        """Ids of `text`; never with offsets."""
        ids = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        if not add_special_tokens:
            return Encoding(ids, None, (0, 0))
        plain = [t not in self._special_ids for t in ids]
        head = plain.index(True) if True in plain else len(ids)
        tail = plain[::-1].index(True) if True in plain else 0
        return Encoding(ids, None, (head, tail))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its string."""
        found: int | None = self._tokenizer.get_vocab().get(token)
        return found


def open_with_transformers(directory: Path) -> FastTokenizer | SlowTokenizer:
    """The tokenizer of a Hugging Face directory, set up by its transformers class."""
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise InputError("the tokenizer directory does not exist", where=str(directory))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, clean_up_tokenization_spaces=False
        )
    except Exception as error:
        present = ", ".join(sorted(p.name for p in directory.iterdir())) or "nothing"
        raise InputError(
            "the tokenizer cannot be loaded",
            where=str(directory),
            expected="tokenizer.json, or the files of a tokenizer class of transformers",
            found=f"{present} ({' '.join(str(error).split())[:300]})",
        ) from error
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    facts = Facts(
        vocab_size=max(vocabulary.values(), default=-1) + 1,
        bos_id=tokenizer.bos_token_id,
        eos_ids=_end_ids(directory, tokenizer.eos_token_id),
        pad_id=tokenizer.pad_token_id,
        truncation_side=tokenizer.truncation_side,
        max_chars_per_token=max(map(len, vocabulary), default=1),
        chat_template=tokenizer.get_chat_template() if tokenizer.chat_template else None,
        special_tokens={k: str(v) for k, v in tokenizer.special_tokens_map.items()},
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return SlowTokenizer(tokenizer, facts)
    return FastTokenizer(backend, facts)


def _end_ids(directory: Path, tokenizer_end: int | None) -> tuple[int, ...]:
    """End ids: generation_config first (chat models end with several), the tokenizer's last."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
            if ids:
                break
    if tokenizer_end is not None:
        ids.append(tokenizer_end)
    return tuple(dict.fromkeys(ids))


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The byte tokenizer for "bytes", else the tokenizer of a directory.

    Raises InputError when the directory holds none; the message lists the files that are there.
    """
    if str(source) == BYTES:
        return ByteTokenizer()
    directory = Path(source)
    if (directory / FACTS_FILE).is_file():
        return FastTokenizer.load(directory)
    tekken = [] if (directory / VOCABULARY_FILE).is_file() else tekken_files(directory)
    if tekken:
        return TekkenTokenizer(tekken[0])
    return open_with_transformers(directory)
