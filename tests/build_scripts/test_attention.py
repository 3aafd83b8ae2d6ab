"""The list of attention implementations decides what is built, verified, run and served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from build_scripts import engines
from converters import dots3, qwen38, voxtral
from converters.checkpoint.config import CheckpointConfig
from converters.registry import FAMILIES, read_checkpoint_config
from converters.voxtral import Voxtral
from plugins import attention
from plugins.attention import Allowlist, Choice
from runtime.contract import CONFIG_FILE
from runtime.engine import Engine
from tests.build_scripts.conftest import Command
from tests.fixtures.voxtral_deterministic import write_huggingface
from triton_repo.generate import write_repository

CPU = Choice("interpreter", "cpu", "tensorrt_rtx")


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_given", set())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from converters.checkpoint.convert import convert

    base = tmp_path_factory.mktemp("attention")
    convert(write_huggingface(base / "hf"), base / "checkpoint")
    return base / "checkpoint"


class OnlyTheInterpreter(Voxtral):
    """A family that takes what its base permits and leaves something out."""

    def attention(self, config: CheckpointConfig) -> Allowlist:
        whole = super().attention(config)
        kept = tuple(row for row in whole.rows if row.implementation == "interpreter")
        return Allowlist(model=whole.model, rows=kept)


def test_every_family_opts_in_for_all_it_has() -> None:
    parts = {
        "qwen38": ("context", "generation"),
        "dots3": ("context", "generation", "draft"),
        "voxtral": ("context", "generation", "audio"),
    }
    known = {family.name for family in FAMILIES.values()}
    assert known == parts.keys()
    for family in (qwen38.FAMILY, dots3.FAMILY, voxtral.FAMILY):
        for model in family.model_types:
            # The list depends on nothing but the model's name here.
            config = CheckpointConfig.model_construct(model_type=model)
            listed = family.attention(config)
            assert listed.model == model
            assert listed.refusal(parts[family.name], CPU) is None
            assert listed.notices(parts[family.name], CPU) == []
            assert listed.notices(parts[family.name], Choice("tensorrt", "cuda", "tensorrt_rtx"))


def test_a_subclass_may_leave_out(checkpoint: Path) -> None:
    config = read_checkpoint_config(checkpoint)
    phases = ("audio", "context", "generation")
    built = Choice("tensorrt", "cuda", "tensorrt_rtx")
    assert Voxtral().attention(config).refusal(phases, built) is None
    narrow = OnlyTheInterpreter().attention(config)
    assert narrow.refusal(phases, built) is not None
    assert narrow.refusal(phases, CPU) is None


def test_a_build_is_refused_before_anything_is_defined(
    command: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "family_of", lambda config: OnlyTheInterpreter())
    defined: list[object] = []
    monkeypatch.setattr(engines, "Network", lambda *arguments: defined.append(arguments))
    done = command("build", checkpoint, tmp_path / "engine", "--flavor", "tensorrt_rtx")
    assert done.code == 4
    assert done.err.count("error: ") == 1
    assert "the attention of voxtral has no such implementation" in done.err
    assert "decoder" in done.err and "audio_encoder" in done.err
    assert "interpreter on cpu, interpreter on cuda" in done.err
    assert defined == [] and not (tmp_path / "engine").exists()


@pytest.fixture
def changed(voxtral_engine: Path, tmp_path: Path) -> Callable[[Callable[[Any], Any]], Path]:
    """The engine directory with other rows."""

    def change(rows: Callable[[Any], Any]) -> Path:
        target = tmp_path / "engine"
        shutil.copytree(voxtral_engine, target)
        path = target / CONFIG_FILE
        content = json.loads(path.read_text())
        content["attention"]["rows"] = rows(content["attention"]["rows"])
        path.write_text(json.dumps(content))
        return target

    return change


def on_cpu(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (row for row in rows if row["device"] == "cpu")


RUN = ("--ids", "1,3,4", "--max-new-tokens", 1)


def test_running_and_verifying_what_is_not_permitted(
    command: Command, changed: Callable[..., Path], voxtral_checkpoint: Path, tmp_path: Path
) -> None:
    engine = changed(lambda rows: [r for r in rows if r["component"] == "decoder"])
    for arguments in (
        ("run", engine, *RUN),
        ("verify", engine, "--against", voxtral_checkpoint),
    ):
        done = command(*arguments)
        assert done.code == 4 and done.err.count("error: ") == 1
        assert "the attention of voxtral has no such implementation" in done.err
        assert "audio_encoder" in done.err


def test_the_interpreter_on_the_cpu_is_nothing_new_for_voxtral(
    command: Command, voxtral_engine: Path
) -> None:
    config = json.loads((voxtral_engine / CONFIG_FILE).read_text())
    rows = list(on_cpu(config["attention"]["rows"]))
    assert {r["component"] for r in rows} == {"decoder", "audio_encoder"}
    assert [r["recent"] for r in rows] == [None, None]
    done = command("run", voxtral_engine, *RUN)
    assert done.code == 0 and "attention by" not in done.err


def test_what_is_new_is_told_once(command: Command, changed: Callable[..., Path]) -> None:
    """The negative control of the test before, and the other half of the rule."""
    told = "has been here since yesterday"

    def new_decoder(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        decoder = "decoder"
        return [r | {"recent": told if r["component"] == decoder else None} for r in rows]

    engine = changed(new_decoder)
    first, second = command("run", engine, *RUN), command("run", engine, *RUN)
    lines = [line for line in first.err.splitlines() if told in line]
    assert lines == [f"voxtral, decoder: attention by interpreter on cpu (tensorrt_rtx) {told}"]
    assert first.code == second.code == 0 and told not in second.err
    opened = Engine.load(engine, executor="interpreter", device="cpu")
    assert opened.notices == ()
    opened.close()


def test_inspect_shows_the_list(command: Command, voxtral_engine: Path) -> None:
    text = command("inspect", voxtral_engine).out
    assert "audio_encoder" in text and "in use" in text and "has not run on a GPU yet" in text


def test_a_repository_for_what_is_not_permitted(
    changed: Callable[..., Path], tmp_path: Path
) -> None:
    from triton_repo.server import running

    engine = changed(lambda rows: [r for r in rows if r["device"] == "cuda"])
    repository = write_repository(engine, tmp_path / "repository")
    with pytest.raises(Exception, match="no such implementation"), running(repository):
        pass
