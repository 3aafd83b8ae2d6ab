"""How many tensors are converted at a time."""

from __future__ import annotations

import os

import pytest

from converters.checkpoint.write import worker_count
from plugins.support.errors import UsageError


def test_one_worker_per_core_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert worker_count(None) == 3
    assert worker_count(8) == 8
    with pytest.raises(UsageError, match="at least one worker"):
        worker_count(0)
