"""Block FP8 sources: partial blocks, heads that begin inside one, padding, and the mistakes."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.checkpoint.config import WEIGHTS_FILE, read_config
from converters.checkpoint.convert import convert
from converters.checkpoint.export_hf import export_hf
from converters.controls import storage_controls
from converters.definition import EngineLimits
from converters.dots3.config import Dots3CheckpointConfig
from converters.dots3.controls import negative_controls
from converters.dots3.oracle import DraftOracle, Oracle
from converters.quantization import nvfp4
from converters.quantization.restore import restored_weights
from plugins.support.errors import InputError
from tests.converters.dots3.driver import Driver
from tests.converters.quantization.hf_reader import stray_names
from tests.fixtures.dots3_fp8 import by_division, is_quantised, write_fp8
from tests.fixtures.dots3_random import METADATA

LIMITS = EngineLimits(1, 128, chunk_size=64, max_logits_tokens=64)
IDS = torch.randint(3, 500, (60,), generator=torch.Generator().manual_seed(29)).tolist()
BOUND = 5e-5
# Decoded by dequantise layers, and by tables.
TARGETS = ("8.9", "8.0")
MLPS = ("mlp.gate_up", "mlp.down", "shared_expert.gate_up", "shared_expert.down")


@dataclass(frozen=True)
class Fp8:
    """The FP8 checkpoint, the plain one that it means, and what became of it."""

    hf_dir: Path
    plain: Path
    ckpt: Path
    config: Dots3CheckpointConfig
    weights: dict[str, Tensor]

    def logits(self, weights: dict[str, Tensor] | None = None, target: str = "8.9") -> Tensor:
        driver = Driver(
            self.config, self.weights if weights is None else weights, LIMITS, targets=(target,)
        )
        rows = [driver.call("context", [IDS[:45]])[0]["logits"]]
        rows += [driver.call("generation", [[token]])[0]["logits"] for token in IDS[45:]]
        return torch.cat(rows)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Fp8:
    directory = tmp_path_factory.mktemp("dots3-fp8")
    hf_dir, plain = write_fp8(directory / "hf")
    ckpt = directory / "checkpoint"
    convert(hf_dir, ckpt)
    config = read_config(ckpt, Dots3CheckpointConfig)
    return Fp8(hf_dir, plain, ckpt, config, load_file(ckpt / WEIGHTS_FILE))


@pytest.fixture(scope="module")
def expected(fp8: Fp8) -> Tensor:
    """transformers on the values that the codes and scales mean."""
    return Oracle(fp8.plain).run(IDS)["logits"]


def _unpadded(name: str, tensor: Tensor, width: int = 144) -> Tensor:
    """What was there before padding, and that the rest is zero."""
    rest = tensor.clone()
    if name.endswith("gate_up.weight"):
        halves = rest.chunk(2)
        kept = torch.cat([half[:width] for half in halves])
        for half in halves:
            half[:width] = 0
    else:
        kept = tensor[:, :width]
        rest[:, :width] = 0
    assert not rest.any()
    return kept


def test_values_are_those_of_128_by_128_blocks(fp8: Fp8, tmp_path: Path) -> None:
    convert(fp8.plain, tmp_path / "plain")
    meant = load_file(tmp_path / "plain" / WEIGHTS_FILE)
    found = restored_weights(fp8.ckpt)
    assert found.keys() == meant.keys()
    for name, values in meant.items():
        padded = name.removesuffix(".weight").endswith(MLPS)
        assert torch.equal(_unpadded(name, found[name]) if padded else found[name], values), name


def test_partial_blocks_keep_their_scales(fp8: Fp8) -> None:
    """576 rows are 4.5 blocks, 1088 are 8.5, and gate and up end in a block each."""
    shapes = {
        "transformer.layers.0.attention.kv_a": ((576, 96), (5, 1)),
        "transformer.layers.1.attention.kv_a": ((1088, 96), (9, 1)),
        "transformer.layers.1.attention.kv_b": ((640, 1024), (5, 8)),
        "transformer.layers.0.mlp.gate_up": ((512, 96), (4, 1)),
        "transformer.layers.0.mlp.down": ((96, 256), (1, 2)),
        "mtp.layers.0.mlp.gate_up": ((512, 96), (4, 1)),
        "mtp.eh_proj": ((96, 192), (1, 2)),
        "transformer.layers.1.mlp.experts.gate_up": ((4, 288, 96), (4, 4, 1)),
    }
    for name, (weight, scale) in shapes.items():
        assert fp8.weights[f"{name}.weight"].dtype == torch.float8_e4m3fn
        assert tuple(fp8.weights[f"{name}.weight"].shape) == weight, name
        assert tuple(fp8.weights[f"{name}.weights_scaling_factor"].shape) == scale, name
    assert fp8.config.quantization.quant_algo == "FP8_BLOCK_SCALES"


@pytest.mark.parametrize("target", TARGETS)
def test_logits_are_those_of_the_decoded_weights(fp8: Fp8, expected: Tensor, target: str) -> None:
    torch.testing.assert_close(fp8.logits(target=target), expected, atol=BOUND, rtol=0.0)


def test_draft_logits_are_those_of_the_decoded_weights(fp8: Fp8) -> None:
    oracle = Oracle(fp8.plain)
    hidden = oracle.run(IDS)["final_hidden"]
    wanted = DraftOracle(fp8.plain, oracle).run(IDS[1:], hidden[:-1])[0]
    limits = EngineLimits(1, 128, chunk_size=64, max_draft_len=2, max_logits_tokens=64)
    driver = Driver(fp8.config, fp8.weights, limits, phases=("draft",))
    found = driver.call("draft", [IDS[1:]], hidden=[hidden[:-1]], past=[0])[0]["logits"]
    torch.testing.assert_close(found, wanted, atol=BOUND, rtol=0.0)


def _mistaken(fp8: Fp8, directory: Path, change: object) -> Tensor:
    """Logits of the plain checkpoint whose matrices were decoded by `change(codes, scales)`."""
    source = load_file(fp8.hf_dir / "model-00002-of-00002.safetensors")
    scales = load_file(fp8.hf_dir / "model-00001-of-00002.safetensors")
    shutil.copytree(fp8.plain, directory)
    decoded = {
        name: change(name, tensor, scales[f"{name}_scale_inv"])  # type: ignore[operator]
        if is_quantised(name)
        else tensor
        for name, tensor in source.items()
    }
    save_file(decoded, directory / "model.safetensors", metadata=METADATA)
    return Oracle(directory).run(IDS)["logits"]


def _right(codes: Tensor, scales: Tensor) -> Tensor:
    rows, columns = codes.shape
    wide = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return codes.float() * wide


def test_the_division_shortcut_is_seen(fp8: Fp8, expected: Tensor, tmp_path: Path) -> None:
    """Rows by scale rows: 144 rows with two scales become 72 each, 576 with five do not divide."""
    assert 576 % 5 and 1088 % 9
    right = _mistaken(fp8, tmp_path / "right", lambda name, c, s: _right(c, s))
    assert torch.equal(right, expected)
    for part in (".mlp.", "kv_a_proj", "kv_b_proj"):
        wrong = _mistaken(
            fp8,
            tmp_path / part.strip("."),
            lambda name, c, s, part=part: (by_division if part in name else _right)(c, s),
        )
        # 640 rows divide into five blocks of 128: there the shortcut is right.
        assert torch.equal(wrong, expected) == (part == "kv_b_proj")
        if part != "kv_b_proj":
            assert (wrong - expected).abs().max() > 1000 * BOUND


def test_heads_before_blocks_are_seen(fp8: Fp8, expected: Tensor, tmp_path: Path) -> None:
    """320 rows per sliding head: the second head begins 64 rows into a block."""

    def by_head(name: str, codes: Tensor, scales: Tensor) -> Tensor:
        if "layers.1.self_attn.kv_b_proj" not in name:
            return _right(codes, scales)
        return torch.cat([_right(codes[:320], scales[:3]), _right(codes[320:], scales[2:])])

    wrong = _mistaken(fp8, tmp_path / "heads", by_head)
    assert (wrong - expected).abs().max() > 1000 * BOUND


def _refused(source: Path, target: Path) -> str:
    with pytest.raises(InputError) as caught:
        convert(source, target)
    assert not target.exists()
    return str(caught.value)


@pytest.mark.parametrize("module", ["indexer.wk", "indexer.weights_proj", "kv_b_proj"])
def test_a_weight_without_its_scale_is_refused(fp8: Fp8, tmp_path: Path, module: str) -> None:
    shutil.copytree(fp8.hf_dir, tmp_path / "hf")
    path = tmp_path / "hf" / "model-00001-of-00002.safetensors"
    scales = load_file(path)
    name = f"model.layers.0.self_attn.{module}.weight_scale_inv"
    del scales[name]
    save_file(scales, path)
    index = tmp_path / "hf" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][name]
    index.write_text(json.dumps(content))
    assert f"layers.0.self_attn.{module}" in _refused(tmp_path / "hf", tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("rows", "message"), [(4, "expected shape [5, 1], found [4, 1]"), (0, "[5, 1]")]
)
def test_a_grid_of_another_size_is_refused(
    fp8: Fp8, tmp_path: Path, rows: int, message: str
) -> None:
    shutil.copytree(fp8.hf_dir, tmp_path / "hf")
    path = tmp_path / "hf" / "model-00001-of-00002.safetensors"
    scales = load_file(path)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    scales[name] = scales[name][:rows].clone()
    save_file(scales, path)
    assert message in _refused(tmp_path / "hf", tmp_path / "checkpoint")


def test_an_export_is_the_padded_model(fp8: Fp8, expected: Tensor, tmp_path: Path) -> None:
    """Codes and scales come back, and so does the layout of the index heads."""
    export_hf(fp8.ckpt, tmp_path / "exported")
    exported = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert exported["intermediate_size"] == 256
    assert exported["quantization_config"]["weight_block_size"] == [128, 128]
    assert "lm_head" in exported["quantization_config"]["modules_to_not_convert"]
    assert stray_names(tmp_path / "exported") == []
    convert(tmp_path / "exported", tmp_path / "again")
    again = (tmp_path / "again" / WEIGHTS_FILE).read_bytes()
    assert again == (fp8.ckpt / WEIGHTS_FILE).read_bytes()
    assert read_config(tmp_path / "again", Dots3CheckpointConfig).dots3.index_rope == "leading"


def test_every_typical_mistake_is_seen_in_fp8_too(fp8: Fp8, expected: Tensor) -> None:
    driver = Driver(fp8.config, fp8.weights, LIMITS, phases=("context",), targets=("8.9",))

    def error(changed: dict[str, Tensor]) -> float:
        driver.bind({**fp8.weights, **changed})
        driver.reset()
        return float((driver.call("context", [IDS])[0]["logits"] - expected).abs().max())

    assert error({}) < BOUND
    storage = storage_controls(fp8.weights)
    assert [control.name for control in storage] == ["FP8 codes without their scales"]
    for control in [*negative_controls(fp8.config), *storage]:
        if control.phase == "draft":
            continue
        # Not close, or not a number.
        assert not error(control.weights(fp8.weights)) <= 1000 * BOUND, control.name


@pytest.mark.parametrize("algorithm", ["fp8", "fp8-block", "nvfp4"])
def test_weights_that_were_quantised_here(fp8: Fp8, tmp_path: Path, algorithm: str) -> None:
    """Gate and up keep scales of their own wherever they lie in one matrix."""
    ckpt = tmp_path / "checkpoint"
    convert(fp8.plain, ckpt, quantize=algorithm, only="all")
    config = read_config(ckpt, Dots3CheckpointConfig)
    made = Fp8(fp8.hf_dir, fp8.plain, ckpt, config, load_file(ckpt / WEIGHTS_FILE))
    decoded = made.logits(restored_weights(ckpt))
    torch.testing.assert_close(made.logits(target="12.0"), decoded, atol=BOUND, rtol=0.0)
    name = "transformer.layers.0.mlp.gate_up.weights_scaling_factor"
    scales = made.weights[name + ("_2" if algorithm == "nvfp4" else "")].clone()
    assert scales.shape[0] == (4 if algorithm == "fp8-block" else 2)
    assert not config.dots3.padded_mlps


def _with_plain_dense_mlp(fp8: Fp8, directory: Path) -> Path:
    """The FP8 checkpoint, its dense layer's MLP left plain as some exporters do."""
    shutil.copytree(fp8.hf_dir, directory)
    meant = load_file(fp8.plain / "model.safetensors")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        tensors = load_file(directory / file)
        for name in [n for n in tensors if ".layers.0.mlp." in n]:
            if name.endswith("_scale_inv"):
                del tensors[name], content["weight_map"][name]
            else:
                tensors[name] = meant[name]
        save_file(tensors, directory / file)
    index.write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_plain_mlps_among_padded_ones_are_padded_too(
    fp8: Fp8, tmp_path: Path, dtype: str | None
) -> None:
    source = _with_plain_dense_mlp(fp8, tmp_path / "hf")
    convert(source, tmp_path / "ckpt", dtype)
    convert(fp8.plain, tmp_path / "plain", dtype)
    found = load_file(tmp_path / "ckpt" / WEIGHTS_FILE)
    wanted = load_file(tmp_path / "plain" / WEIGHTS_FILE)
    for name in ("gate_up.weight", "down.weight"):
        name = f"transformer.layers.0.mlp.{name}"
        assert found[name].dtype == wanted[name].dtype
        assert torch.equal(_unpadded(name, found[name]), wanted[name])


