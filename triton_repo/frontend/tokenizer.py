"""Tokenizers behind one small protocol: a Hugging Face directory, or one id per byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from plugins.support.errors import InputError
from triton_repo.frontend.limits import Offset

BYTES = "bytes"
# Content of every chat template that names no other; used by the byte tokenizer.
BYTE_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Encoding:
    """Ids of one text.

    Attributes:
        ids: token ids.
        offsets: per id the character range in the text, (0, 0) for special tokens; None when the
            tokenizer has none or none were asked for.
        specials: special tokens added in front and behind.
    """

    ids: list[int]
    offsets: list[Offset] | None
    specials: tuple[int, int]


class Tokenizer(Protocol):
    """What the front end needs of a tokenizer."""

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    truncation_side: str
    max_chars_per_token: int
    has_offsets: bool
    chat_template: str | None
    special_tokens: dict[str, str]

    def encode(self, text: str, add_special_tokens: bool, want_offsets: bool) -> Encoding:
        """Ids of `text`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`; undecodable bytes become U+FFFD."""

    def token_id(self, token: str) -> int | None:
        """The id of a token by its string; None when the vocabulary has no such token."""


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
        self.has_offsets = True
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


class HuggingFaceTokenizer:
    """A tokenizer directory as transformers loads it."""

    def __init__(self, directory: Path) -> None:
        # Imported here: the byte tokenizer needs none of it and starts in a fraction of the time.
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
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._vocabulary = vocabulary
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_ids = _end_ids(directory, tokenizer.eos_token_id)
        self.pad_id: int | None = tokenizer.pad_token_id
        self.truncation_side: str = tokenizer.truncation_side
        self.max_chars_per_token = max(map(len, vocabulary), default=1)
        self.has_offsets = self._backend is not None
        self.chat_template: str | None = (
            tokenizer.get_chat_template() if tokenizer.chat_template else None
        )
        self.special_tokens = {k: str(v) for k, v in tokenizer.special_tokens_map.items()}
        self._special_ids = frozenset(tokenizer.all_special_ids)

    def encode(self, text: str, add_special_tokens: bool, want_offsets: bool) -> Encoding:
        """Ids of `text`, with offsets in code points when asked for and available."""
        if self._backend is None:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return Encoding(ids, None, self._count_specials(ids) if add_special_tokens else (0, 0))
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        ids = encoding.ids
        specials = (0, 0)
        if add_special_tokens:
            mask = encoding.special_tokens_mask
            head = next((i for i, m in enumerate(mask) if not m), len(mask))
            tail = next((i for i, m in enumerate(reversed(mask)) if not m), 0)
            specials = (head, tail)
        return Encoding(ids, encoding.offsets if want_offsets else None, specials)

    def _count_specials(self, ids: list[int]) -> tuple[int, int]:
        head = next((i for i, t in enumerate(ids) if t not in self._special_ids), len(ids))
        rest = reversed(ids[head:])
        return head, next((i for i, t in enumerate(rest) if t not in self._special_ids), 0)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`."""
        if self._backend is not None:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its string."""
        return self._vocabulary.get(token)


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
    return HuggingFaceTokenizer(Path(source))
