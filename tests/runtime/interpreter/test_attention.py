"""Attention, rotary embedding and cache update against written-out numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plugins.support.errors import BuildError, InputError
from runtime.interpreter.execute import Interpreter
from runtime.interpreter.trace import trace
from tests.runtime.interpreter.harness import build, new_network, run


def _random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def _reference(q, k, v, allowed, bias=None) -> np.ndarray:
    q, k, v = (t.double().numpy() for t in (q, k, v))
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = q[b, h] @ k[b, h // group].T
            if bias is not None:
                scores = scores + bias[b, h]
            scores = np.where(allowed[b, h], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[b, h] = weights / weights.sum(-1, keepdims=True) @ v[b, h // group]
    return out


def _qkv(dtype=torch.bfloat16):
    q = (_random(2, 4, 3, 16) * 0.3).to(dtype)
    return q, _random(2, 2, 5, 16, seed=1).to(dtype), _random(2, 2, 5, 16, seed=2).to(dtype)


def _mask() -> torch.Tensor:
    mask = _random(2, 1, 3, 5, seed=3) > 0
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_attention_with_a_boolean_mask(dtype: torch.dtype) -> None:
    q, k, v = _qkv(dtype)
    mask = _mask()
    (result,) = run(
        lambda net, q, k, v, m: net.attention(q, k, v, m),
        {"q": q, "k": k, "v": v, "m": mask},
        static=True,
    )
    allowed = np.broadcast_to(mask.numpy(), (2, 4, 3, 5))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    np.testing.assert_allclose(result.float().numpy(), _reference(q, k, v, allowed), atol=tolerance)


def test_the_mask_matters() -> None:
    q, k, v = _qkv(torch.float32)
    with_mask, without = run(
        lambda net, q, k, v, m: [net.attention(q, k, v, m), net.attention(q, k, v)],
        {"q": q, "k": k, "v": v, "m": _mask()},
        static=True,
        compile_engine=False,
    )
    assert (with_mask - without).abs().max() > 0.05


def test_additive_mask() -> None:
    q, k, v = _qkv()
    bias = _random(2, 4, 3, 5, seed=4).bfloat16()
    (result,) = run(
        lambda net, q, k, v, m: net.attention(q, k, v, m),
        {"q": q, "k": k, "v": v, "m": bias},
        static=True,
    )
    everything = np.ones((2, 4, 3, 5), bool)
    expected = _reference(q, k, v, everything, bias.double().numpy())
    np.testing.assert_allclose(result.float().numpy(), expected, atol=3e-2)


@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
def test_causal_kinds_with_key_lengths(causal: str) -> None:
    q, k, v = _qkv()
    lengths = torch.tensor([5, 4], dtype=torch.int32)
    (result,) = run(
        lambda net, q, k, v, n: net.attention(q, k, v, causal=causal, key_lengths=n),
        {"q": q, "k": k, "v": v, "n": lengths},
        static=True,
    )
    shift = 2 if causal == "lower_right" else 0
    rows, columns = np.arange(3)[:, None], np.arange(5)[None, :]
    allowed = np.stack(
        [np.broadcast_to((columns <= rows + shift) & (columns < n), (4, 3, 5)) for n in (5, 4)]
    )
    np.testing.assert_allclose(result.float().numpy(), _reference(q, k, v, allowed), atol=2e-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_rotary_embedding(interleaved: bool, by_position: bool, rotary_dim: int) -> None:
    x = _random(2, 3, 4, 8)
    half = rotary_dim // 2
    angles = _random(10, half, seed=1)
    positions = torch.tensor([[0, 3, 9, 1], [2, 2, 5, 7]], dtype=torch.int32)
    cos, sin = angles.cos(), angles.sin()
    if not by_position:
        cos, sin = cos[positions], sin[positions]

    def definition(net, x, cos, sin, *rest):
        return net.rotary_embedding(
            x, cos, sin, *rest, rotary_dim=rotary_dim, interleaved=interleaved
        )

    inputs = {"x": x, "cos": cos, "sin": sin} | ({"p": positions} if by_position else {})
    (result,) = run(definition, inputs, static=True)
    expected = x.double().numpy().copy()
    for b in range(2):
        for s in range(4):
            angle = angles[positions[b, s]].double().numpy()
            for i in range(half):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                u, w = x[b, :, s, first].double().numpy(), x[b, :, s, second].double().numpy()
                expected[b, :, s, first] = u * np.cos(angle[i]) - w * np.sin(angle[i])
                expected[b, :, s, second] = w * np.cos(angle[i]) + u * np.sin(angle[i])
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-6)


def _cache_network():
    net = new_network()
    cache = net.input("cache", "bfloat16", (-1, 2, 8, 4))
    update = net.input("update", "bfloat16", (-1, 2, -1, 4))
    write = net.input("write", "int32", (-1,))
    updated = net.kv_cache_update(cache, update, write)
    net.output(net.mul(updated, 2.0), "doubled")
    return net


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_cache_is_updated_in_place(contiguous: bool) -> None:
    net = _cache_network()
    storage = torch.zeros(4, 2, 8, 4).bfloat16()
    cache = storage[1:3] if contiguous else storage[::2]
    update = _random(2, 2, 3, 4).bfloat16()
    write = torch.tensor([5, 0], dtype=torch.int32)
    inputs = {"cache": cache, "update": update, "write": write}
    assert build(net, inputs).report.cache_updates() == {"cache.updated": "cache"}
    interpreter = Interpreter(trace(net), {}, strict=True)
    for factor in (1, 2):
        result = interpreter.run({**inputs, "update": update * factor})
        expected = torch.zeros(2, 2, 8, 4).bfloat16()
        expected[0, :, 5:8], expected[1, :, 0:3] = update[0] * factor, update[1] * factor
        assert torch.equal(cache, expected) and torch.equal(result["doubled"], expected * 2)
        assert result["cache.updated"].data_ptr() == cache.data_ptr()


@pytest.mark.parametrize("start", [6, -1])
def test_a_write_outside_the_cache_is_refused(start: int) -> None:
    interpreter = Interpreter(trace(_cache_network()), {})
    cache = torch.zeros(1, 2, 8, 4).bfloat16()
    with pytest.raises(InputError, match="kv_cache_update"):
        interpreter.run(
            {
                "cache": cache,
                "update": torch.ones(1, 2, 3, 4).bfloat16(),
                "write": torch.tensor([start], dtype=torch.int32),
            }
        )
    assert not cache.any()


def test_a_cache_may_not_be_read_before_its_update() -> None:
    net = _cache_network()
    net.output(net.mul(net.inputs["cache"], 3.0), "stale")
    with pytest.raises(BuildError, match="read before its update"):
        trace(net)
