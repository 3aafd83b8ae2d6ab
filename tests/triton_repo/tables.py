"""The tables of right values in `data/`, one JSON list per table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[Any]:
    """The rows of a table as pytest parameters, named by their `id` where they have one."""
    table = json.loads((DATA / f"{name}.json").read_text())
    return [pytest.param(row, id=str(row.get("id", index))) for index, row in enumerate(table)]
