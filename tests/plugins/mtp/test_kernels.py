"""Runs kernel_cases.py in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_in_the_interpreter() -> None:
    cases = Path(__file__).with_name("kernel_cases.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=cases.parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert " passed" in run.stdout
