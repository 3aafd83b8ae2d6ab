"""Runs the files of kernel cases in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.interpreted import assert_passes


@pytest.mark.parametrize("cases", ["kernel_cases.py", "slot_cases.py"])
def test_kernels_in_the_interpreter(cases: str) -> None:
    assert_passes(Path(__file__).with_name(cases))
