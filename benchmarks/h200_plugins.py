"""Plugin layers and CUDA graphs of the interpreter on a GPU: right, and how fast.

    python -m benchmarks.h200_plugins prepare DIR          (any machine)
    python -m benchmarks.h200_plugins run DIR RESULT.json  (the GPU machine; needs no TensorRT)

`prepare` defines the networks and writes them as programs: tiny float32 models with inputs and the
logits that their plugin layers' definitions give, and full-width two-layer slices (one full and one
sliding layer of Dots3 NOTE; one Gated DeltaNet and one sparse layer of Qwen3.8) with plugin layers
and with native ones, and the kernels, compiled. `run` compares the tiny models' logits, then times
the slices with random weights made on the device: generation calls step by step and as replayed
CUDA graphs, with kernels started early and without, and a chunk of a prompt. What attention gives
is compared between kernels, their definitions and native layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plugins.aot.bundle import read_bundle, write_bundle
from plugins.aot.compile import compile_kernel
from plugins.aot.driver import LoadedKernel
from plugins.aot.launch import provide
from plugins.aot.spec import KernelSpec
from runtime.executors.graphs import RepeatedCalls
from runtime.executors.stream import CudaStream
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.program import Program, walk

TARGET = "9.0"
KERNELS = "kernels"
MAX_SEQ_LEN = 8192
CHUNK = 1024
PAST = {CHUNK: MAX_SEQ_LEN - CHUNK}
PAST_OF_STEPS = 8000
# Slots and tokens per slot of a generation call.
CALLS = {"dots3": [(1, 1), (8, 1), (32, 1), (8, 4)], "qwen38": [(1, 1), (32, 1)]}
READ_BYTES_PER_S = 4.3e12
TINY_TOLERANCE = 1e-4


# -- prepare ---------------------------------------------------------------------------------------


def released_dots3() -> Any:
    """The released widths with one full and one sliding layer; the first has a dense MLP."""
    from converters.dots3.config import Mla
    from tests.converters.dots3.tiny import tiny

    small = tiny("bfloat16").config
    full = {"heads": 128, "q_rank": 1024, "kv_rank": 512, "nope": 128, "rope": 64, "value": 128}
    sliding = {"heads": 64, "q_rank": 1024, "kv_rank": 1024, "nope": 192, "rope": 64, "value": 128}
    block = small.dots3.model_copy(
        update={
            "layer_types": ["full_attention", "sliding_attention"],
            "full": Mla(**full, rotary_base=8e7),
            "sliding": Mla(**sliding, rotary_base=5e4),
            "sliding_window": 513,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
            "intermediate_size": 13824,
            "moe_intermediate_size": 1536,
            "shared_intermediate_size": 1536,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "draft_layers": 0,
        }
    )
    return small.model_copy(
        update={
            "vocab_size": 152064,
            "vocab_size_padded": 152064,
            "hidden_size": 5120,
            "num_hidden_layers": 2,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "max_position_embeddings": 524288,
            "dots3": block,
        }
    )


def released_qwen38() -> Any:
    """The released widths with one Gated DeltaNet and one sparse layer, without n-grams."""
    from tests.converters.qwen38.test_network_real_size import _released

    config = _released()
    block = config.qwen38.model_copy(
        update={
            "layer_types": ["linear_attention", "full_attention"],
            "ple_layer_ids": [],
            "ple_layers": [],
        }
    )
    return config.model_copy(update={"num_hidden_layers": 2, "qwen38": block})


class Headers:
    """What conversion would write, as a weight source without values."""

    def __init__(self, wanted: Iterable[Any]) -> None:
        from plugins.trt.weights import WeightInfo

        self._infos = {
            w.target: WeightInfo(
                "float32" if w.target.endswith("router.bias") else "bfloat16", w.shape
            )
            for w in wanted
        }

    def names(self) -> Iterable[str]:
        return self._infos

    def info(self, name: str) -> Any:
        return self._infos.get(name)

    def tensor(self, name: str) -> Tensor:
        raise AssertionError(f"{name} is an input; its values must not be read")


def traced(
    family: str, config: Any, source: Any, phase: Any, limits: Any, plugins: bool
) -> Program:
    """One network of a slice."""
    from converters.dots3.network import define as define_dots3
    from converters.qwen38.network import define as define_qwen38
    from plugins.trt.backend import load_backend
    from plugins.trt.network import Network
    from plugins.trt.weights import WeightPolicy
    from runtime.interpreter.trace import trace
    from tests.plugins.full_trt import capability_for, full_backend

    backend = full_backend() if plugins else load_backend()
    capability = capability_for(TARGET) if plugins else backend.capability()
    net = Network(backend, capability, source, WeightPolicy("inputs"))
    define = define_dots3 if family == "dots3" else define_qwen38
    define(net, config, phase, limits)
    return trace(net)


def prepare(directory: Path) -> None:
    """Write programs and expected logits."""
    from converters.definition import EngineLimits
    from converters.dots3.weights import wanted_tensors as wanted_dots3
    from converters.qwen38.weights import wanted_tensors as wanted_qwen38

    directory.mkdir(parents=True)
    dots3, qwen38 = released_dots3(), released_qwen38()
    slices = {
        "dots3": (dots3, Headers(wanted_dots3(dots3))),
        "qwen38": (qwen38, Headers(wanted_qwen38(qwen38, stacked_experts=True))),
    }
    kernels: dict[str, KernelSpec] = {}
    for family, (config, source) in slices.items():
        for slots, tokens in [*CALLS[family], (1, CHUNK)]:
            drafts = 0 if tokens == CHUNK else tokens - 1
            limits = EngineLimits(slots, MAX_SEQ_LEN, chunk_size=CHUNK, max_draft_len=drafts)
            phase = "context" if tokens == CHUNK else "generation"
            for kind in ("plugin", "native"):
                program = traced(family, config, source, phase, limits, kind == "plugin")
                program.save(directory / f"{family}.{slots}x{tokens}.{kind}.program")
                kernels |= kernels_of(program)
    for family in slices:
        torch.save(tiny_calls(family, directory), directory / f"{family}.tiny.pt")
        for path in directory.glob(f"{family}.tiny.*.program"):
            kernels |= kernels_of(Program.load(path))
    compiled = {key: compile_kernel(spec, TARGET) for key, spec in kernels.items()}
    write_bundle(directory / KERNELS, compiled)


def kernels_of(program: Program) -> dict[str, KernelSpec]:
    """The program's kernels by key; on 9.0 all are launched as compiled for TensorRT."""
    from plugins.operations import OPERATIONS

    nodes = [node for node in walk(program.nodes) if node.kind == "plugin"]
    specs = [OPERATIONS[n.attributes["op"]].spec(n.attributes["values"]) for n in nodes]
    return {s.key: s for s in specs}


