"""The memory that a conversion announces is kept, whatever the size of the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import synthetic
from converters.checkpoint.convert import plan_conversion

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, int]]:
    """Directory and bytes of a checkpoint: of many small matrices, of few large ones, or of codes
    and scales that lie expert by expert.
    """
    sizes = {"small": {}, "large": {"hidden": 2048, "expert": 1024, "experts": 4}, "codes": {}}
    made: dict[str, tuple[Path, int]] = {}

    def make(name: str) -> tuple[Path, int]:
        if name not in made:
            path = tmp_path_factory.mktemp("memory") / name
            text = synthetic.text_config(0.1, **sizes[name])
            experts = "nvfp4" if name == "codes" else "stacked"
            made[name] = path, synthetic.write(path, text, experts)
        return made[name]

    return make


@pytest.mark.parametrize(
    ("matrices", "algorithm", "workers"),
    [
        ("small", "nvfp4", 2),
        ("large", "nvfp4", 1),
        ("large", "nvfp4", 2),
        ("large", "fp8", 2),
        ("large", "fp8-block", 1),
        ("codes", "", 2),
    ],
)
def test_most_anonymous_memory_is_as_announced(
    checkpoint: Callable[[str], tuple[Path, int]],
    tmp_path: Path,
    matrices: str,
    algorithm: str,
    workers: int,
):
    source, size = checkpoint(matrices)
    command = [sys.executable, "-m", "benchmarks.quantization", "child"]
    command += ["--source", str(source), "--target", str(tmp_path / "target")]
    command += ["--quantize", algorithm, "--workers", str(workers)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT)
    found = json.loads(run.stdout)
    # The bound is no matter of the checkpoint's size.
    assert size > 1.5 * found["announced"]
    assert found["found"] <= found["announced"]
    # Something was measured: at least a worker's buffers.
    assert found["found"] > 2_000_000


def test_what_is_announced_follows_the_largest_task(
    checkpoint: Callable[[str], tuple[Path, int]], tmp_path: Path
):
    def announced(matrices: str, **options: object) -> int:
        source, _ = checkpoint(matrices)
        return plan_conversion(source, tmp_path / "out", **options).peak_bytes  # type: ignore[arg-type]

    copy = announced("large", workers=1)
    assert announced("small", workers=1) == pytest.approx(copy, rel=0.1)
    small, large = (announced(m, workers=1, quantize="nvfp4") for m in ("small", "large"))
    assert copy < small < large
    # Copies need no buffers to speak of, so more workers need little.
    assert announced("large", workers=2) - copy < 2**24
    per_worker = announced("large", workers=2, quantize="nvfp4") - large
    # A matrix that is kept while it is read, and a strip of it.
    assert per_worker > 2 * 2048 * 2048 * 2
    assert announced("large", workers=5, quantize="nvfp4") == large + 4 * per_worker
