"""Engine directories with plugin layers: built on a stand-in of full TensorRT, then run as always.

Only the serialized plans are empty; networks, programs and configuration are the real ones, and the
interpreter executes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from build_scripts import engines
from converters.registry import read_checkpoint_config
from plugins.support.errors import EXIT_MISSING_CAPABILITY, EXIT_VERIFICATION_FAILED
from plugins.trt.backend import Backend
from plugins.trt.builder import Plan
from plugins.trt.capability import Capability
from plugins.trt.report import LayerReport
from runtime.contract import read_config
from tests.build_scripts.conftest import Command
from tests.converters.qwen38.tiny import PERIOD
from tests.fixtures import dots3_random
from tests.fixtures.qwen38_deterministic import GOLDEN_GREEDY, GOLDEN_PROMPT, write_deterministic
from tests.plugins.full_trt import capability_for, full_backend

# Keys and values of the deterministic checkpoint stay far below 448 of these.
SCALE = 0.02


@dataclass(frozen=True)
class _OnGpu(Backend):
    """Full TensorRT on a machine with a GPU of one compute capability."""

    target: str = "9.0"

    def capability(self, targets: Sequence[str] | None = None, dtypes: Any = ()) -> Capability:
        found = capability_for(self.target)
        found.check_dtypes(dtypes)
        return found


def _empty_plan(net: Any, profile: Any, path: Path, reporter: Any = None) -> Plan:
    path.write_bytes(b"no plan")
    report = LayerReport((), (), (), 0, 0, 0, dict(net.aliases))
    return Plan(7, hashlib.sha256(b"no plan").hexdigest(), report, net.capability.targets, 0.0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Its compute capability, in a list that tests may change."""
    target = ["9.0"]
    plain = full_backend()

    def load(flavor: str) -> Backend:
        return _OnGpu(plain.flavor, plain.version, plain.trt, target[0])

    monkeypatch.setattr(engines, "load_backend", load)
    monkeypatch.setattr(engines, "build_serialized", _empty_plan)
    return target


def _with_scales(hf_dir: Path, scale: float = SCALE) -> Path:
    """The checkpoint with scales of its caches, as Model Optimizer leaves them."""
    path = hf_dir / "model.safetensors"
    tensors = load_file(path)
    keys = [n for n in tensors if ".self_attn.k_proj.weight" in n and not n.startswith("mtp.")]
    for name in keys:
        attention = name.removesuffix("k_proj.weight")
        for part in ("k_proj.k_scale", "v_proj.v_scale"):
            tensors[attention + part] = torch.tensor(scale)
    save_file(tensors, path)
    return hf_dir


def _source(tmp_path: Path, scale: float = SCALE, **changes: Any) -> Path:
    options = {"files": 1, "mtp": False, "vision": False, **changes}
    return _with_scales(write_deterministic(tmp_path / "hf", **options), scale)


def _built(command: Command, hf_dir: Path, *options: str, build: Sequence[str] = ()) -> Path:
    checkpoint, engine = hf_dir.with_name("checkpoint"), hf_dir.with_name("engine")
    done = command("convert", hf_dir, checkpoint, *options)
    assert done.code == 0, done.err
    limits = ("--max-batch-size", 2, "--max-seq-len", 192, *build)
    done = command("build", checkpoint, engine, *limits)
    assert done.code == 0, done.err
    return engine


def test_all_keeps_fp8_caches_where_engines_have_them(
    command: Command, gpu: list[str], tmp_path: Path
) -> None:
    """By default as the checkpoint has it on a GPU that can, in the computing type elsewhere."""
    source = _source(tmp_path, **PERIOD)

    def caches(out: str, *options: str) -> set[str]:
        limits = ("--max-batch-size", 1, "--max-seq-len", 128, "--tokenizer", "bytes")
        done = command("all", source, tmp_path / out, "--dtype", "float32", *limits, *options)
        assert done.code == 0, done.err
        inputs = read_config(tmp_path / out / "engine").engines["context"].of_kind("cache")
        return {t.dtype for t in inputs if t.name.startswith(("key_cache", "value_cache"))}

    assert caches("default") == {"float8_e4m3fn"}
    assert caches("none", "--kv-cache", "none") == {"float32"}
    gpu[0] = "8.0"
    # Kernels are of one compute capability per process, so this one ends with the build.
    command("all", source, tmp_path / "ampere", "--tokenizer", "bytes")
    converted = read_checkpoint_config(tmp_path / "ampere" / "checkpoint")
    assert converted.quantization.kv_cache_quant_algo is None
    refused = command("all", source, tmp_path / "no", "--tokenizer", "bytes", "--kv-cache", "fp8")
    assert refused.code == EXIT_MISSING_CAPABILITY
    assert "compute capability 8.0 has no float8_e4m3fn" in refused.err
    assert not (tmp_path / "no" / "checkpoint").exists()


