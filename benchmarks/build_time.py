"""How long `build` takes, by number of layers, targets and weight mode.

    python -m benchmarks.build_time

The models are the tiny configuration with more or fewer layers; the compile time of a TensorRT
network depends on its number of layers, hardly on their width. Prints a markdown table.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

from build_scripts.engines import Request, WeightMode, build
from converters.checkpoint.convert import convert
from tests.fixtures.qwen38_deterministic import write_deterministic

GROUP = ["linear_attention"] * 3 + ["full_attention"]
ONE: tuple[str, ...] = ("8.9",)
FOUR = ("8.0", "8.6", "8.9", "12.0")
CASES: tuple[tuple[int, tuple[str, ...], WeightMode], ...] = (
    (4, FOUR, "auto"),
    (8, FOUR, "auto"),
    (16, FOUR, "auto"),
    (8, ONE, "auto"),
    (8, FOUR, "inputs"),
    (8, FOUR, "embedded"),
)


def measure(checkpoint: Path, root: Path, targets: tuple[str, ...], weights: WeightMode) -> str:
    """Build once; returns the cells of one table row."""
    out = root / f"engine-{time.monotonic_ns()}"
    request = Request(8, 1024, None, 0, 512, 8192, "tensorrt_rtx", targets, weights)
    start = time.perf_counter()
    with Path(os.devnull).open("w") as silent, contextlib.redirect_stderr(silent):
        result = build(checkpoint, out, request)
    wall = time.perf_counter() - start
    cells = []
    for plan in result.plans.values():
        kernels = len(plan.report.kernels)
        cells += [f"{plan.seconds:.1f} s", f"{plan.nbytes / 1e6:.1f} MB", str(kernels)]
    return " | ".join([f"{wall:.1f} s", *cells])


def main() -> None:
    """Print the table."""
    engine = ("plan", "kernels")
    columns = ("layers", "targets", "weights", "whole", "context", *engine, "generation", *engine)
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    with tempfile.TemporaryDirectory(prefix="build-time-") as directory:
        root = Path(directory)
        for layers, targets, weights in CASES:
            checkpoint = root / f"checkpoint-{layers}"
            if not checkpoint.exists():
                types = GROUP * (layers // len(GROUP))
                source = write_deterministic(
                    root / f"hf-{layers}", num_hidden_layers=layers, layer_types=types
                )
                with Path(os.devnull).open("w") as silent, contextlib.redirect_stderr(silent):
                    convert(source, checkpoint, "bfloat16")
            cells = measure(checkpoint, root, targets, weights)
            print(f"| {layers} | {' '.join(targets)} | {weights} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
