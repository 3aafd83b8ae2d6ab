"""Sampling parameters of a request: names, ranges, aliases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from triton_repo.frontend.problems import problem

MAX_SEQUENCES = 16
_UINT64 = (1 << 64) - 1
_INT32 = (1 << 31) - 1

# name: (smallest, largest, whether the smallest itself is excluded)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, False),
    "top_p": (-math.inf, 1.0, False),
    "top_k": (-1, _INT32, False),
    "repetition_penalty": (0.0, 100.0, True),
    "presence_penalty": (-100.0, 100.0, False),
    "frequency_penalty": (-100.0, 100.0, False),
    "length_penalty": (-100.0, 100.0, False),
    "min_tokens": (0, _INT32, False),
    "num_return_sequences": (0, MAX_SEQUENCES, False),
    "beam_width": (0, 1, False),
    "seed": (0, _UINT64, False),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; None means: not given, the engine's default holds."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    min_tokens: int | None = None
    num_return_sequences: int = 1

    def given(self) -> dict[str, Any]:
        """The parameters that are set."""
        return {k: v for k, v in asdict(self).items() if v is not None}


def parse_sampling(values: Mapping[str, Any]) -> Sampling:
    """Sampling parameters under their public names, checked.

    `random_seed` is the older name of `seed`. `top_p` <= 0, `top_k` <= 0 and a sequence count or
    beam width of 0 mean "not set".
    """
    values = {k: v for k, v in values.items() if v is not None}
    if not values:
        return Sampling()
    if "random_seed" in values:
        seed = values.pop("random_seed")
        if values.setdefault("seed", seed) != seed:
            raise problem("random_seed", "contradicts seed", expected=values["seed"], found=seed)
    for name, (low, high, open_low) in _RANGES.items():
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, float) and math.isnan(value):
            raise problem(name, "is not a number")
        if value < low or value > high or (open_low and value == low):
            if name == "beam_width":
                raise problem(
                    name, "beam search is not supported; use num_return_sequences", found=value
                )
            comparison = ">" if open_low else ">="
            lower = "" if low == -math.inf else f"{comparison} {low:g} and "
            raise problem(name, "is out of range", expected=f"{lower}<= {high:g}", found=value)
    values.pop("beam_width", None)
    for name in ("top_p", "top_k"):
        if values.get(name, 1) <= 0:
            values.pop(name)
    values["num_return_sequences"] = max(values.get("num_return_sequences", 1), 1)
    known = {k: v for k, v in values.items() if k in Sampling.__dataclass_fields__}
    return Sampling(**known)
