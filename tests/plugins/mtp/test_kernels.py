"""Runs kernel_cases.py in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.plugins.interpreted import assert_passes


def test_kernels_in_the_interpreter() -> None:
    assert_passes(Path(__file__).with_name("kernel_cases.py"))
