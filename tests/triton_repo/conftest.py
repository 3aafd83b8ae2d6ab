"""Tokenizers for tests, and one echo server for all tests that need a real tritonserver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from triton_repo.generate import RepositoryOptions, write_repository
from triton_repo.server import TritonServer, running

# Letters from id 10, digits from 20, one id per character, [CLS] and [SEP] around.
CHARACTER_IDS = {c: 10 + i for i, c in enumerate("abcdef")} | {
    c: 20 + i for i, c in enumerate("0123456789")
}


@pytest.fixture(scope="session")
def character_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer directory with one id per character and special tokens in front and behind."""
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3} | CHARACTER_IDS
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    directory = tmp_path_factory.mktemp("tokenizers") / "characters"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        eos_token="[SEP]",
    ).save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="session")
def echo_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An echo repository with the byte tokenizer and a small context; media may come from loopback
    and from the directory `media` beside it.
    """
    root = tmp_path_factory.mktemp("repository")
    (root / "media").mkdir()
    return write_repository(
        None,
        root / "echo",
        tokenizer="bytes",
        generation="echo",
        options=RepositoryOptions(
            max_context=4096, allow_private_media=True, local_media_root=root / "media"
        ),
    )


@pytest.fixture(scope="session")
def echo_server(echo_repository: Path) -> Iterator[TritonServer]:
    """A running tritonserver with the echo repository."""
    with running(echo_repository) as server:
        yield server
