"""A tekken tokenizer (Mistral's) behind the front end's protocol, through mistral-common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plugins.support.errors import InputError
from triton_repo.frontend.encoding import Encoding


def tekken_files(directory: Path) -> list[Path]:
    """Files of a directory that mistral-common would take for a tekken tokenizer."""
    return sorted(path for path in directory.glob("*.json") if "tekken" in path.name)


class TekkenTokenizer:
    """Plain text and ids; conversations and audio are `triton_repo.frontend.audio.prompts`.

    Raises InputError for a file that mistral-common cannot read.
    """

    def __init__(self, path: Path) -> None:
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        try:
            self._tokenizer = Tekkenizer.from_file(path)
        except Exception as error:  # asserts and lookup errors, for anything wrong in the file
            raise InputError(
                "the tekken tokenizer cannot be loaded",
                where=str(path),
                found=" ".join(str(error).split())[:300] or type(error).__name__,
            ) from error
        self._policies = (SpecialTokenPolicy.KEEP, SpecialTokenPolicy.IGNORE)
        self.vocab_size: int = self._tokenizer.n_words
        self.bos_id: int | None = self._tokenizer.bos_id
        self.eos_ids: tuple[int, ...] = (self._tokenizer.eos_id,)
        self.pad_id: int | None = self._tokenizer.pad_id
        self.truncation_side = "right"
        self.max_chars_per_token = max(map(len, self._tokenizer.vocab()), default=1)
        self.chat_template: str | None = None
        self._transcribe_id = self.token_id("[TRANSCRIBE]")
        self.special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

    def encode(self, text: str, add_special_tokens: bool, want_offsets: bool) -> Encoding:
        """Ids of `text`, a begin-of-sequence id in front if asked for; never with offsets."""
        ids = self._tokenizer.encode(text, bos=add_special_tokens, eos=False)
        return Encoding(list(ids), None, (int(add_special_tokens), 0))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`; incomplete characters become U+FFFD."""
        policy = self._policies[skip_special_tokens]
        return str(self._tokenizer.decode(list(ids), special_token_policy=policy))

    def token_id(self, token: str) -> int | None:
        """The id of a special token by its string."""
        try:
            return int(self._tokenizer.get_special_token(token))
        except ValueError:
            return None

    def marks_language(self, prompt_ids: Sequence[int]) -> bool:
        """After the sign of a transcription."""
        return len(prompt_ids) > 0 and prompt_ids[-1] == self._transcribe_id
