"""Conversions and exports that are killed, or whose source changes meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converters.checkpoint import convert as convert_module
from converters.checkpoint import write
from converters.checkpoint.config import WEIGHTS_FILE
from converters.checkpoint.convert import convert, execute, plan_conversion
from converters.checkpoint.export_hf import export_hf, plan_export
from converters.checkpoint.partial import Partial
from plugins.support.errors import InputError
from tests.converters.qwen38.conftest import Bend

ROOT = Path(__file__).parents[3]


def test_change_between_the_content_samples_is_noticed(
    bend: Bend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = plan_conversion(bend.directory, tmp_path / "ckpt")
    monkeypatch.setattr(type(plan.source), "identity", lambda _: plan.config.source)
    path = bend.directory / "model.safetensors"
    real = convert_module.run_tasks

    def run_tasks(*arguments: Any, **options: Any) -> Any:
        counts = real(*arguments, **options)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return counts

    monkeypatch.setattr(convert_module, "run_tasks", run_tasks)
    with pytest.raises(InputError, match="changed while it was converted"):
        execute(plan, tmp_path / "ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def _flip_the_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _replace(path: Path) -> None:
    """Another file of the same bytes takes its name."""
    path.with_suffix(".new").write_bytes(path.read_bytes())
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_flip_the_last_byte, "changed while it was exported"),
        (_replace, "changed while it was exported"),
        (_shorten, "became shorter while it was read"),
        (lambda path: None, None),
    ],
)
def test_export_whose_source_changes_meanwhile(
    change: Callable[[Path], None],
    message: str | None,
    bend: Bend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The change comes when half of the tensors are written; without one the export is whole."""
    ckpt = tmp_path / "ckpt"
    convert(bend.directory, ckpt)
    monkeypatch.setattr(write, "CHUNK_BYTES", 4096)
    groups = plan_export(ckpt, tmp_path / "out").groups
    tasks = sum(len(write.split_tasks(group)) for group in groups)
    assert tasks > 50
    marks: list[int] = []
    mark = Partial.mark

    def changing(partial: Partial, task: int) -> None:
        mark(partial, task)
        marks.append(task)
        if len(marks) == tasks // 2:
            change(ckpt / WEIGHTS_FILE)

    monkeypatch.setattr(Partial, "mark", changing)
    if message is None:
        export_hf(ckpt, tmp_path / "out", workers=1)
        assert len(marks) == tasks
        return
    with pytest.raises(InputError, match=message) as caught:
        export_hf(ckpt, tmp_path / "out", workers=1)
    assert str(ckpt / WEIGHTS_FILE) in str(caught.value.where)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "hf"]


KILLED_AT_THE_END = """
import os, signal, sys
from pathlib import Path
from converters.checkpoint import convert, export_hf

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

module = {"convert": convert, "export": export_hf}[sys.argv[3]]
setattr(module, sys.argv[4], kill)
if sys.argv[3] == "convert":
    convert.convert(Path(sys.argv[1]), Path(sys.argv[2]), quantize="fp8-block", workers=2)
else:
    export_hf.export_hf(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("verb", "function"),
    [
        ("convert", "write_config"),
        ("export", "_write_rest"),
        ("export", "_copy_tokenizer"),
    ],
)
def test_killed_between_the_last_task_and_the_end(
    verb: str, function: str, bend: Bend, tmp_path: Path
):
    convert(bend.directory, tmp_path / "whole", quantize="fp8-block")
    source = bend.directory if verb == "convert" else tmp_path / "whole"
    target, expected = tmp_path / "target", tmp_path / "expected"
    command = [sys.executable, "-c", KILLED_AT_THE_END, source, target, verb, function]
    run = subprocess.run(command, capture_output=True, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    assert not target.exists()
    for directory in (target, expected):
        if verb == "convert":
            convert(source, directory, quantize="fp8-block")
        else:
            export_hf(source, directory)
    assert not (tmp_path / ".target.partial").exists()
    names = sorted(path.relative_to(expected) for path in expected.rglob("*"))
    assert names == sorted(path.relative_to(target) for path in target.rglob("*"))
    for name in names:
        if (expected / name).is_file():
            assert (target / name).read_bytes() == (expected / name).read_bytes(), name


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def killed_anywhere(source: Path, target: Path, verb: str, seeds: int, *rest: str) -> int:
    """See `tests.converters.killer`; the number of kills."""
    command = [sys.executable, "-m", "tests.converters.killer", source, target, verb, str(seeds)]
    run = subprocess.run([*command, *rest], capture_output=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr.decode()
    return int(run.stdout.split()[-1])


@pytest.mark.parametrize("verb", ["copy", "nvfp4", "export"])
def test_killed_at_any_moment_ends_with_the_same_bytes(verb: str, bend: Bend, tmp_path: Path):
    """Twelve runs, each killed in the middle of up to four random steps."""
    source = bend.directory
    if verb == "export":
        source = tmp_path / "ckpt"
        convert(bend.directory, source, quantize="nvfp4")
        export_hf(source, tmp_path / "whole")
    else:
        convert(source, tmp_path / "whole", quantize=None if verb == "copy" else verb)
    assert killed_anywhere(source, tmp_path / "out", verb, 12) >= 12
    expected = contents(tmp_path / "whole")
    assert contents(tmp_path / "out") == expected
    for seed in range(12):
        assert contents(tmp_path / f"out-{seed}") == expected, seed
    assert not list(tmp_path.glob(".*.partial"))


def test_the_comparison_notices_marks_that_come_too_early(bend: Bend, tmp_path: Path):
    convert(bend.directory, tmp_path / "whole")
    killed_anywhere(bend.directory, tmp_path / "out", "copy", 4, "trusting")
    expected = contents(tmp_path / "whole")
    assert contents(tmp_path / "out") == expected
    assert any(contents(tmp_path / f"out-{seed}") != expected for seed in range(4))


def _touched(path: Path) -> None:
    """Other bytes."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _set_back(path: Path) -> None:
    """Other bytes of the same number, under the time of the old ones."""
    status = path.stat()
    _touched(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [_touched, _set_back])
def test_conversion_of_another_checkpoint_starts_anew(
    change: Callable[[Path], None], bend: Bend, tmp_path: Path
):
    command = [sys.executable, "-c", KILLED_AT_THE_END, bend.directory, tmp_path / "out"]
    run = subprocess.run([*command, "convert", "write_config"], capture_output=True, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    change(bend.directory / "model.safetensors")
    for name in ("out", "whole"):
        convert(bend.directory, tmp_path / name, quantize="fp8-block")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_export_of_another_checkpoint_starts_anew(bend: Bend, tmp_path: Path):
    """Work on a checkpoint that has been replaced under the same name is not continued."""
    convert(bend.directory, tmp_path / "ckpt")
    script = KILLED_AT_THE_END
    command = [sys.executable, "-c", script, tmp_path / "ckpt", tmp_path / "out"]
    run = subprocess.run([*command, "export", "_write_rest"], capture_output=True, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    weights = tmp_path / "ckpt" / WEIGHTS_FILE
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    export_hf(tmp_path / "ckpt", tmp_path / "whole")
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
