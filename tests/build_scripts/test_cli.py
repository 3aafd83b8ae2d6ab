"""The command line itself: help, usage errors, exit codes, JSON, and the missing traceback."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from build_scripts import chain, cli, output
from converters.checkpoint.convert import plan_conversion
from plugins.support import errors

Raise = Callable[[Exception], None]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Raise:
    """Make `doctor` raise the given exception."""

    def arrange(error: Exception) -> None:
        def survey() -> None:
            raise error

        monkeypatch.setattr("build_scripts.machine.survey", survey)

    return arrange


def test_help_loads_no_heavy_library() -> None:
    heavy = ("torch", "transformers", "tensorrt_rtx", "pydantic", "numpy", "safetensors")
    code = (
        "import sys; from build_scripts import cli; code = cli.execute(['--help']);"
        f"sys.exit(code or any(name in sys.modules for name in {heavy!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in cli.NAMES:
        assert verb in done.stdout


@pytest.mark.parametrize("verb", cli.NAMES)
def test_help_of_every_verb_teaches_by_example(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.execute([verb, "--help"]) == errors.EXIT_OK
    text = capsys.readouterr().out
    assert "Examples" in text
    assert f"build-engine {verb}" in text.split("Examples")[1]
    assert "--json" in text


def test_all_has_every_option_of_the_steps_that_make_an_engine() -> None:
    commands: Any = typer.main.get_command(cli.app)
    options = {
        verb: {
            name: parameter.default
            for parameter in commands.commands[verb].params
            for name in parameter.opts
            if name.startswith("--")
        }
        for verb in ("convert", "build", "all")
    }
    assert "--calibration" in options["convert"]
    assert options["convert"].items() <= options["all"].items()
    assert options["build"].items() <= options["all"].items()
    # And what the chain passes on is what the conversion takes.
    taken = set(inspect.signature(plan_conversion).parameters) - {"hf_dir", "ckpt_dir"}
    assert {field.name for field in dataclasses.fields(chain.Conversion)} == taken


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["build", "only-one-directory"],
        ["build", "a", "b", "--max-batch-size", "0"],
        ["build", "a", "b", "--max-batch-size", "many"],
        ["build", "a", "b", "--max-batch-size", str(2**31)],
        ["build", "a", "b", "--max-num-tokens", str(2**31)],
        ["convert", "a", "b", "--workers", str(10**20)],
        ["build", "a", "b", "--flavor", "cuda"],
        ["convert", "a", "b", "--dtype", "int4"],
        ["run", "a", "--no-such-option"],
        ["verify", "a"],
    ],
)
def test_usage_errors_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(arguments) == errors.EXIT_USAGE
    text = capsys.readouterr()
    assert text.err.startswith("error: ")
    assert "--help" in text.err
    assert text.out == ""

    assert cli.execute([*arguments, "--json"]) == errors.EXIT_USAGE
    problem = json.loads(capsys.readouterr().out)["error"]
    assert problem["exit_code"] == errors.EXIT_USAGE
    assert problem["what"] in text.err


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, 2),
        (errors.InputError, 3),
        (errors.BuildError, 3),
        (errors.CapabilityError, 4),
        (errors.VerificationError, 5),
    ],
)
def test_every_kind_of_error_has_its_exit_code(
    kind: type[errors.ToolchainError],
    code: int,
    failing: Raise,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(kind("it does not fit", where="tensor x", expected="a", found="b", fix="cut it"))
    assert cli.execute(["doctor"]) == code
    text = capsys.readouterr().err
    for part in ("error: it does not fit", "tensor x", "a", "b", "cut it"):
        assert part in text
    assert "Traceback" not in text

    assert cli.execute(["doctor", "--json"]) == code
    problem = json.loads(capsys.readouterr().out)["error"]
    assert problem == {
        "kind": kind.__name__,
        "what": "it does not fit",
        "where": "tensor x",
        "expected": "a",
        "found": "b",
        "fix": "cut it",
        "exit_code": code,
    }


def test_an_unexpected_error_is_one_message_and_the_trace_is_on_request(
    failing: Raise, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(ZeroDivisionError("by zero"))
    assert cli.execute(["doctor"]) == cli.EXIT_UNEXPECTED
    text = capsys.readouterr().err
    assert "unexpected ZeroDivisionError: by zero" in text
    assert cli.TRACEBACK_VARIABLE in text
    assert "Traceback" not in text

    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "1")
    assert cli.execute(["doctor"]) == cli.EXIT_UNEXPECTED
    assert "Traceback" in capsys.readouterr().err


def test_interrupt_and_full_disk_are_no_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: Raise
) -> None:
    failing(OSError(28, "No space left on device", "/somewhere/rank0.safetensors"))
    assert cli.execute(["doctor"]) == errors.EXIT_BAD_INPUT
    text = capsys.readouterr().err
    assert "No space left on device" in text
    assert "/somewhere/rank0.safetensors" in text

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("build_scripts.machine.survey", interrupted)
    assert cli.execute(["doctor"]) == cli.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "interrupted; no output directory is half written\n"


def test_stray_prints_do_not_reach_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    with output.reserved_stdout(as_json=True):
        print("chatter of a library")
    output.emit_json({"a": 1})
    text = capsys.readouterr()
    assert json.loads(text.out) == {"a": 1}
    assert "chatter" in text.err


def test_tables_keep_brackets_and_align_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    output.table("T", ("name", "n"), [("pip install 'x[rtx]'", 1), ("y", 1000)])
    lines = capsys.readouterr().out.splitlines()
    assert any("x[rtx]" in line for line in lines)
    assert any("│    1 │" in line for line in lines)


def test_doctor_reports_every_dependency(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["doctor", "--json"]) == errors.EXIT_OK
    found = json.loads(capsys.readouterr().out)
    states = {d["name"]: d["state"] for d in found["dependencies"]}
    assert states["torch"] == "ok"
    assert found["complete"]
    assert set(found["verbs"]) == {"convert", "build", "verify", "run", "repo", "serve"}


def test_doctor_names_the_c_compiler_or_what_its_absence_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    for path, fact in (
        (str(tmp_path), str(tmp_path / "gcc")),
        ("", "none: n-gram tables are read more slowly; install a C compiler, on Debian: "),
    ):
        monkeypatch.setenv("PATH", path)
        cli.execute(["doctor", "--json"])
        found = json.loads(capsys.readouterr().out)["facts"]["C compiler"]
        assert found.startswith(fact)


def test_doctor_fails_when_a_required_package_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from build_scripts import machine

    broken = machine.Package("numpy", "numpy.no_such_module", "every verb")
    absent = machine.Package("no-such-distribution", "no_such", "nothing", "rtx")
    monkeypatch.setattr(machine, "PACKAGES", (broken, absent))
    assert cli.execute(["doctor", "--json"]) == errors.EXIT_MISSING_CAPABILITY
    found = json.loads(capsys.readouterr().out)["dependencies"]
    assert found[0]["state"].startswith("broken: ")
    assert (
        found[1] | {"state": "missing", "install": "pip install 'trtllm-toolchain[rtx]'"}
        == (found[1])
    )


def _inspected(directory: Path, stdout: int, *options: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "build_scripts.cli", "inspect", str(directory), *options]
    return subprocess.run(program, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_reader_that_went_away_is_no_fault(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = _inspected(tmp_path, writer, *options)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (cli.EXIT_NO_READER, "")


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("name", ["there", "nowhere"])
def test_an_output_that_takes_nothing(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """The error of the output, or of the verb, is told on standard error."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text('{"model_type": "llama"}')
    with open("/dev/full", "wb") as full:
        done = _inspected(tmp_path / name, full.fileno(), *options)
    assert done.returncode == 3
    assert done.stderr.startswith("error: ")
    assert ("No space left" if name == "there" else "no such directory") in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
