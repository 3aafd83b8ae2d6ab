"""Widths of dense MLPs for any number of ranks, and that padding changes no result."""

from __future__ import annotations

import pytest
import torch

from converters.checkpoint.header import TensorEntry
from converters.quantization.padding import has_block_scales, padded_shape, padded_width
from plugins.support.dtypes import BY_NAME

HIDDEN = 5120
# Ranks -> width of a dense MLP of 13824 and of a shared expert of 1536.
WIDTHS = {
    1: (13824, 1536),
    2: (13824, 1536),
    3: (13824, 1536),
    4: (13824, 1536),
    6: (13824, 1536),
    8: (14336, 2048),
    12: (13824, 1536),
    16: (14336, 2048),
}
MODULES = ("layers.0.mlp", "layers.46.mlp", "layers.3.mlp.shared_experts")


@pytest.mark.parametrize("tp_size", WIDTHS)
def test_released_widths(tp_size: int) -> None:
    for width, padded in zip((13824, 1536), WIDTHS[tp_size], strict=True):
        assert padded_width(width, tp_size) == padded
        blocks, ranks = padded // 128, padded // 128 // tp_size
        assert ranks * tp_size == blocks
        for module in MODULES:
            for name in ("gate_proj", "up_proj"):
                base = f"model.{module}.{name}"
                shape = padded_shape(f"{base}.weight", (width, HIDDEN), tp_size)
                assert shape == (padded, HIDDEN)
                scales = padded_shape(f"{base}.weight_scale_inv", (width // 128, 40), tp_size)
                assert scales == (blocks, 40)
            base = f"model.{module}.down_proj"
            assert padded_shape(f"{base}.weight", (HIDDEN, width), tp_size) == (HIDDEN, padded)
            scales = padded_shape(f"{base}.weight_scale_inv", (40, width // 128), tp_size)
            assert scales == (40, blocks)


@pytest.mark.parametrize(
    ("width", "tp_size", "padded"), [(144, 1, 256), (144, 2, 256), (1, 3, 384)]
)
def test_partial_blocks(width: int, tp_size: int, padded: int) -> None:
    assert padded_width(width, tp_size) == padded
    assert padded_shape("layers.0.mlp.up_proj.weight", (width, 96), tp_size) == (padded, 96)


@pytest.mark.parametrize(
    "name",
    [
        "layers.3.mlp.experts.7.gate_proj.weight",
        "layers.3.mlp.experts.7.down_proj.weight_scale_inv",
        "layers.3.mlp.gate.weight",
        "layers.3.mlp.gate.e_score_correction_bias",
        "layers.3.self_attn.o_proj.weight",
        "layers.46.eh_proj.weight",
    ],
)
def test_everything_else_keeps_its_shape(name: str) -> None:
    assert padded_shape(name, (1500, 1500), 8) == (1500, 1500)


def test_padding_changes_no_result() -> None:
    """Shares of eight ranks add up to the unpadded MLP, and the last two hold only zeros."""
    chance = torch.Generator().manual_seed(1)
    width, hidden, ranks = 1536, 64, 8
    gate, up = (torch.randn(width, hidden, generator=chance) / 8 for _ in range(2))
    down = torch.randn(hidden, width, generator=chance) / width**0.5
    x = torch.randn(5, hidden, generator=chance)

    def mlp(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def padded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        shape = padded_shape(f"layers.2.mlp.shared_experts.{name}.weight", tensor.shape, ranks)
        room = tensor.new_zeros(shape)
        room[: tensor.shape[0], : tensor.shape[1]] = tensor
        return room

    shares = list(
        zip(
            padded("gate_proj", gate).chunk(ranks),
            padded("up_proj", up).chunk(ranks),
            padded("down_proj", down).chunk(ranks, dim=1),
            strict=True,
        )
    )
    assert [bool(share[0].any()) for share in shares] == [True] * 6 + [False] * 2
    total = torch.stack([mlp(*share) for share in shares]).sum(0)
    torch.testing.assert_close(total, mlp(gate, up, down), atol=2e-5, rtol=0.0)
    # A share that is left out would be seen.
    partial = torch.stack([mlp(*share) for share in shares[1:]]).sum(0)
    assert (partial - mlp(gate, up, down)).abs().max() > 0.1


def _entries(**shapes: tuple[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    return {
        f"model.layers.0.mlp.{name}": TensorEntry(
            f"model.layers.0.mlp.{name}",
            BY_NAME[dtype],
            shape,
            None,
            0,  # type: ignore[arg-type]
        )
        for name, (dtype, shape) in shapes.items()
    }


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "padded"),
    [
        ("down_proj.weight_scale_inv", "float32", (1, 1), True),
        ("up_proj.weight_scale", "float32", (2, 1), True),
        ("shared_experts.up_proj.weight_scale_inv", "bfloat16", (12, 40), True),
        # As Model Optimizer writes them.
        ("up_proj.weight_scale", "float32", (2, 1, 1, 1), True),
        # One scale, the scales of four-bit groups, and routed experts.
        ("up_proj.weight_scale", "float32", (1, 1), False),
        ("up_proj.weight_scale_inv", "float32", (), False),
        ("up_proj.weight_scale", "float8_e4m3fn", (144, 6), False),
        ("experts.0.up_proj.weight_scale_inv", "float32", (2, 1), False),
        ("up_proj.weight", "float32", (144, 96), False),
    ],
)
def test_block_scales_are_recognised(
    name: str, dtype: str, shape: tuple[int, ...], padded: bool
) -> None:
    assert has_block_scales(_entries(**{name: (dtype, shape)})) == padded
