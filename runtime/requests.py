"""What a caller asks of a session and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from plugins.support.errors import ToolchainError, UsageError
from runtime.audio_rows import AudioRows
from runtime.contract import AudioEmbedding, EngineConfig
from runtime.sampling import SamplingParams, TokenChooser

FinishReason = Literal["stop", "length", "cancelled", "error"]


class QueueFullError(ToolchainError):
    """More requests wait than the session lets wait; try again later."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        prompt_ids: ids of the prompt, at least one.
        max_new_tokens: most tokens of the answer, at least 1.
        sampling: how tokens are chosen.
        end_ids: an answer ends with any of these; the id is delivered with the last event.
        stop_ids: an answer ends when its last ids are any of these sequences.
        bad_ids: sequences that must not appear in the answer.
        embedding_bias: added to the logits, float32 [vocab_size], or None.
        audio: rows of the audio engine; engines without one take none.
        embed: answer with the prompt's embedding and no token; `max_new_tokens` must be 0.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_ids: Sequence[int] = ()
    stop_ids: Sequence[Sequence[int]] = ()
    bad_ids: Sequence[Sequence[int]] = ()
    embedding_bias: torch.Tensor | None = None
    audio: AudioRows | None = None
    embed: bool = False

    def check(self, config: EngineConfig) -> None:
        """Raise UsageError naming the first parameter that the engine cannot serve."""
        self.check_prompt(config)
        limits = config.build_config
        count = len(self.prompt_ids)
        if self.embed:
            if limits.pooling is None:
                raise _refused(
                    "embed", "this engine has no pooling", "one built with --pooling", "none"
                )
            if self.max_new_tokens:
                raise _refused(
                    "max_new_tokens", "an embedding has no tokens", "0", str(self.max_new_tokens)
                )
            return
        if self.max_new_tokens < 1:
            raise _refused(
                "max_new_tokens",
                "no token is asked for",
                "at least 1",
                str(self.max_new_tokens),
            )
        if count + self.max_new_tokens > limits.max_seq_len:
            raise _refused(
                "max_new_tokens",
                "prompt and answer together are too long",
                f"at most {limits.max_seq_len} ids (max_seq_len of the engine), "
                f"so max_new_tokens <= {limits.max_seq_len - count} for this prompt",
                f"{count} + {self.max_new_tokens}",
            )
        vocab = config.vocab_size
        _check_ids("end_ids", self.end_ids, vocab)
        for name, groups in (("stop_ids", self.stop_ids), ("bad_ids", self.bad_ids)):
            for group in groups:
                if len(group) == 0:
                    raise _refused(name, "one of the sequences is empty", "at least one id", "none")
                _check_ids(name, group, vocab)
        bias = self.embedding_bias
        if bias is not None and tuple(bias.shape) != (vocab,):
            raise _refused(
                "embedding_bias",
                "the bias has not one value per id",
                f"[{vocab}]",
                str(list(bias.shape)),
            )

    def check_prompt(self, config: EngineConfig) -> None:
        """Raise UsageError when the prompt alone cannot be served."""
        limits = config.build_config
        count = len(self.prompt_ids)
        if count == 0:
            raise _refused("prompt_ids", "the prompt is empty", "at least one id", "none")
        if count > limits.max_input_len:
            raise _refused(
                "prompt_ids",
                "the prompt is too long",
                f"at most {limits.max_input_len} ids (max_input_len of the engine)",
                f"{count} ids",
            )
        _check_ids("prompt_ids", self.prompt_ids, config.vocab_size)
        self._check_audio(config)

    def _check_audio(self, config: EngineConfig) -> None:
        wanted = [host for host in config.host_inputs if isinstance(host, AudioEmbedding)]
        if self.audio is None:
            streams = [host for host in wanted if host.placeholder_id is None]
            if streams:
                raise _refused("audio", "the model listens to a stream", "audio", "none")
            placeholders = {host.placeholder_id for host in wanted}
            found = [token for token in self.prompt_ids if token in placeholders]
            if found:
                raise _refused(
                    "prompt_ids",
                    "a placeholder has no audio",
                    "audio",
                    f"{len(found)} ids {found[0]}",
                )
            return
        if not wanted:
            raise _refused(
                "audio", "this engine takes no audio", "none", f"{self.audio.count} rows"
            )
        self.audio.bind(self.prompt_ids)

    def chooser(self, vocab_size: int) -> TokenChooser:
        """The sampling state of this request."""
        return TokenChooser(
            params=self.sampling,
            vocab_size=vocab_size,
            prompt=self.prompt_ids,
            end_ids=self.end_ids,
            bad_ids=self.bad_ids,
            bias=self.embedding_bias,
        )


def _check_ids(name: str, ids: Sequence[int], vocab: int) -> None:
    for position, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise _refused(
                name,
                "an id is not in the vocabulary",
                f"0 .. {vocab - 1}",
                f"{token} at position {position}",
            )


def _refused(name: str, what: str, expected: str, found: str) -> UsageError:
    return UsageError(what, where=name, expected=expected, found=found)


@dataclass(frozen=True)
class TokenEvent:
    """One step of an answer.

    Attributes:
        token_id: the token; None in a final event that brings none (cancelled, error).
        log_prob: its log-probability under the model itself; None without a token.
        finish_reason: set in the last event of a request, None before.
        top_log_probs: the most likely ids and log-probabilities, if asked for.
        error: what went wrong, with finish_reason "error".
        embedding: float32 [H] on the CPU in the one event of a request for it.
    """

    token_id: int | None
    log_prob: float | None = None
    finish_reason: FinishReason | None = None
    top_log_probs: tuple[tuple[int, float], ...] = ()
    error: str | None = None
    embedding: torch.Tensor | None = None


@dataclass
class Timings:
    """When things happened to one request, in nanoseconds of `time.monotonic_ns`; 0 = not yet.

    Attributes:
        arrival: submitted.
        scheduled: got a slot.
        first_token, last_token: tokens chosen.
        tokens: how many.
    """

    arrival: int = 0
    scheduled: int = 0
    first_token: int = 0
    last_token: int = 0
    tokens: int = 0

    def queue_wait_s(self) -> float:
        """Seconds from arrival to a slot."""
        return (self.scheduled - self.arrival) / 1e9 if self.scheduled else 0.0

    def time_to_first_token_s(self) -> float:
        """Seconds from arrival to the first token."""
        return (self.first_token - self.arrival) / 1e9 if self.first_token else 0.0

    def time_per_token_s(self) -> float:
        """Mean seconds between tokens after the first."""
        gaps = self.tokens - 1
        return (self.last_token - self.first_token) / gaps / 1e9 if gaps > 0 else 0.0
