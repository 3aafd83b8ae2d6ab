"""Sizes as people read them."""

from __future__ import annotations

import pytest

from plugins.support.units import size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (4_110_000, "4.1 MB"),
        (12_900_000_000, "12.9 GB"),
        (3_500_000_000_000, "3.5 TB"),
    ],
)
def test_sizes(nbytes: int, text: str):
    assert size(nbytes) == text
