"""Interrupted work continues, failed work leaves nothing, finished work appears at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from converters.checkpoint.partial import resumable_directory
from plugins.support.errors import InputError, UsageError


def interrupt(path: Path, fingerprint: str, *tasks: int) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        resumable_directory(path, fingerprint, "output") as partial,
    ):
        (partial.work / "data").write_text(fingerprint)
        for task in tasks:
            partial.mark(task)
        raise KeyboardInterrupt


def test_same_work_continues(tmp_path: Path):
    target = tmp_path / "out"
    interrupt(target, "one", 0, 2)
    assert not target.exists()
    with resumable_directory(target, "one", "output") as partial:
        assert partial.done == {0, 2}
        assert (partial.work / "data").read_text() == "one"
    assert [path.name for path in target.iterdir()] == ["data"]
    assert list(tmp_path.iterdir()) == [target]


def test_other_work_starts_anew(tmp_path: Path):
    target = tmp_path / "out"
    interrupt(target, "one", 0, 2)
    with resumable_directory(target, "two", "output") as partial:
        assert partial.done == set()
        assert not (partial.work / "data").exists()


def test_marks_do_not_outlive_a_restart_of_the_machine(tmp_path: Path, monkeypatch):
    target = tmp_path / "out"
    interrupt(target, "one", 0)
    boot = tmp_path / "boot"
    boot.write_text("another boot")
    monkeypatch.setattr("converters.checkpoint.partial._BOOT_ID", boot)
    with resumable_directory(target, "one", "output") as partial:
        assert partial.done == set()


def test_a_torn_mark_is_not_believed(tmp_path: Path):
    target = tmp_path / "out"
    interrupt(target, "one", 0, 12)
    journal = tmp_path / ".out.partial" / "journal"
    journal.write_text(journal.read_text()[:-2])
    # Nor does the piece become a part of the next mark.
    interrupt(target, "one", 34)
    with resumable_directory(target, "one", "output") as partial:
        assert partial.done == {0, 34}


def test_marks_do_not_outlive_the_files_they_speak_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Other work is killed while it clears away what it found, and the first one comes back."""
    target = tmp_path / "out"
    interrupt(target, "one", 0, 12)

    def kill(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", kill)
        with resumable_directory(target, "two", "output"):
            pytest.fail("went on")
    with resumable_directory(target, "one", "output") as partial:
        assert partial.done == set()
        assert not (partial.work / "data").exists()


def test_errors_leave_nothing(tmp_path: Path):
    with (
        pytest.raises(InputError),
        resumable_directory(tmp_path / "out", "one", "output") as partial,
    ):
        (partial.work / "data").write_text("x")
        raise InputError("bad")
    assert list(tmp_path.iterdir()) == []


def test_existing_output_and_second_writer_are_refused(tmp_path: Path):
    target = tmp_path / "out"
    with (
        resumable_directory(target, "one", "output"),
        pytest.raises(UsageError, match="another process"),
        resumable_directory(target, "one", "output"),
    ):
        pass
    (target / "data").write_text("finished")
    with pytest.raises(UsageError, match="already exists"), resumable_directory(target, "", "out"):
        pass
    assert (target / "data").read_text() == "finished"
