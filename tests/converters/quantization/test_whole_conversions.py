"""The files of `--quantize` hold Model Optimizer's bytes: every matrix, hostile values included."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from converters.checkpoint.config import WEIGHTS_FILE
from converters.checkpoint.convert import convert
from tests.fixtures.dots3_fp8 import CHANGES
from tests.fixtures.dots3_random import METADATA, write
from tests.fixtures.qwen38_deterministic import write_deterministic

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    export = pytest.importorskip("modelopt.torch.export.quant_utils")
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
HOSTILE = [-0.0, 0.25, 1.75, -2.5, 6.0, -6.0, 1e-30, -1e-8, 3e4, 5.9604645e-08, 0.01]
# Matrices that engines multiply as one, by the last parts of their names; they share a global
# scale in NVFP4. Gate and up of an expert are one matrix here, and share it in FP8 too.
JOINED = (
    ("attention.q", "attention.k", "attention.v"),
    ("linear_attention.in_proj_qkv", "linear_attention.in_proj_z"),
    ("shared_expert.gate", "shared_expert.up"),
    ("ple.key", "ple.value"),
    ("attention.q_a", "attention.kv_a"),
)


def spoil(tensors: Tensors) -> Tensors:
    """Hostile values in every matrix: single ones, a block of zeros, a block that underflows."""
    generator = torch.Generator().manual_seed(7)
    spoilt = {}
    for name, values in tensors.items():
        values = values.clone()
        if (
            values.dim() > 1
            and values.is_floating_point()
            and min(values.shape[-2] // 2, values.shape[-1] // 32) > 0
        ):
            kinds = torch.tensor(HOSTILE, dtype=values.dtype)
            kinds = kinds[torch.randint(len(HOSTILE), values.shape, generator=generator)]
            mask = torch.rand(values.shape, generator=generator) < 0.02
            # Rows differ in their largest value, so matrices that share a scale do, too.
            kinds = kinds * torch.rand(*values.shape[:-1], 1, generator=generator).to(values.dtype)
            values = torch.where(mask, kinds, values)
            values[..., 0, :16] = 0.0
            values[..., 1, 16:32] = 1e-12
        spoilt[name] = values
    return spoilt


@pytest.fixture(scope="module", params=["qwen38 bfloat16", "qwen38 float32", "dots3 bfloat16"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, _, dtype = request.param.partition(" ")
    directory = tmp_path_factory.mktemp(family) / "hf"
    if family == "dots3":
        write(directory, **CHANGES)
    else:
        # 144 and 48 rows make partial blocks of FP8.
        sizes = {"moe_intermediate_size": 144, "shared_expert_intermediate_size": 48}
        write_deterministic(directory, files=1, vision=False, **sizes)
    path = directory / "model.safetensors"
    target = getattr(torch, dtype)
    tensors = {n: t.to(target) if t.is_floating_point() else t for n, t in load_file(path).items()}
    metadata = METADATA if family == "dots3" else {"format": "pt"}
    save_file(spoil(tensors), path, metadata=metadata)
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"float32"', f'"{dtype}"', 1))
    return directory


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def peers(module: str, plain: Tensors) -> list[str]:
    """Modules with the same global scale in NVFP4, this one among them."""
    for group in JOINED:
        for end in group:
            if module.endswith(f".{end}"):
                base = module.removesuffix(end)
                return [base + other for other in group if f"{base}{other}.weight" in plain]
    return [module]


def made(algorithm: str, values: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Model Optimizer's codes, block scales and global scale of one matrix."""
    if algorithm == "nvfp4":
        second = amax.float() / (6.0 * 448.0)
        codes, scales, _ = NVFP4QTensor.quantize(values.clone(), 16, None, second)
        return codes._quantized_data, scales, second
    if algorithm == "fp8":
        scale = amax.float() / 448.0
        return export.to_quantized_weight(values.clone(), scale, "fp8"), scale
    codes, scales = FP8QTensor.quantize(values.float(), block_sizes={-1: 128, -2: 128})
    return codes._quantized_data, scales


@pytest.mark.parametrize("algorithm", ["nvfp4", "fp8", "fp8-block"])
def test_every_matrix_is_as_model_optimizer_makes_it(
    source: Path, tmp_path: Path, algorithm: str
) -> None:
    convert(source, tmp_path / "plain")
    convert(source, tmp_path / "ckpt", quantize=algorithm, only="all")
    plain, stored = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("plain", "ckpt"))
    modules = {n.removesuffix(".weights_scaling_factor") for n in stored} - stored.keys()
    assert len(modules) > 15
    compared = 0
    for module in sorted(modules):
        whole = plain[f"{module}.weight"]
        codes = stored[f"{module}.weight"]
        scales = stored[f"{module}.weights_scaling_factor"]
        second = stored.get(f"{module}.weights_scaling_factor_2", scales)
        experts = range(len(whole)) if whole.dim() == 3 else [...]
        # Gate above up, in one tensor: blocks do not straddle the two.
        pieces = 2 if module.endswith("gate_up") else 1
        for expert in experts:
            matrix = whole[expert]
            group = [plain[f"{name}.weight"] for name in peers(module, plain)]
            joint = matrix.abs().max()
            if algorithm == "nvfp4" and len(group) > 1:
                joint = torch.stack([member.abs().max() for member in group]).max()
            parts = zip(
                matrix.chunk(pieces),
                codes[expert].chunk(pieces),
                scales[expert].chunk(pieces),
                second[expert].flatten().chunk(pieces),
                strict=True,
            )
            for values, found, blocks, one in parts:
                expected = made(algorithm, values, joint)
                assert torch.equal(bits(found), bits(expected[0])), (module, expert)
                own = one if algorithm == "fp8" else blocks
                assert torch.equal(bits(own), bits(expected[1])), (module, expert)
                if algorithm == "nvfp4":
                    assert torch.equal(bits(one), bits(expected[2])), (module, expert)
                compared += 1
    assert compared > 1.5 * len(modules)
