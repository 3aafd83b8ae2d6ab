"""Quantised matrices decoded by the network, against decoding by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.layers.linear import linear
from converters.layers.stored import gathered_matrices, stored_matrix
from plugins.support.errors import BuildError, InputError
from plugins.trt.network import Network
from tests.converters.layers.evaluate import evaluate

G = torch.Generator().manual_seed(23)
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _decoded(weights: dict[str, Tensor], shape: tuple[int, ...], pieces: int = 1) -> Tensor:
    """The network's values of "w", float32, by layers, by tables, and of gathered matrices."""
    ids = torch.tensor([[2, 0], [1, 2], [0, 0]]).int()

    def build(net, ids):
        out = {"values": stored_matrix(net, "w", shape, "float32", pieces=pieces)}
        if len(shape) == 3:
            out["some"] = gathered_matrices(net, "w", shape, "float32", ids, pieces=pieces)
        return out

    results = [
        evaluate(build, {"ids": ids}, weights, dynamic={"ids": (0,)}, targets=(target,))
        for target in ("12.0", "8.0")
    ]
    for result in results:
        assert torch.equal(result["values"], results[0]["values"])
        if "some" in result:
            assert torch.equal(result["some"], results[0]["values"][ids.long()])
    return results[0]["values"]


def _codes(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=G).to(torch.float8_e4m3fn)


def _scales(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=G) + 0.1


