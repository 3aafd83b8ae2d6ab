"""Every operation through the real module `tensorrt.plugin`, where its bindings are installed.

The bindings (`pip install tensorrt-cu13-bindings`) import when libraries with nine symbols exist;
empty ones are compiled for that. Registration, shape inference and launch parameters then run in
TensorRT's own Python; only symbolic sizes, which come from the library, stand in.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SYMBOLS = (
    "createInferBuilder_INTERNAL", "createInferRuntime_INTERNAL", "createInferRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getPluginRegistry",
    "getBuilderPluginRegistry", "getNvOnnxParserVersion", "initLibNvInferPlugins",
)  # fmt: skip
LIBRARIES = ("nvinfer", "nvonnxparser", "nvinfer_plugin")

SCRIPT = """
import sys
import tensorrt_bindings as trt
sys.modules["tensorrt"] = trt
import tensorrt_bindings.plugin as trtp
sys.modules["tensorrt.plugin"] = trtp
from tensorrt_bindings.plugin import _lib, _tensor
from plugins.aot import quick
from plugins.operations import OPERATIONS

class Size:
    def __init__(self, value): self.value = value
    def is_constant(self): return True
    def get_constant_value(self): return self.value

class Builder:
    def constant(self, value): return Size(value)
    def operation(self, op, a, b):
        a, b = a.value, b.value
        results = {"SUM": a + b, "SUB": a - b, "PROD": a * b, "FLOOR_DIV": a // max(b, 1)}
        return Size(results[op.name])

class Registry:
    def __getattr__(self, name): return lambda *given: self

trt.IDimensionExpr = Size
trt.get_plugin_registry = Registry

# Of inputs whose sizes are unpacked; of others only some are looked at.
RANKS = {"scores": 3}

def describe(known, spec, sizes):
    descs = []
    for argument in spec.inputs:
        desc = trtp.TensorDesc()
        desc.dtype = quick.trtp_dtype(trtp, argument.dtype)
        rank = RANKS.get(argument.name, 4)
        desc.shape_expr = trtp.ShapeExprs(rank, _is_dummy=not sizes)
        for axis in range(rank if sizes else 0):
            desc.shape_expr[axis] = trtp.ShapeExpr(Size(8))
        desc._immutable = True
        descs.append(desc)
    return descs

for name, operation in OPERATIONS.items():
    quick.register(trtp, operation, "9.0")
    known, attributes = _lib.QDP_REGISTRY[name], dict(operation.example)
    spec = operation.spec(attributes)
    _tensor.SymIntExpr._exprBuilder = None
    descs = describe(known, spec, False)
    types = [out.dtype for out in known.register_func(*descs, **attributes)]
    assert types == [quick.trtp_dtype(trtp, a.dtype) for a in spec.outputs], name
    _tensor.SymIntExpr._exprBuilder = Builder()
    descs = describe(known, spec, True)
    outputs = known.register_func(*descs, **attributes)
    aliased = {
        a.name for a, out in zip(spec.outputs, outputs)
        if out.get_aliased() is not None and any(out.get_aliased() is d for d in descs)
    }
    assert aliased == set(spec.aliases), name
    kernel, ptx, launch, extra = known.aot_impl_func(*descs, *attributes.values(), list(outputs), 1)
    assert f".entry {kernel}(" in ptx, name
    assert isinstance(launch, trtp.KernelLaunchParams) and isinstance(extra, trtp.SymExprs)
    assert all(isinstance(value, trtp.SymInt32) for value in extra), name
    shapes = {a.name: (8,) * RANKS.get(a.name, 4) for a in spec.inputs}
    values = operation.values(shapes, attributes)
    grid = (*spec.grid(values), 1, 1)[:3]
    found = [getattr(launch, f"grid_{axis}")._expr.value for axis in "xyz"]
    assert found == list(grid), (name, found, grid)
    assert [value._expr.value for value in extra] == [values[n] for n in spec.scalars], name
print(len(OPERATIONS), "operations,", trt.__version__)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_bindings") is None or shutil.which("cc") is None,
    reason="needs the Python bindings of full TensorRT and a C compiler",
)
def test_every_operation_registers_with_the_real_module(tmp_path: Path) -> None:
    bindings = importlib.util.find_spec("tensorrt_bindings")
    assert bindings is not None and bindings.origin is not None
    version = _major(Path(bindings.origin).parent)
    source = tmp_path / "empty.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in SYMBOLS))
    for library in LIBRARIES:
        file = f"lib{library}.so.{version}"
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{file}", "-o", str(tmp_path / file)]
        subprocess.run([*command, str(source)], check=True)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert " operations, " in run.stdout


def _major(folder: Path) -> str:
    """Major version of the library that the bindings want, from their text."""
    text = (folder / "tensorrt.so").read_bytes()
    start = text.index(b"libnvinfer.so.") + len(b"libnvinfer.so.")
    return text[start : text.index(b"\0", start)].decode()
