"""Rows of the hashed n-gram table: decode steps and prompts, from memory and from disk.

    python -m benchmarks.ngram --file /path/with/space/table --gigabytes 8.2 [--text DIR]

Writes the data once (really, no holes) and reads it as a BF16, an FP8 and an NVFP4 table of that
size, by the constants of the released model with as many rows per hash head as fit. Tokens are
random, so nearly every row is another page: the worst case. "Warm" means preloaded, as a server
does it, and gathered by compiled code (standard error tells; of NVFP4 from the copy with codes and
scales side by side) or, in turn with it, from the file with both apart and by numpy; "small
pages" read and mapped as other files are; "not mapped" in the page cache only; "cold" on disk only.
With a tokenizer (`benchmarks.vocabulary`) also 64 places of real texts, step by step.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from plugins.ngram import layer_constants
from runtime.contract import NgramEmbedding, TensorSpec
from runtime.host_inputs.ngram import NgramGather
from runtime.rows import Row

_VOCABULARY, _WIDTH, _HEADS, _EOS = 248320, 160, 16, 248044
_HEADER = 4096
_SEQUENCES, _PROMPT = 64, 4096
_STEPS = 500
_KINDS = ("bf16", "fp8", "nvfp4")
_TABLE = "t.weight"

Call = Callable[[], object]


def write_data(path: Path, size: int) -> None:
    """Normal numbers in BF16, over and over; as other types they are arbitrary finite codes."""
    block = torch.randn(16 * 1024 * 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    data = block.view(torch.uint8).numpy().data
    with path.open("wb") as file:
        file.write(bytes(_HEADER))
        left = size
        while left > 0:
            left -= file.write(data[: min(left, len(data))])
        os.fsync(file.fileno())


def describe(path: Path, kind: str, size: int) -> int:
    """Give the data the header of a table of that kind; its rows."""
    row = {"bf16": 2 * _WIDTH, "fp8": _WIDTH, "nvfp4": _WIDTH // 2 + _WIDTH // 16}[kind]
    rows = (size - 64) // row // 128 * 128
    dtype, width = {"bf16": ("BF16", _WIDTH), "fp8": ("F8_E4M3", _WIDTH), "nvfp4": ("U8", 80)}[kind]
    tensors = [(_TABLE, dtype, [rows, width], rows * width * (2 if kind == "bf16" else 1))]
    if kind == "nvfp4":
        tensors.append(("t.weights_scaling_factor", "F8_E4M3", [rows, 10], rows * 10))
    if kind != "bf16":
        last = "t.weights_scaling_factor" + ("_2" if kind == "nvfp4" else "")
        tensors.append((last, "F32", [1], 4))
    header, position = {}, 0
    for name, code, shape, count in tensors:
        span = [position, position + count]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": span}
        position += count
    text = json.dumps(header).encode().ljust(_HEADER - 8)
    with path.open("r+b") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(_HEADER + position - 4)
        if kind != "bf16":
            file.write(np.float32(0.01).tobytes())
        file.truncate(_HEADER + position)
    return rows


def open_table(path: Path, rows: int) -> NgramGather:
    """The released model's hash with heads that fill the table."""
    constants = layer_constants(
        vocab_size=_VOCABULARY,
        ngram_size=3,
        heads_per_ngram=_HEADS // 2,
        ngram_vocab_size_base=rows // _HEADS - 400,
        divisor=128,
        seed=1234,
        layer_number=0,
    )
    spec = NgramEmbedding(
        name="ple",
        table=_TABLE,
        multipliers=constants.multipliers,
        sizes=constants.sizes,
        offsets=constants.offsets,
        eos_token_id=_EOS,
    )
    shape = (-1, -1, _HEADS * _WIDTH)
    return NgramGather(
        spec, TensorSpec(name="ple", dtype="bfloat16", shape=shape, kind="host"), path
    )


def drop(path: Path) -> None:
    """Forget the file's pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def populate(gather: NgramGather) -> None:
    """Have the table read and mapped in small pages."""
    for part in gather._table.parts:
        part._map.madvise(mmap.MADV_NORMAL)
        part._map.madvise(mmap.MADV_NOHUGEPAGE)
        part._map.madvise(getattr(mmap, "MADV_POPULATE_READ", 22))
        part._map.madvise(mmap.MADV_RANDOM)
        np.frombuffer(part._map, np.uint8)[:: mmap.PAGESIZE].max()


class Calls:
    """Random calls, and the time that each takes."""

    def __init__(self) -> None:
        self._numbers = np.random.default_rng(0)

    def decode(self, gather: NgramGather) -> Callable[[], object]:
        """One token for each of 64 sequences."""
        tokens = self._numbers.integers(0, _EOS, (_SEQUENCES, 1))
        context = self._numbers.integers(0, _EOS, (_SEQUENCES, 2))
        return lambda: gather(tokens, context, np.ones(_SEQUENCES, np.int64))

    def prompt(self, gather: NgramGather) -> Callable[[], object]:
        """4096 tokens of one sequence."""
        tokens = self._numbers.integers(0, _EOS, (1, _PROMPT))
        return lambda: gather(tokens, np.full((1, 2), _EOS), np.array([_PROMPT]))

    def chunks(self, gather: NgramGather, engine_s: float) -> Callable[[], object]:
        """The same in chunks of 512 with the engine's time in between, which does not count."""
        prompt = self._numbers.integers(0, _EOS, _PROMPT)

        def run() -> float:
            waited = 0.0
            for start in range(0, _PROMPT, 512):
                chunk = prompt[None, start : start + 512]
                before = prompt[max(0, start - 2) : start]
                context = np.full((1, 2), _EOS)
                context[0, 2 - len(before) :] = before
                begin = time.perf_counter()
                gather(chunk, context, np.array([512]), [Row(prompt.tolist(), start, 512)])
                waited += time.perf_counter() - begin
                time.sleep(engine_s)
            return waited

        return run

    def text(self, gather: NgramGather, texts: list[npt.NDArray[np.int64]]) -> Iterator[Call]:
        """500 steps at 64 places of as many texts, token by token."""
        chosen = self._numbers.choice(len(texts), _SEQUENCES, replace=False)
        ids = [texts[i] for i in chosen]
        starts = [int(self._numbers.integers(2, len(one) - _STEPS)) for one in ids]
        for step in range(_STEPS):
            last = np.stack(
                [one[s + step - 2 : s + step + 1] for one, s in zip(ids, starts, strict=True)]
            )
            tokens, context = last[:, 2:].copy(), last[:, :2].copy()
            yield lambda t=tokens, c=context: gather(t, c, np.ones(_SEQUENCES, np.int64))


