"""Tokenizers for tests, and one echo server for all tests that need a real tritonserver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from triton_repo.generate import RepositoryOptions, write_repository
from triton_repo.server import TritonServer, running

# Letters from id 10, digits from 20, one id per character, a first and a last token around. No
# token is longer than a character: texts are cut by characters before they are tokenised.
CHARACTER_IDS = {c: 10 + i for i, c in enumerate("abcdef")} | {
    c: 20 + i for i, c in enumerate("0123456789")
}


@pytest.fixture(scope="session")
def character_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer directory with one id per character and special tokens in front and behind."""
    vocabulary = {"_": 0, "[": 1, "]": 2, "?": 3} | CHARACTER_IDS
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[ $A ]", special_tokens=[("[", 1), ("]", 2)]
    )
    directory = tmp_path_factory.mktemp("tokenizers") / "characters"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="_",
        cls_token="[",
        sep_token="]",
        unk_token="?",
        eos_token="]",
    ).save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="session")
def pieces_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer directory as Llama's: words with their space, bytes for all else, a begin token,
    two end ids, cuts on the left, and a chat template that writes the begin token itself.
    """
    special = ["<unk>", "<s>", "</s>", "<end>", "<pad>", "<image>", "<think>", "</think>"]
    words = ["▁Hello", "▁world", "s", "▁are", ".", "▁", "▁London", "London", "ST", "OP", "▁STOP"]
    vocabulary = [(piece, 0.0) for piece in special]
    vocabulary += [(f"<0x{b:02X}>", -9.0) for b in range(256)]
    vocabulary += [(word, -1.0) for word in words]
    raw = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    # A text may be there, and nothing of it left.
    raw.normalizer = normalizers.Replace(Regex("^ +$"), "")
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    directory = tmp_path_factory.mktemp("tokenizers") / "pieces"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=special[5:],
        truncation_side="left",
    )
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% for p in m['content'] %}"
        "{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endfor %}{{ style }}"
        "{{ '<think>' if enable_thinking else '<think></think>' }}"
    )
    fast.save_pretrained(str(directory))
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
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
