"""Quantized types against tables and torch's own conversions."""

from __future__ import annotations

import numpy as np
import torch

from runtime.interpreter.execute import Interpreter
from runtime.interpreter.kinds.quantization import decode_float4, encode_float4, unpack_float4
from runtime.interpreter.trace import trace
from tests.runtime.interpreter.harness import build, new_network, run

_GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def test_packed_codes_are_low_nibble_first() -> None:
    packed = torch.tensor([0x21, 0x43, 0x65], dtype=torch.uint8)
    assert decode_float4(unpack_float4(packed)).tolist() == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0]


def test_encoding_rounds_to_the_nearest_value_and_ties_to_even() -> None:
    values = torch.cat(
        (torch.linspace(-8, 8, 4001), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    )
    decoded = decode_float4(encode_float4(values)).double().numpy()
    wanted = []
    for value in values.double().tolist():
        distances = np.abs(_GRID - min(abs(value), 6.0))
        nearest = np.flatnonzero(distances == distances.min())
        code = next((int(c) for c in nearest if c % 2 == 0), int(nearest[0]))
        wanted.append(np.copysign(_GRID[code], value))
    np.testing.assert_array_equal(decoded, np.array(wanted))


def test_fp8_weight_with_block_scales() -> None:
    raw = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)) + 0.5
    net = new_network({"w": raw, "s": scales}, "inputs", dtypes=("float8_e4m3fn",))
    w = net.weight("w", "float8_e4m3fn", (6, 8))
    s = net.weight("s", "float32", (3, 2))
    net.output(net.dequantize(w, s, "float32", block_shape=(2, 4)), "y0")
    result = Interpreter(trace(net), {"w": raw, "s": scales}, strict=True).run({})["y0"]
    expected = raw.float().numpy() * np.kron(scales.numpy(), np.ones((2, 4)))
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6)
    assert build(net, {}).targets == ("8.9", "12.0")


def test_fp8_per_channel_and_per_tensor() -> None:
    raw = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    channel, scalar = torch.tensor([1.0, 2.0, 0.5, 4.0]), torch.tensor(0.25)

    def definition(net, x):
        data = net.literal(raw)
        per_channel = net.dequantize(data, net.literal(channel), "bfloat16", axis=0)
        x8 = net.quantize(x, net.literal(scalar), "float8_e4m3fn")
        back = net.dequantize(x8, net.literal(scalar), "bfloat16")
        return [per_channel, back]

    x = torch.tensor([[0.1, 200.0, -3.3]]).bfloat16()
    per_channel, back = run(definition, {"x": x}, dtypes=("float8_e4m3fn",))
    assert torch.equal(per_channel, (raw.float() * channel[:, None]).bfloat16())
    clamped = (x.float() / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.25
    assert torch.equal(back, clamped.bfloat16()) and back[0, 1].item() == 112.0


def test_nvfp4_weight_with_two_levels_of_scales() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (3, 16), generator=generator).to(torch.uint8)
    scales = (torch.rand(3, 2, generator=generator) + 0.5).to(torch.float8_e4m3fn)

    def definition(net):
        data = net.literal(packed, dtype="float4_e2m1fn")
        unit = net.literal(torch.tensor(0.125))
        decoded = net.dequantize(net.literal(scales), unit, "float32")
        return net.dequantize(data, decoded, "float32", block_shape=(1, 16))

    (result,) = run(definition, {}, dtypes=("float4_e2m1fn",))
    values = np.array([*_GRID, *-_GRID])
    codes = np.stack((packed.numpy() & 15, packed.numpy() >> 4), -1).reshape(3, 32)
    expected = values[codes] * np.repeat(scales.float().numpy(), 16, 1) * 0.125
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6)


def test_dynamic_quantization_keeps_values_within_half_a_step() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    unit = torch.tensor(0.01)

    def definition(net, x):
        data, scales = net.dynamic_quantize(x, 1, net.literal(unit))
        decoded = net.dequantize(scales, net.literal(unit), "float32")
        return [net.dequantize(data, decoded, "float32", block_shape=(1, 16)), decoded]

    back, decoded = run(definition, {"x": x}, static=True, dtypes=("float4_e2m1fn",))
    step = decoded.repeat_interleave(16, 1)
    # The grid is widest between 4 and 6; block scales are rounded to FP8 (1/16 relative).
    assert ((back - x.float()).abs() <= step * 1.0 + 0.4 * step).all()
    assert (back - x.float()).abs().mean() < 0.15 * x.float().abs().mean()
