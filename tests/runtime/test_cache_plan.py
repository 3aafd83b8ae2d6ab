"""The cache plan counts the bytes that the slot tensors take, no more and no less."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.engines import write_engine


def test_bytes_are_those_of_the_tensors(tmp_path: Path) -> None:
    plan = write_engine(tmp_path / "engine", slots=3).cache_plan
    by_name = {group.name: group for group in plan.groups}
    rows = 256 + 64
    assert by_name["key_cache"].bytes_per_token == 2 * 4 * 4
    assert by_name["key_cache"].bytes_per_sequence == 2 * rows * 4 * 4
    assert by_name["index_key_cache"].tokens_per_row == 4
    assert by_name["index_key_cache"].bytes_per_token == 8 * 4 / 4
    assert by_name["recurrent_state"].bytes_per_token == 0
    assert by_name["recurrent_state"].bytes_per_sequence == 3 * 2 * 4
    assert plan.bytes_per_token == 32 + 8
    assert plan.bytes_per_sequence == rows * (32 + 8) + 24
    assert plan.total_bytes == 3 * plan.bytes_per_sequence


def test_table_shows_every_group_and_the_total(tmp_path: Path) -> None:
    plan = write_engine(tmp_path / "engine", slots=3).cache_plan
    lines = plan.table().splitlines()
    assert [line.split()[0] for line in lines] == [
        "group",
        "key_cache",
        "index_key_cache",
        "recurrent_state",
        "total",
    ]
    assert lines[-1].split()[-1] == f"{plan.total_bytes:,}"
