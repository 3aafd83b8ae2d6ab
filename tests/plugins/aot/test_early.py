"""Kernels that start before their predecessor has ended: order, launch, results on a GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensorMode

from plugins.aot import launch as launching
from plugins.aot.compile import CompiledKernel, assemble, compile_kernel, wait_first
from plugins.aot.driver import LoadedKernel
from plugins.aot.spec import KernelSpec
from plugins.dsa import plan as dsa_plan
from plugins.mtp import plan as mtp_plan
from plugins.qsa import kernel, plan
from plugins.qsa.plan import Geometry
from plugins.support.errors import InputError, UsageError

G = Geometry()
WAIT, HAND_OVER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
MERGE = plan.merge_splits(G, 4)
# Plain kernels, one with several groups of warps, one in clusters.
KERNELS = {
    "merge": MERGE,
    "select": plan.select_row(G, 512, 1),
    "norm": mtp_plan.rms_norm(mtp_plan.Rows()),
    "hopper": plan.attend_hopper(G, plan.HOPPER_ROWS),
    "window": dsa_plan.window_split_hopper(dsa_plan.SLIDING),
}
MEMORY = re.compile(r"\b(LDG|LDGSTS|LD|STG|ST|ATOM|ATOMG|RED|REDG|UBLKCP|UTMALDG|UTMASTG)\b")


def body(ptx: str) -> list[str]:
    """The entry point's instructions; declarations and debug lines left out."""
    lines = ptx[ptx.index("{", ptx.index(".entry")) + 1 :].splitlines()
    return [line.strip() for line in lines if re.match(r"\s*[a-z@]", line)]


def machine_code(ptx: str, folder: Path) -> list[str]:
    """The assembled instructions in order."""
    from triton.backends.nvidia.compiler import get_ptxas

    (folder / "kernel.ptx").write_text(ptx)
    made = ["--gpu-name=sm_90a", str(folder / "kernel.ptx"), "-o", str(folder / "kernel.cubin")]
    subprocess.run([get_ptxas(90).path, *made], check=True)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    listed = subprocess.run(
        [tool, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    )
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", listed.stdout)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_waits_before_it_does_anything_else(name: str, tmp_path: Path) -> None:
    if not KERNELS[name].compiles():
        pytest.skip("this Triton is too old for the kernel")
    compiled = compile_kernel(KERNELS[name], "9.0")
    assert compiled.waits
    assert body(compiled.ptx)[:2] == [WAIT, HAND_OVER]
    assert compiled.ptx.count(WAIT) == compiled.ptx.count(HAND_OVER) == 1
    code = machine_code(compiled.ptx, tmp_path)
    first = next(i for i, line in enumerate(code) if MEMORY.search(line))
    assert code.index("ACQBULK") < code.index("PREEXIT") < len(code)
    assert code.index("ACQBULK") < first
    assert not any(re.match(r"(@\S+ )?(BRA|BRX|CALL)", c) for c in code[: code.index("ACQBULK")])


def test_gpus_without_early_starts_get_plain_kernels() -> None:
    for capability in ("8.0", "8.9"):
        plain = compile_kernel(MERGE, capability)
        assert "griddepcontrol" not in plain.ptx and not plain.waits
    newer = compile_kernel(MERGE, "12.0")
    assert newer.waits and "registers" in assemble(newer.ptx, "12.0")


def test_a_wait_behind_the_first_access_does_not_count() -> None:
    compiled = compile_kernel(MERGE, "9.0")
    load = re.search(r"\n[^\n]*\bld\.global[^\n]*\n", compiled.ptx)
    assert load is not None
    without = compiled.ptx.replace(f"\t{WAIT}\n", "")
    late = without.replace(load[0], f"{load[0]}\t{WAIT}\n", 1)
    assert "registers" in assemble(late, "9.0")
    for wrong in (without, late):
        assert not replace(compiled, ptx=wrong).waits
    assert replace(compiled, ptx=wait_first(without)).waits


class Recorded(LoadedKernel):
    """Notes launches; has no device."""

    def __init__(self, compiled: CompiledKernel) -> None:
        self.kernel = compiled
        self.starts: list[bool] = []

    def launch(self, grid: Any, arguments: Any, early: bool = False) -> None:
        self.starts.append(early)


def merge_call(device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, int]]:
    parts = {"partial": (4, 2, 24, 256), "partial_lse": (4, 2, 24)}
    tensors = {name: torch.zeros(shape, device=device) for name, shape in parts.items()}
    for name in ("gate", "out"):
        tensors[name] = torch.zeros(2, 1, 6144, dtype=torch.bfloat16, device=device)
    return tensors, {"rows": 2, "splits": 4}


