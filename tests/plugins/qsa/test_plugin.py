"""Registration with `tensorrt.plugin`, through a stand-in that behaves like it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plugins.aot import quick
from plugins.aot.compile import (
    CAPABILITIES,
    SHARED_BYTES,
    assemble,
    compile_kernel,
    entry_parameters,
    newest_ptx,
)
from plugins.qsa import chain, kernel, plan, reference, stages
from plugins.qsa.plan import Geometry
from plugins.qsa.plugin import COMPILED_FOR, OPERATIONS, geometry_attributes
from plugins.support.errors import UsageError
from plugins.trt.backend import load_backend
from tests.plugins.full_trt import Desc, Expr, plugin_module, value

TRT = load_backend("tensorrt_rtx").trt
BY_ID = {operation.id: operation for operation in OPERATIONS}


def tensors(name: str, shapes: dict[str, tuple[Any, ...]]) -> list[Desc]:
    return [Desc(shapes.get(a.name, ("any",))) for a in BY_ID[name].arguments().inputs]


@pytest.fixture(scope="module")
def trtp() -> Any:
    module = plugin_module(TRT)
    for operation in OPERATIONS:
        quick.register(module, operation, "9.0")
    return module


def test_every_operation_registers(trtp: Any) -> None:
    assert set(trtp.known) == set(BY_ID)
    for operation in OPERATIONS:
        quick.register(trtp, operation, "9.0")
    for operation in OPERATIONS:
        for name, kind in operation.attributes.items():
            assert type(operation.example[name]) is kind, (operation.id, name)


def run(trtp: Any, name: str, shapes: dict[str, tuple[Any, ...]], **changes: Any) -> tuple:
    operation = BY_ID[name]
    attributes = {**operation.example, **changes}
    known, given = trtp.known[name], tensors(name, shapes)
    ordered = {n: attributes[n] for n in operation.attributes}
    # As TensorRT does: attributes by keyword for shapes, by position for the kernel.
    outputs = known.describe(*given, **ordered)
    return outputs, known.implement(*given, *ordered.values(), outputs, 1)


def test_decode_attention_launch(trtp: Any) -> None:
    b, s, c = Expr("B"), Expr("S"), Expr("C")
    shapes = {"q": (b, 24, s, 256), "k_cache": (b, 2, c, 256)}
    (out,), (name, ptx, launch, scalars) = run(trtp, "qsa::attend", shapes)
    sizes = {"B": 64, "S": 3, "C": 4096}
    assert [value(e, **sizes) for e in out.shape_expr] == [64, 3, 6144]
    assert out.dtype == TRT.bfloat16
    assert [value(e, **sizes) for e in scalars] == [3, 4096]
    grid = (launch.grid_x, launch.grid_y, launch.grid_z)
    assert [value(e, **sizes) for e in grid] == [64 * 3 * 2, 1, 1]
    assert value(launch.block_x) == 128 and 0 < value(launch.shared_mem) <= 227 * 1024
    assert f".entry {name}(" in ptx


def test_prefill_launches(trtp: Any) -> None:
    b, s = Expr("B"), Expr("S")
    outputs, (_, _, launch, scalars) = run(trtp, "qsa::unite", {"blocks": (b, s, 512)}, words=1000)
    sizes = {"B": 2, "S": 130}
    shapes = [[value(e, **sizes) for e in out.shape_expr] for out in outputs]
    assert shapes == [[2, 33, 3], [2, 33, 3, 1024], [2, 33, 1000]]
    assert [value(e, **sizes) for e in (launch.grid_x, launch.grid_y)] == [33, 2]
    assert [value(e, **sizes) for e in scalars] == [130, 1000]
    shapes_in = {"q": (b, 24, s, 256), "k_cache": (b, 2, 4000, 256), "together": (b, s, 6144)}
    (out,), (_, _, launch, _) = run(trtp, "qsa::attend_apart", shapes_in)
    assert out.aliases is not None and out.aliases.shape_expr == (b, s, 6144)
    assert [value(e, **sizes) for e in (launch.grid_x, launch.grid_y)] == [260, 2]
    (out,), (_, _, launch, _) = run(trtp, "qsa::attend_dense", shapes_in)
    assert out.aliases is not None and out.aliases.shape_expr == (b, s, 6144)
    grid = (launch.grid_x, launch.grid_y, launch.grid_z)
    assert [value(e, **sizes) for e in grid] == [25, 2, 2]
    (out,), (_, _, launch, scalars) = run(trtp, "qsa::attend_hopper", shapes_in)
    assert [value(e, **sizes) for e in out.shape_expr] == [2, 130, 6144]
    # 13 tiles of 128 lines and 17 of 8 queries, two key heads, two slots.
    assert [value(e, **sizes) for e in (launch.grid_x, launch.grid_y)] == [30 * 4, 1]
    assert [value(e, **sizes) for e in scalars] == [130, 4000, 2]
    assert value(launch.block_x) == 384


def test_scoring_and_selecting_long_rows(trtp: Any) -> None:
    b, s = Expr("B"), Expr("S")
    shapes = {"index_query": (b, 4, s, 128), "index_keys": (b, 9999, 128)}
    outputs, (_, _, launch, scalars) = run(trtp, "qsa::score_groups", shapes)
    sizes = {"B": 2, "S": 130}
    made = [[value(e, **sizes) for e in out.shape_expr] for out in outputs]
    # Rows of scores are padded to a multiple of 4.
    assert made == [[2, 130, 10000], [2, 130, 1252]]
    assert [value(e, **sizes) for e in scalars] == [130, 9999, 4]
    grid = (launch.grid_x, launch.grid_y, launch.grid_z)
    assert [value(e, **sizes) for e in grid] == [40, 33, 2]
    shapes = {"scores": (b, s, 10000), "maxima": (b, s, 1252)}
    (out,), (_, _, launch, scalars) = run(trtp, "qsa::select_grouped", shapes, width=1250)
    assert [value(e, **sizes) for e in out.shape_expr] == [2, 130, 512]
    assert value(launch.grid_x, **sizes) == 260
    assert [value(e, **sizes) for e in scalars] == [130, 10000]


def test_prepare_updates_its_caches_in_place(trtp: Any) -> None:
    b, s = Expr("B"), Expr("S")
    shapes = {
        "q_gate": (b, s, 12288),
        "key_cache_before": (b, 2, 4096, 256),
        "index_keys_before": (b, 1, 1024, 128),
    }
    outputs, (_, _, launch, scalars) = run(trtp, "qsa::prepare", shapes)
    names = [a.name for a in BY_ID["qsa::prepare"].arguments().outputs]
    aliased = {n for n, out in zip(names, outputs, strict=True) if out.aliases is not None}
    assert aliased == {"key_cache", "value_cache", "index_keys"}
    sizes = {"B": 5, "S": 7}
    assert [value(e, **sizes) for e in scalars] == [7, 4096, 1024, 5]
    assert value(launch.grid_x, **sizes) == 35 and value(launch.grid_y) == 8


def test_the_same_grid_as_direct_launches(trtp: Any) -> None:
    # Eight rows: what kernel.py launches for a call of that size.
    how = kernel.decode_plan(Geometry(), 8)
    shapes = {"q": (Expr("B"), 24, 1, 256), "k_cache": (Expr("B"), 2, 4096, 256)}
    changes = {"splits": how.splits, "columns": 64, "warps": 2, "stages": 2}
    outputs, (_, _, launch, scalars) = run(trtp, "qsa::attend_split", shapes, **changes)
    spec = kernel.decode_partial(Geometry(), how)
    direct = spec.grid({"rows": 8, "splits": how.splits})
    assert (value(launch.grid_x, B=8), value(launch.grid_y, B=8)) == direct
    assert [value(e, B=8) for e in scalars] == [1, 4096, 8, how.splits]
    partial = [value(e, B=8) for e in outputs[0].shape_expr]
    assert partial == [how.splits, 8, 24, 256]


def test_plans_cover_every_column_and_fit_the_gpu() -> None:
    for cache in ("bfloat16", "float8_e4m3fn"):
        g = Geometry(cache_dtype=cache)
        for rows in (1, 2, 3, 8, 31, 64, 65, 128, 500, 5000):
            for deep in (True, False):
                how = kernel.decode_plan(g, rows, deep=deep)
                if how.once:
                    assert how.splits * how.tiles.columns >= g.blocks * g.ratio + g.ratio - 1
                else:
                    assert how.splits * how.tiles.columns <= g.blocks * g.ratio
                tile = how.tiles.columns * how.tiles.stages * g.width * 2
                assert deep or tile * (1 if g.fp8 else 2) < 140_000


def test_geometry_survives_as_attributes() -> None:
    g = Geometry(blocks=256, k_scale=0.5)
    attributes = {**BY_ID["qsa::select"].example, **geometry_attributes(g)}
    assert BY_ID["qsa::select"].spec(attributes).constants["K"] == 256


def test_an_attribute_of_another_type_is_refused() -> None:
    operation = BY_ID["qsa::merge"]
    broken = quick.Operation(**{**vars(operation), "attributes": {"sizes": list}})
    with pytest.raises(UsageError, match="type"):
        quick.register(plugin_module(TRT), broken, "9.0")
    broken = quick.Operation(**{**vars(operation), "attributes": {"gate": int}})
    with pytest.raises(UsageError, match="share a name"):
        quick.register(plugin_module(TRT), broken, "9.0")


def test_one_process_builds_for_one_gpu(trtp: Any) -> None:
    with pytest.raises(UsageError, match="one compute capability"):
        quick.register(trtp, BY_ID["qsa::merge"], "8.0")


@pytest.mark.parametrize("capability", list(CAPABILITIES))
@pytest.mark.parametrize("name", [n for n in BY_ID if n != "qsa::attend_hopper"])
def test_every_kernel_compiles_for_every_gpu(name: str, capability: str) -> None:
    operation = BY_ID[name]
    spec = operation.spec(operation.example)
    compiled = compile_kernel(spec, COMPILED_FOR.get(capability, capability))
    assert len(entry_parameters(compiled.ptx)) == len(spec.tensors) + len(spec.scalars)
    assert compiled.shared_bytes <= SHARED_BYTES[capability] * 1024


def test_the_hopper_kernel_compiles() -> None:
    operation = BY_ID["qsa::attend_hopper"]
    spec = operation.spec(operation.example)
    compiled = compile_kernel(spec, "9.0", newest_ptx(580))
    # A loader and two consumers of four warps each.
    assert compiled.threads == 384
    assert compiled.shared_bytes <= SHARED_BYTES["9.0"] * 1024
    assert "wgmma.mma_async" in compiled.ptx and ".version 9.0" in compiled.ptx
    assert len(entry_parameters(compiled.ptx)) == len(spec.tensors) + len(spec.scalars)
    # The assembler says so where it would wait after each product.
    assert "C75" not in assemble(compiled.ptx, "9.0")


def test_only_geometries_that_fit_get_the_hopper_kernel() -> None:
    g = Geometry()
    assert plan.fits_hopper(g, (9, 0))
    assert not plan.fits_hopper(g, (8, 9)) and not plan.fits_hopper(g, (10, 0))
    for changed in ({"cache_dtype": "float8_e4m3fn"}, {"width": 128}, {"heads": 40}, {"ratio": 2}):
        assert not plan.fits_hopper(replace(g, **changed), (9, 0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_kernels_run_through_the_driver() -> None:
    from plugins.aot.driver import LoadedKernel

    major, minor = torch.cuda.get_device_capability()
    spec = plan.select_row(Geometry(), 512, 1)
    loaded = LoadedKernel(compile_kernel(spec, f"{major}.{minor}"))
    scores = torch.rand(3, 1, 500, device="cuda")
    past = torch.tensor([1999, 3, 0], dtype=torch.int32, device="cuda")
    new = torch.ones(3, dtype=torch.int32, device="cuda")
    ids = torch.zeros(3, 1, 512, dtype=torch.int32, device="cuda")
    call = {"scores": scores, "past": past, "new": new, "ids": ids}
    loaded.run(spec, call, {"S": 1, "NB": 500, "rows": 3})
    kept = [int((ids[row] >= 0).sum()) for row in range(3)]
    assert kept == [500, 1, 0] and ids[0, 0, :500].tolist() == list(range(500))


@pytest.mark.parametrize(
    ("rows", "layers"), [(2051, ["attend_hopper"]), (2052, ["unite", "attend_hopper"])]
)
def test_contexts_within_the_budget_need_no_union(
    rows: int, layers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    added: dict[str, dict[str, Any]] = {}

    def add(site: Any, name: str, tensors: Any, **attributes: Any) -> dict[str, Any]:
        added[name] = attributes
        return {
            argument.name: argument.name for argument in BY_ID[f"qsa::{name}"].arguments().outputs
        }

    monkeypatch.setattr(chain, "_add", add)
    monkeypatch.setattr(chain.layer, "target_of", lambda net: "9.0")
    monkeypatch.setattr(plan, "fits_hopper", lambda g, capability: True)
    # Rows behind the visible ones, for padding, do not count.
    net = SimpleNamespace(shape=lambda tensor: (1, 2, 4096, 256))
    calls = SimpleNamespace(net=net, context=True, rows=rows, past="past")
    site: Any = SimpleNamespace(geometry=Geometry(), calls=calls)
    tensor: Any = None
    assert chain.attend(site, tensor, tensor, tensor, tensor, tensor) == "out"
    assert list(added) == layers
    assert added["attend_hopper"]["whole"] == (rows == 2051)
    # The last query of the longest context is dense exactly there.
    assert (reference.visible_blocks(torch.tensor([[rows - 1]]), 4) > 512).item() == (rows == 2052)


def test_whole_contexts_are_the_same_without_union() -> None:
    g = Geometry(
        heads=4, kv_heads=2, width=8, index_heads=2, index_width=8, ratio=4, blocks=4,
        dtype="float32", cache_dtype="float32",
    )  # fmt: skip
    make = torch.Generator().manual_seed(3)
    tensors = {
        "q": torch.randn(2, 4, 5, 8, generator=make),
        "k_cache": torch.randn(2, 2, 40, 8, generator=make),
        "v_cache": torch.randn(2, 2, 40, 8, generator=make),
        "gate": torch.randn(2, 5, 32, generator=make),
        "new": torch.tensor([5, 3], dtype=torch.int32),
        "blocks": torch.arange(4, dtype=torch.int32).repeat(2, 5, 1),
    }
    attributes = {**geometry_attributes(g), "tile_rows": 2, "words": 10, "interleaved_gate": 0}
    for past, same in ((14, True), (15, False)):
        given = {**tensors, "past": torch.tensor([past, 0], dtype=torch.int32)}
        united = stages.unite(given, attributes)
        right = stages.attend_hopper({**given, **united}, {**attributes, "whole": 0})["out"]
        unread = {"counts": given["past"], "entries": given["past"]}
        found = stages.attend_hopper({**given, **unread}, {**attributes, "whole": 1})["out"]
        # 19 tokens are four blocks and a tail, 20 are five: one more than is kept.
        assert plan.within_budget(g, past + 5) == same
        assert torch.equal(found, right) == same