def test_plain_mlps_among_padded_ones_are_not_quantised_otherwise(fp8: Fp8, tmp_path: Path) -> None:
    source = _with_plain_dense_mlp(fp8, tmp_path / "hf")
    with pytest.raises(InputError, match="dense MLPs are padded"):
        convert(source, tmp_path / "ckpt", quantize="fp8", only="mlp")
    assert not (tmp_path / "ckpt").exists()


def _changed_copy(fp8: Fp8, directory: Path, change: object) -> Path:
    """The FP8 checkpoint with the tensors of every file changed by `change(tensors)`."""
    shutil.copytree(fp8.hf_dir, directory)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors = load_file(path)
        change(tensors)  # type: ignore[operator]
        save_file(tensors, path)
        content["weight_map"] |= dict.fromkeys(tensors, path.name)
    index.write_text(json.dumps(content))
    return directory


def test_a_missing_expert_is_named(fp8: Fp8, tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".layers.2.mlp.experts.3." in n]:
            del tensors[name]

    message = _refused(_changed_copy(fp8, tmp_path / "hf", drop), tmp_path / "checkpoint")
    for name in ("gate", "up", "down"):
        assert f"layers.2.mlp.experts.3.{name}_proj.weight" in message


def test_declarations_are_held_to_the_tensors(fp8: Fp8, tmp_path: Path) -> None:
    """One scale for all is declared; an excluded module in another spelling is FP8."""
    shutil.copytree(fp8.hf_dir, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "indexer.wk", "nothing"]
    path.write_text(json.dumps(config))
    notes = convert(tmp_path / "hf", tmp_path / "ckpt").plan.notes
    assert [note.split(" (")[0] for note in notes] == [
        "exclusion 'nothing' matches nothing",
        "excluded but quantised: 2 × layers.*.self_attn.indexer.wk",
    ]
    del config["quantization_config"]["weight_block_size"]
    path.write_text(json.dumps(config))
    message = _refused(tmp_path / "hf", tmp_path / "checkpoint")
    assert "FP8, as declared" in message
    assert "FP8_BLOCK_SCALES in groups of 128, by element types" in message