def test_kernels_start_early_where_they_wait() -> None:
    for capability, wanted in (("9.0", True), ("8.9", False)):
        loaded = Recorded(compile_kernel(MERGE, capability))
        loaded.run(MERGE, *merge_call())
        loaded.run(MERGE, *merge_call(), early=False)
        loaded.run(replace(MERGE, early=False), *merge_call())
        assert loaded.starts == [wanted, False, False]
    # A GPU of compute capability 10.0 runs some kernels that were compiled for 8.9.
    with pytest.raises(UsageError, match="does not wait") as caught:
        LoadedKernel.launch(loaded, (1,), [], early=True)
    assert caught.value.where == "merge_splits"


def test_only_hopper_launches_every_kernel_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, by_triton = Recorded(compile_kernel(MERGE, "9.0")), []
    monkeypatch.setattr(launching, "_loaded", lambda _: loaded)
    monkeypatch.setattr(KernelSpec, "launch", lambda spec, *_: by_triton.append(spec.name))
    monkeypatch.setattr(torch.cuda, "device", lambda _: FakeTensorMode())
    for capability, early, plain in (((9, 0), 1, 0), ((8, 9), 0, 1), ((12, 0), 0, 1)):
        loaded.starts.clear()
        by_triton.clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        with FakeTensorMode():
            launching.launch(MERGE, *merge_call("cuda"))
        assert (loaded.starts, by_triton) == ([True] * early, ["qsa_merge"] * plain)
    launching.launch(MERGE, *merge_call())
    assert by_triton[1:] == ["qsa_merge"]


def test_kernels_are_compiled_for_the_installed_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launching, "LoadedKernel", Recorded)
    for cuda, version in ((12000, "8.0"), (12040, "8.4"), (12070, "8.5"), (13010, "8.7")):
        monkeypatch.setattr(launching, "_LOADED", {})
        monkeypatch.setattr(launching, "driver_cuda", lambda c=cuda: c)
        assert f".version {version}" in launching._loaded(MERGE).kernel.ptx
    monkeypatch.setattr(launching, "_LOADED", {})
    monkeypatch.setattr(launching, "driver_cuda", lambda: 11080)
    with pytest.raises(InputError, match="driver is too old"):
        launching._loaded(MERGE)


# -- on a GPU --------------------------------------------------------------------------------------


def has_early_starts() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


on_hopper = pytest.mark.skipif(not has_early_starts(), reason="needs compute capability 9.0")
ROWS, BLOCKS = 8, 4096