def tiny_calls(family: str, directory: Path) -> dict[str, Any]:
    """Chunks, uniform decode beside a padding slot and a slot used again, on a tiny model."""
    from converters.definition import EngineLimits
    from tests.converters.dots3.tiny import tiny as tiny_dots3
    from tests.converters.qwen38.tiny import tiny as tiny_qwen38

    checkpoint = tiny_dots3(index_topk=16) if family == "dots3" else tiny_qwen38()
    limits = EngineLimits(2, 192, chunk_size=128, max_draft_len=2, max_logits_tokens=128)
    driver = checkpoint.driver(limits, plugins=True)
    ids = torch.randint(3, 500, (150,), generator=torch.Generator().manual_seed(5)).tolist()
    calls: list[Any] = []

    def call(phase: Any, pieces: list[list[int]]) -> None:
        run = driver.runs[phase].run

        def keep(inputs: Mapping[str, Tensor], fetch: Any = ()) -> dict[str, Tensor]:
            given = {n: t.clone() for n, t in inputs.items() if n not in driver.memory}
            out: dict[str, Tensor] = run(inputs, fetch=fetch)
            calls.append((phase, given, [len(p) for p in pieces], out["logits"].clone()))
            return out

        driver.runs[phase].run = keep
        driver.call(phase, pieces)
        driver.runs[phase].run = run

    call("context", [ids[:40], []])
    call("context", [ids[40:47], ids[:3]])
    for start in range(47, 80, 3):
        call("generation", [ids[start : start + 3], ids[start - 44 : start - 41]])
    for start in range(80, 95, 3):
        call("generation", [[], ids[start : start + 3]])
    driver.free(0)
    calls.append(("free", {}, [0], None))
    call("context", [ids[:100], []])
    for start in range(100, 121, 3):
        call("generation", [ids[start : start + 3], []])
    for phase, program in driver.programs.items():
        program.save(directory / f"{family}.tiny.{phase}.program")
    kinds = driver.definitions["context"].kinds
    memory = {n: kinds[n] for n in driver.memory}
    return {"weights": dict(driver.weights), "memory": memory, "calls": calls}


