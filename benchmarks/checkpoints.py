"""All measurements of checkpoints in one run: quantisation, conversion, memory and n-gram rows.

    python -m benchmarks.checkpoints --directory /path/with/space

Runs `benchmarks.quantization speed`, `benchmarks.conversion`, `benchmarks.quantization memory` and
`benchmarks.ngram` one after the other, each in a process of its own, and ends with the first that
fails. Needs twice the checkpoint's size and the table's on the disk, 33 GB as it is.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Print Markdown tables under the commands that made them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, required=True, help="where to work")
    parser.add_argument("--gigabytes", type=float, default=12.0, help="of the checkpoint")
    parser.add_argument("--table", type=Path, help="kept table of `benchmarks.ngram`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
        table = arguments.table or Path(temporary) / "table"
        for line in (
            "quantization speed --rounds 5",
            f"conversion --rounds 3 --directory {shlex.quote(temporary)}",
            f"quantization memory --gigabytes {arguments.gigabytes} "
            f"--directory {shlex.quote(temporary)}",
            f"ngram --file {shlex.quote(str(table))}",
        ):
            command = f"python -m benchmarks.{line}"
            print(f"\n`{command}`\n", flush=True)
            start = time.perf_counter()
            subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
            print(f"\n{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
