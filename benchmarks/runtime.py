"""Tokens per second of an engine directory through the runtime, and what the runtime itself costs.

    python -m benchmarks.runtime ENGINE_DIR [--tokens 64] [--prompt 128] [--threads 1]

Prints a Markdown table for benchmarks/README.md. Prompts are pseudo-random ids, end ids are off.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from runtime.engine import Engine
from runtime.requests import GenerationRequest
from runtime.rows import Row
from runtime.sampling import SamplingParams, TokenChooser, choose_tokens
from runtime.session import Session

# The vocabulary of the released checkpoint, for the cost of sampling alone.
RELEASED_VOCAB = 248_320


def prompts(engine: Engine, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    shape = (count, length)
    ids: list[list[int]] = torch.randint(
        3, engine.config.vocab_size, shape, generator=generator
    ).tolist()
    return ids


def generate(engine: Engine, batch: int, length: int, tokens: int) -> tuple[float, float, float]:
    """Prompt tokens/s until the last first token, generated tokens/s after it, seconds/step."""
    with Session(engine, threaded=False) as session:
        handles = [
            session.submit(GenerationRequest(prompt, tokens))
            for prompt in prompts(engine, batch, length)
        ]
        start = time.perf_counter()
        while any(handle.timings.first_token == 0 for handle in handles):
            session.step()
        first = time.perf_counter()
        done = sum(handle.timings.tokens for handle in handles)
        before = session.stats().totals.generation_calls
        while session.step():
            pass
        end = time.perf_counter()
        total = sum(handle.timings.tokens for handle in handles)
        calls = session.stats().totals.generation_calls - before
    return batch * length / (first - start), (total - done) / (end - first), (end - first) / calls


def bare_step(engine: Engine, batch: int, length: int, steps: int) -> float:
    """Seconds of a generation call without scheduling and sampling."""
    rows: list[Row | None] = [
        Row(prompt, length, 1, (0,)) for prompt in prompts(engine, batch, length + 1)
    ]
    with engine.claim():
        for slot in range(batch):
            engine.executor.begin(slot)
        engine.step("generation", 0, rows)
        start = time.perf_counter()
        for _ in range(steps):
            engine.step("generation", 0, rows)
        seconds = (time.perf_counter() - start) / steps
        for slot in range(batch):
            engine.executor.end(slot)
    return seconds


def sampling(options: dict[str, float], rows: int = 8, repeats: int = 5) -> float:
    """Seconds to choose one token for each of `rows` rows of the released vocabulary."""
    generator = torch.Generator().manual_seed(0)
    # Peaked like a language model: a few likely tokens and a long tail.
    logits = torch.randn(rows, RELEASED_VOCAB, generator=generator)
    logits[:, :20] += torch.linspace(25, 10, 20)
    params = SamplingParams(**options)  # type: ignore[arg-type]
    choosers = [TokenChooser(params, RELEASED_VOCAB, prompt=range(1000)) for _ in range(rows)]
    choose_tokens(logits, choosers)
    start = time.perf_counter()
    for _ in range(repeats):
        choose_tokens(logits, choosers)
    return (time.perf_counter() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    engine = Engine.load(options.engine_dir, device=options.device)
    print(f"loaded in {time.perf_counter() - start:.2f} s; {engine.reason}\n")
    print("| batch | prompt tokens/s | generated tokens/s | ms/step | ms/step, engine alone |")
    print("|---|---|---|---|---|")
    for batch in (1, min(8, engine.slots)):
        # Once to prepare what depends on shapes.
        generate(engine, batch, options.prompt, options.tokens)
        prompt_rate, rate, step = generate(engine, batch, options.prompt, options.tokens)
        bare = bare_step(engine, batch, options.prompt, options.tokens)
        print(f"| {batch} | {prompt_rate:.0f} | {rate:.1f} | {step * 1e3:.2f} | {bare * 1e3:.2f} |")
    print(f"\nChoosing 8 tokens among {RELEASED_VOCAB}:\n\n| parameters | ms |\n|---|---|")
    cases: list[dict[str, float]] = [
        {},
        {"temperature": 1.0},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.9},
        {"repetition_penalty": 1.1},
    ]
    for case in cases:
        text = ", ".join(f"{key} {value}" for key, value in case.items()) or "greedy"
        print(f"| {text} | {sampling(case) * 1e3:.1f} |")
    engine.close()


if __name__ == "__main__":
    main()
