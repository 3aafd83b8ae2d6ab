"""The verbs on a real checkpoint: golden numbers, known text, and every artefact inspected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from converters.dots3.oracle import DraftOracle, Oracle
from runtime import contract
from tests.build_scripts.conftest import Command
from tests.fixtures import qwen38_quantized
from tests.fixtures.dots3_fp8 import write_fp8
from tests.fixtures.qwen38_checkpoint import known_continuations
from tests.fixtures.qwen38_deterministic import (
    GOLDEN_ARGMAX,
    GOLDEN_GREEDY,
    GOLDEN_LAST_LOGITS,
    GOLDEN_MAX_LOGIT,
    GOLDEN_PROMPT,
)

TOLERANCE = 2e-4


@pytest.fixture
def golden_prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("\n".join(map(str, GOLDEN_PROMPT)))
    return path


def test_golden_numbers_come_out_of_run(
    command: Command, deterministic_engine: Path, golden_prompt: Path, tmp_path: Path
) -> None:
    out = tmp_path / "logits.npy"
    done = command(
        "run", deterministic_engine, "--ids-file", golden_prompt, "--logits", out,
        "--max-new-tokens", 16, "--ignore-eos", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    result = done.json
    assert result["prompt_ids"] == GOLDEN_PROMPT
    assert result["output_ids"] == GOLDEN_GREEDY
    assert result["finish_reason"] == "length"
    assert result["executor"] == "interpreter"
    times = result["timings"]
    assert set(times) == {"load_s", "logits_s", "first_token_s", "first_text_s", "generate_s"}
    assert 0 < times["first_token_s"] <= times["first_text_s"] <= times["generate_s"]
    logits = np.load(out)
    assert logits.dtype == np.float32
    assert logits.shape == (len(GOLDEN_PROMPT), 512)
    np.testing.assert_allclose(logits[-1, :6], GOLDEN_LAST_LOGITS, rtol=0, atol=TOLERANCE)
    assert logits[-1].argmax() == GOLDEN_ARGMAX
    assert abs(logits[-1].max() - GOLDEN_MAX_LOGIT) < TOLERANCE


def test_run_stops_at_an_end_id_and_says_so(command: Command, trained_engine: Path) -> None:
    known = next(k for k in known_continuations() if k.kind == "text")
    arguments = ("run", trained_engine, "--prompt", known.prompt, "--max-new-tokens", 150)
    done = command(*arguments, "--json")
    assert done.json["text"] == known.continuation
    assert done.json["finish_reason"] == "stop"
    streamed = command(*arguments)
    assert streamed.out == known.continuation + "\n"
    assert "max_seq_len 256" in streamed.err

    cut = command(*arguments[:-1], 5, "--json").json
    assert cut["finish_reason"] == "length"
    assert cut["output_ids"] == done.json["output_ids"][:5]


def test_sampling_follows_the_seed(command: Command, deterministic_engine: Path) -> None:
    def sample(seed: int) -> list[int]:
        done = command(
            "run", deterministic_engine, "--ids", "5,6,7", "--max-new-tokens", 12,
            "--temperature", 2.0, "--top-k", 50, "--seed", seed, "--ignore-eos", "--json",
        )  # fmt: skip
        ids = done.json["output_ids"]
        assert isinstance(ids, list)
        return ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_verify_passes_and_shows_the_mistakes(
    command: Command, deterministic_engine: Path, deterministic_checkpoint: Path
) -> None:
    done = command("verify", deterministic_engine, "--against", deterministic_checkpoint, "--json")
    assert done.code == 0, done.out
    found = done.json
    assert found["passed"]
    for phase in contract.PHASES:
        assert found["definition"][phase]["logits"]["argmax"] == 1.0
        assert found["definition"][phase]["logits"]["kl"] < 1e-9
    assert len(found["negative_controls"]) >= 15
    assert all(control["noticed"] for control in found["negative_controls"])


def test_verify_fails_when_the_reference_has_one_other_tensor(
    command: Command, deterministic_engine: Path, deterministic_checkpoint: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    name = "lm_head.weight"
    for path in deterministic_checkpoint.iterdir():
        if path.suffix != ".safetensors":
            (other / path.name).write_bytes(path.read_bytes())
            continue
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = tensors[name] * 1.01
        save_file(tensors, other / path.name, {"format": "pt"})
    done = command("verify", deterministic_engine, "--against", other)
    assert done.code == 5
    assert "OUT OF BOUNDS" in done.out
    assert "verification FAILED" in done.err


def test_verify_compares_the_draft_engine_too(command: Command, drafting_engine: Path) -> None:
    checkpoint = drafting_engine.with_name(f"{drafting_engine.name}-hf")
    done = command("verify", drafting_engine, "--against", checkpoint, "--json")
    assert done.code == 0, done.out
    draft = done.json["definition"]["draft"]
    assert draft["logits"]["argmax"] == 1.0 and draft["logits"]["kl"] < 1e-9
    assert draft["taps"]["hidden_states.next_draft"]["relative"] < 1e-4
    noticed = [c for c in done.json["negative_controls"] if c["name"].startswith("draft layer")]
    assert len(noticed) == 4 and all(control["noticed"] for control in noticed)


def test_run_reports_drafts_and_writes_their_logits(
    command: Command, drafting_engine: Path, tmp_path: Path
) -> None:
    checkpoint = drafting_engine.with_name(f"{drafting_engine.name}-hf")
    ids = [3 + 37 * i * i % 490 for i in range(70)]
    answers = []
    for drafts in (0, 1, 2, 3):
        done = command(
            "run", drafting_engine, "--ids", ",".join(map(str, ids)), "--max-new-tokens", 12,
            "--ignore-eos", "--num-draft-tokens", drafts,
            "--draft-logits", tmp_path / f"{drafts}.npy", "--json",
        ).json  # fmt: skip
        answers.append(done["output_ids"])
        told = done["drafts"]
        assert told["verified"] == drafts * told["steps"] and told["accepted"] <= told["verified"]
        assert told["steps"] + told["accepted"] >= 11
    assert answers[1:] == answers[:1] * 3
    oracle = Oracle(checkpoint)
    hidden = oracle.run(ids)["final_hidden"]
    wanted = DraftOracle(checkpoint, oracle).run(ids[1:], hidden[:-1])[0]
    np.testing.assert_allclose(np.load(tmp_path / "3.npy"), wanted.numpy(), atol=5e-5, rtol=0)
    refused = command(
        "run", drafting_engine, "--ids", "5,6", "--max-new-tokens", 1, "--num-draft-tokens", 4
    )
    assert refused.code == 2 and "cannot verify that many" in refused.err


def test_verify_fails_when_the_draft_layer_is_another(
    command: Command, drafting_engine: Path, tmp_path: Path
) -> None:
    hf_dir = drafting_engine.with_name(f"{drafting_engine.name}-hf")
    shutil.copytree(hf_dir, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["model.layers.6.hnorm.weight"] *= 1.01
    save_file(tensors, path, metadata)
    done = command("verify", drafting_engine, "--against", tmp_path / "other", "--json")
    assert done.code == 5
    found = json.loads(done.out)["definition"]
    assert found["context"]["logits"]["kl"] < 1e-9 < found["draft"]["logits"]["kl"]


def test_block_fp8_runs_through_the_chain(command: Command, tmp_path: Path) -> None:
    """Partial blocks and padded MLPs: converted, built, verified with its drafts, and run."""
    source, plain = write_fp8(tmp_path / "hf")
    assert command("convert", source, tmp_path / "ckpt").code == 0
    sizes = ("--max-batch-size", 1, "--max-seq-len", 128, "--chunk-size", 64)
    built = command("build", tmp_path / "ckpt", tmp_path / "engine", *sizes, "--max-draft-len", 1)
    assert built.code == 0, built.err
    verified = command("verify", tmp_path / "engine", "--against", source, "--json").json
    assert verified["passed"] and set(verified["definition"]) == {"context", "generation", "draft"}
    noticed = {c["name"]: c["noticed"] for c in verified["negative_controls"]}
    assert len(noticed) > 20 and all(noticed.values())
    assert noticed["FP8 codes without their scales"]
    shown = command("inspect", tmp_path / "engine", "--json").json
    assert "draft replicated_embed: yes" in json.dumps(shown)
    # The same text as the plain weights give, whatever is drafted.
    ids = [5, 60, 7, 81, 9]
    wanted = list(ids)
    oracle = Oracle(plain)
    for _ in range(8):
        wanted.append(int(oracle.run(wanted)["logits"][-1].argmax()))
    for drafts in (0, 1):
        done = command(
            "run", tmp_path / "engine", "--ids", ",".join(map(str, ids)), "--max-new-tokens", 8,
            "--ignore-eos", "--num-draft-tokens", drafts, "--json",
        )  # fmt: skip
        assert done.json["output_ids"] == wanted[len(ids) :]


def test_the_layer_report_is_written_beside_the_engines(trained_engine: Path) -> None:
    report = json.loads((trained_engine / contract.LAYER_REPORT_FILE).read_text())
    for phase in contract.PHASES:
        summary = report[phase]["summary"]
        assert summary["attention"] == 2
        assert summary["top-k"] >= 8 + 2
        assert summary["in-place updates"] == 6
        assert summary["weight dequantisations"] == 0


def test_inspect_tells_every_artefact(
    command: Command, trained_checkpoint: Path, trained_engine: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "model_repository"
    assert command("repo", trained_engine, repository).code == 0
    checkpoint = trained_engine.with_name(f"{trained_engine.name}-checkpoint")
    kinds = {
        trained_checkpoint: "Hugging Face checkpoint",
        checkpoint: "TensorRT-LLM checkpoint",
        trained_engine: "engine directory",
        repository: "Triton model repository",
    }
    for path, kind in kinds.items():
        done = command("inspect", path, "--json")
        assert done.code == 0, done.err
        assert done.json["kind"] == kind
        assert command("inspect", path).code == 0
    engine = command("inspect", trained_engine, "--json").json
    assert engine["limits"]["max_batch_size"] == 8
    assert engine["chunk_size"] == 64
    assert engine["targets"] == ["8.9"]
    assert command("inspect", repository, "--json").json["models"] == [
        "ensemble",
        "postprocessing",
        "preprocessing",
        "tensorrt_llm",
        "tensorrt_llm_bls",
    ]


def test_inspect_lists_the_format_of_every_module(command: Command, tmp_path: Path) -> None:
    def formats(checkpoint: qwen38_quantized.Quantized) -> list[tuple[object, ...]]:
        source = checkpoint.write(tmp_path / "hf")
        assert command("convert", source, tmp_path / "ckpt").code == 0
        found = command("inspect", tmp_path / "ckpt", "--json").json["tables"]["Formats"]
        shown = command("inspect", tmp_path / "ckpt").out
        assert all(row["algorithm"] in shown for row in found)
        for name in ("hf", "ckpt"):
            shutil.rmtree(tmp_path / name)
        return [tuple(row.values()) for row in found]

    mixed = formats(qwen38_quantized.mixed_dense())
    # Two layers have attention; one of them has two projections in blocks.
    names = [f"transformer.layers.*.attention.{name}" for name in ("k", "q")]
    assert [row for row in mixed if row[0] in names] == [
        ("transformer.layers.*.attention.k", "plain", "", 2),
        ("transformer.layers.*.attention.q", "FP8_BLOCK_SCALES", "128", 1),
        ("transformer.layers.*.attention.q", "plain", "", 1),
    ]
    assert ("transformer.layers.*.mlp.experts.gate_up", "NVFP4", "16", 8) in mixed
    assert ("transformer.layers.*.mlp.shared_expert.down", "FP8", "", 1) in mixed
    assert ("transformer.layers.*.ple.ngram_embedding", "FP8", "", 1) in mixed
    assert ("mtp.layers.*.mlp.experts.down", "plain", "", 1) in mixed

    single = qwen38_quantized.plain()
    single.experts(qwen38_quantized.BASE, qwen38_quantized.as_nvfp4)
    one = formats(single)
    assert {row[1:3] for row in one} == {("NVFP4", "16"), ("plain", "")}
    assert ("transformer.layers.*.mlp.experts.down", "NVFP4", "16", 8) in one


def test_all_leaves_the_three_artefacts(
    command: Command, trained_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "served"
    done = command(
        "all", trained_checkpoint, out, "--max-batch-size", 2, "--max-seq-len", 128,
        "--target", "8.9", "--weights", "embedded", "--json",
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    result = done.json
    assert sorted(p.name for p in out.iterdir()) == ["checkpoint", "engine", "model_repository"]
    assert result["verify"]["passed"]
    assert result["build"]["limits"]["max_seq_len"] == 128
    config = contract.read_config(out / "engine")
    assert config.weights.mode == "embedded"
    assert not config.engines["context"].of_kind("weight")
    prompt = known_continuations()[0]
    answer = command("run", out / "engine", "--prompt", prompt.prompt, "--max-new-tokens", 8)
    assert prompt.continuation.startswith(answer.out.rstrip("\n"))
    again = command("all", trained_checkpoint, out)
    assert again.code == 2
    assert "already exists" in again.err


def test_all_hands_the_calibration_result_to_the_conversion(
    command: Command, trained_checkpoint: Path, tmp_path: Path
) -> None:
    calibrated = ("--calibration", trained_checkpoint)
    done = command("all", trained_checkpoint, tmp_path / "served", *calibrated)
    assert done.code == 2
    assert "nothing takes the scales of the calibration result" in done.err
    done = command(
        "all", trained_checkpoint, tmp_path / "served", "--quantize", "nvfp4", *calibrated
    )
    assert done.code == 3
    assert "input_scale" in done.err
    assert not (tmp_path / "served").exists()


def test_quantised_weights_are_verified_as_what_they_mean(
    command: Command, trained_checkpoint: Path, deterministic_checkpoint: Path, tmp_path: Path
) -> None:
    checkpoint, engine, exported = (tmp_path / name for name in ("checkpoint", "engine", "hf"))
    assert command("convert", trained_checkpoint, checkpoint, "--quantize", "nvfp4").code == 0
    done = command("export-hf", checkpoint, exported, "--json")
    assert done.json["quant_algo"] == "W4A16_NVFP4"
    assert (exported / "hf_quant_config.json").is_file()
    assert done.json["files"] == len(list(exported.glob("*.safetensors"))) == 2

    limits = ("--max-seq-len", 128, "--chunk-size", 64, "--target", "12.0")
    assert command("build", checkpoint, engine, *limits).code == 0
    found = command("verify", engine, "--against", trained_checkpoint, "--json").json
    assert found["passed"]
    # The networks compute what the codes mean; what the format costs is told beside it.
    assert found["definition"]["context"]["logits"]["kl"] < 1e-9
    assert found["quantised"]["kl"] > 1e-4
    # Mistakes in reading what is stored; gate and up have one global scale here.
    noticed = {c["name"]: c["noticed"] for c in found["negative_controls"]}
    assert noticed["halves of the bytes of FP4 codes swapped"]
    assert "global scale of the gate used for up" not in noticed
    assert not any("table" in name and "scale" in name for name in noticed)

    other = command("verify", engine, "--against", deterministic_checkpoint)
    assert other.code == 3
    assert "another checkpoint" in other.err