def read_texts(tokenizer: Path) -> list[npt.NDArray[np.int64]]:
    """Ids of the longer texts of `benchmarks.vocabulary`."""
    from transformers import AutoTokenizer

    from benchmarks.vocabulary import sources

    encode = AutoTokenizer.from_pretrained(tokenizer)
    chosen = islice((text for text in sources() if len(text) > 20_000), 200)
    texts = [np.array(encode(t[:40_000], add_special_tokens=False)["input_ids"]) for t in chosen]
    return [text for text in texts if len(text) > 2 * _STEPS]


def timed(call: Call) -> float:
    """Milliseconds that a call takes, or that it says."""
    start = time.perf_counter()
    waited = call()
    return (waited if isinstance(waited, float) else time.perf_counter() - start) * 1e3


def written(times: list[float]) -> str:
    """Median and fastest."""
    return f"{statistics.median(times):.3g} ({min(times):.3g})"


def milliseconds(calls: Iterable[Call]) -> str:
    """Median and fastest of calls."""
    return written([timed(call) for call in calls])


def in_turn(gather: NgramGather, calls: Iterable[Call]) -> list[str]:
    """By compiled code, by it from rows that lie apart, by numpy: bad moments hit all of them."""
    joined, compiled = gather._joined, gather._compiled
    ways = [(joined, compiled), (None, compiled), (None, None)]
    if joined is None:
        del ways[0]
    times: list[list[float]] = [[] for _ in ways]
    for number, call in enumerate(calls):
        gather._joined, gather._compiled = ways[number % len(ways)]
        times[number % len(ways)].append(timed(call))
    gather._joined, gather._compiled = joined, compiled
    cells = [written(one) for one in times]
    return cells if joined else [cells[0], "", cells[1]]


def meanwhile(gather: NgramGather, calls: Calls) -> list[str]:
    """Decode steps while codes and scales are copied side by side, and how long that takes."""
    if gather._joining is None:
        return ["", ""]
    start = time.perf_counter()
    times = [timed(calls.decode(gather))]
    while gather._joining.is_alive():
        times.append(timed(calls.decode(gather)))
    return [written(times), f"{time.perf_counter() - start:.1f}"]


def measure(path: Path, kind: str, size: int, texts: list[npt.NDArray[np.int64]]) -> list[str]:
    """One row of the table; what preloading did goes to standard error."""
    rows = describe(path, kind, size)
    calls = Calls()
    cells = [kind, f"{path.stat().st_size / 1e9:.1f}"]
    drop(path)
    gather = open_table(path, rows)
    cold = milliseconds(calls.decode(gather) for _ in range(5))
    cold_prompt = milliseconds(calls.prompt(gather) for _ in range(2))
    cold_chunks = milliseconds(calls.chunks(gather, 0.2) for _ in range(2))
    populate(gather)
    small = milliseconds(calls.decode(gather) for _ in range(400))
    gather = open_table(path, rows)
    unmapped = milliseconds(calls.decode(gather) for _ in range(50))
    drop(path)
    loads = []
    for _ in range(2):
        gather = open_table(path, rows)
        start = time.perf_counter()
        print(gather.preload(), file=sys.stderr)
        loads.append(f"{time.perf_counter() - start:.1f}")
        copying = meanwhile(gather, calls)
    warm = in_turn(gather, (calls.decode(gather) for _ in range(3000)))
    warm_text = in_turn(gather, calls.text(gather, texts)) if texts else [""] * 3
    prompt = in_turn(gather, (calls.prompt(gather) for _ in range(30)))
    cells += [*warm, *warm_text, small, unmapped, cold]
    return [*cells, *prompt, cold_prompt, cold_chunks, *loads, *copying]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--file", type=Path, required=True, help="made where it does not exist")
    parser.add_argument("--gigabytes", type=float, default=8.2)
    parser.add_argument("--text", type=Path, metavar="DIR", help="tokenizer for real texts")
    parser.add_argument("--only", choices=_KINDS, nargs="+", default=_KINDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = int(arguments.gigabytes * 1e9)
    if not arguments.file.exists():
        write_data(arguments.file, size)
    texts = read_texts(arguments.text) if arguments.text else []
    print("ms, median (fastest)\n")
    names = ["table", "GB"]
    for name in ("decode warm", "text warm"):
        names += [name, "apart", "by numpy"]
    names += ["small pages", "not mapped", "cold", "4096 warm", "apart", "by numpy", "cold"]
    names += ["cold in chunks of 512, 200 ms apart", "preload s", "again s"]
    names += ["decode while copying", "copying s"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for kind in arguments.only:
        print(f"| {' | '.join(measure(arguments.file, kind, size, texts))} |", flush=True)


if __name__ == "__main__":
    main()
