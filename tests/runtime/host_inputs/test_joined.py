"""A copy with the parts of a row side by side has every byte, and is made where there is room."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.host_inputs import joined as module
from runtime.host_inputs.compiled import SOURCE, CompiledGather, compile_library, find_compiler
from runtime.host_inputs.joined import join_rows, reserve
from runtime.host_inputs.ngram import NgramGather
from runtime.host_inputs.table import StoredTable
from tests.runtime.host_inputs.test_compiled import CONSTANTS, call, opened, same, table

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
BESIDE = ", codes and scales of a row are being copied side by side"


def reserved(size: int) -> np.ndarray:
    memory = reserve(size)
    assert memory is not None
    return memory


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 200),
    at_a_time=st.integers(1, 210),
    widths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
)
def test_every_byte_is_in_its_place(rows: int, at_a_time: int, widths: list[int]) -> None:
    numbers = np.random.default_rng(rows)
    parts = [numbers.integers(0, 256, (rows, width), np.uint8) for width in widths]
    memory = reserved(rows * sum(widths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROWS", at_a_time)
        found = join_rows(parts, memory)
    for part, right in zip(found, parts, strict=True):
        assert np.array_equal(part, right)
        assert np.shares_memory(part, memory)
    assert memory.tobytes() == np.concatenate(parts, axis=1).tobytes()


def test_fresh_memory() -> None:
    assert reserve(1 << 60) is None
    memory = reserved(3 << 20)
    assert memory.shape == (3 << 20,)
    assert not memory.any()
    memory[-1] = 1


def preloaded(gather: NgramGather) -> str:
    """What preloading says, after everything that it started."""
    said = gather.preload()
    if gather._joining is not None:
        gather._joining.join(60)
        assert not gather._joining.is_alive()
    return said


@needs_compiler
def test_rows_of_the_copy_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "t", "nvfp4", CONSTANTS.rows, 7)
    by_numpy, gather = opened(path), opened(path)
    assert preloaded(gather).endswith(f"; rows are gathered by compiled code{BESIDE}")
    asked: list[CompiledGather] = []
    original = CompiledGather.gather

    def noting(compiled: CompiledGather, *rest: Any) -> int:
        asked.append(compiled)
        return original(compiled, *rest)

    monkeypatch.setattr(CompiledGather, "gather", noting)
    monkeypatch.setattr(StoredTable, "gather", lambda *_: pytest.fail("numpy gathered"))
    found = [gather(*call(seed)) for seed in (0, 1)]
    assert asked == [gather._joined] * 2
    assert gather._joined is not gather._compiled
    monkeypatch.undo()
    assert same(found[0], by_numpy(*call(0)))
    assert same(found[1], by_numpy(*call(1)))
    # Nobody's cache has to give it back, and nothing of the file is asked for.
    monkeypatch.setattr(StoredTable, "request", lambda *_: pytest.fail("asked for rows"))
    monkeypatch.setattr("runtime.host_inputs.ngram._WAITED_NS", -1)
    assert same(gather(*call(0)), found[0])
    # It is a copy: other bytes in it are other values.
    codes = gather._joined._kept[0]
    codes ^= 0x33
    assert not same(gather(*call(0)), found[0])


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("row * t->scale_stride", "row * t->blocks"),
        ("t->codes + row * t->code_stride", "t->codes + row * t->row_bytes"),
    ],
)
def test_a_copy_that_gives_other_values_is_not_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    right: str,
    wrong: str,
) -> None:
    """Code that is right for rows of one piece only."""
    text = SOURCE.read_text()
    assert text.count(right) == 1
    (tmp_path / "gather.c").write_text(text.replace(right, wrong))
    monkeypatch.setattr("runtime.host_inputs.compiled.SOURCE", tmp_path / "gather.c")
    path = table(tmp_path / "t", "nvfp4", CONSTANTS.rows, 7)
    by_numpy, gather = opened(path), opened(path)
    compile_library.cache_clear()
    try:
        assert preloaded(gather).endswith(BESIDE)
    finally:
        compile_library.cache_clear()
    assert gather._joined is None
    assert "gives other values side by side" in capfd.readouterr().err
    assert same(gather(*call()), by_numpy(*call()))


@needs_compiler
def test_calls_do_not_wait_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "t", "nvfp4", CONSTANTS.rows, 7)
    by_numpy, gather = opened(path), opened(path)
    go, priority = threading.Event(), []

    def slowly(*given: Any) -> Any:
        assert go.wait(60)
        priority.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return join_rows(*given)

    monkeypatch.setattr("runtime.host_inputs.ngram.join_rows", slowly)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    gather.preload()
    assert gather._joining is not None
    expected = by_numpy(*call())
    assert gather._joined is None
    assert same(gather(*call()), expected)
    go.set()
    gather._joining.join(60)
    assert gather._joined is not None
    assert same(gather(*call()), expected)
    assert priority == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "times", "there_is", "expected"),
    [
        ("nvfp4", 3.0, True, BESIDE),
        # Three quarters of it are less than table and copy.
        ("nvfp4", 2.5, True, ""),
        ("nvfp4", 3.0, False, ""),
        # Rows that are one piece anyway.
        ("fp8", 3.0, True, ""),
        ("bf16", 3.0, True, ""),
    ],
)
def test_where_there_is_no_room_or_no_use_rows_stay_apart(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    times: float,
    there_is: bool,
    expected: str,
) -> None:
    path = table(tmp_path / "t", kind, CONSTANTS.rows, 6)
    by_numpy, gather = opened(path), opened(path)
    available = int(times * sum(part.nbytes for part in gather._table.parts))
    monkeypatch.setattr("runtime.host_inputs.ngram.available_bytes", lambda: available)
    if not there_is:
        monkeypatch.setattr("runtime.host_inputs.ngram.reserve", lambda _: None)
    assert preloaded(gather).endswith(f"; rows are gathered by compiled code{expected}")
    assert (gather._joined is not None) == bool(expected)
    assert same(gather(*call()), by_numpy(*call()))
