"""What a family's `define` is told and what it tells back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from plugins.support.errors import InputError

Phase = Literal["context", "generation", "audio", "draft"]
InputKind = Literal["token", "host", "cache", "state"]
Dims = tuple[int, ...]

# Rows of the caches, tokens of a context call and chunks of a recurrence come in multiples of this.
TOKEN_BLOCK = 64


@dataclass(frozen=True)
class EngineLimits:
    """Sizes that a pair of engines is built for.

    Attributes:
        max_batch_size: slots.
        max_seq_len: prompt and generated tokens of one sequence together.
        chunk_size: most tokens per slot in one context call, a multiple of 64.
        max_draft_len: draft tokens that one generation call verifies.
        max_logits_tokens: most logit rows per slot in one context call.
        max_num_tokens: tokens of one context call, padding included. TensorRT plans memory for
            the largest call that the profile allows, so it bounds the slots of a context call.
        hidden_states: whether the context engine outputs the hidden states of all tokens.

    Raises InputError for sizes that no engine can have.
    """

    max_batch_size: int
    max_seq_len: int
    chunk_size: int = 512
    max_draft_len: int = 0
    max_logits_tokens: int = 64
    max_num_tokens: int = 8192
    hidden_states: bool = False

    def __post_init__(self) -> None:
        positive = (self.max_batch_size, self.max_seq_len, self.chunk_size, self.max_logits_tokens)
        if min(positive) < 1 or self.max_draft_len < 0:
            raise InputError("engine limits must be positive", found=str(self))
        if self.chunk_size % TOKEN_BLOCK:
            raise InputError(
                f"the chunk size must be a multiple of {TOKEN_BLOCK}", found=str(self.chunk_size)
            )
        if self.step_tokens > self.chunk_size:
            raise InputError(
                "a generation step cannot be longer than a context chunk",
                expected=f"max_draft_len < {self.chunk_size}",
                found=str(self.max_draft_len),
            )

    @property
    def step_tokens(self) -> int:
        """Tokens per slot in one generation call."""
        return 1 + self.max_draft_len

    @property
    def context_slots(self) -> int:
        """Most slots of one context call."""
        return max(1, min(self.max_batch_size, self.max_num_tokens // self.chunk_size))

    @property
    def visible_rows(self) -> int:
        """Cache rows a sequence can use: max_seq_len rounded up to a multiple of 64."""
        return -(-self.max_seq_len // TOKEN_BLOCK) * TOKEN_BLOCK

    @property
    def cache_rows(self) -> int:
        """Cache rows of a slot, including the scrap rows that padding slots write to."""
        return self.visible_rows + self.chunk_size


@dataclass(frozen=True)
class Definition:
    """What a defined network expects of its caller, next to what the network itself knows.

    Attributes:
        kinds: network input -> kind; inputs that are missing here are weights.
        profile: network input with dynamic dimensions -> (smallest, best, largest) dimensions.
        decisions: what was decided once for this network, by name; recorded with the engine.
    """

    kinds: dict[str, InputKind] = field(default_factory=dict)
    profile: dict[str, tuple[Dims, Dims, Dims]] = field(default_factory=dict)
    decisions: dict[str, bool] = field(default_factory=dict)