@pytest.mark.parametrize("kv_cache", ["none", "fp8"])
def test_from_checkpoint_to_answer(
    kv_cache: str, command: Command, gpu: list[str], tmp_path: Path
) -> None:
    hf_dir = _source(tmp_path)
    engine = _built(command, hf_dir, "--dtype", "float32", "--kv-cache", kv_cache)
    config = read_config(engine)
    updated = {f"{kind}_cache.{n}" for kind in ("key", "value", "index_key") for n in (3, 7)}
    for entry in config.engines.values():
        assert set(entry.plugin_caches) == updated
        dtypes = {t.name: t.dtype for t in entry.of_kind("cache")}
        assert dtypes.keys() == updated
        for name, dtype in dtypes.items():
            narrow = kv_cache == "fp8" and not name.startswith("index")
            assert dtype == ("float8_e4m3fn" if narrow else "float32")
    assert "qsa::prepare" in {plugin.name for plugin in config.plugins}
    assert ("float8_e4m3fn" in command("inspect", engine).out) == (kv_cache == "fp8")

    verified = command("verify", engine, "--against", hf_dir, "--json")
    assert verified.code == 0, verified.err
    controls = verified.json["negative_controls"]
    assert len(controls) > 10 and all(control["noticed"] for control in controls)
    # The definition is compared without rounding; the engine's own caches round.
    for phase, taps in verified.json["as_built"].items():
        off = taps["taps"]["layers.7.mixer"]["relative"]
        assert (1e-3 < off < 0.5) if kv_cache == "fp8" else off < 1e-5, phase
    ids = ",".join(map(str, GOLDEN_PROMPT))
    done = command("run", engine, "--ids", ids, "--max-new-tokens", 16, "--ignore-eos", "--json")
    assert done.code == 0, done.err
    assert done.json["output_ids"] == GOLDEN_GREEDY


def test_quantised_weights_beside_fp8_caches(
    command: Command, gpu: list[str], tmp_path: Path
) -> None:
    hf_dir = _source(tmp_path, **PERIOD)
    engine = _built(command, hf_dir, "--quantize", "fp8", "--kv-cache", "fp8")
    verified = command("verify", engine, "--against", hf_dir, "--json")
    assert verified.code == 0, verified.err


def test_verification_notices_scales_that_saturate(
    command: Command, gpu: list[str], tmp_path: Path
) -> None:
    hf_dir = _source(tmp_path, scale=0.001, **PERIOD)
    engine = _built(command, hf_dir, "--dtype", "float32", "--kv-cache", "fp8")
    verified = command("verify", engine, "--against", hf_dir, "--json")
    assert verified.code == EXIT_VERIFICATION_FAILED
    taps = verified.json["definition"]["context"]["taps"]
    assert taps["layers.2.bundle"]["relative"] < 1e-5
    assert taps["layers.3.mixer"]["relative"] > 1e-2


def test_gpus_without_float8_are_refused_before_anything_is_built(
    command: Command, gpu: list[str], tmp_path: Path
) -> None:
    gpu[0] = "8.0"
    hf_dir, checkpoint = _source(tmp_path), tmp_path / "checkpoint"
    assert command("convert", hf_dir, checkpoint, "--kv-cache", "fp8").code == 0
    done = command("build", checkpoint, tmp_path / "engine")
    assert done.code == EXIT_MISSING_CAPABILITY
    assert "compute capability 8.0 has no float8_e4m3fn" in done.err
    assert not (tmp_path / "engine").exists()


def test_latent_attention_and_drafts_of_plugin_layers_are_verified(
    command: Command, gpu: list[str], tmp_path: Path
) -> None:
    # A power of two, which the kernels that select take.
    hf_dir = dots3_random.write(tmp_path / "hf", index_topk=16)
    engine = _built(command, hf_dir, "--dtype", "float32", build=("--max-draft-len", "2"))
    config = read_config(engine)
    operations = {plugin.name for plugin in config.plugins}
    assert {"dsa::score", "dsa::select_chunk", "dsa::attend", "mtp::embed_norms"} <= operations
    # TensorRT's own layer updates latents, and names them itself.
    assert not any(entry.plugin_caches for entry in config.engines.values())
    verified = command("verify", engine, "--against", hf_dir, "--json")
    assert verified.code == 0, verified.err
    assert "draft" in verified.json["definition"]
    controls = verified.json["negative_controls"]
    assert len(controls) > 10 and all(control["noticed"] for control in controls)


def test_a_declaration_that_a_family_cannot_follow_is_refused(
    command: Command, gpu: list[str], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    assert command("convert", dots3_random.write(tmp_path / "hf"), checkpoint).code == 0
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["quantization"]["kv_cache_quant_algo"] = "FP8"
    path.write_text(json.dumps(config))
    done = command("build", checkpoint, tmp_path / "engine", "--max-seq-len", 192)
    assert done.code == EXIT_MISSING_CAPABILITY
    assert "this engine cannot have FP8 caches: TensorRT's own layer updates them" in done.err
    assert not (tmp_path / "engine").exists()
