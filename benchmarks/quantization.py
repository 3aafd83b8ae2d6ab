"""NVFP4 quantisation against Model Optimizer, and memory of whole conversions.

    python -m benchmarks.quantization speed
    python -m benchmarks.quantization memory --gigabytes 12 --directory /path/with/space

`speed` alternates between the competitors in one process with the same number of threads. `memory`
converts a synthetic checkpoint in child processes and reports the most anonymous memory they had
beyond what the imported program takes, next to the announced bound.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import synthetic
from converters.checkpoint.convert import execute, plan_conversion
from converters.quantization import nvfp4
from converters.quantization.magnitude import largest_magnitude

_ROWS, _COLUMNS = 2048, 4096


def ours(weight: torch.Tensor) -> None:
    """What conversion does with a matrix."""
    nvfp4.quantize(weight, nvfp4.global_scale(largest_magnitude(weight)))


def in_workers(weight: torch.Tensor, workers: int, pool: ThreadPoolExecutor) -> None:
    """As conversion does it: matrices side by side, one thread each, the same ones all the time."""

    def work(part: torch.Tensor) -> None:
        torch.set_num_threads(1)
        ours(part)

    list(pool.map(work, weight.chunk(workers)))


def measure_speed(rounds: int) -> None:
    """Print a table in millions of weights per second of wall and of processor time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.quantization.qtensor import NVFP4QTensor
    print(
        "| type | threads | time | Model Optimizer 0.47 | here | ratio |\n|---|---|---|---|---|---|"
    )
    for dtype in (torch.bfloat16, torch.float32):
        weight = (torch.randn(_ROWS, _COLUMNS) * 0.02).to(dtype)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            pool = ThreadPoolExecutor(threads)
            competitors: list[Callable[[], object]] = [
                lambda w=weight: NVFP4QTensor.quantize(w, nvfp4.BLOCK),
                lambda w=weight, t=threads, p=pool: in_workers(w, t, p),
            ]
            times: list[list[tuple[float, float]]] = [[], []]
            for _ in range(rounds):
                for work, found in zip(competitors, times, strict=True):
                    start, used = time.perf_counter(), time.process_time()
                    work()
                    found.append((time.perf_counter() - start, time.process_time() - used))
            for column, name in enumerate(("wall", "processor")):
                theirs, mine = (
                    weight.numel() / statistics.median(item[column] for item in found) / 1e6
                    for found in times
                )
                kind = str(dtype).removeprefix("torch.")
                print(
                    f"| {kind} | {threads} | {name} | {theirs:.1f} | {mine:.1f} "
                    f"| {mine / theirs:.1f} |"
                )


def anonymous_bytes() -> int:
    """Anonymous memory of this process; mapped and cached files do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell RssAnon")


def convert_and_watch(source: Path, target: Path, quantize: str | None, workers: int) -> None:
    """Convert in this process; print announced and found memory as JSON."""
    before = anonymous_bytes()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        plan = plan_conversion(source, target, quantize=quantize, workers=workers)
        report = execute(plan, target)
    finally:
        done.set()
        watcher.join()
    result = {
        "announced": plan.peak_bytes,
        "found": peak - before,
        "seconds": report.seconds,
        "bytes": plan.bytes_read,
    }
    print(json.dumps(result))


def measure_memory(gigabytes: float, directory: Path | None) -> None:
    """Print a table in MB."""
    print("| | workers | announced | found | seconds | MB/s read |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        source, target = Path(temporary) / "source", Path(temporary) / "target"
        synthetic.write(source, synthetic.text_config(gigabytes), "single")
        for quantize, workers in (("", 2), ("nvfp4", 1), ("nvfp4", 2), ("fp8-block", 2)):
            command = [sys.executable, "-m", "benchmarks.quantization", "child"]
            command += ["--source", str(source), "--target", str(target)]
            command += ["--workers", str(workers), "--quantize", quantize]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
            found = json.loads(output)
            shutil.rmtree(target)
            name = f"--quantize {quantize}" if quantize else "copy"
            cells = [found["announced"] / 1e6, found["found"] / 1e6, found["seconds"]]
            cells.append(found["bytes"] / found["seconds"] / 1e6)
            print(f"| {name} | {workers} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")


def main() -> None:
    """Command line, see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("speed", "memory", "child"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=12.0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--quantize", default="")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.what == "speed":
        measure_speed(arguments.rounds)
    elif arguments.what == "memory":
        measure_memory(arguments.gigabytes, arguments.directory)
    else:
        convert_and_watch(
            arguments.source, arguments.target, arguments.quantize or None, arguments.workers
        )


if __name__ == "__main__":
    main()
