"""Conversion against `cp` of the same bytes, in one run.

    python -m benchmarks.conversion --gigabytes 2 --directory /path/with/space

Source files are in the page cache (they were just written); targets are on the same file system.
Every series has a `cp` of its own source, and every round runs all of a series in another order:
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
from functools import partial
from pathlib import Path

from benchmarks import synthetic
from converters.checkpoint.convert import convert

Competitors = dict[str, Callable[[], object]]
SERIES = ("copies", "casts", "nvfp4", "fp8")
# Codes take half or a quarter of the bytes that the size is given in.
_SMALLER = {"fp8": 1.4, "nvfp4": 2.2}


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


def competitors(kind: str, gigabytes: float, root: Path) -> tuple[int, Competitors]:
    """Write the sources of a series; their bytes, and what runs, `cp` first."""
    target = root / "target"
    text = synthetic.text_config(gigabytes * _SMALLER.get(kind, 1.0))
    kinds: list[synthetic.Experts] = ["nvfp4"] if kind == "nvfp4" else ["fp8"]
    if kind in ("copies", "casts"):
        kinds = ["stacked", "single"] if kind == "copies" else ["stacked"]
    sizes = {experts: synthetic.write(root / experts, text, experts) for experts in kinds}
    first = root / kinds[0]
    runs: Competitors = {
        f"cp -r, {sizes[kinds[0]] / 1e9:.2f} GB": lambda: subprocess.run(
            ["cp", "-r", first, target], check=True
        )
    }
    for experts in kinds:
        for dtype in ("float32", "float16") if kind == "casts" else (None,):
            name = f"convert, {experts} experts" if dtype is None else f"convert --dtype {dtype}"
            runs[name] = partial(convert, root / experts, target, dtype)
    return sizes[kinds[0]], runs


def report(kind: str, gigabytes: float, rounds: int, root: Path) -> None:
    """Print the rows of a series."""
    size, runs = competitors(kind, gigabytes, root)
    times = measured(runs, rounds, root / "target")
    reference = statistics.median(next(iter(times.values())))
    for name, values in times.items():
        middle = statistics.median(values)
        print(
            f"| {name} | {size / middle / 1e6:.0f} | {reference / middle:.2f} "
            f"| {min(values):.2f}-{max(values):.2f} s |",
            flush=True,
        )


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--directory", type=Path, help="where to work; a temporary one if absent")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--series", choices=SERIES, nargs="+", default=list(SERIES))
    arguments = parser.parse_args()
    print(f"medians of {arguments.rounds} rounds\n")
    print("| | MB/s read | of cp | fastest to slowest round |\n|---|---|---|---|")
    for kind in arguments.series:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
            report(kind, arguments.gigabytes, arguments.rounds, Path(temporary))


if __name__ == "__main__":
    main()