class Chain:
    """Scores, selection, attention in runs and their sum, on fixed tensors."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.how = kernel.decode_plan(G, ROWS)
        group = kernel.group_size(BLOCKS)
        self.specs = {
            "score": plan.score_blocks(G, 1, kernel.score_tile(group), group),
            "select": kernel.select_spec(G, BLOCKS),
            "attend": kernel.decode_partial(G, self.how),
            "merge": plan.merge_splits(G, self.how.splits),
        }
        capability = "9.0"
        self.loaded = {
            n: LoadedKernel(compile_kernel(s, capability)) for n, s in self.specs.items()
        }
        context = BLOCKS * G.ratio

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, device="cuda", dtype=dtype)

        ids = empty(ROWS, 1, G.blocks, dtype=torch.int32)
        self.made = {
            "scores": empty(ROWS, 1, BLOCKS),
            "maxima": empty(ROWS, 1, BLOCKS // group),
            "partial": empty(self.how.splits, ROWS, G.heads, G.width),
            "partial_lse": empty(self.how.splits, ROWS, G.heads),
            "out": empty(ROWS, 1, G.heads * G.width, dtype=torch.bfloat16),
        }
        self.ids = ids
        self.tensors = self.made | {
            "index_query": draw(ROWS, G.index_heads, 1, G.index_width),
            "index_keys": draw(ROWS, BLOCKS, G.index_width),
            "past": torch.full((ROWS,), context - 1, dtype=torch.int32, device="cuda"),
            "new": torch.ones(ROWS, dtype=torch.int32, device="cuda"),
            "q": draw(ROWS, G.heads, 1, G.width),
            "k_cache": draw(ROWS, G.kv_heads, context, G.width),
            "v_cache": draw(ROWS, G.kv_heads, context, G.width),
            "gate": draw(ROWS, 1, G.heads * G.width),
            "ids": ids,
            "blocks": ids,
        }
        self.values = {
            "S": 1, "C": context, "NB": BLOCKS, "rows": ROWS, "batch": ROWS,
            "splits": self.how.splits, "tiles": kernel.score_tiles(ROWS, 1, BLOCKS),
        }  # fmt: skip

    def run(self, early: bool) -> None:
        """Poison everything that the kernels make, then make it."""
        self.ids.fill_(-1)
        for tensor in self.made.values():
            tensor.fill_(float("nan"))
        for name, spec in self.specs.items():
            self.loaded[name].run(spec, self.tensors, self.values, early)

    def replayed(self, early: bool, times: int = 20) -> list[Tensor]:
        """Outputs of replays of one graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run(early)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.run(early)
            found = []
            for _ in range(times):
                graph.replay()
                found.append(self.made["out"].clone())
            torch.cuda.synchronize()
        return found


@pytest.fixture(scope="module")
def chain() -> Chain:
    return Chain()


@on_hopper
def test_early_starts_change_no_bit(chain: Chain) -> None:
    chain.run(early=False)
    wanted = chain.made["out"].clone()
    assert torch.isfinite(wanted).all()
    chain.run(early=True)
    assert torch.equal(chain.made["out"], wanted)
    for early in (False, True):
        assert all(torch.equal(found, wanted) for found in chain.replayed(early))


@on_hopper
@pytest.mark.parametrize("name", ["attend", "merge"])
def test_without_the_wait_results_are_wrong(
    chain: Chain, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = chain.replayed(early=True, times=1)[0]
    compiled = chain.loaded[name].kernel
    monkeypatch.setattr(CompiledKernel, "waits", True)
    monkeypatch.setattr(CompiledKernel, "check", lambda _: None)
    hasty = replace(compiled, ptx=compiled.ptx.replace(WAIT, ""))
    monkeypatch.setitem(chain.loaded, name, LoadedKernel(hasty))
    assert not all(torch.equal(found, right) for found in chain.replayed(early=True))


@on_hopper
@pytest.mark.parametrize("write", [Tensor.zero_, lambda t: t.copy_(torch.ones_like(t))])
def test_copies_and_fills_in_front_are_waited_for(
    chain: Chain, write: Callable[[Tensor], Tensor]
) -> None:
    """They are nodes of another kind in a graph, and the kernels say nothing about them."""
    tensors, values = merge_call("cuda")
    loaded = LoadedKernel(compile_kernel(MERGE, "9.0"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        loaded.run(MERGE, tensors, values)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            write(tensors["partial"])
            loaded.run(MERGE, tensors, values)
        tensors["partial"].fill_(5.0)
        graph.replay()
        torch.cuda.synchronize()
    # A closed half of what was written: gates of 0.
    assert torch.equal(tensors["out"], (write(torch.empty(2, 1, 6144)) / 2).bfloat16().cuda())
