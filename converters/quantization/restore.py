"""The float32 weights that a converted checkpoint means, by target name.

The decoding is that of the format modules, not of the networks, so that networks can be compared
with it. All weights are in memory at once.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from converters.checkpoint.config import WEIGHTS_FILE
from converters.quantization import fp8, nvfp4


def restored_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Every weight of the checkpoint in `directory`, decoded where it is quantised; no scales."""
    tensors = load_file(directory / WEIGHTS_FILE)
    result = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix.endswith(("scaling_factor", "scaling_factor_2")):
            continue
        scale = tensors.get(f"{module}.weights_scaling_factor")
        if scale is None:
            result[name] = tensor.float()
            continue
        second = tensors.get(f"{module}.weights_scaling_factor_2")
        result[name] = (
            _fp8(tensor, scale.float()) if second is None else _nvfp4(tensor, scale, second)
        )
    return result


def _nvfp4(codes: torch.Tensor, scales: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    if codes.dim() == 2:
        return _nvfp4(codes[None], scales[None], second[None])[0]
    pieces = second.shape[1]
    return torch.stack(
        [
            torch.cat(
                [
                    nvfp4.dequantize(c, s, factor)
                    for c, s, factor in zip(
                        expert.chunk(pieces), block.chunk(pieces), factors, strict=True
                    )
                ]
            )
            for expert, block, factors in zip(codes, scales, second, strict=True)
        ]
    )


def _fp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if codes.dim() == 2:
        return _fp8(codes[None], scale[None])[0]
    rows = codes.shape[1]
    if scale.dim() == 2:
        return codes.float() * scale.repeat_interleave(rows // scale.shape[1], 1)[..., None]
    experts = []
    # Blocks of gate and of up are apart, so the number of projections follows from the block rows.
    pieces = 1 if scale.shape[1] == -(-rows // fp8.BLOCK) else 2
    for expert, blocks in zip(codes, scale, strict=True):
        experts.append(
            torch.cat(
                [
                    fp8.dequantize_blocks(c, b)
                    for c, b in zip(expert.chunk(pieces), blocks.chunk(pieces), strict=True)
                ]
            )
        )
    return torch.stack(experts)
