"""Tokenizer files: parsed before the long work, copied as they are."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from converters.checkpoint.json_files import read_json_object
from plugins.support.errors import InputError

# Any of these is a tokenizer; the others only describe how to use one.
_TOKENIZERS = ("tokenizer.json", "tekken.json", "tokenizer.model")
_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


@dataclass(frozen=True)
class TokenizerFiles:
    """The files to copy; none when the checkpoint has no tokenizer."""

    files: tuple[Path, ...]

    @classmethod
    def find(cls, directory: Path, vocab_size: int) -> TokenizerFiles:
        """Parse what is there.

        Raises InputError for a damaged file and for a tokenizer that gives ids which the
        embedding of `vocab_size` rows does not have.
        """
        main = [directory / name for name in _TOKENIZERS if (directory / name).is_file()]
        if not main:
            return cls(())
        others = [directory / name for name in _COMPANIONS if (directory / name).is_file()]
        for path in (*main, *others):
            if path.suffix == ".json":
                read_json_object(path, path.name)
        if main[0].name == "tokenizer.json":
            _check(main[0], vocab_size)
        elif main[0].name == "tekken.json":
            _check_tekken(main[0], vocab_size)
        return cls((*main, *others))

    def copy_to(self, directory: Path) -> None:
        """Copy the files into the new `directory`, or make nothing when there are none."""
        if self.files:
            directory.mkdir(exist_ok=True)
        for path in self.files:
            shutil.copyfile(path, directory / path.name)


def _check(path: Path, vocab_size: int) -> None:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            "the tokenizer cannot be loaded", where=str(path), found=str(error)
        ) from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    _check_largest(path, largest, vocab_size)


def _check_tekken(path: Path, vocab_size: int) -> None:
    config = read_json_object(path, path.name).get("config")
    size = config.get("default_vocab_size") if isinstance(config, dict) else None
    if type(size) is not int:
        raise InputError(
            "the tokenizer does not say how many ids it has",
            where=f"{path}: config.default_vocab_size",
            expected="a number of ids",
            found=repr(size),
        )
    _check_largest(path, size - 1, vocab_size)


def _check_largest(path: Path, largest: int, vocab_size: int) -> None:
    if largest >= vocab_size:
        raise InputError(
            "the tokenizer gives token ids that the model has no embedding for",
            where=str(path),
            expected=f"ids below {vocab_size} (vocab_size)",
            found=f"ids up to {largest}",
            fix="use the tokenizer that belongs to this checkpoint",
        )
