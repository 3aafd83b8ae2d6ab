"""Weights, scopes, plugins and the pieces of the facade that no layer test covers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plugins.support.errors import BuildError, CapabilityError, InputError, UsageError
from plugins.trt.backend import load_backend
from plugins.trt.network import Network
from plugins.trt.weights import SafetensorsSource, TensorSource, WeightPolicy


def _network(weights, mode="auto", threshold=64) -> Network:
    return Network(
        load_backend("tensorrt_rtx"),
        source=TensorSource(weights),
        policy=WeightPolicy(mode, threshold),
    )


@pytest.mark.parametrize(
    ("mode", "inputs"), [("auto", ["large"]), ("inputs", ["small", "large"]), ("embedded", [])]
)
def test_the_policy_decides_what_becomes_an_input(mode: str, inputs: list[str]) -> None:
    net = _network({"small": torch.zeros(15).bfloat16(), "large": torch.zeros(32).bfloat16()}, mode)
    small = net.weight("small", "bfloat16", (15,))
    large = net.weight("large", "bfloat16", (32,))
    assert net.weight_inputs == inputs
    assert {n for n, c in net.constants.items() if c.weight} == {"small", "large"} - set(inputs)
    assert net.weight("small", "bfloat16", (15,)) is small and large.name == "large"


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "found"),
    [
        ("w", "bfloat16", (4, 5), "bfloat16 [5, 4]"),
        ("w", "float32", (5, 4), "bfloat16 [5, 4]"),
        ("v", "bfloat16", (5, 4), "no such tensor"),
    ],
)
def test_a_weight_that_is_not_as_declared(name: str, dtype: str, shape, found: str) -> None:
    net = _network({"w": torch.zeros(5, 4).bfloat16()})
    with pytest.raises(BuildError) as caught:
        net.weight(name, dtype, shape)
    assert name in str(caught.value) and found in str(caught.value)


def test_two_declarations_of_one_weight() -> None:
    net = _network({"w": torch.zeros(4)})
    net.weight("w", "float32", (4,))
    with pytest.raises(BuildError, match="two declarations"):
        net.weight("w", "float32", (2, 2))


def test_packed_four_bit_weights_have_a_logical_shape() -> None:
    net = _network({"w": torch.zeros(2, 8, dtype=torch.uint8)}, "embedded")
    assert net.shape(net.weight("w", "float4_e2m1fn", (2, 16))) == (2, 16)


def test_a_weight_file(tmp_path: Path) -> None:
    path = tmp_path / "rank0.safetensors"
    save_file({"a": torch.ones(2, 3).bfloat16()}, path)
    source = SafetensorsSource(path)
    info = source.info("a")
    assert info is not None and (info.dtype, info.shape) == ("bfloat16", (2, 3))
    assert source.info("b") is None and torch.equal(source.tensor("a"), torch.ones(2, 3).bfloat16())
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(InputError, match="cannot be read"):
        SafetensorsSource(path)


def test_scopes_name_layers_and_their_metadata() -> None:
    net = _network({})
    x = net.input("x", "float32", (2,))
    with net.scope("layers.3"), net.scope("attention"):
        y = net.exp(x)
    layer = net.raw.get_layer(0)
    assert y.name == "layers.3.attention.exp" == layer.name
    assert layer.metadata == "layers.3.attention" and net.scope_name == ""


def test_outputs_of_inputs_constants_and_outputs_keep_both_names() -> None:
    net = _network({})
    x = net.input("x", "float32", (2,))
    first = net.output(x, "a")
    net.output(first, "b")
    net.output(net.literal(torch.ones(2)), "c")
    assert list(net.outputs) == ["a", "b", "c"] and list(net.inputs) == ["x"]


def test_taps_follow_a_tensor_that_becomes_an_output() -> None:
    net = _network({})
    y = net.tap(net.exp(net.input("x", "float32", (2,))), "middle")
    net.output(y, "y")
    assert net.taps["middle"].name == "y"
    with pytest.raises(BuildError, match="tap name"):
        net.tap(y, "middle")


def test_plugins_need_a_flavour_that_has_them() -> None:
    net = _network({})
    x = net.input("x", "float32", (2,))
    with pytest.raises(CapabilityError) as caught:
        net.plugin("qsa::attend", [x], {}, [("float32", 1)])
    assert "qsa::attend" in str(caught.value) and "native" in str(caught.value)


def test_a_loop_that_forgets_a_value() -> None:
    net = _network({})
    x = net.input("x", "float32", (3, 2))
    with pytest.raises(BuildError, match="never updated"), net.loop(3) as loop:
        loop.carry(net.literal(torch.zeros(2)))
        loop.iterate(x, 0)


def test_backends() -> None:
    with pytest.raises(UsageError, match="unknown TensorRT flavour"):
        load_backend("openvino")
    assert load_backend("auto").trt.__name__ in ("tensorrt", "tensorrt_rtx")


def test_a_missing_backend_says_what_to_install(monkeypatch) -> None:
    def missing(name: str):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("plugins.trt.backend.importlib.import_module", missing)
    with pytest.raises(CapabilityError) as caught:
        load_backend("tensorrt")
    assert "pip install tensorrt" in str(caught.value)


def test_an_old_backend_is_refused(monkeypatch) -> None:
    class Old:
        __version__ = "10.3.0"

    monkeypatch.setattr("plugins.trt.backend.importlib.import_module", lambda name: Old)
    with pytest.raises(CapabilityError, match=r"10\.3\.0"):
        load_backend("tensorrt")


def test_inputs_made_in_advance_do_not_stay() -> None:
    weights = {
        "used": torch.zeros(32),
        "unused": torch.zeros(32),
        "packed": torch.zeros(2, 32).to(torch.float8_e4m3fn),
        "early": torch.zeros(32),
    }
    net = _network(weights, "inputs")
    y = net.mul(net.weight("used", "float32", (32,)), 2.0)
    net.weight("packed", "uint8", (2, 32))
    z = net.input("early", "float32", (-1,))
    net.output(net.add(y, z), "y")
    net.finish()
    raw = {net.raw.get_input(i).name: net.raw.get_input(i) for i in range(net.raw.num_inputs)}
    assert set(raw) == {"used", "packed", "early"} == set(net.inputs)
    assert tuple(raw["early"].shape) == (-1,) and raw["packed"].dtype == net.trt.uint8
    assert "float8_e4m3fn" not in net.dtypes
