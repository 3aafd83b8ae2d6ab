"""Kernels compiled without a GPU: parameters, scratch, versions, bundles."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from torch._subclasses import FakeTensorMode

from plugins.aot.bundle import MANIFEST, read_bundle, write_bundle
from plugins.aot.compile import (
    CAPABILITIES,
    SHARED_BYTES,
    assemble,
    compile_kernel,
    entry_parameters,
    in_clusters,
    newest_ptx,
    runs_on,
    static_shared,
    strip_scratch,
)
from plugins.aot.driver import LoadedKernel
from plugins.aot.spec import KernelSpec
from plugins.qsa import kernel, plan
from plugins.qsa.plan import Geometry, Rotary, Tiles
from plugins.support.errors import CapabilityError, InputError, UsageError

G = Geometry()
FP8 = Geometry(cache_dtype="float8_e4m3fn")
SMALL = plan.merge_splits(G, 4)
KERNELS = {
    "prepare": plan.prepare(G, Rotary(axes=3), 1e-6),
    "select": plan.select_row(G, 2048, 4),
    "attend": plan.attend_whole(G, Tiles(64, 2, 2)),
    "unite": plan.unite_blocks(G, 4),
}


@pytest.mark.parametrize("capability", list(CAPABILITIES))
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_to_exactly_the_declared_parameters(name: str, capability: str) -> None:
    spec = KERNELS[name]
    kernel = compile_kernel(spec, capability)
    assert kernel.parameters == spec.parameters
    assert len(entry_parameters(kernel.ptx)) == len(spec.parameters)
    header = re.search(r"\.entry\s+\w+\s*\((.*?)\)", kernel.ptx, re.DOTALL)
    assert header is not None
    kinds = [line.split()[1] for line in header[1].split(",")]
    wanted = [".u64"] * len(spec.inputs) + [".u32"] * len(spec.scalars)
    assert kinds == wanted + [".u64"] * len(spec.outputs)
    assert kernel.shared_bytes <= SHARED_BYTES[capability] * 1024
    assert f".reqntid {kernel.threads}" in kernel.ptx
    assert "registers" in assemble(kernel.ptx, capability)


def test_float8_kernels_need_hardware_that_has_it() -> None:
    spec = plan.attend_whole(FP8, Tiles(64, 2, 2))
    assert "e4m3x2" in compile_kernel(spec, "8.9").ptx
    with pytest.raises(CapabilityError, match="float8"):
        compile_kernel(spec, "8.0")


def test_tiles_that_do_not_fit_are_refused() -> None:
    deep = plan.attend_whole(G, Tiles(64, 2, 3))
    assert compile_kernel(deep, "9.0").shared_bytes > 99 * 1024
    with pytest.raises(InputError, match="shared memory"):
        compile_kernel(deep, "8.9")


def test_the_ptx_version_follows_the_driver() -> None:
    assert newest_ptx(580) == 90 and newest_ptx(571) == 87 and newest_ptx(999) == 90
    with pytest.raises(InputError, match="too old"):
        newest_ptx(470)
    for version in (80, 90):
        assert f".version {version / 10}" in compile_kernel(SMALL, "9.0", version).ptx
    with pytest.raises(InputError, match="PTX version"):
        compile_kernel(SMALL, "12.0", 84)


def test_hopper_kernels_are_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = plan.attend_hopper(G, plan.HOPPER_ROWS)
    for other in ("8.0", "8.9", "10.0", "12.0"):
        with pytest.raises(CapabilityError, match="instructions") as caught:
            compile_kernel(spec, other)
        assert (caught.value.expected, caught.value.found) == ("compute capability 9.0", other)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    with FakeTensorMode(), pytest.raises(CapabilityError, match="instructions"):
        spec.launch({"q": torch.empty(1, device="cuda")}, {})
    plan.select_row(G, 512, 1).check((8, 9))


def test_kernels_that_an_old_triton_compiles_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = plan.attend_hopper(G, plan.HOPPER_ROWS)
    assert spec.compiles() and kernel.prefill_plan(G, (9, 0)).hopper
    monkeypatch.setattr(triton, "__version__", "3.8.1")
    with pytest.raises(CapabilityError, match="this Triton does not compile") as caught:
        compile_kernel(spec, "9.0")
    assert (caught.value.expected, caught.value.found) == ("Triton 3.9 or newer", "3.8")
    # In process there are others for every GPU.
    assert not kernel.prefill_plan(G, (9, 0)).hopper
    assert plan.select_row(G, 512, 1).compiles()
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    assert spec.compiles()


def test_code_for_9_0_and_newer_is_for_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_on("8.0", (8, 0)) and runs_on("8.0", (8, 9)) and runs_on("8.9", (12, 0))
    assert not runs_on("8.9", (8, 0))
    assert runs_on("9.0", (9, 0)) and not runs_on("9.0", (10, 0)) and not runs_on("12.0", (12, 1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    with pytest.raises(CapabilityError, match="another GPU") as caught:
        LoadedKernel(compile_kernel(SMALL, "9.0"))
    assert caught.value.found == "10.0"


def test_unknown_capability_is_refused() -> None:
    with pytest.raises(CapabilityError, match="compute capability"):
        compile_kernel(SMALL, "7.5")


def test_compiling_twice_gives_the_same_digest() -> None:
    first, second = compile_kernel(SMALL, "9.0"), compile_kernel(SMALL, "9.0")
    assert first.digest == second.digest
    assert first.digest != compile_kernel(plan.merge_splits(G, 8), "9.0").digest
    assert SMALL.key != plan.merge_splits(G, 8).key and SMALL.key.startswith("qsa_merge-")


PTX = """
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .u32 k_param_1,
	.param .u64 .ptr .global .align 1 k_param_2,
	.param .u64 .ptr .global .align 1 k_param_3
)
{
	ld.param.b64 %rd1, [k_param_0];
	ret;
}
"""


def test_scratch_pointers_go_only_when_unused() -> None:
    assert entry_parameters(PTX) == [f"k_param_{i}" for i in range(4)]
    assert entry_parameters(strip_scratch(PTX, "k", 2)) == ["k_param_0", "k_param_1"]
    used = PTX.replace("ret;", "ld.param.b64 %rd2, [k_param_3];\n\tret;")
    with pytest.raises(InputError, match="scratch"):
        strip_scratch(used, "k", 2)
    for wrong in (1, 5):
        with pytest.raises(InputError, match="number of parameters"):
            strip_scratch(PTX, "k", wrong)


def test_the_assembler_s_refusal_is_reported() -> None:
    broken = compile_kernel(SMALL, "9.0").ptx.replace("ret;", "nonsense;")
    with pytest.raises(InputError, match="assembler"):
        assemble(broken, "9.0")


def test_clusters_are_declared_in_the_kernel() -> None:
    plain = compile_kernel(SMALL, "9.0")
    paired = compile_kernel(replace(SMALL, cluster=2), "9.0")
    assert "cluster" not in plain.ptx
    assert paired.ptx == plain.ptx.replace(".reqntid", ".reqnctapercluster 2, 1, 1\n.reqntid")
    assert in_clusters(plain.ptx, 2) == paired.ptx and in_clusters(plain.ptx, 1) == plain.ptx
    assert "registers" in assemble(paired.ptx, "9.0")
    assert SMALL.key != replace(SMALL, cluster=2).key
    # GPUs without clusters.
    with pytest.raises(CapabilityError, match="no clusters"):
        compile_kernel(replace(SMALL, cluster=2), "8.9")


def test_clusters_are_not_left_to_triton_s_launcher() -> None:
    with pytest.raises(UsageError, match="clusters of 2"):
        replace(SMALL, cluster=2).launch({}, {})


def test_a_kernel_s_own_shared_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ".extern .shared .align 16 .b8 global_smem[];\n"
    assert static_shared(text) == 0
    text += "  .shared .align 1024 .b8 exchange[17408];\n.shared .align 8 .b8 more[24];\n"
    assert static_shared(text) == 17432
    from plugins.dsa import plan as dsa_plan

    paired = dsa_plan.window_whole_hopper(dsa_plan.SLIDING)
    dynamic = compile_kernel(paired, "9.0").shared_bytes
    monkeypatch.setitem(SHARED_BYTES, "9.0", -(-dynamic // 1024))
    with pytest.raises(InputError, match="more shared memory"):
        compile_kernel(paired, "9.0")


def test_argument_order_is_checked() -> None:
    with pytest.raises(UsageError, match="order"):
        replace(SMALL, inputs=SMALL.inputs[::-1])
    assert isinstance(replace(SMALL, name="other"), KernelSpec)


def test_bundles_round_trip_and_notice_changes(tmp_path: Path) -> None:
    kernels = {SMALL.key: compile_kernel(SMALL, "9.0")}
    write_bundle(tmp_path / "kernels", kernels)
    assert read_bundle(tmp_path / "kernels") == kernels
    with pytest.raises(UsageError, match="exists"):
        write_bundle(tmp_path / "kernels", kernels)
    with pytest.raises(InputError, match="no such kernel"):
        read_bundle(tmp_path / "kernels", ["other"])
    file = tmp_path / "kernels" / f"{SMALL.key}.ptx"
    file.write_text(file.read_text() + "// changed\n")
    with pytest.raises(InputError, match="was changed"):
        read_bundle(tmp_path / "kernels")
    (tmp_path / "kernels" / MANIFEST).write_text("[")
    with pytest.raises(InputError, match="not a directory of compiled kernels"):
        read_bundle(tmp_path / "kernels")


def test_float32_products_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Geometry(dtype="float32", cache_dtype="float32", width=32)
    spec = plan.attend_whole(exact, Tiles(16, 4, 1))
    assert "tf32" not in compile_kernel(spec, "9.0").ptx
    # What the compiler does unless it is told.
    monkeypatch.setattr(KernelSpec, "options", property(lambda self: {}))
    assert "tf32" in compile_kernel(spec, "9.0").ptx