def test_a_mixed_export_comes_back_as_it_was(fp8: Fp8, tmp_path: Path) -> None:
    """Experts in NVFP4 beside block FP8: linear layers then have Model Optimizer's scales."""
    plain = load_file(fp8.plain / "model.safetensors")

    def requantise(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".mlp.experts." in n]:
            tensors.pop(name)
            if name.endswith(".weight"):
                scale = nvfp4.global_scale(plain[name].abs().max())
                packed, scales = nvfp4.quantize(plain[name], scale)
                tensors |= {name: packed, f"{name}_scale": scales, f"{name}_scale_2": scale}

    source = _changed_copy(fp8, tmp_path / "hf", requantise)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    name = "model.layers.0.mlp.down_proj.weight_scale"
    assert load_file(tmp_path / "out" / index["weight_map"][name])[name].shape == (1, 1, 2, 1)
    converted = convert(tmp_path / "out", tmp_path / "again")
    assert not converted.plan.notes
    again = read_config(tmp_path / "again", Dots3CheckpointConfig)
    assert again.dots3 == read_config(tmp_path / "ckpt", Dots3CheckpointConfig).dots3.model_copy(
        update={"intermediate_size": 256, "shared_intermediate_size": 256}
    )
    assert (tmp_path / "again" / WEIGHTS_FILE).read_bytes() == (
        tmp_path / "ckpt" / WEIGHTS_FILE
    ).read_bytes()
