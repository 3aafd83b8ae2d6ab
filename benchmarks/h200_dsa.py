"""Checks and times the latent-attention kernels on one GPU, at Dots3's real sizes.

    python3 benchmarks/h200_dsa.py --compile DIR      on any machine, without a GPU
    python3 benchmarks/h200_dsa.py --kernels DIR [--out results.json] [--only PART ...] [--sweep]

Without --kernels, kernels are compiled on the GPU's machine by its own Triton.

Every kernel is first compared with `plugins/dsa/reference.py` in float32 on the same inputs. Times
are medians over replays of a CUDA graph that runs the operation once per input set, so that no set
is found in the cache of the one before. A floor is the larger of two times: the bytes that must
move over the measured read rate, and the multiplications and additions that must be done over the
measured bf16 matrix rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.graph_time import timed, timed_in_turn
from plugins.aot.bundle import read_bundle, write_bundle
from plugins.aot.compile import CompiledKernel, compile_kernel
from plugins.aot.driver import LoadedKernel
from plugins.aot.spec import KernelSpec
from plugins.dsa import kernel, plan, reference
from plugins.dsa.plan import SLIDING, AttendTiles, DenseTiles, Geometry, IndexTiles, WindowTiles

FULL = Geometry()
DEVICE = "cuda"
SETS = 4
HOPPER = (False, True)


@dataclass
class Row:
    """One line of the result table; times in microseconds."""

    part: str
    case: str
    time: float
    bytes_floor: float
    flop_floor: float
    error: float | None = None
    other: str = ""
    other_time: float | None = None

    @property
    def share(self) -> float:
        return max(self.bytes_floor, self.flop_floor) / self.time


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the 2-norm; NaN and unwritten elements make it NaN."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(torch.bfloat16)


def ints(values: Sequence[int] | int, count: int) -> torch.Tensor:
    filled = [values] * count if isinstance(values, int) else list(values)
    return torch.tensor(filled, dtype=torch.int32, device=DEVICE)


def ceilings() -> dict[str, float]:
    """Measured read rate (bytes/s), copy rate and bf16 matrix rate (FLOP/s)."""
    data = torch.randn(2**30, device=DEVICE)
    target = torch.empty_like(data)
    copy = timed([lambda: target.copy_(data)], 10)
    read = timed([lambda: data.sum()], 10)
    size = 8192
    a, b = randn(size, size), randn(size, size)
    product = timed([lambda: a @ b], 10)
    return {
        "copy": 2 * data.numel() * 4 / copy * 1e6,
        "read": data.numel() * 4 / read * 1e6,
        "matrix": 2 * size**3 / product * 1e6,
    }


class Bench:
    """Runs the parts and collects their rows."""

    def __init__(self, sweep: bool) -> None:
        torch.manual_seed(0)
        self.rates = ceilings()
        self.sweep = sweep
        self.rows: list[Row] = []
        print({name: f"{rate / 1e12:.2f} T/s" for name, rate in self.rates.items()}, flush=True)

    def add(
        self,
        part: str,
        case: str,
        calls: Sequence[Callable[[], object]],
        bytes_moved: float,
        flop: float,
        mistake: float | None = None,
        other: tuple[str, float] | None = None,
        time: float | None = None,
    ) -> float:
        time = timed(calls) if time is None else time
        row = Row(
            part,
            case,
            time,
            bytes_moved / self.rates["read"] * 1e6,
            flop / self.rates["matrix"] * 1e6,
            mistake,
            *(other or ("", None)),
        )
        self.rows.append(row)
        beside = f"  {row.other} {row.other_time:.1f} us" if row.other_time is not None else ""
        shown = "" if mistake is None else f"  error {mistake:.1e}"
        print(
            f"{part:10} {case:34} {time:9.1f} us  bytes {row.bytes_floor:8.1f}  "
            f"flop {row.flop_floor:8.1f}  {row.share:5.0%}{shown}{beside}",
            flush=True,
        )
        return time

    def results(self) -> dict[str, Any]:
        return {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "rates": self.rates,
            "rows": [{**asdict(row), "share": row.share} for row in self.rows],
        }

    # Sparse attention -----------------------------------------------------------------------

    def _sparse_set(self, g: Geometry, batch: int, steps: int, context: int) -> dict[str, Any]:
        past = ints(context - steps, batch)
        tokens = torch.rand(batch * steps, context - steps + 1, device=DEVICE)
        tokens = tokens.topk(min(g.kept, context - steps + 1), dim=-1).indices.sort(-1).values
        if tokens.shape[-1] < g.kept:
            tokens = F.pad(tokens, (0, g.kept - tokens.shape[-1]), value=-1)
        return {
            "q_latent": randn(batch, steps, g.heads, g.latent, scale=0.5),
            "q_rope": randn(batch, steps, g.heads, g.rope, scale=0.5),
            "tokens": tokens.to(torch.int32).reshape(batch, steps, g.kept),
            "past": past,
            "new": ints(steps, batch),
            "gate": randn(batch, steps, g.heads),
        }

    def _sparse_cost(self, g: Geometry, rows: int, kept: int) -> tuple[float, float]:
        width = g.latent + g.rope
        row_bytes = 2 * (kept * width + g.heads * (width + g.latent)) + 4 * kept
        return rows * row_bytes, rows * 2 * g.heads * kept * (width + g.latent)

    def check_sparse(self) -> None:
        """Odd lengths, padding rows, offsets beyond 2^31 elements; poisoned surroundings."""
        g = FULL
        batch, steps, rows = 40, 3, 98304
        cache = torch.full(
            (batch, 1, rows, g.latent + g.rope), float("nan"), dtype=torch.bfloat16, device=DEVICE
        )
        past = ints([0, 5, 63, 64, 2046, 2047, 5000, 90000] * 5, batch)
        new = ints([3, 1, 0, 2, 3, 3, 1, 3] * 5, batch)
        chosen = [0, 1, 2, 3, 4, 5, 6, 7, 39]
        for slot in chosen:
            count = int(past[slot] + new[slot])
            cache[slot, 0, :count] = randn(count, g.latent + g.rope)
        visible = reference.visible_counts(past, new, steps)
        scores = torch.randn(batch, steps, int(visible.max()), device=DEVICE)
        scores = scores.where(scores.abs() > 0.2, 0.0)
        tokens = kernel.select(g, scores, past, new)
        assert torch.equal(tokens, reference.select_tokens(scores, visible, g.kept)), "selection"
        q_latent = randn(batch, steps, g.heads, g.latent, scale=0.5)
        q_rope = randn(batch, steps, g.heads, g.rope, scale=0.5)
        gate = randn(batch, steps, g.heads)
        pick = torch.tensor(chosen, device=DEVICE)
        want = reference.latent_attention(
            q_latent[pick].float(),
            q_rope[pick].float(),
            cache[pick, 0].float(),
            tokens[pick],
            scale=g.scale,
            gate=gate[pick],
        )
        for hopper in HOPPER:
            for splits in (1, 2, 4) if hopper else (1, 4):
                how = kernel.AttendPlan(AttendTiles(), splits, hopper)
                got = kernel.attend(g, q_latent, q_rope, cache, tokens, past, new, gate, how)[pick]
                mistake = error(got, want)
                print(f"check      sparse {how}: error {mistake:.1e}", flush=True)
                assert mistake < 6e-3, f"sparse attention {how}: {mistake}"
                assert not got[2].any() and not got[1, 1:].any(), "padding rows are not zero"

    def sparse(self) -> None:
        self.check_sparse()
        g = FULL
        context = 32768
        cache = randn(128, 1, context, g.latent + g.rope)
        for batch, steps in ((1, 1), (8, 1), (32, 1), (64, 1), (128, 1), (32, 4)):
            sets = [self._sparse_set(g, batch, steps, context) for _ in range(SETS)]
            rows = batch * steps
            cost = self._sparse_cost(g, rows, g.kept)
            plans = [kernel.attend_plan(g, rows, cache.device)]
            if self.sweep:
                more = {1, plans[0].splits * 2, max(1, plans[0].splits // 2)} - {plans[0].splits}
                plans += [replace(plans[0], splits=n) for n in sorted(more) if n <= 32]
                plans.append(replace(plans[0], hopper=False))
            for how in plans:
                calls = [partial(kernel.attend, g, cache=cache[:batch], how=how, **s) for s in sets]
                kind = "" if how.hopper else " portable"
                self.add("sparse", f"{batch} x {steps}, {how.splits} runs{kind}", calls, *cost)
        # Prefill: 2048 queries of one request at 32k.
        sets = [self._sparse_set(g, 1, 2048, context) for _ in range(2)]
        cost = self._sparse_cost(g, 2048, g.kept)
        calls = [partial(kernel.attend, g, cache=cache[:1], **s) for s in sets]
        self.add("sparse", "prefill 2048 rows at 32k", calls, *cost)

    def short(self) -> None:
        """Contexts within the budget, where the layer is dense: against torch."""
        g = FULL
        for batch, context in ((1, 2048), (32, 512), (32, 2048), (128, 2048)):
            caches = [randn(batch, 1, context, g.latent + g.rope) for _ in range(SETS)]
            sets = [self._sparse_set(g, batch, 1, context) for _ in range(SETS)]
            pairs = list(zip(sets, caches, strict=True))
            calls = [partial(kernel.attend, g, cache=c, **s) for s, c in pairs]

            theirs = timed([partial(_torch_latent, g, s, c) for s, c in pairs])
            cost = self._sparse_cost(g, batch, min(context, g.kept))
            self.add("short", f"{batch} x 1 at {context}", calls, *cost, other=("sdpa", theirs))

    def dense(self) -> None:
        """Context phase in the expanded form, against torch."""
        for name, g, past_tokens in (("full", FULL, 0), ("sliding", SLIDING, 4096)):
            small = 300
            self._check_dense(g, small)
            steps = 2048
            rows = steps + (g.window - 1 if g.window else past_tokens)
            sets = [
                {
                    "q_nope": randn(1, steps, g.heads, g.nope),
                    "q_rope": randn(1, steps, g.heads, g.rope),
                    "expanded": randn(1, rows, g.heads, g.nope + g.value),
                    "cache": randn(1, 1, rows, g.latent + g.rope),
                    "gate": randn(1, steps, g.heads),
                    "past": ints(past_tokens, 1),
                    "new": ints(steps, 1),
                }
                for _ in range(2)
            ]
            pairs = steps * g.window if g.window else steps * (steps + 1) // 2
            flop = 2.0 * g.heads * pairs * (g.nope + g.rope + g.value)
            moved = (
                2.0 * g.heads * (steps * (g.nope + g.rope + g.value) + rows * (g.nope + g.value))
            )
            tiles: list[DenseTiles | None] = [None]
            if self.sweep:
                tiles += [DenseTiles()]
            cases: dict[str, list[Callable[[], object]]] = {}
            for one in tiles:
                label = (
                    "" if one is None else f" {one.queries}/{one.tokens}/{one.warps}/{one.stages}"
                )
                cases[label] = [partial(kernel.attend_dense, g, tiles=one, **s) for s in sets]
            rivals = {} if g.window else self._torch_dense(g, steps, rows)
            times = timed_in_turn({**cases, **rivals})
            if rivals:
                print(f"torch      { ({name: times[name] for name in rivals}) }", flush=True)
            best = min(rivals, key=lambda n: times[n], default=None)
            theirs = None if best is None else (best, times[best])
            for label, calls in cases.items():
                case = f"{name} 2048 rows{label}"
                self.add("dense", case, calls, moved, flop, other=theirs, time=times[label])

    def _check_dense(self, g: Geometry, steps: int) -> None:
        past_tokens = 100
        lead = g.window - 1 if g.window else past_tokens
        q_nope, q_rope = randn(1, steps, g.heads, g.nope), randn(1, steps, g.heads, g.rope)
        expanded = randn(1, lead + steps, g.heads, g.nope + g.value)
        cache, gate = randn(1, 1, lead + steps, g.latent + g.rope), randn(1, steps, g.heads)
        new = steps - 7
        # Row j stands at past - lead + j; rows before position 0 do not exist.
        skip = max(0, lead - past_tokens)
        visible = reference.visible_counts(ints(past_tokens, 1), ints(new, 1), steps)
        both = expanded[:, skip:]
        want = reference.expanded_attention(
            q_nope.float(),
            q_rope.float(),
            reference.Expanded(both[..., : g.nope], both[..., g.nope :]),
            cache[:, 0, skip:, g.latent :],
            visible - (past_tokens - lead + skip) * (visible > 0),
            scale=g.scale,
            window=g.window or None,
            gate=gate,
        )
        call = (q_nope, q_rope, expanded, cache, ints(past_tokens, 1), ints(new, 1), gate)
        for tiles in (None, DenseTiles()):
            got = kernel.attend_dense(g, *call, tiles=tiles)
            mistake = error(got, want)
            print(f"check      dense, window {g.window}, {tiles}: error {mistake:.1e}", flush=True)
            assert mistake < 6e-3 and not got[0, new:].any(), f"dense attention: {mistake}"

    def _torch_dense(
        self, g: Geometry, steps: int, rows: int
    ) -> dict[str, list[Callable[[], object]]]:
        q = randn(1, g.heads, steps, g.nope + g.rope)
        k = randn(1, g.heads, rows, g.nope + g.rope)
        v = randn(1, g.heads, rows, g.value)
        padded = F.pad(v, (0, g.nope + g.rope - g.value))
        return {
            name: [partial(F.scaled_dot_product_attention, q, k, value, is_causal=True)]
            for name, value in (("sdpa", v), ("sdpa, v padded", padded))
        }

    # Window -----------------------------------------------------------------------------------

    def check_window(self) -> None:
        g = SLIDING
        for rows, steps, base in ((516, 4, 0), (1600, 3, 700), (2048, 1, 0)):
            past = ints([0, 1, 511, 512, 513, 1500, 2000, 700], 8)
            if base:
                past = (past + base).clamp(max=base + rows - steps)
            new = ints([steps, 1, steps, 0, steps, steps, steps, 1], 8)
            start = ints([base if int(p) >= base + 512 or base == 0 else 0 for p in past], 8)
            cache = randn(8, 1, rows, g.latent + g.rope)
            q_latent = randn(8, steps, g.heads, g.latent, scale=0.3)
            q_rope = randn(8, steps, g.heads, g.rope, scale=0.3)
            gate = randn(8, steps, g.heads)
            ids = reference.window_rows(past, new, start, queries=steps, window=g.window, rows=rows)
            want = reference.latent_attention(
                q_latent.float(), q_rope.float(), cache[:, 0].float(), ids, scale=g.scale, gate=gate
            )
            choices: tuple[dict[str, Any], ...] = (
                {"tiles": WindowTiles(1)},
                {"tiles": WindowTiles(4)},
                {"splits": 1},
                {"splits": 2},
                {"splits": 8},
            )
            for choice in choices:
                got = kernel.attend_window(
                    g, q_latent, q_rope, cache, past, new, start, gate, **choice
                )
                mistake = error(got, want)
                assert mistake < 8e-3, f"window attention, {rows} rows, {choice}: {mistake}"
                assert not got[3].any(), "padding rows are not zero"
                print(f"check      window, ring of {rows}, {choice}: {mistake:.1e}", flush=True)

    def window(self) -> None:
        self.check_window()
        g = SLIDING
        rows = 1024
        width = g.latent + g.rope
        for batch, steps in WINDOW_CALLS:
            many = steps > 64
            span = g.window - 1 + steps
            sets: list[dict[str, Any]] = [
                {
                    "q_latent": randn(batch, steps, g.heads, g.latent, scale=0.3),
                    "q_rope": randn(batch, steps, g.heads, g.rope, scale=0.3),
                    "cache": randn(batch, 1, span if many else 1024, g.latent + g.rope),
                    "gate": randn(batch, steps, g.heads),
                    "past": torch.randint(600, 5000, (batch,), device=DEVICE).to(torch.int32),
                    "new": ints(steps, batch),
                    "base": ints(0, batch),
                }
                for _ in range(2 if many else SETS)
            ]
            rows = batch * steps
            width = g.latent + g.rope
            moved = 2.0 * (batch * span * width + rows * g.heads * (width + g.latent))
            flop = 2.0 * rows * g.heads * g.window * (width + g.latent)
            variants: list[dict[str, Any]] = [{}]
            if self.sweep and not many:
                variants.append({"tiles": WindowTiles(min(steps, 4))})
                variants += [{"splits": n} for n in (1, 2, 4) if batch * steps * n < 256]
            for choice in variants:
                calls = [partial(kernel.attend_window, g, **s, **choice) for s in sets]
                label = f", {choice['splits']} runs" if "splits" in choice else ""
                label += " portable" if "tiles" in choice else ""
                self.add("window", f"{batch} x {steps}{label}", calls, moved, flop)

    # Indexer ----------------------------------------------------------------------------------

    def check_index(self) -> None:
        g = FULL
        for steps in (1, 3, 130):
            past, new = ints([0, 700, 3000], 3), ints([steps, steps, max(0, steps - 2)], 3)
            rows = 3200
            query = randn(3, steps, g.index_heads, g.index_width)
            keys = randn(3, 1, rows, g.index_width)
            weights = randn(3, steps, g.index_heads)
            got = kernel.score(g, query, keys, weights, past, new)
            want = reference.index_scores(query, keys[:, 0], weights)
            seen = torch.arange(rows, device=DEVICE)
            seen = seen < reference.visible_counts(past, new, steps)[..., None]
            mistake = error(got[seen], want[seen])
            assert mistake < 1e-5, f"index scores: {mistake}"
        print(f"check      index scores: error {mistake:.1e}", flush=True)

    def index(self) -> None:
        self.check_index()
        g = FULL
        for batch, steps, context in (
            (1, 1, 32768),
            (32, 1, 32768),
            (128, 1, 32768),
            (1, 1, 131072),
            (32, 1, 131072),
            (1, 1, 524288),
            (32, 4, 32768),
            (1, 2048, 32768),
        ):
            past, new = ints(context - steps, batch), ints(steps, batch)
            count = SETS if batch * context < 2**21 else 2
            keys = [randn(batch, 1, context, g.index_width) for _ in range(count)]
            query = randn(batch, steps, g.index_heads, g.index_width)
            weights = randn(batch, steps, g.index_heads)
            moved = batch * context * (2.0 * g.index_width + 4 * steps)
            flop = 2.0 * batch * steps * context * g.index_heads * g.index_width
            variants: list[IndexTiles | None] = [None]
            if self.sweep:
                rows = SCORE_SWEEP if steps == 1 else SCORE_SWEEP_MANY
                variants = [IndexTiles(*v) for v in rows]
            for one in variants:
                calls = [
                    partial(kernel.score, g, query, k, weights, past, new, tiles=one) for k in keys
                ]
                label = "" if one is None else " " + "/".join(map(str, asdict(one).values()))
                try:
                    self.add("score", f"{batch} x {steps} at {context}{label}", calls, moved, flop)
                except Exception as problem:
                    print(f"score {label}: {type(problem).__name__}", flush=True)
            scores = [kernel.score(g, query, k, weights, past, new) for k in keys]
            visible = reference.visible_counts(past, new, steps)
            for given in (scores[0], scores[0].round()):
                want = reference.select_tokens(given, visible, g.kept)
                assert torch.equal(kernel.select(g, given, past, new), want), "selection"
            theirs = timed([partial(torch.topk, s, g.kept) for s in scores], 8)
            calls = [partial(kernel.select, g, s, past, new) for s in scores]
            self.add(
                "top-k",
                f"{batch} x {steps} at {context}",
                calls,
                4.0 * batch * steps * (context + g.kept),
                0.0,
                other=("torch.topk", theirs),
            )


# Rows and tokens per row that the parts select from.
SELECTED = ((120, 90003), (1, 32768), (32, 32768), (128, 32768), (2048, 32768), (1, 131072),
            (32, 131072), (1, 524288))  # fmt: skip


def specs() -> dict[str, KernelSpec]:
    """Every kernel that the parts launch, unless they sweep."""
    found = [
        plan.attend_whole_hopper(FULL),
        plan.attend_split_hopper(FULL),
        plan.attend_pair_hopper(FULL),
        plan.attend_whole(FULL),
        plan.attend_split(FULL),
        plan.window_whole_hopper(SLIDING),
        plan.window_split_hopper(SLIDING),
        *(plan.merge_splits(FULL, runs) for runs in (4, 8, 32)),
        *(plan.merge_splits(SLIDING, runs) for runs in (2, 4, 8)),
        *(plan.attend_dense_hopper(g) for g in (FULL, SLIDING)),
        *(plan.attend_dense(g, DenseTiles()) for g in (FULL, SLIDING)),
        *(plan.score_tokens(FULL, kernel.score_tiles(steps)) for steps in (1, 3, 130)),
    ]
    for queries in (1, 4):
        tiles = WindowTiles(queries)
        found += [plan.window_scores(SLIDING, tiles), plan.window_values(SLIDING, tiles)]
    for rows, count in SELECTED:
        (chunk, _), *levels = kernel.select_levels(FULL, rows, count)
        found.append(plan.select_chunk(FULL, chunk))
        found += [plan.select_among(FULL, chunk) for chunk, _ in levels]
    return {spec.key: spec for spec in found}


def use_compiled(directory: Path) -> None:
    """Make every spec launch the kernel compiled from it, through the driver, as TensorRT does."""
    loaded: dict[str, LoadedKernel] = {}

    def load(entry: tuple[str, CompiledKernel]) -> None:
        torch.zeros(1, device=DEVICE)
        loaded[entry[0]] = LoadedKernel(entry[1])

    torch.zeros(1, device=DEVICE)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(load, read_bundle(directory).items()))

    def launch(self: KernelSpec, tensors: Any, values: Any) -> None:
        loaded[self.key].run(self, tensors, values, early=False)

    KernelSpec.launch = launch  # type: ignore[method-assign]
    kernel.launch = launch
    # They were compiled elsewhere: this machine's Triton does not matter.
    KernelSpec.compiles = lambda _: True  # type: ignore[method-assign]


def _torch_latent(g: Geometry, s: dict[str, torch.Tensor], cache: torch.Tensor) -> torch.Tensor:
    """torch's attention over whole caches, one query per slot: heads are its queries."""
    query = torch.cat([s["q_latent"], s["q_rope"]], -1).reshape(cache.shape[0], 1, g.heads, -1)
    return F.scaled_dot_product_attention(query, cache, cache[..., : g.latent], scale=g.scale)


