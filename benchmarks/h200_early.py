"""Which kernels gain by starting before their predecessor has ended, on an H200.

    python -m benchmarks.h200_early compile KERNEL_DIR
    python -m benchmarks.h200_early run KERNEL_DIR RESULT.json

`compile` needs no GPU. `run` times decode steps of sparse attention from the index scores to the
sum of the runs, attention and its sum alone, and prefill attention, with different sets of kernels
started early, and compares every result bit by bit with that of ordinary launches. Times are
medians over CUDA-graph replays in microseconds, several rounds in turn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import h200_qsa
from benchmarks.h200_qsa import BF16, CONTEXT, DRIVER, FP8, Timed, caches, int32, randn, timed
from plugins.aot.bundle import write_bundle
from plugins.aot.compile import compile_kernel, newest_ptx
from plugins.aot.spec import KernelSpec
from plugins.dsa import kernel as dsa
from plugins.dsa import plan as dsa_plan
from plugins.qsa import kernel as qsa
from plugins.qsa import plan as qsa_plan
from plugins.qsa.plan import Geometry

QSA_ROWS = ((BF16, 1), (BF16, 8), (BF16, 32), (BF16, 64), (FP8, 8), (FP8, 32), (FP8, 64))
DSA_ROWS = (1, 8, 32)
DSA = dsa_plan.Geometry()
DSA_CONTEXT = 8192
BLOCKS = CONTEXT // BF16.ratio
SELECT, ATTEND, MERGE = {"select"}, {"attend"}, {"merge"}
STEPS: dict[str, set[str]] = {
    "none": set(),
    "merge": MERGE,
    "select": SELECT,
    "attend": ATTEND,
    "select merge": SELECT | MERGE,
    "attend merge": ATTEND | MERGE,
    "select attend merge": SELECT | ATTEND | MERGE,
    "all": {"score", *SELECT, *ATTEND, *MERGE},
}
PREFILL: dict[str, set[str]] = {"none": set(), "attend": ATTEND, "unite attend": {"unite", *ATTEND}}
# What the names above stand for, by the beginning of a kernel's name.
STAGES = {
    "qsa_score": "score",
    "qsa_select": "select",
    "qsa_attend": "attend",
    "qsa_merge": "merge",
    "qsa_unite": "unite",
    "dsa_index_scores": "score",
    "dsa_select": "select",
    "dsa_attend": "attend",
    "dsa_merge": "merge",
}
# Stages that start early.
EARLY: set[str] = set()


def specs() -> dict[str, KernelSpec]:
    """Every kernel that a run launches."""
    group = qsa.group_size(BLOCKS)
    found = [
        qsa_plan.score_blocks(BF16, 1, qsa.score_tile(group), group),
        qsa.select_spec(BF16, BLOCKS),
        qsa_plan.unite_blocks(BF16, qsa_plan.HOPPER_ROWS),
        *(qsa_plan.attend_hopper(BF16, qsa_plan.HOPPER_ROWS, whole=w) for w in (False, True)),
        dsa_plan.score_tokens(DSA, dsa.score_tiles(1)),
        dsa_plan.attend_split_hopper(DSA),
        dsa_plan.attend_pair_hopper(DSA),
        dsa_plan.attend_whole_hopper(DSA),
    ]
    for g, rows in QSA_ROWS:
        how = qsa.decode_plan(g, rows)
        if how.splits == 1:
            found.append(qsa_plan.attend_whole(g, how.tiles))
        else:
            found += [qsa.decode_partial(g, how), qsa_plan.merge_splits(g, how.splits)]
    for rows in DSA_ROWS:
        (chunk, _), *levels = dsa.select_levels(DSA, rows, DSA_CONTEXT)
        found.append(dsa_plan.select_chunk(DSA, chunk))
        found += [dsa_plan.select_among(DSA, chunk) for chunk, _ in levels]
        splits = dsa.attend_plan(DSA, rows, torch.device("cpu")).splits
        found.append(dsa_plan.merge_splits(DSA, splits))
    return {spec.key: spec for spec in found}


def launch(spec: KernelSpec, tensors: Mapping[str, Tensor], values: Mapping[str, int]) -> None:
    """Launch a loaded kernel, early where its stage is in `EARLY`."""
    stage = next(stage for name, stage in STAGES.items() if spec.name.startswith(name))
    grid = spec.grid(values)
    if all(extent > 0 for extent in grid):
        loaded = h200_qsa.LOADED[spec.key]
        loaded.launch(grid, spec.arguments(tensors, values), stage in EARLY)


def compare(
    calls: Sequence[Timed], sets: Mapping[str, set[str]], rounds: int = 3
) -> dict[str, list[float]]:
    """Times of each round for each set; stops where a result differs from ordinary launches."""

    def start_early(stages: set[str]) -> None:
        EARLY.clear()
        EARLY.update(stages)

    start_early(set())
    wanted = calls[0]().clone()
    times: dict[str, list[float]] = {name: [] for name in sets}
    for _ in range(rounds):
        for name, stages in sets.items():
            start_early(stages)
            if not torch.equal(calls[0](), wanted):
                raise SystemExit(f"started early, other results: {name}")
            times[name].append(timed(calls))
    return times


def qsa_calls(g: Geometry, rows: int, whole_step: bool) -> list[Timed]:
    """Decode steps of all input sets, or their attention alone."""
    sets = max(1, min(8, 64 // rows))
    key, value = caches(sets * rows)
    if g.fp8:
        key = h200_qsa.to_fp8(key, g.k_scale)
        value = h200_qsa.to_fp8(value, g.v_scale)
    index_keys = randn(sets * rows, BLOCKS, BF16.index_width)
    past, new = int32([CONTEXT - 1]).repeat(rows), int32([1]).repeat(rows)

    def one(number: int) -> Timed:
        mine = slice(number * rows, (number + 1) * rows)
        index_query = randn(rows, BF16.index_heads, 1, BF16.index_width)
        query, gate = randn(rows, g.heads, 1, g.width), randn(rows, 1, g.heads * g.width)

        def select() -> Tensor:
            scored = qsa.score(BF16, index_query, index_keys[mine], past, new)
            return qsa.select(BF16, *scored, past, new)

        chosen = select()

        def call() -> Tensor:
            blocks = select() if whole_step else chosen
            return qsa.attend_decode(g, query, key[mine], value[mine], blocks, past, new, gate)

        return call

    return [one(number) for number in range(sets)]


def dsa_calls(rows: int) -> list[Timed]:
    """Decode steps of all input sets."""
    past, new = int32([DSA_CONTEXT - 192]).repeat(rows), int32([1]).repeat(rows)

    def one() -> Timed:
        index_query = randn(rows, 1, DSA.index_heads, DSA.index_width)
        index_keys = randn(rows, 1, DSA_CONTEXT, DSA.index_width)
        weights, gate = randn(rows, 1, DSA.index_heads), randn(rows, 1, DSA.heads)
        latent, rope = randn(rows, 1, DSA.heads, DSA.latent), randn(rows, 1, DSA.heads, DSA.rope)
        cache = randn(rows, 1, DSA_CONTEXT, DSA.latent + DSA.rope) * 0.1

        def call() -> Tensor:
            scores = dsa.score(DSA, index_query, index_keys, weights, past, new)
            tokens = dsa.select(DSA, scores, past, new)
            return dsa.attend(DSA, latent, rope, cache, tokens, past, new, gate)

        return call

    return [one() for _ in range(4 if rows < 32 else 2)]


def prefill_call(share: float | None) -> Timed:
    """2048 rows within the budget (None), or at the end of the context with neighbours that share
    so much of their blocks.
    """
    steps = 2048
    key, value = caches(1, steps if share is None else CONTEXT)
    past, new = int32([key.shape[2] - steps]), int32([steps])
    if share is None:
        blocks = int32(range(BF16.blocks)).repeat(1, steps, 1)
    else:
        blocks = h200_qsa.neighbours(steps, (CONTEXT - steps) // BF16.ratio, share)
    query, gate = randn(1, BF16.heads, steps, BF16.width), randn(1, steps, BF16.heads * BF16.width)
    return lambda: qsa.attend_prefill(BF16, query, key, value, blocks, past, new, gate)


def run(folder: Path) -> dict[str, Any]:
    """All comparisons."""
    torch.manual_seed(0)
    h200_qsa.load(folder)
    for module in (qsa, dsa):
        module.launch = launch  # type: ignore[attr-defined]
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }

    def note(name: str, times: dict[str, list[float]]) -> None:
        results[name] = times
        print(name, json.dumps(times), flush=True)

    for g, rows in QSA_ROWS:
        name = f"{g.cache_dtype}, {rows} rows"
        note(f"qsa step, {name}", compare(qsa_calls(g, rows, True), STEPS))
        sets = {s: STEPS[s] for s in ("none", "merge", "attend merge")}
        note(f"qsa attention, {name}", compare(qsa_calls(g, rows, False), sets))
    for rows in DSA_ROWS:
        note(f"dsa step, {rows} rows", compare(dsa_calls(rows), STEPS))
    for share in (None, 0.75, 0.0):
        name = "within the budget" if share is None else f"share {share}"
        note(f"qsa prefill, {name}", compare([prefill_call(share)], PREFILL, 5))
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("compile", "run"))
    parser.add_argument("kernels", type=Path)
    parser.add_argument("result", type=Path, nargs="?")
    options = parser.parse_args()
    if options.what == "compile":
        ptx = newest_ptx(DRIVER)
        compiled = {key: compile_kernel(s, "9.0", ptx) for key, s in specs().items()}
        write_bundle(options.kernels, compiled)
    else:
        options.result.write_text(json.dumps(run(options.kernels), indent=1) + "\n")


if __name__ == "__main__":
    main()
