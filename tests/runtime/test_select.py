"""Which executor a machine gets, and the sentence that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plugins.attention import Allowlist, Row
from plugins.support.errors import CapabilityError, InputError, UsageError
from plugins.trt.types import Flavor
from runtime.contract import CONFIG_FILE, EngineConfig, PluginEntry
from runtime.engine import Engine
from runtime.executors.select import choose
from runtime.machine import Gpu, Machine, probe

ADA = Gpu(0, "an Ada card", "8.9")
HOPPER = Gpu(0, "a Hopper card", "9.0")
RTX: dict[Flavor, str] = {"tensorrt_rtx": "1.7.1.116"}


def _machine(*gpus: Gpu, libraries: dict[Flavor, str] | None = None) -> Machine:
    return Machine(RTX if libraries is None else libraries, gpus)


def test_fitting_gpu_gets_tensorrt(config: EngineConfig) -> None:
    choice = choose(config, _machine(ADA), "auto", "auto")
    assert (choice.name, str(choice.device)) == ("tensorrt", "cuda:0")
    assert "an Ada card" in choice.reason


@pytest.mark.parametrize(
    ("machine", "device", "words"),
    [
        (_machine(), "cpu", "no CUDA device"),
        (_machine(HOPPER), "cuda:0", "a Hopper card with 9.0; needs compute capability 8.9, 12.0"),
        (_machine(ADA, libraries={}), "cuda:0", "no tensorrt_rtx; needs tensorrt_rtx 1.7.1.116"),
        (
            _machine(ADA, libraries={"tensorrt_rtx": "1.8.0.1"}),
            "cuda:0",
            "tensorrt_rtx 1.8.0.1; needs tensorrt_rtx 1.7.1.116",
        ),
    ],
)
def test_other_machines_get_the_interpreter_and_the_reason(
    config: EngineConfig, machine: Machine, device: str, words: str
) -> None:
    choice = choose(config, machine, "auto", "auto")
    assert (choice.name, str(choice.device)) == ("interpreter", device)
    assert words in choice.reason
    with pytest.raises(CapabilityError) as caught:
        choose(config, machine, "tensorrt", "auto")
    assert caught.value.fix


def test_second_gpu_is_judged_by_itself(config: EngineConfig) -> None:
    machine = _machine(HOPPER, Gpu(1, "an Ada card", "8.9"))
    assert choose(config, machine, "auto", "auto").name == "interpreter"
    choice = choose(config, machine, "auto", "cuda:1")
    assert (choice.name, str(choice.device)) == ("tensorrt", "cuda:1")


def test_wishes_are_granted(config: EngineConfig) -> None:
    assert choose(config, _machine(ADA), "interpreter", "auto").name == "interpreter"
    choice = choose(config, _machine(ADA), "auto", "cpu")
    assert (choice.name, str(choice.device)) == ("interpreter", "cpu")


@pytest.mark.parametrize(
    ("executor", "device", "error"),
    [
        ("fastest", "auto", UsageError),
        ("auto", "tpu", UsageError),
        ("auto", "meta", UsageError),
        ("tensorrt", "cpu", UsageError),
        ("interpreter", "cuda:1", CapabilityError),
    ],
)
def test_impossible_wishes_are_refused(
    config: EngineConfig, executor: str, device: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        choose(config, _machine(ADA), executor, device)


def test_custom_operations_must_be_those_of_the_build(config: EngineConfig) -> None:
    plugin = PluginEntry(name="qsa::attend", digest="a" * 64)
    built = config.model_copy(update={"plugins": (plugin,)})
    with pytest.raises(CapabilityError, match="does not have") as caught:
        choose(built, _machine(), "auto", "auto")
    assert caught.value.where == "qsa::attend"
    other = Machine(RTX, (), {"qsa::attend": "b" * 64})
    with pytest.raises(CapabilityError, match="another version"):
        choose(built, other, "interpreter", "cpu")
    same = Machine(RTX, (), {"qsa::attend": "a" * 64})
    assert choose(built, same, "auto", "auto").name == "interpreter"
    # A serialized engine carries its kernels.
    assert choose(built, _machine(ADA), "auto", "auto").name == "tensorrt"


def test_probe_names_the_flavour_if_it_can_be_imported() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    assert probe("tensorrt_rtx").libraries == {"tensorrt_rtx": trt.__version__}


def test_wrong_directory_is_refused_before_anything_is_opened(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    refuse: Callable[..., None] = lambda *arguments: opened.append(arguments)  # noqa: E731
    monkeypatch.setattr("runtime.engine.open_executor", refuse)
    copy = tmp_path / "engine"
    copy.mkdir()
    for file in engine_dir.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    raw = json.loads((copy / CONFIG_FILE).read_text())
    raw["engines"]["context"]["file_bytes"] += 1
    (copy / CONFIG_FILE).write_text(json.dumps(raw))
    with pytest.raises(InputError, match="not the one that was built"):
        Engine.load(copy)
    assert opened == []


def _permitting(config: EngineConfig, *rows: Row) -> EngineConfig:
    return config.model_copy(update={"attention": Allowlist(model="language", rows=rows)})


ON_CPU = Row(component="decoder", implementation="interpreter", device="cpu")
ENGINE = Row(component="decoder", implementation="tensorrt", device="cuda")


def test_what_the_model_does_not_permit_is_passed_over(config: EngineConfig) -> None:
    """A GPU that could run the engines, and the interpreter on it, are left for the CPU."""
    choice = choose(_permitting(config, ON_CPU), _machine(ADA), "auto", "auto")
    assert (choice.name, str(choice.device)) == ("interpreter", "cpu")
    assert "the attention of language has no such implementation" in choice.reason
    assert "needs interpreter on cpu" in choice.reason
    only = choose(_permitting(config, ENGINE), _machine(ADA), "auto", "auto")
    assert only.name == "tensorrt"


@pytest.mark.parametrize(
    ("executor", "device", "rows", "found", "allowed"),
    [
        ("tensorrt", "auto", (ON_CPU,), "tensorrt on cuda", "interpreter on cpu"),
        ("interpreter", "cuda", (ON_CPU, ENGINE), "interpreter on cuda",
         "interpreter on cpu, tensorrt on cuda"),
        ("auto", "cpu", (ENGINE,), "interpreter on cpu", "tensorrt on cuda"),
        ("interpreter", "auto", (), "interpreter on cpu", "another flavour than tensorrt_rtx"),
    ],
)  # fmt: skip
def test_one_message_for_what_is_not_permitted(
    config: EngineConfig, executor: str, device: str, rows: tuple[Row, ...], found: str,
    allowed: str,
) -> None:  # fmt: skip
    with pytest.raises(CapabilityError) as caught:
        choose(_permitting(config, *rows), _machine(ADA), executor, device)
    error = caught.value
    assert error.what == "the attention of language has no such implementation"
    assert error.where == "decoder"
    assert error.expected == allowed
    assert error.found == f"{found} (tensorrt_rtx)"
    assert error.fix


def test_permission_comes_before_the_machine(config: EngineConfig) -> None:
    """A machine that could not do it either does not hide that it is not permitted."""
    with pytest.raises(CapabilityError, match="no such implementation"):
        choose(_permitting(config, ON_CPU), _machine(), "tensorrt", "auto")
    # The negative control: with the row, the machine is the problem.
    with pytest.raises(CapabilityError, match="need a GPU"):
        choose(_permitting(config, ON_CPU, ENGINE), _machine(), "tensorrt", "auto")
