"""Plugin layers: argument order, shapes, launch sizes; kernels compiled without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from plugins.aot.compile import assemble, compile_kernel, entry_parameters, static_shared
from plugins.dsa import chain, kernel, plan
from plugins.dsa.plan import SLIDING, Geometry
from plugins.dsa.plugin import COMPILED_FOR, OPERATIONS, geometry_attributes
from plugins.support.errors import UsageError

FULL = Geometry()
BY_NAME = {operation.id: operation for operation in OPERATIONS}


class Shape:
    """A symbolic shape as TensorRT gives it: it can only be indexed."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    def __getitem__(self, axis: int) -> int:
        return self._sizes[axis]

    __iter__ = None


B, S, C, R = 3, 2, 9000, 516
SHAPES: dict[str, dict[str, Shape]] = {
    "score": {
        "index_query": Shape(B, S, 64, 128),
        "index_keys": Shape(B, 1, C, 128),
        "head_weights": Shape(B, S, 64),
    },
    "select_chunk": {"scores": Shape(B, S, 131072)},
    "select_among": {"scores": Shape(B, S, 131072), "candidates": Shape(B * S, 8192)},
    "attend": {"q_latent": Shape(B, S, 128, 512), "cache": Shape(B, 1, C, 576)},
    "attend_pair": {"q_latent": Shape(B, S, 128, 512), "cache": Shape(B, 1, C, 576)},
    "attend_split": {"q_latent": Shape(B, S, 128, 512), "cache": Shape(B, 1, C, 576)},
    "merge": {"gate": Shape(B, S, 128)},
    "window_scores": {"q_latent": Shape(B, S, 64, 1024), "cache": Shape(B, 1, R, 1088)},
    "window_values": {"gate": Shape(B, S, 64), "cache": Shape(B, 1, R, 1088)},
    "window": {"gate": Shape(B, S, 64), "cache": Shape(B, 1, R, 1088)},
    "window_split": {"q_latent": Shape(B, S, 64, 1024), "cache": Shape(B, 1, R, 1088)},
    "dense": {
        "q_nope": Shape(B, S, 128, 128),
        "expanded": Shape(B, C, 128, 256),
        "cache": Shape(B, 1, C, 576),
    },
}
OUT = {
    "score": {"scores": (B, S, C)},
    "select_chunk": {"chosen": (B * S, 8192)},
    "select_among": {"chosen": (B * S, 2048)},
    "attend": {"out": (B, S, 128, 512)},
    "attend_pair": {
        "out": (B, S, 128, 512),
        "partial": (B, S, 2, 128, 256),
        "partial_lse": (B, S, 2, 128),
    },
    "attend_split": {"partial": (B, S, 2, 128, 512), "partial_lse": (B, S, 2, 128)},
    "merge": {"out": (B, S, 128, 512)},
    "window_scores": {
        "probabilities": (B, S, 64, 576),
        "tile_max": (B, S, 9, 64),
        "tile_sum": (B, S, 9, 64),
    },
    "window_values": {"out": (B, S, 64, 1024)},
    "window": {"out": (B, S, 64, 1024)},
    "window_split": {"partial": (B, S, 2, 64, 1024), "partial_lse": (B, S, 2, 64)},
    "dense": {"out": (B, S, 128, 128)},
}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_shapes_and_launch(name: str) -> None:
    operation = BY_NAME[f"dsa::{name}"]
    shapes: dict[str, Any] = dict(SHAPES[name])
    if name.startswith("attend"):
        shapes["tokens"] = Shape(B, S, 2048)
    spec = operation.spec(operation.example)
    assert operation.outputs(shapes, operation.example) == OUT[name]
    values = operation.values(shapes, operation.example)
    assert set(spec.scalars) <= set(values)
    grid = spec.grid(values)
    assert all(isinstance(extent, int) and extent > 0 for extent in grid)


def test_every_operation_is_covered_and_has_typed_attributes() -> None:
    assert {operation.id for operation in OPERATIONS} == {f"dsa::{name}" for name in SHAPES}
    for operation in OPERATIONS:
        for name, kind in operation.attributes.items():
            assert type(operation.example[name]) is kind


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0", "12.0"])
@pytest.mark.parametrize(
    "name", ["attend", "window_values", "dense", "select_chunk", "select_among"]
)
def test_kernels_compile_for_every_gpu(name: str, capability: str) -> None:
    operation = BY_NAME[f"dsa::{name}"]
    attributes = dict(operation.example)
    small = capability in ("8.9", "12.0")
    if "small" in attributes:
        attributes["small"] = int(small)
    spec = operation.spec(attributes)
    compiled = compile_kernel(spec, COMPILED_FOR.get(capability, capability))
    assert len(entry_parameters(compiled.ptx)) == len(spec.tensors) + len(spec.scalars)
    limit = {"8.0": 163, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}[capability]
    assert compiled.shared_bytes <= limit * 1024


