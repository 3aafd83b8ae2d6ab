"""Program files: round trip, and refusal of everything that cannot be executed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from plugins.support.errors import CapabilityError, InputError
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.program import Program
from runtime.interpreter.trace import trace
from tests.runtime.interpreter.harness import define, new_network


def _program() -> Program:
    net = new_network({"w": torch.ones(3).bfloat16()})

    def definition(net, x):
        y = net.add(net.mul(x, net.reshape(net.weight("w", "bfloat16", (3,)), (1, 3))), 1.0)
        net.tap(y, "middle")
        table = net.literal(torch.tensor([[2.0, 0.5, 1.0]]).bfloat16())
        with net.loop(net.dim(x, 0)) as loop:
            row = loop.iterate(x, 0)
            total = loop.carry(net.literal(torch.zeros(3).bfloat16()))
            loop.update(total, net.add(total, row))
            last = loop.last(total)
        return [net.mul(y, table), last]

    with net.scope("block"):
        define(net, definition, {"x": torch.zeros(2, 3).bfloat16()})
    return trace(net)


@pytest.fixture(scope="module")
def program() -> Program:
    return _program()


def test_a_program_file_runs_where_tensorrt_is_absent(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "rank0.context.program"
    program.save(path)
    script = f"""
import sys
sys.modules["tensorrt"] = sys.modules["tensorrt_rtx"] = None
import torch
from pathlib import Path
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.program import Program
program = Program.load(Path({str(path)!r}))
weights = {{"w": torch.tensor([1.0, 2.0, 4.0]).bfloat16()}}
interpreter = Interpreter(program, weights, strict=True)
out = interpreter.run({{"x": torch.ones(2, 3).bfloat16()}}, ["middle"])
print([out[k].tolist() for k in ("y0", "y1", "middle")])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(
        [[[4.0, 1.5, 5.0]] * 2, [2.0, 2.0, 2.0], [[2.0, 3.0, 5.0]] * 2]
    ), done.stderr


def test_round_trip_keeps_everything(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "p"
    program.save(path)
    loaded = Program.load(path)
    assert loaded.model_dump() == program.model_dump()
    assert loaded.literals.keys() == program.literals.keys()
    for name, value in program.literals.items():
        assert torch.equal(loaded.literals[name], value)
    assert loaded.weights == {"w": "w"} and "w" not in loaded.literals


def _mutate(program: Program, path: Path, change) -> None:
    """Write the program file with a change made to its JSON graph."""
    program.save(path)
    with safe_open(str(path), "pt") as file:
        graph = json.loads(file.metadata()["program"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(graph, tensors)
    save_file(tensors, path, {"program": json.dumps(graph)})


def _node(graph: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(node for node in graph["nodes"] if node["kind"] == kind)


def _cycle(graph, tensors) -> None:
    node = _node(graph, "elementwise")
    node["inputs"] = [node["outputs"][0], node["inputs"][1]]


def _wrong_order(graph, tensors) -> None:
    graph["nodes"].reverse()


def _missing_tensor(graph, tensors) -> None:
    del graph["tensors"]["x"]


def _two_origins(graph, tensors) -> None:
    graph["nodes"].append(_node(graph, "elementwise"))


def _unknown_output(graph, tensors) -> None:
    graph["outputs"].append("nothing")


def _literal_shape(graph, tensors) -> None:
    name = next(iter(tensors))
    graph["tensors"][name]["shape"] = [17]


def _literal_gone(graph, tensors) -> None:
    del tensors[next(iter(tensors))]


def _version(graph, tensors) -> None:
    graph["format_version"] = 99


def _extra_key(graph, tensors) -> None:
    graph["nodes"][0]["command"] = "rm"


def _wrong_type(graph, tensors) -> None:
    graph["nodes"][0]["inputs"] = 7


def _dtype(graph, tensors) -> None:
    graph["tensors"]["x"]["dtype"] = "complex64"


def _negative(graph, tensors) -> None:
    graph["tensors"]["x"]["shape"] = [-5, 3]


def _no_body(graph, tensors) -> None:
    _node(graph, "loop")["loop"] = None


def _body_gap(graph, tensors) -> None:
    _node(graph, "loop")["loop"]["nodes"] = []


def _alias(graph, tensors) -> None:
    graph["aliases"] = {"y0": "nothing"}


def _tap(graph, tensors) -> None:
    graph["taps"]["middle"] = "nothing"


_HOSTILE = (
    _cycle,
    _wrong_order,
    _missing_tensor,
    _two_origins,
    _unknown_output,
    _literal_shape,
    _literal_gone,
    _version,
    _extra_key,
    _wrong_type,
    _dtype,
    _negative,
    _no_body,
    _body_gap,
    _alias,
    _tap,
)


@pytest.mark.parametrize("change", _HOSTILE, ids=lambda f: f.__name__.strip("_"))
def test_a_program_that_cannot_be_executed_is_refused(
    program: Program, tmp_path: Path, change
) -> None:
    path = tmp_path / "p"
    _mutate(program, path, change)
    with pytest.raises(InputError) as caught:
        Program.load(path)
    assert str(path) in str(caught.value)


def test_an_unchanged_mutation_loads(program: Program, tmp_path: Path) -> None:
    _mutate(program, tmp_path / "p", lambda graph, tensors: None)
    assert Program.load(tmp_path / "p").outputs == program.outputs


@pytest.mark.parametrize("content", [b"", b"vtrt", b"\xff" * 64])
def test_files_that_are_no_program(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p"
    path.write_bytes(content)
    with pytest.raises(InputError, match="cannot be read"):
        Program.load(path)


def test_truncated_missing_and_other_files(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "p"
    with pytest.raises(InputError, match="cannot be read"):
        Program.load(path)
    program.save(path)
    whole = path.read_bytes()
    for size in (8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="cannot be read"):
            Program.load(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(InputError, match="holds no program"):
        Program.load(path)
    with pytest.raises(InputError, match="cannot be written"):
        program.save(tmp_path / "missing" / "p")


def _kind(graph, tensors) -> None:
    _node(graph, "elementwise")["kind"] = "fft"


def _operation(graph, tensors) -> None:
    _node(graph, "elementwise")["attributes"]["op"] = "BITWISE_AND"


def _attribute(graph, tensors) -> None:
    del _node(graph, "elementwise")["attributes"]["op"]


def _operand(graph, tensors) -> None:
    _node(graph, "elementwise")["inputs"] = ["x"]


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (_kind, CapabilityError, "fft"),
        (_operation, CapabilityError, "BITWISE_AND"),
        (_attribute, InputError, "op"),
        (_operand, InputError, "input 1"),
    ],
)
def test_what_a_layer_cannot_be_names_the_layer(
    program: Program, tmp_path: Path, change, error, word: str
) -> None:
    path = tmp_path / "p"
    _mutate(program, path, change)
    loaded = Program.load(path)
    with pytest.raises(error) as caught:
        Interpreter(loaded, {"w": torch.ones(3).bfloat16()}).run({"x": torch.ones(2, 3).bfloat16()})
    assert word in str(caught.value) and "block." in str(caught.value)


def test_a_changed_attribute_changes_the_result(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "p"

    def change(graph, tensors) -> None:
        _node(graph, "elementwise")["attributes"]["op"] = "SUB"

    _mutate(program, path, change)
    x = {"x": torch.full((2, 3), 2.0).bfloat16()}
    w = {"w": torch.ones(3).bfloat16()}
    right, wrong = (Interpreter(p, w).run(x)["y0"] for p in (program, Program.load(path)))
    assert not torch.equal(right, wrong)
