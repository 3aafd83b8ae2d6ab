"""Checks and times the QSA kernels on an H200, beside vLLM's and torch's for the same step.

Two steps, because the GPU machine needs no compiler for ours:

    python -m benchmarks.h200_qsa compile KERNEL_DIR
    python -m benchmarks.h200_qsa run KERNEL_DIR RESULT.json [--vllm DIR]

`compile` needs no GPU. `run` launches exactly the compiled PTX through the CUDA driver, in two
ways: "us" as TensorRT does, "early_us" as the interpreter does, every kernel before its predecessor
has ended. DIR holds
`qsa.py` and `qsa_indexer.py` of vLLM 0.33 (models/qwen4_exp/nvidia/ops in its wheel) and, if its
own top-k is wanted, the library `_C_stable_libtorch.abi3.so`, plain or as `vllm_c_sm90.so.xz`.
Every section runs in its own process. Times are medians over CUDA-graph replays in microseconds.
"""

# Closures are called in the iteration that makes them.
# ruff: noqa: B023

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import lzma
import os
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.aot.bundle import read_bundle, write_bundle
from plugins.aot.compile import compile_kernel, newest_ptx
from plugins.aot.driver import LoadedKernel
from plugins.aot.spec import KernelSpec
from plugins.qsa import kernel, plan
from plugins.qsa import reference as ref
from plugins.qsa.plan import Geometry, Rotary

SECTIONS = ("ceilings", "attention", "dense", "select", "score", "prefill", "prepare")
ROWS = (1, 8, 32, 64, 128, 256)
SELECT_SHAPES = tuple((rows, nb) for rows in (1, 32, 128) for nb in (8192, 32768, 65536))
DRIVER = 580
CONTEXT = 32768
EPS = 1e-6
BF16 = Geometry()
FP8 = Geometry(cache_dtype="float8_e4m3fn", k_scale=0.5, v_scale=0.25)
Timed = Callable[[], Any]


# -- compiled kernels ------------------------------------------------------------------------------


def specs() -> dict[str, KernelSpec]:
    """Every kernel that a run launches."""
    found: list[KernelSpec] = []
    for g in (BF16, FP8):
        for rows in ROWS:
            how = kernel.decode_plan(g, rows)
            if how.splits == 1:
                found.append(plan.attend_whole(g, how.tiles))
                continue
            found.append(kernel.decode_partial(g, how))
            found.append(plan.merge_splits(g, how.splits))
    found.append(plan.unite_blocks(BF16, plan.HOPPER_ROWS))
    found += [plan.attend_hopper(BF16, plan.HOPPER_ROWS, whole=whole) for whole in (False, True)]
    portable = kernel.PREFILL
    found.append(plan.unite_blocks(BF16, portable.rows))
    found.append(plan.attend_tile(BF16, portable.rows, portable.together))
    found.append(plan.attend_apart(BF16, portable.rows, portable.apart))
    found.append(plan.attend_dense(BF16, portable.lines, portable.dense))
    for steps in (1, kernel.SCORE_ROWS):
        for count in (8192, 32768, 65536):
            group = kernel.group_size(count)
            found.append(plan.score_blocks(BF16, steps, plan.Tiles(64, 4, 3), group))
    found.extend(kernel.select_spec(BF16, count) for count in (512, 8192, 32768, 65536))
    for g in (BF16, FP8):
        for axes in (1, 3):
            found.append(plan.prepare(g, Rotary(axes=axes), EPS))
    return {spec.key: spec for spec in found}


def compile_all(folder: Path) -> None:
    """Compile every kernel for compute capability 9.0 and the driver of the H200."""
    ptx = newest_ptx(DRIVER)
    write_bundle(folder, {k: compile_kernel(s, "9.0", ptx) for k, s in specs().items()})


LOADED: dict[str, LoadedKernel] = {}
# Start kernels before their predecessors have ended.
EARLY = [True]


def load(folder: Path) -> None:
    """Load all compiled kernels, to be launched instead of any that this process would compile."""
    torch.zeros(1, device="cuda")
    compiled = read_bundle(folder)

    def one(item: tuple[str, Any]) -> tuple[str, LoadedKernel]:
        torch.zeros(1, device="cuda")
        return item[0], LoadedKernel(item[1])

    with ThreadPoolExecutor(12) as pool:
        LOADED.update(pool.map(one, compiled.items()))

    # They were compiled elsewhere: this machine's Triton does not matter.
    KernelSpec.compiles = lambda _: True  # type: ignore[method-assign]
    kernel.launch = launch


