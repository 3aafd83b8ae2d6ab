"""The command line as a function, for tests that look at its exit code and output."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from build_scripts import cli


@dataclass(frozen=True)
class Done:
    """One finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on standard output."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Command = Callable[..., Done]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `build-engine` with the given arguments in this process."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = cli.execute([str(argument) for argument in arguments])
        text = capsys.readouterr()
        return Done(code, text.out, text.err)

    return run
