"""Audio rows: where they go, streams that grow, and requests that wait for them."""

from __future__ import annotations

import pytest
import torch

from plugins.support.errors import UsageError
from runtime.audio_rows import AudioRows


def numbered(count: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].expand(-1, 2).clone()


def test_rows_replace_placeholders_in_order() -> None:
    rows = AudioRows(numbered(3, 10), placeholder_id=7)
    rows.bind([1, 7, 7, 2, 7])
    whole = torch.zeros(5, 2)
    rows.place(0, whole)
    assert whole[:, 0].tolist() == [0, 10, 11, 0, 12]
    for cut in range(6):
        parts = torch.zeros(cut, 2), torch.zeros(5 - cut, 2)
        rows.place(0, parts[0])
        rows.place(cut, parts[1])
        assert torch.equal(torch.cat(parts), whole)
    # A placeholder that is generated later has no row.
    beyond = torch.zeros(2, 2)
    rows.place(5, beyond)
    assert not beyond.any()


@pytest.mark.parametrize("prompt", [[7, 7], [7, 7, 7, 7], [1, 2]])
def test_counts_must_match(prompt: list[int]) -> None:
    with pytest.raises(UsageError, match="do not match"):
        AudioRows(numbered(3), placeholder_id=7).bind(prompt)


def test_a_stream_grows_and_ends() -> None:
    heard = []
    rows = AudioRows(numbered(2), None, ended=False)
    rows.notify(lambda: heard.append(rows.count))
    assert rows.covers(1)
    assert not rows.covers(2)
    assert not rows.over(2)
    rows.append(numbered(1, 2))
    rows.append(numbered(1, 3), last=True)
    assert heard == [3, 4]
    assert rows.covers(3)
    assert rows.over(4)
    assert not rows.over(3)
    placed = torch.zeros(3, 2)
    rows.place(1, placed)
    assert placed[:, 0].tolist() == [1, 2, 3]
    with pytest.raises(UsageError, match="ended"):
        rows.append(numbered(1))
