"""Time to first token and time per token: a direct session against a real tritonserver.

    python -m benchmarks.serving ENGINE_DIR

The engine directory is that of the trained tiny checkpoint (with a tokenizer). Both sides run the
same engine on the same machine with the same prompts; the difference is what Triton, its Python
backend, tokenisation and gRPC cost. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from runtime.contract import TOKENIZER_DIR
from runtime.engine import Engine
from runtime.requests import GenerationRequest
from runtime.session import Session
from tests.demo import ask
from tests.fixtures.qwen38_checkpoint import known_continuations
from triton_repo.frontend.tokenizer import load_tokenizer
from triton_repo.generate import write_repository
from triton_repo.server import running

TOKENS = 32
ROUNDS = 5
CLIENTS = (1, 4, 8)


@dataclass(frozen=True)
class Sample:
    """One request: seconds to the first token, and seconds per token after it."""

    first_s: float
    per_token_s: float


Ask = Callable[[str], Sample]


def measure(ask_once: Ask, prompts: Sequence[str], clients: int) -> str:
    """ROUNDS x `clients` simultaneous requests; returns the cells of one table row."""
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask_once, [prompts[0]] * clients))
        start = time.perf_counter()
        samples = [
            sample
            for number in range(ROUNDS)
            for sample in pool.map(
                ask_once, [prompts[(number + i) % len(prompts)] for i in range(clients)]
            )
        ]
        wall = time.perf_counter() - start
    first = statistics.median(s.first_s for s in samples)
    per_token = statistics.median(s.per_token_s for s in samples)
    rate = ROUNDS * clients * TOKENS / wall
    return f"{first * 1e3:.1f} ms | {per_token * 1e3:.2f} ms | {rate:.0f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("engine_dir", type=Path)
    engine_dir: Path = parser.parse_args().engine_dir.resolve()
    prompts = [k.prompt for k in known_continuations() if k.kind == "text"]
    tokenizer = load_tokenizer(engine_dir / TOKENIZER_DIR)
    print("| path | clients | first token | per token | tokens/s |\n|---|---|---|---|---|")

    with Session(Engine.load(engine_dir)) as session:

        def direct(prompt: str) -> Sample:
            ids = tokenizer.encode(prompt, True, False).ids
            handle = session.submit(GenerationRequest(ids, TOKENS))
            for _ in handle:
                pass
            times = handle.timings
            return Sample(times.time_to_first_token_s(), times.time_per_token_s())

        for clients in CLIENTS:
            print(f"| session | {clients} | {measure(direct, prompts, clients)} |", flush=True)

    with tempfile.TemporaryDirectory(prefix="serving-") as directory:
        repository = write_repository(engine_dir, Path(directory) / "model_repository")
        with running(repository) as server:
            for model in ("ensemble", "tensorrt_llm_bls"):

                def served(prompt: str, model: str = model) -> Sample:
                    answer = ask(server.grpc_url, prompt, TOKENS, stream=True, model=model)
                    rest = max(1, answer.pieces - 1)
                    return Sample(answer.first_s, (answer.total_s - answer.first_s) / rest)

                for clients in CLIENTS:
                    cells = measure(served, prompts, clients)
                    print(f"| {model} | {clients} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
