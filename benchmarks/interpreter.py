"""What one call of the network interpreter costs, and where.

    python -m benchmarks.interpreter ENGINE_DIR [--promote] [--kinds] [--device cpu]

CPU seconds of the process, so that other work on the machine counts little; on a GPU wall seconds
with the device waited for. Prints Markdown for benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file

from runtime import contract
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.plan import Registers, Step
from runtime.interpreter.program import Program, walk

Inputs = dict[str, torch.Tensor]


def make_inputs(interpreter: Interpreter, batch: int, tokens: int, past: int, span: int) -> Inputs:
    """A full batch in the middle of its sequences, with random contents."""
    generator = torch.Generator().manual_seed(0)
    lengths = {"past_lengths": past, "new_lengths": tokens}
    result: Inputs = {}
    for name in interpreter.program.inputs:
        dtype, shape = interpreter.input_info(name)
        if name in lengths:
            value = torch.full((batch,), lengths[name], dtype=dtype)
        elif name == "logits_positions":
            value = torch.full((batch, 1), tokens - 1, dtype=dtype)
        elif name == "attention_span":
            value = torch.zeros(span, dtype=dtype)
        elif name == "input_ids":
            value = torch.randint(3, 200, (batch, tokens), generator=generator, dtype=dtype)
        else:
            free = iter((batch, tokens))
            sizes = [next(free) if n == -1 else n for n in shape]
            value = (torch.randn(sizes, generator=generator) * 0.1).to(dtype)
        result[name] = value.to(interpreter.device)
    return result


def clock(device: torch.device) -> float:
    """Seconds; see the module's docstring."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(interpreter: Interpreter, inputs: Inputs, runs: int) -> tuple[float, float]:
    """Seconds of the first call with these shapes, and the median of later ones."""

    def timed() -> float:
        start = clock(interpreter.device)
        interpreter.run(inputs)
        return clock(interpreter.device) - start

    first = timed()
    return first, statistics.median(timed() for _ in range(runs))


def by_kind(interpreter: Interpreter, inputs: Inputs) -> list[tuple[str, int, float]]:
    """(kind, steps, seconds) of one call, dearest first."""
    kinds = {node.name: node.kind for node in walk(interpreter.program.nodes)}
    seconds: defaultdict[str, float] = defaultdict(float)
    steps: Counter[str] = Counter()
    interpreter.run(inputs)
    plan = next(reversed(interpreter.plans.values()))

    def watch(step: Step, kind: str) -> Step:
        def run(registers: Registers) -> None:
            start = clock(interpreter.device)
            step(registers)
            seconds[kind] += clock(interpreter.device) - start
            steps[kind] += 1

        return run

    original = plan.steps
    plan.steps = [watch(s, kinds[n]) for s, n in zip(original, plan.names, strict=True)]
    interpreter.run(inputs)
    plan.steps = original
    return [
        (kind, steps[kind], value)
        for kind, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--promote", action="store_true", help="compute 16-bit types as float32")
    parser.add_argument("--kinds", action="store_true", help="also split by layer kind")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = contract.read_config(options.engine_dir)
    weights = load_file(options.engine_dir / contract.weights_file())
    print("| phase | slots x tokens | layers | steps | read ms | first call ms | call ms |")
    print("|---|---|---|---|---|---|---|")
    for phase, entry in config.engines.items():
        start = time.process_time()
        program = Program.load(options.engine_dir / entry.program)
        read = time.process_time() - start
        interpreter = Interpreter(program, weights, options.device, options.promote)
        most = entry.profile["input_ids"].max
        span = entry.profile["attention_span"].max[0] if "attention_span" in entry.profile else 0
        for batch in sorted({1, most[0]}):
            past = min(100, span - most[1]) if span else 100
            inputs = make_inputs(interpreter, batch, most[1], past, span)
            first, later = measure(interpreter, inputs, options.runs)
            steps = len(next(reversed(interpreter.plans.values())).steps)
            print(
                f"| {phase} | {batch} x {most[1]} | {len(program.nodes)} | {steps} "
                f"| {read * 1e3:.0f} | {first * 1e3:.0f} | {later * 1e3:.1f} |"
            )
            if options.kinds:
                for kind, count, seconds in by_kind(interpreter, inputs)[:8]:
                    print(f"|   {kind} |  |  | {count} |  |  | {seconds * 1e3:.2f} |")


if __name__ == "__main__":
    main()
