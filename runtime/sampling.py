"""From logits to tokens: penalties, bans, temperature, top-k, top-p, log-probabilities.

Rows are worked on together, yet every row's result depends on its own logits and parameters only:
reductions run along rows, candidates are grouped by a size that the row's own parameters give, and
random numbers are a function of seed and token number.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from plugins.ngram import splitmix64
from plugins.support.errors import UsageError

_GAMMA = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
MAX_TOP_LOG_PROBS = 100
# Tokens that a top-p row looks at before it sorts the whole vocabulary.
_FIRST_CANDIDATES = 1024

_Filter = Literal["all", "top_k", "top_p"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The defaults choose the most likely one.

    Attributes:
        temperature: divides the logits; 0 = most likely token. None means 1 where top_k or top_p
            ask for sampling, else 0.
        top_k: sample among the k most likely; None or 0 = all; 1 = most likely token.
        top_p: sample among the fewest tokens whose probability reaches it; None = all.
        seed: 0 .. 2^64-1; None draws one. Equal seeds give equal tokens for equal logits.
        min_tokens: end ids cannot come before that many tokens.
        repetition_penalty: divides positive, multiplies negative logits of every id in the prompt
            or the answer.
        presence_penalty: subtracted once from ids in the answer.
        frequency_penalty: subtracted from ids in the answer per occurrence.
        top_log_probs: how many of the most likely tokens come back with each token.

    Raises UsageError naming a parameter that is out of range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_log_probs: int = 0

    def __post_init__(self) -> None:
        number = math.inf
        _within("temperature", self.temperature, 0.0, number)
        _within("top_k", self.top_k, 0, number)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("seed", self.seed, 0, _MASK64)
        _within("min_tokens", self.min_tokens, 0, number)
        _within("repetition_penalty", self.repetition_penalty, 0.0, number, open_low=True)
        _within("presence_penalty", self.presence_penalty, -number, number)
        _within("frequency_penalty", self.frequency_penalty, -number, number)
        _within("top_log_probs", self.top_log_probs, 0, MAX_TOP_LOG_PROBS)

    @property
    def effective_temperature(self) -> float:
        """The temperature with its default filled in; 0 = most likely token."""
        if self.top_k == 1:
            return 0.0
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.top_k in (None, 0) and self.top_p is None else 1.0

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the ids that came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _within(
    name: str, value: float | None, low: float, high: float, open_low: bool = False
) -> None:
    if value is None:
        return
    fine = (low < value if open_low else low <= value) and value <= high and math.isfinite(value)
    if not fine:
        relation = f"{'>' if open_low else '>='} {low:g}" if low > -math.inf else "a finite number"
        limit = f" and <= {high:g}" if high < math.inf else ""
        raise UsageError(
            f"{name} is out of range",
            where=name,
            expected=relation + limit,
            found=str(value),
        )


@dataclass(frozen=True)
class Sampled:
    """One chosen token.

    Attributes:
        token_id: the id; -1 where `error` says why there is none.
        log_prob: natural logarithm of its probability under the model itself (before penalties,
            bans and temperature), over the real vocabulary.
        top_log_probs: the most likely ids and their log-probabilities, best first.
        error: why no token could be chosen.
    """

    token_id: int
    log_prob: float
    top_log_probs: tuple[tuple[int, float], ...] = ()
    error: str | None = None


@dataclass
class TokenChooser:
    """What sampling has to know about one request; `accept` every token it got.

    Attributes:
        params: how to choose.
        vocab_size: ids below it can be chosen.
        prompt: the prompt's ids.
        end_ids: banned until `min_tokens`.
        bad_ids: sequences of ids that must not appear in the answer.
        bias: added to the logits before anything else, float32 [vocab_size], or None.
    """

    params: SamplingParams
    vocab_size: int
    prompt: Sequence[int] = ()
    end_ids: Sequence[int] = ()
    bad_ids: Sequence[Sequence[int]] = ()
    bias: torch.Tensor | None = None
    answer: list[int] = field(default_factory=list)
    _seen: torch.Tensor | None = None
    _counts: torch.Tensor | None = None

    def __post_init__(self) -> None:
        seed = self.params.seed
        self._seed = secrets.randbits(64) if seed is None else seed
        self._single_bans = [bad[0] for bad in self.bad_ids if len(bad) == 1]
        self._long_bans = [tuple(bad) for bad in self.bad_ids if len(bad) > 1]
        if self.params.penalises:
            self._seen = torch.zeros(self.vocab_size, dtype=torch.bool)
            self._seen[torch.tensor(list(self.prompt), dtype=torch.long)] = True
            self._counts = torch.zeros(self.vocab_size)

    def accept(self, token: int) -> None:
        """Count `token` as part of the answer."""
        self.answer.append(token)
        if self._seen is not None and self._counts is not None:
            self._seen[token] = True
            self._counts[token] += 1

    def banned(self) -> list[int]:
        """Ids that cannot come next."""
        bans = list(self._single_bans)
        if len(self.answer) < self.params.min_tokens:
            bans.extend(self.end_ids)
        for bad in self._long_bans:
            start = len(bad) - 1
            if tuple(self.answer[-start:]) == bad[:-1]:
                bans.append(bad[-1])
        return bans

    def uniform(self) -> float:
        """The random number in [0, 1) for the next token."""
        state = (self._seed + (len(self.answer) + 1) * _GAMMA) & _MASK64
        mixed = splitmix64(splitmix64(np.array([state], dtype=np.uint64)))
        return int(mixed[0] >> np.uint64(11)) / (1 << 53)

    def adjusts(self) -> bool:
        """Whether the logits change before a token is chosen."""
        return self.bias is not None or self.params.penalises

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """Bias and penalties on one row of logits, [vocab_size]."""
        if self.bias is not None:
            self.bias = self.bias.to(logits.device)
            logits = logits + self.bias
        if self._seen is not None and self._counts is not None:
            # They follow the logits to their device once.
            seen = self._seen = self._seen.to(logits.device)
            counts = self._counts = self._counts.to(logits.device)
            factor = self.params.repetition_penalty
            scaled = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(seen, scaled, logits)
            logits = logits - self.params.frequency_penalty * counts
            logits = logits - self.params.presence_penalty * (counts > 0)
        return logits


def choose_tokens(logits: torch.Tensor, choosers: Sequence[TokenChooser]) -> list[Sampled]:
    """Choose one token per row.

    Args:
        logits: float32 [B, V], V >= vocab_size; columns beyond the vocabulary are ignored.
        choosers: one per row, all of one vocabulary. They are not changed.

    Returns:
        One result per row; rows with NaN or without any allowed token carry an error.
    """
    vocab = choosers[0].vocab_size
    model = logits[:, :vocab].float()
    adjusted = _adjusted(model, choosers)
    best_value, best = adjusted.max(dim=-1)
    normaliser = torch.logsumexp(model, dim=-1)
    chosen = best.tolist()
    problems = _problems(best_value, normaliser)

    groups: dict[tuple[_Filter, int], list[int]] = defaultdict(list)
    for row, chooser in enumerate(choosers):
        if problems[row] is None and chooser.params.effective_temperature > 0:
            groups[_filter(chooser.params, vocab)].append(row)
    for (kind, candidates), rows in groups.items():
        picked = _sample(adjusted[rows], [choosers[row] for row in rows], kind, candidates)
        for row, token in zip(rows, picked, strict=True):
            chosen[row] = token

    index = torch.tensor(chosen, device=model.device).unsqueeze(-1)
    log_probs = (model.gather(-1, index).squeeze(-1) - normaliser).tolist()
    tops = _top_log_probs(model, normaliser, choosers)
    return [
        Sampled(-1, math.nan, (), problem)
        if problem is not None
        else Sampled(chosen[row], log_probs[row], tops[row])
        for row, problem in enumerate(problems)
    ]


def _adjusted(model: torch.Tensor, choosers: Sequence[TokenChooser]) -> torch.Tensor:
    bans = [(row, token) for row, chooser in enumerate(choosers) for token in chooser.banned()]
    changes = [row for row, chooser in enumerate(choosers) if chooser.adjusts()]
    if not bans and not changes:
        return model
    adjusted = model.clone()
    for row in changes:
        adjusted[row] = choosers[row].adjust(model[row])
    if bans:
        rows, tokens = zip(*bans, strict=True)
        adjusted[list(rows), list(tokens)] = -math.inf
    return adjusted


def _problems(best: torch.Tensor, normaliser: torch.Tensor) -> list[str | None]:
    problems: list[str | None] = []
    for value, total in zip(best.tolist(), normaliser.tolist(), strict=True):
        if not math.isfinite(total):
            problems.append("the model's logits are not finite")
        elif not math.isfinite(value):
            problems.append("bias, bad_ids and min_tokens leave no token to choose")
        else:
            problems.append(None)
    return problems


def _filter(params: SamplingParams, vocab: int) -> tuple[_Filter, int]:
    """How candidates are found, and how many of the most likely tokens are looked at first."""
    if params.top_k:
        return "top_k", min(vocab, 1 << (params.top_k - 1).bit_length())
    if params.top_p is not None and params.top_p < 1.0:
        return "top_p", min(vocab, _FIRST_CANDIDATES)
    return "all", vocab


def _sample(
    logits: torch.Tensor, choosers: Sequence[TokenChooser], kind: _Filter, candidates: int
) -> list[int]:
    """Sample from `logits` [R, V], looking at the `candidates` most likely tokens of each row."""
    vocab, device = logits.shape[-1], logits.device

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(-1)

    temperature = column([chooser.params.effective_temperature for chooser in choosers])
    draws = column([chooser.uniform() for chooser in choosers])
    # The best value is subtracted first, so that a tiny temperature does not overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.float()
    if kind == "all":
        return _draw(torch.softmax(scaled, dim=-1).double(), draws).tolist()

    values, ids = (
        torch.topk(scaled, candidates, dim=-1)
        if candidates < vocab
        else torch.sort(scaled, dim=-1, descending=True, stable=True)
    )
    rank = torch.arange(candidates, device=device)
    if kind == "top_k":
        top_k = column([chooser.params.top_k or vocab for chooser in choosers])
        values = values.masked_fill(rank >= top_k, -math.inf)
        probabilities = torch.softmax(values, dim=-1).double()
    else:
        probabilities = torch.softmax(scaled, dim=-1).gather(-1, ids).double()
    top_p = column([1.0 if (p := chooser.params.top_p) is None else p for chooser in choosers])
    reached = probabilities.cumsum(dim=-1)
    kept = torch.where((reached - probabilities < top_p) | (rank == 0), probabilities, 0.0)
    picked: list[int] = ids.gather(-1, _draw(kept, draws).unsqueeze(-1)).squeeze(-1).tolist()
    if kind == "top_p" and candidates < vocab:
        # A flat distribution needs more candidates than were looked at.
        flat = (reached[:, -1:] < top_p).squeeze(-1).nonzero().squeeze(-1).tolist()
        if flat:
            again = _sample(logits[flat], [choosers[row] for row in flat], kind, vocab)
            for row, token in zip(flat, again, strict=True):
                picked[row] = token
    return picked


def _draw(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Places drawn in proportion to `weights` [R, N] by numbers in [0, 1) [R, 1]; int64 [R]."""
    cumulated = weights.cumsum(dim=-1)
    target = draws * cumulated[:, -1:]
    place = torch.searchsorted(cumulated, target, right=True).squeeze(-1)
    # Rounding can point behind the last place that has any weight.
    places = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(dim=-1)
    return torch.minimum(place, last)


def _top_log_probs(
    model: torch.Tensor, normaliser: torch.Tensor, choosers: Sequence[TokenChooser]
) -> list[tuple[tuple[int, float], ...]]:
    wanted = [chooser.params.top_log_probs for chooser in choosers]
    if not any(wanted):
        return [()] * len(choosers)
    values, ids = torch.topk(model, min(max(wanted), model.shape[-1]), dim=-1)
    values = values - normaliser.unsqueeze(-1)
    return [
        tuple(zip(row_ids[:count], row_values[:count], strict=True))
        for count, row_ids, row_values in zip(wanted, ids.tolist(), values.tolist(), strict=True)
    ]
