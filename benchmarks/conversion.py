"""Conversion against `cp` of the same bytes, in one run.

    python -m benchmarks.conversion --gigabytes 2 --directory /path/with/space

Source files are in the page cache (they were just written); targets are on the same file system.
Copies and casts are two series, each with `cp`; every round runs all of a series in another order:
pages that one leaves behind are the next one's, and a machine that takes free pages back from its
guest makes new ones cost more than the copy.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import synthetic
from converters.checkpoint.convert import convert

Competitors = dict[str, Callable[[], object]]


def seconds(work: Callable[[], object], target: Path) -> float:
    """Time one run, starting without dirty pages and leaving nothing."""
    os.sync()
    start = time.perf_counter()
    work()
    duration = time.perf_counter() - start
    shutil.rmtree(target)
    return duration


def measured(competitors: Competitors, rounds: int, target: Path) -> dict[str, list[float]]:
    """Seconds of each in all rounds."""
    times: dict[str, list[float]] = {name: [] for name in competitors}
    order = list(competitors)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            times[name].append(seconds(competitors[name], target))
    return times


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--directory", type=Path, help="where to work; a temporary one if absent")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        root = Path(temporary)
        target = root / "target"
        stacked, single = root / "stacked", root / "single"
        size = synthetic.write(stacked, arguments.gigabytes, stacked_experts=True)
        synthetic.write(single, arguments.gigabytes, stacked_experts=False)
        copy = {"cp -r": lambda: subprocess.run(["cp", "-r", stacked, target], check=True)}
        copies: Competitors = {
            "convert, stacked experts": lambda: convert(stacked, target),
            "convert, expert by expert": lambda: convert(single, target),
        }
        casts: Competitors = {
            "convert --dtype float32": lambda: convert(stacked, target, "float32"),
            "convert --dtype float16": lambda: convert(stacked, target, "float16"),
        }
        series = [measured(copy | more, arguments.rounds, target) for more in (copies, casts)]
    print(f"{size / 1e9:.2f} GB of bf16 tensors, median of {arguments.rounds} rounds\n")
    print("| | MB/s read | of cp | fastest to slowest round |\n|---|---|---|---|")
    for times in series:
        reference = statistics.median(times["cp -r"])
        for name, values in times.items():
            middle = statistics.median(values)
            print(
                f"| {name} | {size / middle / 1e6:.0f} | {reference / middle:.2f} "
                f"| {min(values):.2f}-{max(values):.2f} s |"
            )


if __name__ == "__main__":
    main()