@pytest.mark.parametrize(
    "spec",
    [
        plan.attend_whole_hopper(FULL),
        plan.attend_split_hopper(FULL),
        plan.attend_pair_hopper(FULL),
        plan.window_whole_hopper(SLIDING),
        plan.window_split_hopper(SLIDING),
        plan.attend_dense_hopper(FULL),
        plan.attend_dense_hopper(SLIDING),
    ],
    ids=lambda spec: spec.key,
)
def test_hopper_kernels_compile(spec: Any) -> None:
    compiled = compile_kernel(spec, "9.0")
    # A loader and two consumers of four warps each; absorbed attention also has a scorer.
    assert compiled.threads == (384 if spec.name == "dsa_attend_dense" else 512)
    own = static_shared(compiled.ptx)
    assert own + compiled.shared_bytes <= 227 * 1024
    # What a launch asks for lies behind the array in which windows exchange scores, and tiles need
    # that border.
    assert own % 1024 == 0 and (own > 0) == ("window" in spec.name)
    assert (".reqnctapercluster 2, 1, 1" in compiled.ptx) == (spec.cluster > 1)
    assert "wgmma.mma_async" in compiled.ptx
    # Operand addresses computed ahead of the loop and spilled made a kernel a third slower. A pair
    # spills a little behind its loop, where it has the other program's output besides its own.
    spilled = re.search(r"(\d+) bytes spill stores", assemble(compiled.ptx, "9.0"))
    assert spilled is not None and int(spilled[1]) <= (96 if "pair" in spec.name else 64)
    assert len(entry_parameters(compiled.ptx)) == len(spec.tensors) + len(spec.scalars)


@pytest.mark.parametrize(("g", "tokens"), [(FULL, 128), (SLIDING, 64)], ids=["full", "sliding"])
def test_nothing_waits_in_a_dense_consumers_turn(g: Geometry, tokens: int) -> None:
    ptx = compile_kernel(plan.attend_dense_hopper(g), "9.0").ptx
    barriers = re.findall(r"bar\.(sync|arrive)\s+(\d+), (\d+);", ptx)
    turns = [(kind, name) for kind, name, threads in barriers if threads == "256"]
    # Each consumer waits for its turn and passes the other's; the second passes one at the start.
    assert sorted(turns) == [("arrive", "14")] * 2 + [
        ("arrive", "15"),
        ("sync", "14"),
        ("sync", "15"),
    ]
    # The compiler's own barriers have other names.
    assert all(int(name) < 14 for _, name, threads in barriers if threads != "256")
    for name in ("14", "15"):
        before, behind = re.split(rf"bar\.sync {name}, 256;", ptx)
        stretch = before[before.rindex("mbarrier.try_wait") :]
        # A row of a thread: an exponential per column, and the factor on earlier sums.
        assert stretch.count("ex2.approx") == 2 * (tokens // 4 + 1)
        ahead = behind[: behind.index("mbarrier.try_wait")]
        assert ahead.count("wgmma.commit_group") == (4 if g.window else 3)


def test_a_pair_meets_when_its_partial_outputs_are_written() -> None:
    ptx = compile_kernel(plan.attend_pair_hopper(FULL), "9.0").ptx
    # The loader, the scorer and both consumers, whose two branches the compiler may join.
    waits = ptx.count("barrier.cluster.wait.acquire")
    assert waits == ptx.count("barrier.cluster.arrive.release") >= 4
    for part in ptx.split("barrier.cluster.arrive.release")[1:]:
        between = part[: part.index("barrier.cluster.wait.acquire")]
        assert "st.global" not in between
    # Values of the other program are read behind the meeting: 64 heads x 256 channels by 128
    # threads, two at a time, for both consumers.
    loads = [p.count("ld.global.v2") for p in re.split("barrier.cluster.wait.acquire", ptx)[1:]]
    assert sorted(loads)[-2:] == [64, 64]


@pytest.mark.parametrize(
    ("rows", "hopper", "layers"),
    [
        (8, True, ["attend_split", "merge"]),
        (32, True, ["attend_pair"]),
        (32, False, ["attend_split", "merge"]),
        (64, True, ["attend"]),
    ],
)
def test_runs_of_few_rows(
    rows: int, hopper: bool, layers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[str] = []

    def add(site: Any, name: str, tensors: Any, **attributes: Any) -> dict[str, Any]:
        added.append(name)
        outputs = BY_NAME[f"dsa::{name}"].arguments().outputs
        return {argument.name: argument.name for argument in outputs}

    monkeypatch.setattr(chain, "_add", add)
    monkeypatch.setattr(chain, "_hopper", lambda site: hopper)
    monkeypatch.setattr(chain, "_kernels", lambda site: {})
    site: Any = SimpleNamespace(geometry=FULL, slots=rows, steps=1)
    tensor: Any = None
    assert chain.attend(site, tensor, tensor, tensor, tensor, tensor) == "out"
    assert added == layers


def test_hopper_kernels_only_where_they_fit() -> None:
    assert plan.fits_hopper(FULL, (9, 0)) and plan.fits_hopper(SLIDING, (9, 0))
    assert not plan.fits_hopper(FULL, (10, 0))
    assert not plan.fits_hopper(Geometry(latent=256), (9, 0))
    assert not plan.fits_hopper(Geometry(dtype="float16"), (9, 0))
    assert not plan.fits_hopper(Geometry(heads=96), (9, 0))
    assert not plan.fits_hopper(replace(SLIDING, window=600), (9, 0))


@pytest.mark.parametrize(
    ("rows", "runs"), [(1, 8), (8, 8), (16, 4), (32, 2), (34, 1), (64, 1), (2048, 1)]
)
def test_windows_are_cut_where_few_queries_leave_a_gpu_empty(rows: int, runs: int) -> None:
    assert kernel.window_splits(SLIDING, rows) == runs


def test_argument_order_is_checked() -> None:
    spec = plan.attend_whole(FULL)
    with pytest.raises(UsageError, match="order"):
        type(spec)(**{**vars(spec), "inputs": spec.inputs[::-1]})


def test_attributes_carry_the_geometry() -> None:
    assert Geometry(**geometry_attributes(SLIDING)) == SLIDING