# -- run -------------------------------------------------------------------------------------------


class Slots:
    """Caches and states of a program's slots on the device, states in one copy."""

    def __init__(self, program: Program, slots: int, device: str) -> None:
        self.tensors = {}
        for name in program.inputs:
            info = program.tensors[name]
            if "cache" in name or "state" in name:
                self.tensors[name] = torch.zeros(
                    (slots, *info.shape[1:]), dtype=getattr(torch, info.dtype), device=device
                )

    def inputs(self, count: int) -> dict[str, Tensor]:
        return {name: tensor[:count] for name, tensor in self.tensors.items()}

    def keep(self, outputs: Mapping[str, Tensor], count: int) -> None:
        for name, tensor in self.tensors.items():
            if f"{name}.next" in outputs:
                tensor[:count].copy_(outputs[f"{name}.next"])


def tiny_logits(
    programs: Mapping[str, Program], saved: Mapping[str, Any], device: str, graphs: bool
) -> tuple[list[Tensor], float]:
    """Logits of all calls, and their largest difference from the expected ones."""
    runs = {p: Interpreter(x, saved["weights"], device) for p, x in programs.items()}
    slots = Slots(programs["context"], 2, device)
    repeated = RepeatedCalls(CudaStream(torch.device(device)), torch.device(device))
    worst, logits = 0.0, []

    def work(phase: str, bound: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs = runs[phase].run({**bound, **slots.inputs(2)})
        slots.keep(outputs, 2)
        return outputs

    def step(bound: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return work("generation", bound)

    for phase, inputs, lengths, wanted in saved["calls"]:
        if phase == "free":
            for name, tensor in slots.tensors.items():
                if "state" in name:
                    tensor[0].zero_()
            continue
        if graphs and phase == "generation":
            capturable = lambda: not runs["generation"].host_reads  # noqa: E731
            found = repeated.run(2, inputs, step, capturable)["logits"]
        else:
            found = work(phase, {n: t.to(device) for n, t in inputs.items()})["logits"]
        assert torch.isfinite(found).all()
        for slot, length in enumerate(lengths):
            difference = (found[slot, :length].cpu() - wanted[slot, :length]).abs()
            worst = max(worst, float(difference.max()) if length else 0.0)
        logits.append(found.cpu().clone())
    captured = [call for call in repeated._forms.values() if call.replay is not None]
    assert len(captured) == int(graphs)
    return logits, worst


def check_tiny(directory: Path, family: str, device: str) -> dict[str, Any]:
    """Logits by kernels against those by definition, and replayed graphs against both."""
    saved = torch.load(directory / f"{family}.tiny.pt", weights_only=True)
    programs = {
        phase: Program.load(directory / f"{family}.tiny.{phase}.program")
        for phase in ("context", "generation")
    }
    eager, difference = tiny_logits(programs, saved, device, False)
    graphs, with_graphs = tiny_logits(programs, saved, device, True)
    used = {n.attributes["op"] for p in programs.values() for n in p.nodes if n.kind == "plugin"}
    return {
        "eager": difference,
        "graphs": with_graphs,
        "graphs equal eager": all(map(torch.equal, eager, graphs)),
        "plugins": sorted(used),
    }


def random_weights(program: Program, device: str) -> dict[str, Tensor]:
    """Values in whose range products of any depth stay finite."""
    generator = torch.Generator(device).manual_seed(1)
    weights = {}
    for name, key in program.weights.items():
        info = program.tensors[name]
        value = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device=device)
        if len(info.shape) == 1:
            value.uniform_(0.5, 1.5, generator=generator)
        else:
            value.normal_(0.0, info.shape[-1] ** -0.5, generator=generator)
        weights[key] = value
    return weights


def timed(work: Callable[[], object], repeats: int, inner: int = 1) -> float:
    """Median microseconds of one call, by device events."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / inner)
    return statistics.median(times)


def read_floor(program: Program, slots: int, tokens: int) -> dict[str, float]:
    """Bytes that a call must read: weights used, the latents or blocks chosen, index keys."""
    size = {n: 2 for n in ("bfloat16", "float16")} | {"float32": 4, "int32": 4}
    weights = 0.0
    for name, key in program.weights.items():
        info = program.tensors[name]
        count = float(torch.Size(info.shape).numel() * size[info.dtype])
        if "vocab_embedding" in key:
            count = 0.0
        elif ".experts." in key:
            chosen = 8 if "dots3" in key or info.shape[0] == 256 else 10
            # Experts that some token chooses, of E, when each takes `chosen` at random.
            share = 1.0 - (1.0 - chosen / info.shape[0]) ** (slots * tokens)
            count *= share
        weights += count
    memory = 0.0
    for name in program.inputs:
        info = program.tensors[name]
        row = info.shape[-1] * 2
        if name.startswith("latent_cache"):
            memory += slots * tokens * 2048 * row
        elif name.startswith("index_key_cache"):
            rows = PAST_OF_STEPS // (1 if info.shape[-2] > 4096 else 4)
            memory += slots * rows * row
        elif name.startswith("window_state"):
            memory += slots * 513 * row
        elif name.startswith(("key_cache", "value_cache")):
            memory += slots * tokens * 2048 * row * info.shape[1]
        elif name.startswith("recurrent_state"):
            memory += 2.0 * slots * float(torch.Size(info.shape[1:]).numel() * 4)
    return {
        "weight bytes": weights,
        "memory bytes": memory,
        "floor us": (weights + memory) / READ_BYTES_PER_S * 1e6,
    }


def definition(op: str) -> Callable[..., tuple[Tensor, ...]]:
    """An operation's definition in torch, as the interpreter calls implementations."""
    from plugins.operations import DEFINITIONS, OPERATIONS

    def run(inputs: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        spec = OPERATIONS[op].spec(attributes)
        given = {a.name: tensor for a, tensor in zip(spec.inputs, inputs, strict=True)}
        made = DEFINITIONS[op](given, attributes)
        made |= {after: given[before] for after, before in spec.aliases.items()}
        return tuple(made[a.name] for a in spec.outputs)

    return run


@contextmanager
def as_tensorrt() -> Iterator[None]:
    """Launch kernels as TensorRT does: each starts when its predecessor has ended."""
    run = LoadedKernel.run
    LoadedKernel.run = partialmethod(run, early=False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        LoadedKernel.run = run  # type: ignore[method-assign]


def time_kind(
    program: Program, weights: Mapping[str, Tensor], slots: int, tokens: int, device: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One program, eager and, if it generates, replayed; also what its attention layers give."""
    past = PAST.get(tokens, PAST_OF_STEPS)
    run = Interpreter(program, weights, device)
    memory = Slots(program, slots, device)
    generator = torch.Generator(device).manual_seed(2)
    for tensor in memory.tensors.values():
        tensor.normal_(0.0, 0.5, generator=generator)
    first = {name: tensor.clone() for name, tensor in memory.tensors.items() if "state" in name}
    inputs = {
        "input_ids": torch.arange(slots * tokens, dtype=torch.int32).view(slots, tokens) + 5,
        "past_lengths": torch.full((slots,), past, dtype=torch.int32),
        "new_lengths": torch.full((slots,), tokens, dtype=torch.int32),
        "logits_positions": torch.arange(min(tokens, 4), dtype=torch.int32).repeat(slots, 1),
        "attention_span": torch.zeros(MAX_SEQ_LEN, dtype=torch.int32),
        "rejected_lengths": torch.zeros(slots, dtype=torch.int32),
    }
    inputs = {name: tensor for name, tensor in inputs.items() if name in program.inputs}
    on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
    taps = sorted(name for name in program.taps if name.endswith(".mixer"))

    def work(bound: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs = run.run({**bound, **memory.inputs(slots)})
        memory.keep(outputs, slots)
        return outputs

    def restore() -> None:
        for name, tensor in first.items():
            memory.tensors[name].copy_(tensor)

    result: dict[str, Any] = {}
    tapped = run.run({**on_device, **memory.inputs(slots)}, fetch=taps)
    attended = {name: tapped[name].float().clone() for name in taps}
    ops = {n.attributes["op"] for n in program.nodes if n.kind == "plugin"}
    if ops:
        restore()
        by_definition = Interpreter(
            program, weights, device, plugin_ops={op: definition(op) for op in ops}
        )
        tapped = by_definition.run({**on_device, **memory.inputs(slots)}, fetch=taps)
        for name in taps:
            wrong = (attended[name] - tapped[name].float()).norm() / tapped[name].float().norm()
            result[f"{name}, kernels against definitions"] = float(wrong)
    restore()
    wanted = work(on_device)["logits"].clone()
    result["eager us"] = timed(lambda: work(on_device), 15)
    result["steps"] = len(next(reversed(run.plans.values())).steps)
    result["gib"] = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    if tokens == CHUNK:
        return result, attended

    def graphs() -> dict[str, Any]:
        stream = CudaStream(torch.device(device))
        repeated = RepeatedCalls(stream, torch.device(device))

        def replayed() -> Mapping[str, Tensor]:
            return repeated.run(0, inputs, work, lambda: not run.host_reads)

        for _ in range(3):
            replayed()
        call = repeated._forms[0]
        assert call.replay is not None, run.host_reads
        restore()
        same = bool(torch.equal(replayed()["logits"], wanted))
        with stream.ordered():
            graph = timed(call.replay, 15, 5)
        inputs_too = timed(replayed, 15)
        return {"graph us": graph, "graph with inputs us": inputs_too, "graph equals eager": same}

    result |= graphs()
    if ops:
        with as_tensorrt():
            result |= {f"{name}, no early starts": value for name, value in graphs().items()}
    return result, attended


def time_slice(
    directory: Path,
    family: str,
    slots: int,
    tokens: int,
    weights: Mapping[str, Tensor],
    device: str,
) -> dict[str, Any]:
    """One form of call, with plugin layers and with native ones."""
    result: dict[str, Any] = {}
    attended: dict[str, dict[str, Tensor]] = {}
    for kind in ("native", "plugin"):
        program = Program.load(directory / f"{family}.{slots}x{tokens}.{kind}.program")
        result[kind], attended[kind] = time_kind(program, weights, slots, tokens, device)
        if tokens != CHUNK:
            result |= read_floor(program, slots, tokens)
    for name, wanted in attended["native"].items():
        found = attended["plugin"][name]
        result[f"{name}, plugin against native"] = float((found - wanted).norm() / wanted.norm())
    return result


def run(directory: Path, out: Path) -> None:
    """Check, time, write."""
    device, started = "cuda:0", time.time()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "max_seq_len": MAX_SEQ_LEN,
        "past": PAST_OF_STEPS,
    }

    provide(read_bundle(directory / KERNELS))

    def save() -> None:
        out.write_text(json.dumps(result, indent=1) + "\n")

    for family in CALLS:
        try:
            result[f"{family} tiny"] = check_tiny(directory, family, device)
        except Exception as error:
            result[f"{family} tiny"] = f"{type(error).__name__}: {error}"[:1500]
        print(
            family, "tiny", result[f"{family} tiny"], f"{time.time() - started:.0f} s", flush=True
        )
        save()
    for family, calls in CALLS.items():
        some = Program.load(next(directory.glob(f"{family}.*.native.program")))
        weights = random_weights(some, device)
        for slots, tokens in [*calls, (1, CHUNK)]:
            name = f"{family} {slots} x {tokens}"
            try:
                result[name] = time_slice(directory, family, slots, tokens, weights, device)
            except Exception as error:
                result[name] = f"{type(error).__name__}: {error}"[:1500]
            print(name, json.dumps(result[name]), f"{time.time() - started:.0f} s", flush=True)
            save()
        del weights
        torch.cuda.empty_cache()
    failed = [name for name, value in result.items() if isinstance(value, str) and "rror" in value]
    for family in CALLS:
        tiny = result[f"{family} tiny"]
        if not isinstance(tiny, dict) or tiny["eager"] > TINY_TOLERANCE:
            failed.append(f"{family} tiny")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("prepare", "run"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("result", type=Path, nargs="?")
    options = parser.parse_args()
    if options.what == "prepare":
        prepare(options.directory)
    else:
        run(options.directory, options.result)


if __name__ == "__main__":
    main()
