"""What TensorRT lets pass with a line in its log, or without: each must raise at its own line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from plugins.support.errors import BuildError, CapabilityError, UsageError
from plugins.trt import builder
from plugins.trt.backend import load_backend
from plugins.trt.builder import build_serialized
from plugins.trt.logger import is_harmless
from plugins.trt.network import Network
from plugins.trt.weights import TensorSource, WeightPolicy


@pytest.fixture
def net() -> Network:
    return Network(load_backend("tensorrt_rtx"))


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """The block raises a BuildError that contains all words."""
    with pytest.raises(BuildError) as caught:
        yield
    for word in words:
        assert word in str(caught.value), str(caught.value)


def _buildable(net: Network) -> Network:
    x = net.input("x", "float32", (-1, 4))
    net.output(net.mul(x, 2.0), "y")
    return net


_PROFILE = {"x": ((1, 4), (2, 4), (8, 4))}


# 1. Names


def test_a_duplicate_input_name(net: Network) -> None:
    net.input("x", "float32", (2,))
    with refused("already in use", "x"):
        net.input("x", "float32", (2,))


def test_a_duplicate_output_name(net: Network) -> None:
    x = net.input("x", "float32", (2,))
    net.output(net.mul(x, 2.0), "y")
    with refused("already in use", "y"):
        net.output(net.mul(x, 3.0), "y")


def test_an_output_named_like_a_layer(net: Network) -> None:
    x = net.input("x", "float32", (2,))
    with net.scope("layers.0"):
        a = net.exp(x)
    with refused("already in use"):
        net.output(net.mul(a, 2.0), a.name)


def test_a_name_tensorrt_keeps_although_another_was_set(net: Network) -> None:
    x = net.input("x", "float32", (2,))
    net.exp(x)
    layer = net.raw.add_unary(x, net.trt.UnaryOperation.ABS)
    layer.get_output(0).name = "x"
    with refused("the network"):
        net._check_log("the network")


def test_repeated_layers_get_names_of_their_own(net: Network) -> None:
    x = net.input("x", "float32", (2,))
    with net.scope("a"):
        names = [net.exp(x).name, net.exp(x).name]
    with net.scope("b"):
        names.append(net.exp(x).name)
    assert names == ["a.exp", "a.exp_1", "b.exp"]


# 2. A mask on causal attention is dropped


def test_a_mask_together_with_a_causal_kind(net: Network) -> None:
    q = net.input("q", "bfloat16", (1, 2, 4, 16))
    mask = net.input("m", "bool", (1, 1, 4, 4))
    with refused("exclude each other"):
        net.attention(q, q, q, mask, causal="upper_left")


@pytest.mark.parametrize(
    ("shape", "dtype", "word"),
    [
        ((4, 4), "bool", "does not fit"),
        ((1, 1, 4, 5), "bool", "does not fit"),
        ((1, 1, 4, 4), "float32", "bool or of the query's type"),
    ],
)
def test_a_mask_that_does_not_fit(net: Network, shape, dtype: str, word: str) -> None:
    q = net.input("q", "bfloat16", (1, 2, 4, 16))
    mask = net.input("m", dtype, shape)
    with refused(word):
        net.attention(q, q, q, mask)


# 3. Flags the flavour only complains about: any logged error is an error of the build


def test_an_error_logged_while_configuring(net: Network, tmp_path: Path, monkeypatch) -> None:
    _buildable(net)
    original = builder._config

    def configured(n: Network):
        config = original(n)
        config.set_flag(n.trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
        config.runtime_platform = n.trt.RuntimePlatform.WINDOWS_AMD64
        return config

    monkeypatch.setattr(builder, "_config", configured)
    with refused():
        build_serialized(net, _PROFILE, tmp_path / "a.engine")
    assert not (tmp_path / "a.engine").exists()


# 4. add_* returns nothing


def test_top_k_beyond_the_limit(net: Network) -> None:
    x = net.input("x", "float32", (1, 5000))
    with refused("k is out of range", "1..3840", "3841"):
        net.topk(x, 3841, 1)
    with refused("k is out of range"):
        net.topk(net.input("z", "float32", (1, 3)), 4, 1)


def test_one_dimensional_convolution(net: Network) -> None:
    x = net.input("x", "float32", (1, 4, 9))
    with refused("rank 4"):
        net.convolution(x, net.literal(np.zeros((4, 1, 3), np.float32)), groups=4)


def test_a_layer_that_is_not_added(net: Network) -> None:
    with refused("gave no reason"):
        net._done(None, "something")


# 5. Shapes that nobody asks for


@pytest.mark.parametrize(
    "define",
    [
        lambda net, a, b: net.matmul(a, b),
        lambda net, a, b: net.add(a, b),
        lambda net, a, b: net.concat([a, b], 0),
        lambda net, a, b: net.reshape(a, (5, 2)),
        lambda net, a, b: net.slice(a, (0, 2), (2, 3)),
        lambda net, a, b: net.transpose(a, (0, 0)),
        lambda net, a, b: net.squeeze(a, (0,)),
        lambda net, a, b: net.gather(a, b, 0),
        lambda net, a, b: net.expand(a, (4, 4)),
        lambda net, a, b: net.gather_elements(a, net.iota(2), 0),
        lambda net, a, b: net.gather_nd(a, net.reshape(net.iota(3), (1, 3))),
        lambda net, a, b: net.scatter_nd(a, net.iota(2), a),
        lambda net, a, b: net.scatter_elements(a, net.cast(b, "int32"), a, 1),
        lambda net, a, b: net.add(a, net.cast(a, "int32")),
        lambda net, a, b: net.add(a, net.reshape(a, (8,))),
        lambda net, a, b: net.select(a, a, a),
        lambda net, a, b: net.div(net.cast(a, "int32"), 2),
        lambda net, a, b: net.mul(net.cast(a, "int32"), 0.5),
        lambda net, a, b: net.sigmoid(net.cast(a, "int32")),
        lambda net, a, b: net.reduce_sum(a, (2,)),
    ],
)
def test_operands_that_do_not_fit(net: Network, define: Callable) -> None:
    a = net.input("a", "float32", (2, 4))
    b = net.input("b", "float32", (3, 5))
    with net.scope("layers.7"), refused("layers.7"):
        define(net, a, b)


def test_what_only_tensorrt_notices_is_raised_at_once(net: Network) -> None:
    x = net.input("x", "float32", (2, 4))
    scale = net.input("s", "bfloat16", (1, 4))
    with net.scope("here"), refused("here.layer_norm"):
        net.layer_norm(x, scale, scale, (1,), 1e-6)


# 6. Unused inputs stay inputs that must be bound


def test_an_unused_weight_is_not_an_input() -> None:
    source = TensorSource({"w": torch.zeros(4), "unused": torch.zeros(4)})
    net = Network(load_backend("tensorrt_rtx"), source=source, policy=WeightPolicy("inputs"))
    net.output(net.mul(net.weight("w", "float32", (4,)), 2.0), "y")
    assert list(net.inputs) == ["w"]


# 7. Profiles


@pytest.mark.parametrize(
    ("profile", "word"),
    [
        ({"x": ((4, 4), (2, 4), (8, 4))}, "impossible"),
        ({"x": ((1, 5), (2, 5), (8, 5))}, "impossible"),
        ({"x": ((1,), (2,), (8,))}, "impossible"),
        ({}, "lacks a dynamic input"),
        ({**_PROFILE, "z": ((1,), (1,), (1,))}, "no dynamic input"),
    ],
)
def test_profiles(net: Network, tmp_path: Path, profile, word: str) -> None:
    _buildable(net)
    with refused(word):
        build_serialized(net, profile, tmp_path / "a.engine")
    assert not list(tmp_path.iterdir())


# 8. See 6; 9. A constant whose count is not its shape


def test_constants_take_shape_and_count_from_one_array(net: Network) -> None:
    value = net.literal(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert net.shape(value) == (2, 3)
    with refused("cannot be empty"):
        net.literal(np.zeros((0, 3), np.float32))
    with refused("uint8"):
        net.literal(np.zeros(3, np.uint8))


def test_a_scalar_constant_keeps_rank_zero(net: Network) -> None:
    assert net.shape(net.literal(np.array(3.0, np.float32))) == ()


# 10. FP8 and FP4 without a target list


def test_every_listed_target_is_checked_against_the_element_types() -> None:
    backend = load_backend("tensorrt_rtx")
    assert backend.capability(None, ("bfloat16",)).targets == ("8.0", "8.6", "8.9", "12.0")
    assert backend.capability(None, ("float8_e4m3fn",)).targets == ("8.9", "12.0")
    assert backend.capability(None, ("float4_e2m1fn",)).targets == ("12.0",)
    with pytest.raises(CapabilityError, match=r"8\.6 has no float8_e4m3fn"):
        backend.capability(("8.6", "8.9"), ("float8_e4m3fn",))
    with pytest.raises(UsageError, match=r"9\.0"):
        backend.capability(("9.0",))
    with pytest.raises(UsageError, match="not a compute capability"):
        backend.capability(("sm80",))


def test_a_type_used_later_is_refused_before_building(net: Network, tmp_path: Path) -> None:
    data = net.literal(torch.zeros(4, 4).to(torch.float8_e4m3fn))
    net.output(net.dequantize(data, net.literal(torch.tensor(1.0)), "float32"), "y")
    with pytest.raises(CapabilityError, match=r"8\.0 has no float8_e4m3fn"):
        build_serialized(net, {}, tmp_path / "a.engine")


# 11. Misaligned and freed buffers


def test_buffers_are_kept_and_aligned(net: Network) -> None:
    raw = torch.zeros(9, dtype=torch.uint8)
    odd = raw[1:].view(torch.uint8)
    values = torch.frombuffer(
        bytearray(raw.numpy().tobytes()), dtype=torch.bfloat16, count=4, offset=1
    )
    assert odd.data_ptr() % 2 == 1 or values.data_ptr() % 2 == 1
    constant = net.literal(values)
    kept = net.constants[constant.name].array
    assert kept.data_ptr() % 2 == 0 and any(b is kept for b in net._buffers)


# 12. A build that returns nothing


def test_a_build_without_result(net: Network, tmp_path: Path) -> None:
    x = net.input("x", "int64", (4,))
    net.output(net.mul(x, 2), "y")
    q = net.input("q", "float32", (1, 2, 4, 16))
    layer = net.raw.add_attention_v2(
        q, q, q, net.trt.AttentionNormalizationOp.SOFTMAX, net.trt.CausalMaskKind.NONE
    )
    net.output(net._one(layer, "attention"), "z")
    with refused("fused attention", "tensorrt_rtx"):
        build_serialized(net, {}, tmp_path / "a.engine")
    assert not list(tmp_path.iterdir())


# Cache updates


@pytest.mark.parametrize(
    ("cache", "update", "index", "word"),
    [
        (("bfloat16", (1, 2, -1, 4)), ("bfloat16", (1, 2, 1, 4)), "int32", "static length"),
        (("bfloat16", (1, 2, 8, 4)), ("float16", (1, 2, 1, 4)), "int32", "floating-point type"),
        (("bfloat16", (1, 2, 8, 4)), ("bfloat16", (1, 2, 1, 4)), "int64", "int32"),
        (("bfloat16", (1, 2, 8, 4)), ("bfloat16", (1, 2, 9, 4)), "int32", "does not fit"),
        (("bfloat16", (1, 2, 8, 4)), ("bfloat16", (1, 3, 1, 4)), "int32", "does not fit"),
    ],
)
def test_cache_updates_that_cannot_be(net: Network, cache, update, index: str, word: str) -> None:
    with refused(word):
        net.kv_cache_update(
            net.input("c", *cache), net.input("u", *update), net.input("w", index, (1,))
        )


def test_a_cache_must_be_an_input_and_is_updated_once(net: Network) -> None:
    cache = net.input("c", "bfloat16", (1, 2, 8, 4))
    update = net.input("u", "bfloat16", (1, 2, 1, 4))
    write = net.input("w", "int32", (1,))
    with refused("network input"):
        net.kv_cache_update(net.mul(cache, 1.0), update, write)
    assert net.kv_cache_update(cache, update, write).name == "c.updated"
    assert list(net.outputs) == ["c.updated"]
    with refused("twice"):
        net.kv_cache_update(cache, update, write)


def test_only_two_kinds_of_lines_are_harmless() -> None:
    assert is_harmless(
        "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (In catchCudaError at "
        "/_src/common/dispatch/checkMacros.cpp:250 (cudaError 35: CUDA driver version ..."
    )
    assert is_harmless("Thread context has not been set!")
    assert not is_harmless("Error Code 3: API Usage Error (Parameter check failed")
    assert not is_harmless("catchCudaError (cudaError 2: out of memory)")