@pytest.mark.parametrize(
    ("shape", "pieces"),
    [
        ((192, 320), 1),
        ((64, 320), 1),
        ((128, 128), 1),
        ((256, 48), 1),
        ((3, 130, 128), 1),
        ((3, 8, 8), 1),
        ((512, 128), 2),
        ((288, 96), 2),
        ((3, 512, 128), 2),
        ((3, 300, 40), 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_blocks_with_partial_last_ones(
    shape: tuple[int, ...], pieces: int, dtype: torch.dtype
) -> None:
    codes, rows = _codes(*shape), shape[-2] // pieces
    per_piece = math.ceil(rows / 128)
    scale = _scales(*shape[:-2], pieces * per_piece, math.ceil(shape[-1] / 128)).to(dtype)
    expected = codes.float()
    for row in range(shape[-2]):
        for column in range(0, shape[-1], 128):
            number = row // rows * per_piece + row % rows // 128
            block = scale[..., number, column // 128].float()
            expected[..., row, column : column + 128] *= block[..., None]
    weights = {"w.weight": codes, "w.weights_scaling_factor": scale}
    assert torch.equal(_decoded(weights, shape, pieces), expected)


@pytest.mark.parametrize("pieces", [1, 2])
def test_fp8_with_one_scale(pieces: int) -> None:
    codes, scale = _codes(6, 8), _scales(pieces)
    expected = codes.float() * scale.repeat_interleave(6 // pieces)[:, None]
    weights = {"w.weight": codes, "w.weights_scaling_factor": scale}
    assert torch.equal(_decoded(weights, (6, 8), pieces), expected)
    codes, scale = _codes(3, 6, 8), _scales(3, pieces)
    expected = codes.float() * scale.repeat_interleave(6 // pieces, 1)[..., None]
    weights = {"w.weight": codes, "w.weights_scaling_factor": scale}
    assert torch.equal(_decoded(weights, (3, 6, 8), pieces), expected)


def _nvfp4(shape: tuple[int, ...], globals_: tuple[int, ...]) -> dict[str, Tensor]:
    return {
        "w.weight": torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=G).byte(),
        "w.weights_scaling_factor": _scales(*shape[:-1], shape[-1] // 16).to(torch.float8_e4m3fn),
        "w.weights_scaling_factor_2": _scales(*globals_),
    }


def _nvfp4_by_hand(weights: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    packed = weights["w.weight"].long()
    codes = torch.stack([packed % 16, packed // 16], -1).flatten(-2)
    value = VALUES[codes % 8] * torch.where(codes >= 8, -1.0, 1.0)
    scale = weights["w.weights_scaling_factor"].float()
    glob = weights["w.weights_scaling_factor_2"]
    scale = scale * glob.repeat_interleave(shape[-2] // glob.shape[-1], -1)[..., None]
    return value * scale.repeat_interleave(16, -1)


@pytest.mark.parametrize(
    ("shape", "globals_"),
    [((6, 32), (1,)), ((6, 32), (2,)), ((3, 8, 32), (3, 1)), ((3, 8, 32), (3, 2))],
)
def test_nvfp4(shape: tuple[int, ...], globals_: tuple[int, ...]) -> None:
    weights = _nvfp4(shape, globals_)
    expected = _nvfp4_by_hand(weights, shape)
    pieces = globals_[-1]
    assert torch.equal(_decoded(weights, shape, pieces), expected)
    swapped = weights | {"w.weight": (weights["w.weight"] >> 4) | (weights["w.weight"] << 4)}
    assert not torch.allclose(_decoded(swapped, shape, pieces), expected)


def test_nvfp4_check_vector() -> None:
    weights = {
        "w.weight": torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]] * 2).byte(),
        "w.weights_scaling_factor": torch.tensor([[1.0], [1.0]]).to(torch.float8_e4m3fn),
        "w.weights_scaling_factor_2": torch.tensor([0.5]),
    }
    half = VALUES / 2
    assert torch.equal(_decoded(weights, (2, 16)), torch.cat([half, -half]).expand(2, -1))


def test_linear_reads_what_is_stored() -> None:
    weights = _nvfp4((6, 32), (1,))
    x = torch.randn(2, 3, 32, generator=G)
    out = evaluate(lambda net, x: {"y": linear(net, x, "w", 6)}, {"x": x}, weights)["y"]
    torch.testing.assert_close(out, x @ _nvfp4_by_hand(weights, (6, 32)).T)


def test_scales_that_do_not_fit_are_refused() -> None:
    codes = _codes(6, 8)
    with pytest.raises(InputError, match="scales do not fit") as caught:
        _decoded({"w.weight": codes, "w.weights_scaling_factor": _scales(2, 2)}, (6, 8))
    assert caught.value.where == "w.weights_scaling_factor"
    with pytest.raises(InputError, match="scales do not fit"):
        _decoded({"w.weight": codes}, (6, 8))
    broken = _nvfp4((3, 8, 32), (3, 2))
    del broken["w.weights_scaling_factor_2"]
    with pytest.raises(InputError, match="scales do not fit"):
        _decoded(broken, (3, 8, 32), 2)
    with pytest.raises(BuildError, match="not what the network needs"):
        _decoded(_nvfp4((6, 32), (1,)), (6, 64))
    with pytest.raises(InputError, match="no way to read"):
        _decoded({"w.weight": torch.zeros(6, 8, dtype=torch.int8)}, (6, 8))


@pytest.mark.parametrize(
    ("weights", "shape", "native"),
    [
        # FP8 blocks, stacked and plain: one layer each.
        ({"codes": (256, 384), "blocks": (2, 3)}, (256, 384), [(128, 128)]),
        ({"codes": (3, 256, 128), "blocks": (3, 2, 1)}, (3, 256, 128), [(1, 128, 128)]),
        # Blocks that gate and up do not fill: codes natively, scales spread.
        ({"codes": (288, 96), "blocks": (4, 1)}, (288, 96), [None]),
        ({"fp4": (8, 16)}, (8, 32), [None, (1, 16)]),
        ({"fp4": (3, 8, 16)}, (3, 8, 32), [None, (1, 1, 16)]),
    ],
)
def test_codes_are_decoded_by_dequantise_layers_where_targets_have_them(
    monkeypatch: pytest.MonkeyPatch,
    weights: dict[str, tuple[int, ...]],
    shape: tuple[int, ...],
    native: list[tuple[int, ...] | None],
) -> None:
    if "fp4" in weights:
        tensors = _nvfp4(shape, (*shape[:-2], 1))
    else:
        tensors = {"w.weight": _codes(*weights["codes"])}
        tensors["w.weights_scaling_factor"] = _scales(*weights["blocks"])
    pieces = 2 if shape == (288, 96) else 1
    calls: list[tuple[int, ...] | None] = []
    dequantize = Network.dequantize

    def noting(net: Network, *arguments: Any, **options: Any) -> Any:
        calls.append(options.get("block_shape"))
        return dequantize(net, *arguments, **options)

    monkeypatch.setattr(Network, "dequantize", noting)
    found = {}
    for target, expected in (("12.0", native), ("8.0", [])):
        calls.clear()
        found[target] = evaluate(
            lambda net: {"values": stored_matrix(net, "w", shape, "float32", pieces=pieces)},
            {},
            tensors,
            targets=(target,),
        )["values"]
        assert calls == expected, target
    assert torch.equal(found["12.0"], found["8.0"])
