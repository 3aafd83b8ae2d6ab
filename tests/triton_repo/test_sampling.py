"""Sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.support.errors import UsageError
from triton_repo.frontend.sampling import parse_sampling


def test_unset_values() -> None:
    unset = {"top_p": 0.0, "top_k": 0, "beam_width": 0, "num_return_sequences": 0, "seed": None}
    assert parse_sampling(unset).given() == {"num_return_sequences": 1}
    assert parse_sampling({"top_p": -1.0, "top_k": -1}).given() == {"num_return_sequences": 1}


def test_a5_23_the_old_seed_name() -> None:
    assert parse_sampling({"random_seed": 7}).seed == 7
    assert parse_sampling({"random_seed": 7, "seed": 7}).seed == 7
    with pytest.raises(UsageError, match="contradicts"):
        parse_sampling({"random_seed": 7, "seed": 8})
    assert parse_sampling({"seed": 2**64 - 1}).seed == 2**64 - 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("top_p", 1.5), ("top_k", -2),
        ("repetition_penalty", 0.0), ("presence_penalty", 1e9), ("min_tokens", -1),
        ("num_return_sequences", 17), ("num_return_sequences", -1), ("beam_width", 2),
        ("seed", -1),
    ],
)  # fmt: skip
def test_ranges(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        parse_sampling({name: value})
    assert caught.value.where == name
