"""The interpreter as a whole: promotion, taps, call shapes, memory, devices, plugins."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from plugins.support.errors import BuildError, CapabilityError, InputError
from plugins.trt.network import Network
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.kinds import KINDS, Bound
from runtime.interpreter.trace import trace
from tests.plugins.full_trt import capability_for, full_backend
from tests.runtime.interpreter.harness import define, new_network, program_of, run


def _chain(net, x):
    y = net.mul(x, 1.0009765625)
    for _ in range(6):
        y = net.add(net.mul(y, 1.01), 0.001)
    return y


def test_promotion_computes_sixteen_bit_networks_in_float32() -> None:
    x = torch.linspace(0.1, 1.0, 7).bfloat16()
    (rounded,) = run(_chain, {"x": x})
    (promoted,) = run(_chain, {"x": x}, promote=True, compile_engine=False)
    exact = x.double() * 1.0  # constants of the network are rounded to bfloat16 as well
    factor = torch.tensor(1.01).bfloat16().double()
    step = torch.tensor(0.001).bfloat16().double()
    for _ in range(6):
        exact = exact * factor + step
    assert rounded.dtype == torch.bfloat16 and promoted.dtype == torch.float32
    assert (promoted.double() - exact).abs().max() < 1e-6
    assert (rounded.double() - exact).abs().max() > 1e-3


@pytest.mark.parametrize("limit", [0, 16 << 20])
def test_large_weights_are_promoted_where_they_are_used(limit: int, monkeypatch) -> None:
    monkeypatch.setattr("runtime.interpreter.execute._PROMOTE_BYTES", limit)
    table = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).bfloat16()

    def definition(net, x, i):
        w = net.weight("table", "bfloat16", (6, 4))
        rows = net.gather(w, i, 0)
        return [net.matmul(x, w, transpose_b=True), net.mul(rows, 1.0)]

    x, i = torch.ones(2, 4).bfloat16() / 3, torch.tensor([5, 0], dtype=torch.int32)
    product, rows = run(
        definition, {"x": x, "i": i}, weights={"table": table}, promote=True, compile_engine=False
    )
    assert torch.allclose(product, x.float() @ table.float().T) and product.dtype == torch.float32
    assert torch.equal(rows, table[[5, 0]].float())


def test_promoted_caches_must_be_float32() -> None:
    net = new_network()
    cache = net.input("cache", "bfloat16", (1, 1, 4, 2))
    net.kv_cache_update(
        cache, net.input("u", "bfloat16", (1, 1, 1, 2)), net.input("w", "int32", (1,))
    )
    interpreter = Interpreter(trace(net), {}, promote_floats=True)
    assert interpreter.input_info("cache")[0] == torch.float32
    inputs = {"u": torch.ones(1, 1, 1, 2).bfloat16(), "w": torch.tensor([2], dtype=torch.int32)}
    with pytest.raises(InputError, match="float32"):
        interpreter.run({**inputs, "cache": torch.zeros(1, 1, 4, 2).bfloat16()})
    memory = torch.zeros(1, 1, 4, 2)
    interpreter.run({**inputs, "cache": memory})
    assert memory.sum() == 2


def test_taps_and_tensors_can_be_fetched() -> None:
    net = new_network()

    def definition(net, x):
        y = net.tap(net.exp(x), "layers.0.bundle")
        return net.log(y)

    define(net, definition, {"x": torch.zeros(3)})
    interpreter = Interpreter(trace(net), {})
    x = torch.tensor([0.0, 1.0, 2.0])
    result = interpreter.run({"x": x}, ["layers.0.bundle", "exp", "x"])
    assert torch.allclose(result["layers.0.bundle"], x.exp())
    assert torch.equal(result["exp"], result["layers.0.bundle"]) and torch.equal(result["x"], x)
    assert set(interpreter.run({"x": x})) == {"y0"}
    with pytest.raises(InputError, match=r"layers\.9"):
        interpreter.run({"x": x}, ["layers.9.bundle"])


def test_every_call_shape_gives_its_own_result() -> None:
    def definition(net, x):
        n = net.dim(x, 1)
        scale = net.div(1.0, net.cast(net.unsqueeze(n, (1,)), "float32"))
        return [net.mul(net.reduce_sum(x, (1,)), scale), net.iota(n)]

    interpreter = Interpreter(program_of(definition, {"x": torch.zeros(2, 3)}), {}, strict=True)
    for _ in range(2):
        for rows, columns in ((2, 3), (1, 7), (5, 1)):
            x = torch.randn(rows, columns)
            mean, positions = interpreter.run({"x": x}).values()
            assert torch.allclose(mean, x.mean(1, keepdim=True), atol=1e-6)
            assert positions.tolist() == list(range(columns))


def test_results_kept_for_later_runs_are_not_handed_out() -> None:
    interpreter = Interpreter(
        program_of(lambda net, x: net.iota(net.dim(x, 0)), {"x": torch.zeros(3)}), {}
    )
    x = torch.zeros(4)
    interpreter.run({"x": x})["y0"].add_(100)
    assert interpreter.run({"x": x})["y0"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        ({}, "not those of the program"),
        ({"x": torch.zeros(2, 3), "z": torch.zeros(1)}, "not those of the program"),
        ({"x": torch.zeros(2, 4)}, "float32 [-1, 3]"),
        ({"x": torch.zeros(3)}, "float32 [-1, 3]"),
        ({"x": torch.zeros(2, 3).half()}, "torch.float16"),
    ],
)
def test_inputs_that_are_not_the_programs(inputs, word: str) -> None:
    net = new_network()
    net.output(net.exp(net.input("x", "float32", (-1, 3))), "y")
    with pytest.raises(InputError) as caught:
        Interpreter(trace(net), {}).run(inputs)
    assert word in str(caught.value)


@pytest.mark.parametrize("weights", [{}, {"w": torch.zeros(4)}, {"w": torch.zeros(3).half()}])
def test_weights_that_are_not_the_programs(weights) -> None:
    net = new_network({"w": torch.zeros(3)})
    net.output(net.exp(net.weight("w", "float32", (3,))), "y")
    with pytest.raises(InputError) as caught:
        Interpreter(trace(net), weights)
    assert "w" in str(caught.value) and "float32 [3]" in str(caught.value)


def test_intermediates_are_dropped_after_their_last_use(monkeypatch) -> None:
    alive: list[weakref.ref] = []
    most: list[int] = []

    def watching(call):
        def run(x: torch.Tensor) -> torch.Tensor:
            result = torch.exp(x)
            most.append(sum(1 for ref in alive if ref() is not None))
            alive.append(weakref.ref(result))
            return result

        return Bound(run, (0,))

    monkeypatch.setitem(KINDS, "unary", watching)

    def definition(net, x):
        for _ in range(10):
            x = net.exp(x)
        return x

    interpreter = Interpreter(program_of(definition, {"x": torch.zeros(3)}), {})
    gc.disable()
    try:
        for _ in range(2):
            alive.clear()
            interpreter.run({"x": torch.full((3,), -9.0)})
    finally:
        gc.enable()
    assert len(most) == 20 and max(most) <= 2


def test_the_strict_mode_sees_a_wrong_kind(monkeypatch) -> None:
    monkeypatch.setitem(KINDS, "unary", lambda call: Bound(lambda x: x.double(), (0,)))
    interpreter = Interpreter(
        program_of(lambda net, x: net.exp(x), {"x": torch.zeros(2)}), {}, strict=True
    )
    with pytest.raises(InputError, match="not what TensorRT inferred"):
        interpreter.run({"x": torch.zeros(2)})


def test_an_unknown_layer_is_named() -> None:
    net = new_network()
    x = net.input("x", "float32", (2, 3))
    with net.scope("tower"):
        net.output(net._one(net.raw.add_non_zero(x), "find"), "y")
    with pytest.raises(CapabilityError) as caught:
        trace(net)
    assert "NON_ZERO" in str(caught.value) and "tower.find" in str(caught.value)


def _plugin_network() -> Network:
    net = Network(full_backend(), capability_for("9.0"))
    x = net.input("x", "float32", (-1, 4))
    with net.scope("layers.1"):
        _register_split(net.backend.plugin_module())
        a, b = net.plugin("test::split", [net.mul(x, 2.0)], {"at": 1}, [("float32", 2)] * 2)
        assert (net.shape(a), net.shape(b)) == ((-1, 1), (-1, 3))
        net.output(net.add(net.reduce_sum(b, (1,)), a), "y")
    return net


def _register_split(trtp: Any) -> None:
    if "test::split" in trtp.known:
        return

    def describe(x, at):
        rows, columns = x.shape_expr
        left = trtp.from_shape_expr((rows, at), x.dtype)
        return left, trtp.from_shape_expr((rows, columns - at), x.dtype)

    def implement(x, at, outputs, tactic):
        raise AssertionError("nothing is built here")

    desc = trtp.TensorDesc
    describe.__annotations__ = {"x": desc, "at": int, "return": tuple[desc, desc]}
    launch = tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]
    implement.__annotations__ = {"return": launch}
    trtp.register("test::split")(describe)
    trtp.aot_impl("test::split")(implement)


def _split(inputs, attributes):
    (x,) = inputs
    return x[:, : attributes["at"]], x[:, attributes["at"] :]


def test_plugins_run_by_the_given_implementation() -> None:
    program = trace(_plugin_network())
    assert program.inputs == ("x",)
    (node,) = (n for n in program.nodes if n.kind == "plugin")
    assert (node.name, node.scope) == ("layers.1.test_split", "layers.1")
    x = torch.randn(3, 4)
    run = Interpreter(program, {}, strict=True, plugin_ops={"test::split": _split}).run
    for _ in range(2):
        assert torch.allclose(run({"x": x})["y"], 2 * x.sum(1, keepdim=True), atol=1e-5)
    with pytest.raises(CapabilityError, match="test::split"):
        Interpreter(program, {}).run({"x": x})


def test_attention_that_does_not_come_back_the_same_is_left_out() -> None:
    seen = []

    def look(inputs, attributes):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return _split(inputs, attributes)

    before = torch.backends.cuda.cudnn_sdp_enabled()
    Interpreter(trace(_plugin_network()), {}, plugin_ops={"test::split": look}).run(
        {"x": torch.zeros(1, 4)}
    )
    assert seen == [False] and torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attention_comes_back_the_same_on_a_gpu() -> None:
    def definition(net, q, k, v, mask):
        return net.attention(q, k, v, mask)

    inputs = {
        "q": torch.randn(32, 24, 1, 256, dtype=torch.bfloat16),
        "k": torch.randn(32, 2, 2052, 256, dtype=torch.bfloat16),
        "v": torch.randn(32, 2, 2052, 256, dtype=torch.bfloat16),
        "mask": torch.rand(32, 1, 1, 2052) < 0.99,
    }
    net = new_network()
    define(net, definition, inputs, static=True)
    run = Interpreter(trace(net), {}, device="cuda").run
    first = next(iter(run(inputs).values()))
    assert all(torch.equal(next(iter(run(inputs).values())), first) for _ in range(20))


def test_plugin_calls_that_tensorrt_refuses() -> None:
    net = _plugin_network()
    x = net.inputs["x"]
    for attributes in ({"at": 1.0}, {}, {"other": 1}):
        with pytest.raises(BuildError, match="refused the plugin call"):
            net.plugin("test::split", [x], attributes, [("float32", 2)] * 2)
    with pytest.raises(CapabilityError, match="not registered"):
        net.plugin("test::none", [x], {}, [("float32", 2)])
    with pytest.raises(BuildError, match="not the declared one"):
        net.plugin("test::split", [x], {"at": 1}, [("float32", 2), ("float32", 3)])


def test_an_operation_that_disagrees_with_its_declaration() -> None:
    run = Interpreter(
        trace(_plugin_network()), {}, strict=True, plugin_ops={"test::split": lambda i, a: (i[0],)}
    ).run
    with pytest.raises(InputError, match="another number of tensors"):
        run({"x": torch.zeros(1, 4)})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    def definition(net, x):
        return [_chain(net, x), net.mul(x, net.cast(net.iota(net.dim(x, 0)), "float32"))]

    x = torch.randn(5)
    program = program_of(definition, {"x": x})
    here = Interpreter(program, {}).run({"x": x})
    there = Interpreter(program, {}, device="cuda", strict=True).run({"x": x})
    for name, value in here.items():
        assert there[name].is_cuda and torch.allclose(there[name].cpu(), value, atol=1e-5)


def test_a_stale_cache_read_is_refused_even_through_views() -> None:
    net = new_network()
    cache = net.input("c", "bfloat16", (1, 1, 4, 2))
    early = net.reshape(cache, (4, 2))
    net.kv_cache_update(
        cache, net.input("u", "bfloat16", (1, 1, 1, 2)), net.input("w", "int32", (1,))
    )
    net.output(net.mul(early, 2.0), "y")
    with pytest.raises(BuildError, match=r"c\.updated"):
        trace(net)