def launch(spec: KernelSpec, tensors: Any, values: Any) -> None:
    """`plugins.aot.launch.launch` with the loaded kernels."""
    LOADED[spec.key].run(spec, tensors, values, EARLY[0])


# -- measuring -------------------------------------------------------------------------------------


def both(calls: Sequence[Timed], prefix: str = "") -> dict[str, float]:
    """Times as TensorRT launches, and with kernels started early."""
    return {prefix + "us": timed(calls, early=False), prefix + "early_us": timed(calls)}


def timed(
    calls: Sequence[Timed], milliseconds: float = 30.0, repeats: int = 9, early: bool = True
) -> float:
    """Median microseconds per call over graph replays; one call per input set."""
    stream = torch.cuda.Stream()
    EARLY[0] = early
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)

        def replay(count: int) -> float:
            start.record(stream)
            for _ in range(count):
                graph.replay()
            stop.record(stream)
            stop.synchronize()
            return start.elapsed_time(stop) / count

        EARLY[0] = True
        replay(1)
        count = max(1, int(milliseconds / repeats / max(replay(1), 1e-3)))
        times = sorted(replay(count) for _ in range(repeats))
    return times[len(times) // 2] / len(calls) * 1e3


def error(result: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of the expected value; NaN counts as infinite."""
    value = ((result.float() - expected.float()).norm() / expected.float().norm()).item()
    return value if value == value else float("inf")


def demand(value: float, bound: float, what: str) -> float:
    """Stop when a result is wrong: a wrong kernel's time means nothing."""
    if not value <= bound:
        raise SystemExit(f"{what}: error {value} above {bound}")
    return value


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def int32(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def random_blocks(rows: int, count: int, kept: int) -> Tensor:
    picked = torch.rand(rows, count, device="cuda").topk(kept, dim=1).indices
    return picked.sort(1).values.to(torch.int32)


def caches(slots: int, context: int = CONTEXT) -> tuple[Tensor, Tensor]:
    key = torch.empty(
        slots, BF16.kv_heads, context, BF16.width, device="cuda", dtype=torch.bfloat16
    )
    value = torch.empty_like(key)
    for slot in range(0, slots, 16):
        key[slot : slot + 16].normal_()
        value[slot : slot + 16].normal_()
    return key, value


def to_fp8(cache: Tensor, scale: float) -> Tensor:
    out = torch.empty(cache.shape, dtype=torch.float8_e4m3fn, device="cuda")
    for slot in range(0, cache.shape[0], 16):
        part = cache[slot : slot + 16].float() / scale
        out[slot : slot + 16] = part.clamp(-448, 448).to(torch.float8_e4m3fn)
    return out


# -- vLLM ------------------------------------------------------------------------------------------


def vllm_modules(folder: Path) -> tuple[Any, Any]:
    """vLLM's two kernel files with the few names that they import."""

    def module(name: str, **names: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(names)
        sys.modules[name] = made
        return made

    platform = types.SimpleNamespace(
        get_device_capability=lambda: (9, 0),
        has_device_capability=lambda n: n <= 90,
        is_device_capability_family=lambda n: n == 90,
    )
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.warmup", "vllm.utils"):
        module(name)
    module("vllm.platforms", current_platform=platform)
    module("vllm.triton_utils", HAS_TRITON=True, tl=tl, triton=triton)
    helper = "vllm.model_executor.warmup.jit_warmup_triton_helper"
    module(helper, TritonWarmupTensor=object, triton_scalar_specialization_rep=lambda x: x)
    sys.modules["vllm"].envs = module("vllm.envs")  # type: ignore[attr-defined]
    module("vllm.utils.math_utils", round_up=lambda a, b: -(-a // b) * b)
    loaded = []
    for name in ("qsa", "qsa_indexer"):
        spec = importlib.util.spec_from_file_location(f"vllm_{name}", folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        loaded.append(made)
    return loaded[0], loaded[1]


def vllm_topk(folder: Path) -> Any:
    """vLLM's compiled operations, None when the library is absent or does not load."""
    packed, plain = folder / "vllm_c_sm90.so.xz", folder / "_C_stable_libtorch.abi3.so"
    try:
        if packed.exists():
            plain = Path("/tmp/vllm_c_sm90.so")
            plain.write_bytes(lzma.decompress(packed.read_bytes()))
        ctypes.CDLL(str(plain), mode=os.RTLD_LAZY | os.RTLD_GLOBAL)
        return torch.ops._C
    except OSError:
        return None


def vllm_indices(blocks: Tensor, positions: Tensor) -> Tensor:
    """vLLM's selection rows: token ids, -1 behind them, then their count."""
    tokens = ref.expand_tokens(blocks.long(), positions.long(), BF16.ratio).flatten(0, 1)
    count = (tokens >= 0).sum(1, keepdim=True)
    order = torch.where(tokens >= 0, tokens, 2**30).sort(1).values
    return torch.cat([torch.where(order == 2**30, -1, order), count], 1).to(torch.int32)


def vllm_cache(key: Tensor, value: Tensor, page: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """The same caches in vLLM's paged layout, pages in random order, and the page table."""
    slots, heads, context, width = key.shape
    pages = context // page
    table = torch.randperm(slots * pages, device="cuda").view(slots, pages)
    paged = torch.empty(slots * pages, heads, page, 2 * width, device="cuda", dtype=key.dtype)
    for slot in range(slots):
        paged[table[slot], :, :, :width] = key[slot].view(heads, pages, page, width).transpose(0, 1)
        paged[table[slot], :, :, width:] = (
            value[slot].view(heads, pages, page, width).transpose(0, 1)
        )
    vk, vv = paged.transpose(1, 2).split(width, dim=-1)
    return vk, vv, table.to(torch.int32)


# -- sections --------------------------------------------------------------------------------------


def section_ceilings(_: Path | None) -> dict[str, Any]:
    """Rates that the machine reaches: reading, copying, bf16 matrix products."""
    buffer = torch.empty(2**29, dtype=torch.int64, device="cuda").random_()
    floats = buffer.view(torch.float32)
    half = buffer[: 2**28]
    a = randn(8192, 8192)
    return {
        "read_TBps": {
            "sum of int64": buffer.nbytes / timed([lambda: torch.sum(buffer)], 100) / 1e6,
            "max of float32": buffer.nbytes / timed([lambda: torch.amax(floats)], 100) / 1e6,
        },
        "copy_TBps": 2 * half.nbytes / timed([lambda: buffer[2**28 :].copy_(half)], 100) / 1e6,
        "bf16_TFLOPs": 2 * 8192**3 / timed([lambda: a @ a], 100) / 1e6,
        "empty_kernel_us": timed([lambda: a[:1, :1].add_(0)] * 50),
    }


def decode_call(g: Geometry, t: dict[str, Tensor]) -> Timed:
    """One decode attention with outputs allocated beforehand."""
    rows = t["q"].shape[0] * t["q"].shape[2]
    how = kernel.decode_plan(g, rows)
    values = {"S": t["q"].shape[2], "C": t["k_cache"].shape[2], "rows": rows}
    values["splits"] = how.splits
    if how.splits == 1:
        whole = plan.attend_whole(g, how.tiles)
        return lambda: launch(whole, t, values)
    shape = (how.splits, rows, g.heads)
    t["partial"] = torch.empty((*shape, g.width), device="cuda")
    t["partial_lse"] = torch.empty(shape, device="cuda")
    first, second = kernel.decode_partial(g, how), plan.merge_splits(g, how.splits)

    def call() -> None:
        launch(first, t, values)
        launch(second, t, values)

    return call


def section_attention(vllm: Path | None) -> dict[str, Any]:
    """Decode attention, one query per slot, 32k context, 512 random blocks and a random tail."""
    slots = max(ROWS)
    key, value = caches(slots)
    key8, value8 = to_fp8(key, FP8.k_scale), to_fp8(value, FP8.v_scale)
    theirs = None if vllm is None else vllm_modules(vllm)[0]
    if theirs is not None:
        vk, vv, table = vllm_cache(key, value)
    results: dict[str, Any] = {}
    for rows in ROWS:
        # Cold: the sets together exceed the cache several times. Warm: two sets, for one row.
        for sets, label in ((max(3, min(48, 140 // rows)), ""), (2, " warm")):
            if label and rows > 8:
                continue
            inputs, bf16, fp8, other = [], [], [], []
            for number in range(sets):
                first = number * rows % max(1, slots - rows + 1)
                mine = slice(first, first + rows)
                past = int32([CONTEXT - 4]).repeat(rows)
                past -= torch.randint(0, 4, (rows,), device="cuda", dtype=torch.int32)
                t = {
                    "q": randn(rows, BF16.heads, 1, BF16.width),
                    "gate": randn(rows, 1, BF16.heads * BF16.width),
                    "past": past,
                    "new": int32([1]).repeat(rows),
                    "blocks": random_blocks(rows, (CONTEXT - 8) // 4, BF16.blocks)[:, None],
                    "k_cache": key[mine],
                    "v_cache": value[mine],
                    "out": torch.full(
                        (rows, 1, BF16.heads * BF16.width),
                        float("nan"),
                        device="cuda",
                        dtype=torch.bfloat16,
                    ),
                }
                inputs.append(t)
                bf16.append(decode_call(BF16, dict(t)))
                t8 = {**t, "k_cache": key8[mine], "v_cache": value8[mine]}
                fp8.append(decode_call(FP8, t8))
                if theirs is not None:
                    args = (
                        t["q"][:, :, 0].contiguous(),
                        vk,
                        vv,
                        vllm_indices(t["blocks"], past[:, None]),
                        table[mine],
                        torch.arange(rows, device="cuda", dtype=torch.int32),
                        False,
                    )
                    out = torch.empty_like(args[0])
                    gate = t["gate"].view(rows, -1)
                    other.append(
                        lambda a=args, o=out, s=gate: theirs.qsa_sparse_paged_attention(
                            *a, out=o, output_gate=s
                        )
                    )
            t = inputs[0]
            few = slice(0, min(rows, 32))
            tokens = ref.expand_tokens(t["blocks"][few].long(), t["past"][few, None].long(), 4)

            def expect(k: Tensor, v: Tensor) -> Tensor:
                return ref.attend(
                    t["q"][few], k[few], v[few], tokens, scale=1 / 16, gate=t["gate"][few]
                )

            right = expect(t["k_cache"], t["v_cache"])
            wide = (key8[few].float() * FP8.k_scale, value8[few].float() * FP8.v_scale)
            right8 = expect(*wide)
            del wide
            errors = {}
            for name, call, wanted in (("bf16", bf16[0], right), ("fp8", fp8[0], right8)):
                t["out"].fill_(float("nan"))
                call()
                torch.cuda.synchronize()
                errors[name] = demand(
                    error(t["out"][few], wanted), 6e-3, f"attention {rows} {name}"
                )
            row: dict[str, Any] = {
                "rows": rows,
                "input_sets": sets,
                "errors": errors,
                "bytes": rows * 2 * 2048 * BF16.width * 2 * 2,
                **both(bf16),
                **both(bf16, "again_"),
                **both(fp8, "fp8_"),
            }
            if theirs is not None:
                row["vllm_us"] = timed(other)
            results[f"{rows} rows{label}"] = row
    # 1 + k tokens per slot, and rows that attend to nothing.
    t = {
        "q": randn(32, BF16.heads, 4, BF16.width),
        "gate": randn(32, 4, BF16.heads * BF16.width),
        "past": int32([CONTEXT - 9 - i for i in range(32)]),
        "new": int32([i % 5 for i in range(32)]),
        "blocks": random_blocks(128, 8000, 512).view(32, 4, 512),
    }
    position = t["past"][:, None] + torch.arange(4, device="cuda")
    position = torch.where(torch.arange(4, device="cuda") < t["new"][:, None], position, -1)
    seen = torch.where(position[..., None] < 0, -1, t["blocks"])
    tokens = ref.expand_tokens(seen.long(), position.long(), 4)
    right = ref.attend(t["q"], key[:32], value[:32], tokens, scale=1 / 16, gate=t["gate"])
    cached = (key[:32], value[:32], t["blocks"], t["past"], t["new"], t["gate"])
    out = kernel.attend_decode(BF16, t["q"], *cached)
    zero = out[position < 0].abs().max().item()
    results["32 slots x 4 tokens"] = {
        "error": demand(error(out, right), 6e-3, "uniform decode"),
        "padding rows": demand(zero, 0.0, "padding rows"),
        **both([lambda: kernel.attend_decode(BF16, t["q"], *cached)]),
    }
    return results


def section_dense(_: Path | None) -> dict[str, Any]:
    """Contexts within the budget, where the selection is everything: beside torch's attention."""
    results: dict[str, Any] = {}
    attention = torch.nn.functional.scaled_dot_product_attention
    for rows in (32, 64, 128):
        sets = []
        for _unused in range(3):
            key, value = caches(rows, 2048)
            t = {
                "q": randn(rows, BF16.heads, 1, BF16.width),
                "gate": randn(rows, 1, BF16.heads * BF16.width),
                "past": int32([2047]).repeat(rows),
                "new": int32([1]).repeat(rows),
                "blocks": int32(range(512)).repeat(rows, 1, 1),
                "k_cache": key,
                "v_cache": value,
                "out": torch.empty(rows, 1, 6144, device="cuda", dtype=torch.bfloat16),
            }
            sets.append(t)
        ours = [decode_call(BF16, t) for t in sets]
        torchs = [
            lambda t=t: attention(t["q"], t["k_cache"], t["v_cache"], enable_gqa=True) for t in sets
        ]
        ours[0]()
        right = torchs[0]().transpose(1, 2).reshape(rows, 1, -1) * sets[0]["gate"].float().sigmoid()
        results[f"decode {rows} x 2048"] = {
            "error": demand(error(sets[0]["out"], right), 6e-3, "dense decode"),
            **both(ours),
            "sdpa_us": timed(torchs),
        }
    key, value = caches(1, 2048)
    q, gate = randn(1, 24, 2048, 256), randn(1, 2048, 6144)
    blocks = int32(range(512)).repeat(1, 2048, 1)
    seen = (torch.arange(2048, device="cuda") + 1) // 4
    blocks[0][blocks[0] >= seen[:, None]] = -1
    call = (key, value, blocks, int32([0]), int32([2048]), gate)
    out = kernel.attend_prefill(BF16, q, *call)
    dense = lambda: attention(q, key, value, is_causal=True, enable_gqa=True)  # noqa: E731
    right = dense().transpose(1, 2).reshape(1, 2048, -1) * gate.float().sigmoid()
    portable = kernel.attend_prefill(BF16, q, *call, kernel.PREFILL)
    # In a cache that holds longer contexts: the union, of nothing, is not left out.
    longer = caches(1, 2 * 2048)
    longer[0][:, :, :2048], longer[1][:, :, :2048] = key, value
    union = kernel.attend_prefill(BF16, q, *longer, *call[2:])
    results["prefill 2048 causal"] = {
        "union error": demand(error(union, right), 6e-3, "dense prefill behind the union"),
        "error": demand(error(out, right), 6e-3, "dense prefill"),
        "portable error": demand(error(portable, right), 6e-3, "portable dense prefill"),
        **both([lambda: kernel.attend_prefill(BF16, q, *call)]),
        **both([lambda: kernel.attend_prefill(BF16, q, *call, kernel.PREFILL)], "portable_"),
        "sdpa_us": timed([dense]),
        **both([lambda: kernel.attend_prefill(BF16, q, *longer, *call[2:])], "union_"),
        **both([lambda: kernel.attend_prefill(BF16, q, *call)], "again_"),
        "sdpa_again_us": timed([dense]),
    }
    return results


def maxima(scores: Tensor) -> Tensor | None:
    """What scoring writes beside the scores of long rows."""
    group = kernel.group_size(scores.shape[-1])
    return scores.unflatten(-1, (-1, group)).amax(-1) if group else None


def section_select(vllm: Path | None) -> dict[str, Any]:
    """Exact top 512 of rows of scores."""
    results: dict[str, Any] = {}
    theirs = None if vllm is None else vllm_topk(vllm)
    for rows, count in (*SELECT_SHAPES, (2048, 8192)):
        sets = []
        for _unused in range(max(2, min(8, 200_000_000 // (rows * count * 4)))):
            draw = torch.randn(2, rows, 1, count, device="cuda").relu_()
            sets.append(draw.sum(0))
        past, new = int32([count * 4 - 1]).repeat(rows), int32([1]).repeat(rows)
        seen = torch.full((rows, 1), count, device="cuda")
        for scores in (sets[0], (sets[0] * 2).round() / 2):
            right = ref.select_blocks(scores, seen, 512)
            same = (kernel.select(BF16, scores, maxima(scores), past, new) == right).all().item()
            demand(0.0 if same else 1.0, 0.5, f"select {rows} x {count}")
        row = {
            **both([partial(kernel.select, BF16, s, maxima(s), past, new) for s in sets]),
            "torch_us": timed([partial(torch.topk, s[:, 0], 512) for s in sets]),
        }
        if theirs is not None:
            lengths = int32([count]).repeat(rows)
            ids = torch.empty(rows, 512, dtype=torch.int32, device="cuda")
            space = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
            op = theirs.cooperative_topk if rows <= 64 else theirs.persistent_topk
            row["vllm_us"] = timed(
                [partial(op, s[:, 0], lengths, ids, space, 512, count) for s in sets]
            )
        results[f"{rows} x {count}"] = row
    return results


def score_and_select(query: Tensor, keys: Tensor, past: Tensor, new: Tensor) -> Tensor:
    """The best blocks of a row, from the index queries on."""
    return kernel.select(BF16, *kernel.score(BF16, query, keys, past, new), past, new)


def section_score(vllm: Path | None) -> dict[str, Any]:
    """Index scores of all visible blocks."""
    results: dict[str, Any] = {}
    theirs = None if vllm is None else vllm_modules(vllm)[1]
    pool = torch.empty(128 * 65536 * 128, device="cuda", dtype=torch.bfloat16).normal_()
    for rows, count in SELECT_SHAPES:
        size = rows * count * 128
        sets = []
        for number in range(max(1, min(8, pool.numel() // size, 400_000_000 // (2 * size) + 1))):
            keys = pool[number * size : (number + 1) * size].view(rows, count, 128)
            sets.append((randn(rows, 4, 1, 128), keys))
        past, new = int32([count * 4 - 1]).repeat(rows), int32([1]).repeat(rows)
        got, tops = kernel.score(BF16, *sets[0], past, new)
        if tops is not None:
            demand(0.0 if torch.equal(tops, maxima(got)) else 1.0, 0.5, "maxima")
        right = ref.block_scores(sets[0][0][:1], sets[0][1][:1])
        row = {
            "input_sets": len(sets),
            "bytes": rows * count * 260,
            "error": demand(error(got[:1], right), 1e-5, f"score {rows} x {count}"),
            **both([partial(kernel.score, BF16, *s, past, new) for s in sets]),
            **both([partial(score_and_select, *s, past, new) for s in sets], "with_select_"),
        }
        if theirs is not None:
            table = torch.arange(rows * count // 64, device="cuda", dtype=torch.int32)
            table = table.view(rows, -1)
            seen = int32([count]).repeat(rows)
            logits = torch.empty(rows, count, device="cuda")
            tiles = theirs._decode_tiles_per_program(rows, count)

            def one(q: Tensor, keys: Tensor, t: Any = (table, seen, logits, tiles)) -> None:
                pages, visible, out, per = t
                cache, query = keys.view(-1, 64, 1, 128), q[:, :, 0]
                grid = (query.shape[0], triton.cdiv(out.shape[1], 64 * per))
                theirs._qsa_mqa_paged_uniform_kernel[grid](
                    query, cache, pages, visible, out,
                    *query.stride()[:-1], *cache.stride()[:2], *pages.stride()[:-1],
                    *out.stride()[:-1], PAGE_SIZE=64, PAGE_TABLE_WIDTH=pages.shape[1],
                    NUM_HEADS=4, HEAD_DIM=128, DECODE_QUERY_LEN=1, BLOCK_N=64,
                    TILES_PER_PROG=per, STAGES=2, num_warps=2,
                )  # fmt: skip

            row["vllm_us"] = timed([partial(one, *s) for s in sets])
        results[f"{rows} x {count}"] = row
    q, keys = randn(1, 4, 2048, 128), pool[: 8192 * 128].view(1, 8192, 128)
    past, new = int32([CONTEXT - 2048]), int32([2048])
    got, right = kernel.score(BF16, q, keys, past, new)[0], ref.block_scores(q, keys)
    seen = (past + torch.arange(2048, device="cuda") + 1)[:, None] // 4
    mask = torch.arange(8192, device="cuda") < seen
    results["prefill 2048 x 8192"] = {
        "error": demand(error(got[0][mask], right[0][mask]), 1e-5, "score prefill"),
        **both([lambda: kernel.score(BF16, q, keys, past, new)]),
    }
    return results


def neighbours(rows: int, count: int, share: float) -> Tensor:
    """Selections [1, rows, 512] of which each keeps `share` of its predecessor's blocks."""
    if share == 0:
        return random_blocks(rows, count, 512)[None]
    keep, chosen = int(512 * share), torch.randperm(count, device="cuda")[:512]
    out = []
    for _unused in range(rows):
        kept = chosen[torch.randperm(512, device="cuda")[:keep]]
        free = torch.ones(count, device="cuda", dtype=torch.bool)
        free[kept] = False
        others = free.nonzero()[:, 0]
        fresh = others[torch.randperm(others.numel(), device="cuda")[: 512 - keep]]
        chosen = torch.cat([kept, fresh])
        out.append(chosen.sort().values)
    return torch.stack(out).to(torch.int32)[None]


def prefill_borders() -> dict[str, Any]:
    """Both prefill paths where chunks cross the budget, end early or are empty."""
    steps, context = 301, 8192
    past, new = int32([0, 1900, 2047, 6000, 500]), int32([301, 300, 301, 7, 0])
    slots = len(past)
    key, value = caches(slots, context)
    position = past[:, None] + torch.arange(steps, device="cuda", dtype=torch.int32)
    position = torch.where(torch.arange(steps, device="cuda") < new[:, None], position, -1)
    for slot in range(slots):
        # What was not written yet must not matter.
        key[slot, :, int(past[slot] + new[slot]) :] = float("nan")
        value[slot, :, int(past[slot] + new[slot]) :] = float("nan")
    scores = torch.rand(slots, steps, context // 4, device="cuda")
    blocks = ref.select_blocks(scores, (position + 1) // 4, 512)
    tokens = ref.expand_tokens(blocks.long(), position.long(), 4)
    q = randn(slots, 24, steps, 256)
    gate = randn(slots, steps, 6144)
    # Shut, and wide open.
    gate[0, ::3], gate[0, 1::3] = -200.0, 200.0
    finite = (key.nan_to_num(), value.nan_to_num())
    right = ref.attend(q, *finite, tokens, scale=1 / 16, gate=gate)
    errors = {}
    for name, how in (("hopper", None), ("portable", kernel.PREFILL)):
        got = kernel.attend_prefill(BF16, q, key, value, blocks, past, new, gate, how)
        errors[name] = demand(error(got, right), 6e-3, f"prefill borders, {name}")
        demand(got[position < 0].abs().max().item(), 0.0, f"padding rows, {name}")
    return errors


def section_prefill(vllm: Path | None) -> dict[str, Any]:
    """2048 queries of one request at 32k context."""
    results: dict[str, Any] = {"borders": prefill_borders()}
    theirs = None if vllm is None else vllm_modules(vllm)[0]
    key, value = caches(1)
    key8, value8 = to_fp8(key, FP8.k_scale), to_fp8(value, FP8.v_scale)
    steps = 2048
    past, new = int32([CONTEXT - steps]), int32([steps])
    if theirs is not None:
        vk, vv, table = vllm_cache(key, value)
    for share in (0.75, 0.5, 0.0):
        blocks = neighbours(steps, (CONTEXT - steps) // 4, share)
        q, gate = randn(1, 24, steps, 256), randn(1, steps, 6144)
        position = (past[:, None] + torch.arange(steps, device="cuda")).long()
        tokens = ref.expand_tokens(blocks.long(), position, 4)
        call = (blocks, past, new, gate)
        out = kernel.attend_prefill(BF16, q, key, value, *call)
        out8 = kernel.attend_prefill(FP8, q, key8, value8, *call)
        worst = 0.0
        for start in (0, 1001, 1984):
            part = slice(start, start + 64)
            rest: dict[str, Any] = {"scale": 1 / 16, "gate": gate[:, part]}
            right = ref.attend(q[:, :, part], key, value, tokens[:, part], **rest)
            worst = max(worst, error(out[:, part], right))
            wide = (key8.float() * FP8.k_scale, value8.float() * FP8.v_scale)
            right = ref.attend(q[:, :, part], *wide, tokens[:, part], **rest)
            worst = max(worst, error(out8[:, part], right))
        unite = partial(kernel.unite, BF16, blocks, past, new, plan.HOPPER_ROWS, CONTEXT // 4)
        portable = kernel.attend_prefill(BF16, q, key, value, *call, kernel.PREFILL)
        row = {
            "error": demand(worst, 6e-3, f"prefill {share}"),
            "from portable": demand(error(out, portable), 6e-3, f"prefill {share}, all rows"),
            "blocks_per_tile": unite()[0].float().mean((0, 1)).tolist(),
            **both([lambda: kernel.attend_prefill(BF16, q, key, value, *call)]),
            "unite_us": timed([unite], early=False),
            **both(
                [lambda: kernel.attend_prefill(BF16, q, key, value, *call, kernel.PREFILL)],
                "portable_",
            ),
            **both([lambda: kernel.attend_prefill(FP8, q, key8, value8, *call)], "fp8_"),
        }
        if theirs is not None:
            args = (
                q[0].transpose(0, 1).contiguous(),
                vk,
                vv,
                vllm_indices(blocks, position),
                table,
                int32([0]).repeat(steps),
                True,
            )
            other = torch.empty_like(args[0])
            row["vllm_us"] = timed(
                [
                    lambda: theirs.qsa_sparse_paged_attention(
                        *args, out=other, output_gate=gate.view(steps, -1)
                    )
                ]
            )
        results[f"share {share}"] = row
    return results


def section_prepare(_: Path | None) -> dict[str, Any]:
    """Norms, rotary embedding and cache writes in one pass."""
    results: dict[str, Any] = {}
    for batch, steps in ((1, 1), (64, 1), (1, 2048)):
        context = 4096
        past, new = int32([1001 + i for i in range(batch)]), int32([steps]).repeat(batch)
        draws = (randn(batch, steps, 12288), randn(batch, steps, 512), randn(batch, steps, 512),
                 randn(batch, steps, 640))  # fmt: skip
        weights = tuple(randn(n) * 0.1 for n in (256, 256, 128, 128))
        state = randn(batch, 3, 128)
        exponent = torch.arange(0, 64, 2, device="cuda", dtype=torch.float32) / 64
        frequencies = 1.0 / 1e7**exponent
        cache = [torch.zeros(batch, 2, context, 256, device="cuda", dtype=torch.bfloat16)]
        cache += [torch.zeros_like(cache[0])]
        cache += [torch.zeros(batch, context // 4, 128, device="cuda", dtype=torch.bfloat16)]

        def call(d: Any = draws, w: Any = weights, f: Any = frequencies, c: Any = cache,
                 s: Any = state, p: Any = past, n: Any = new) -> Any:  # fmt: skip
            return kernel.prepare(BF16, Rotary(), EPS, d, w, (f, f), tuple(c), s, p, n)

        got = call()
        position = past[:, None] + torch.arange(steps, device="cuda")
        right = ref.prepare(
            *draws, q_norm=weights[0], k_norm=weights[1], index_q_norm=weights[2],
            positions=position, rotary_dim=64, index_rotary_dim=64, theta=1e7, eps=EPS,
        )  # fmt: skip
        written = torch.stack([cache[0][b, :, p] for b, p in enumerate(position.long())])
        results[f"{batch} x {steps}"] = {
            "error": max(
                demand(error(got.query, right.query), 3e-3, "prepare query"),
                demand(error(got.index_query, right.index_query), 3e-3, "prepare index query"),
                demand(error(written, right.key), 3e-3, "prepare key cache"),
            ),
            **both([call] * 8),
        }
    return results


# -- command line ----------------------------------------------------------------------------------


def run(folder: Path, result: Path, vllm: Path | None) -> None:
    """Run every section in its own process and write one result file."""
    if not folder.exists():
        compile_all(folder)
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton_of_vllm_kernels": triton.__version__,
    }
    for section in SECTIONS:
        part = result.with_suffix(f".{section}.json")
        command = [sys.executable, "-m", "benchmarks.h200_qsa", "section", section]
        command += [str(folder), str(part)] + ([str(vllm)] if vllm else [])
        code = subprocess.run(command, check=False).returncode
        results[section] = json.loads(part.read_text()) if code == 0 else {"failed": code}
        part.unlink(missing_ok=True)
        print(section, json.dumps(results[section]), flush=True)
    result.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("compile").add_argument("kernels", type=Path)
    runs = verbs.add_parser("run")
    runs.add_argument("kernels", type=Path)
    runs.add_argument("result", type=Path)
    runs.add_argument("--vllm", type=Path)
    one = verbs.add_parser("section")
    one.add_argument("section", choices=SECTIONS)
    one.add_argument("kernels", type=Path)
    one.add_argument("result", type=Path)
    one.add_argument("vllm", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.verb == "compile":
        compile_all(arguments.kernels)
    elif arguments.verb == "run":
        run(arguments.kernels, arguments.result, arguments.vllm)
    else:
        torch.manual_seed(0)
        load(arguments.kernels)
        section = globals()[f"section_{arguments.section}"]
        arguments.result.write_text(json.dumps(section(arguments.vllm)))


if __name__ == "__main__":
    main()
