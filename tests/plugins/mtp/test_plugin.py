"""Plugin layers of the draft layer's input: shapes, launch, and code for every GPU."""

from __future__ import annotations

import pytest

from plugins.aot.compile import compile_kernel, entry_parameters
from plugins.mtp.plan import Rows
from plugins.mtp.plugin import OPERATIONS, row_attributes

BY_NAME = {operation.id: operation for operation in OPERATIONS}
SHAPES = {
    "mtp::embed_norms": {
        "ids": (3, 4),
        "positions": (3, 4),
        "table": (152064, 5120),
        "hidden": (3, 4, 5120),
        "embed_weight": (5120,),
        "hidden_weight": (5120,),
    },
    "mtp::rms_norm": {"x": (3, 4, 5120), "weight": (5120,)},
}
OUT = {
    "mtp::embed_norms": {"joined": (3, 4, 10240)},
    "mtp::rms_norm": {"normed": (3, 4, 5120)},
}
GRID = {"mtp::embed_norms": (12, 2), "mtp::rms_norm": (12,)}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_shapes_and_launch(name: str) -> None:
    operation = BY_NAME[name]
    spec = operation.spec(operation.example)
    assert [argument.name for argument in spec.inputs] == list(SHAPES[name])
    assert operation.outputs(SHAPES[name], operation.example) == OUT[name]
    values = operation.values(SHAPES[name], operation.example)
    assert set(spec.scalars) <= set(values)
    assert spec.grid(values) == GRID[name]


def test_every_operation_is_covered_and_has_typed_attributes() -> None:
    assert BY_NAME.keys() == SHAPES.keys()
    for operation in OPERATIONS:
        for name, kind in operation.attributes.items():
            assert type(operation.example[name]) is kind


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0", "12.0"])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_kernels_compile_for_every_gpu(name: str, capability: str) -> None:
    for dtype in ("bfloat16", "float32"):
        spec = BY_NAME[name].spec(row_attributes(Rows(dtype=dtype)))
        compiled = compile_kernel(spec, capability)
        assert len(entry_parameters(compiled.ptx)) == len(spec.tensors) + len(spec.scalars)
        assert compiled.threads == 256
        # A row stays in registers: shared memory only joins the sums of the warps.
        assert compiled.shared_bytes <= 1024


def test_no_attribute_has_the_name_of_a_tensor() -> None:
    for operation in OPERATIONS:
        names = {argument.name for argument in operation.arguments().tensors}
        assert not names & operation.attributes.keys()
