"""Runs operation_cases.py in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from plugins.operations import OPERATIONS, digests
from tests.plugins.interpreted import assert_passes


def test_operations_in_the_interpreter() -> None:
    assert_passes(Path(__file__).with_name("operation_cases.py"))


def test_digests_tell_operations_apart() -> None:
    assert set(digests()) == set(OPERATIONS)
    assert len(set(digests().values())) == len(OPERATIONS)


def test_networks_without_plugins_need_no_kernel_compiler() -> None:
    """`make demo` installs none."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import converters.registry, converters.qwen38.network, converters.dots3.network\n"
        "import converters.voxtral.network, build_scripts.engines, runtime.session\n"
        "import runtime.executors.interpreter\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