# Slots and queries per slot.
WINDOW_CALLS = (
    (1, 1), (8, 1), (16, 1), (32, 1), (48, 1), (64, 1), (96, 1), (128, 1), (32, 4), (1, 2048),
)  # fmt: skip
SCORE_SWEEP = [(1, 128, 4, 3), (1, 128, 8, 3), (1, 64, 4, 4), (1, 128, 4, 4)]
SCORE_SWEEP_MANY = [(4, 128, 8, 3), (2, 128, 8, 3), (4, 64, 4, 3), (2, 128, 4, 3)]


def main() -> None:
    parts = ("sparse", "short", "dense", "window", "index")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--sweep", action="store_true", help="also time other tiles")
    parser.add_argument("--compile", type=Path, help="only compile kernels into this directory")
    parser.add_argument("--kernels", type=Path, help="launch the kernels compiled there")
    options = parser.parse_args()
    if options.compile:
        kernels = {key: compile_kernel(spec, "9.0") for key, spec in specs().items()}
        write_bundle(options.compile, kernels)
        return
    if options.kernels:
        use_compiled(options.kernels)
    bench = Bench(options.sweep)
    for part in options.only:
        getattr(bench, part)()
        if options.out:
            options.out.write_text(json.dumps(bench.results(), indent=1) + "\n")


if __name__ == "__main__":
    main()
