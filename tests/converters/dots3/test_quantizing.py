"""`--quantize ... --only all` takes exactly the projections, and leaves what selects and gates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.checkpoint.config import WEIGHTS_FILE
from converters.checkpoint.convert import convert
from converters.checkpoint.recipe import Wanted
from converters.quantization.restore import restored_weights
from converters.quantization.targets import Quantize
from tests.fixtures.dots3_fp8 import CHANGES
from tests.fixtures.dots3_random import METADATA, write

# Layers: full attention and a dense MLP, a window and experts, full attention and experts.
FULL, SPARSE = (0, 2), (1, 2)
SCALES = {
    "nvfp4": ("weights_scaling_factor", "weights_scaling_factor_2"),
    "fp8": ("weights_scaling_factor",),
    "fp8-block": ("weights_scaling_factor",),
}
ERRORS = {"nvfp4": 0.2, "fp8": 0.04, "fp8-block": 0.04}
EXPERTS = ("mlp.experts.gate_up", "mlp.experts.down")
SHARED = ("mlp.shared_expert.gate_up", "mlp.shared_expert.down")
DENSE = ("mlp.gate_up", "mlp.down")
PROJECTIONS = tuple(f"attention.{name}" for name in ("q_a", "q_b", "kv_a", "kv_b", "dense"))


def quantised(only: str) -> set[str]:
    """Modules that a scope quantises."""
    found = {f"transformer.layers.{layer}.{name}" for layer in SPARSE for name in EXPERTS}
    if only in ("mlp", "all"):
        found |= {f"transformer.layers.{layer}.{name}" for layer in SPARSE for name in SHARED}
        found |= {f"transformer.layers.0.{name}" for name in DENSE}
    if only == "all":
        found |= {f"transformer.layers.{n}.{name}" for n in range(3) for name in PROJECTIONS}
    return found


NORMS = ("q_a_layernorm.weight", "kv_a_layernorm.weight", "k_rope_layernorm.weight")
INDEXER = ("q_b.weight", "k.weight", "weights.weight", "k_layernorm.weight", "k_layernorm.bias")
DRAFT = {
    "mtp.vocab_embedding.weight",
    "mtp.enorm.weight",
    "mtp.hnorm.weight",
    "mtp.eh_proj.weight",
    "mtp.ln_f.weight",
    "mtp.layers.0.input_layernorm.weight",
    "mtp.layers.0.post_layernorm.weight",
    "mtp.layers.0.attention.gate.weight",
    *(f"mtp.layers.0.attention.{name}" for name in NORMS),
    *(f"mtp.layers.0.{name}.weight" for name in (*PROJECTIONS, *DENSE)),
}


def kept() -> set[str]:
    """Tensors that no scope touches: the draft layer, and everything that is no projection."""
    found = {"transformer.vocab_embedding.weight", "transformer.ln_f.weight", "lm_head.weight"}
    for layer in range(3):
        base = f"transformer.layers.{layer}."
        found |= {f"{base}{name}_layernorm.weight" for name in ("input", "post")}
        found |= {f"{base}attention.{name}" for name in ("gate.weight", *NORMS)}
        if layer in FULL:
            found |= {f"{base}attention.indexer.{name}" for name in INDEXER}
        if layer in SPARSE:
            found |= {f"{base}mlp.router.weight", f"{base}mlp.router.bias"}
    return found | DRAFT


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BF16, with heads of the released sizes."""
    hf_dir = write(tmp_path_factory.mktemp("dots3-quantizing") / "hf", **CHANGES)
    path = hf_dir / "model.safetensors"
    tensors = {name: values.bfloat16() for name, values in load_file(path).items()}
    save_file(tensors, path, metadata=METADATA)
    return hf_dir


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    directory = tmp_path_factory.mktemp("plain") / "ckpt"
    convert(source, directory)
    return load_file(directory / WEIGHTS_FILE)


@pytest.mark.parametrize("only", ["experts", "mlp", "all"])
@pytest.mark.parametrize("algorithm", list(SCALES))
def test_exactly_the_scope_is_quantised(
    source: Path, plain: dict[str, torch.Tensor], tmp_path: Path, algorithm: str, only: str
) -> None:
    convert(source, tmp_path / "ckpt", quantize=algorithm, only=only)
    stored = load_file(tmp_path / "ckpt" / WEIGHTS_FILE)
    restored = restored_weights(tmp_path / "ckpt")
    weights = {f"{module}.weight" for module in quantised(only)}
    scales = {f"{module}.{name}" for module in quantised(only) for name in SCALES[algorithm]}
    assert plain.keys() == {f"{module}.weight" for module in quantised("all")} | kept()
    assert stored.keys() == plain.keys() | scales
    for name, values in plain.items():
        if name in weights:
            assert stored[name].dtype != values.dtype, name
            error = (restored[name] - values.float()).abs().max() / values.abs().max()
            assert 0 < float(error) < ERRORS[algorithm], name
        else:
            assert stored[name].dtype == values.dtype, name
            assert torch.equal(stored[name], values), name


@pytest.mark.parametrize("name", ["attention.gate", "attention.indexer.weights", "mtp.eh_proj"])
def test_the_comparison_notices_one_projection_too_many(
    source: Path,
    plain: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    covers = Quantize.covers

    def also(self: Quantize, wanted: Wanted) -> bool:
        return covers(self, wanted) or wanted.target.endswith(f"{name}.weight")

    monkeypatch.setattr(Quantize, "covers", also)
    with pytest.raises(AssertionError):
        test_exactly_the_scope_is_quantised(source, plain, tmp_path, "fp8", "all")
