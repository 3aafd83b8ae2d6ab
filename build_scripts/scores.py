"""Numbers for "the same": per layer and for the logits, with the bounds that decide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import log_softmax

from plugins.support.errors import InputError

# Float32 with another order of summation stays below these by a factor of about ten on the tested
# checkpoints; the mildest mistake among the negative controls is above them by more than that.
RELATIVE_BOUND = 1e-3
KL_BOUND = 1e-7
LOGITS = "logits"


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from the reference.

    Attributes:
        max_abs: largest absolute difference.
        relative: the same, divided by the largest absolute value of the reference.
    """

    max_abs: float
    relative: float


@dataclass(frozen=True)
class LogitsScore:
    """How far logits are from the reference.

    Attributes:
        max_abs: largest absolute difference.
        kl: mean over tokens of the divergence of our distribution from the reference's, in nats.
        argmax: share of tokens with the same most likely next token.
    """

    max_abs: float
    kl: float
    argmax: float


@dataclass(frozen=True)
class Score:
    """One run against the reference: per tap, and for the logits."""

    taps: dict[str, Difference]
    logits: LogitsScore

    @property
    def worst(self) -> tuple[str, float]:
        """The tap with the largest relative difference; not-a-number counts as infinite."""
        relative = {name: finite(d.relative) for name, d in self.taps.items()}
        name = max(relative, key=lambda key: relative[key])
        return name, relative[name]

    @property
    def within(self) -> bool:
        """Whether every bound holds."""
        return (
            self.worst[1] <= RELATIVE_BOUND
            and finite(self.logits.kl) <= KL_BOUND
            and self.logits.argmax == 1.0
        )


def finite(value: float) -> float:
    """`value`, with not-a-number as the worst there is."""
    return math.inf if math.isnan(value) else value


def score(
    ours: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
) -> Score:
    """Compare taps and logits, [tokens, ...] each, with the same tokens of the reference."""
    taps = {}
    for tap, value in ours.items():
        if tap == LOGITS:
            continue
        if tap not in reference:
            raise InputError("the reference has no such value", where=f"tap {tap}")
        taps[tap] = difference(tap, value, reference[tap])
    return Score(taps, logits_score(ours[LOGITS], reference[LOGITS]))


def difference(tap: str, ours: torch.Tensor, reference: torch.Tensor) -> Difference:
    """How far a tap, [tokens, ...], is from the reference. Raises InputError for other shapes."""
    if ours.shape != reference.shape:
        raise InputError(
            "a value has another shape than the reference",
            where=f"tap {tap}",
            expected=str(list(reference.shape)),
            found=str(list(ours.shape)),
        )
    if not reference.is_floating_point():
        # Choices are right or wrong: count the tokens that chose something else.
        wrong = (ours != reference).flatten(1).any(-1).double()
        return Difference(float(wrong.sum()), float(wrong.mean()))
    ours, reference = ours.double(), reference.double()
    largest, scale = float((ours - reference).abs().max()), float(reference.abs().max())
    return Difference(largest, largest / scale if scale else largest)


def logits_score(ours: torch.Tensor, reference: torch.Tensor) -> LogitsScore:
    """Compare logits [tokens, vocabulary]; ours may be padded with more columns."""
    ours, reference = ours[:, : reference.shape[1]].double(), reference.double()
    ours_log, reference_log = log_softmax(ours, -1), log_softmax(reference, -1)
    divergence = float((reference_log.exp() * (reference_log - ours_log)).sum(-1).mean())
    same = (ours.argmax(-1) == reference.argmax(-1)).double().mean()
    return LogitsScore(
        max_abs=float((ours - reference).abs().max()),
        # Rounding can bring a divergence of zero a little below zero.
        kl=divergence if math.isnan(divergence) else max(0.0, divergence),
        argmax=float(same),
    )
