"""What a verb prints: tables and lines for people, or one JSON object for programs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from plugins.support.errors import ToolchainError

# "12", "1.5e-06", "34 ms", "-", "5 of 8": cells that line up at the right.
_NUMBER = re.compile(r"-|[-+]?[\d.,]+(e[-+]?\d+)?( ?\S+)?( \d+)?$")


@contextmanager
def reserved_stdout(as_json: bool) -> Iterator[None]:
    """Keep standard output for the one JSON object: prints of libraries go to standard error."""
    if not as_json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def emit_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object and a newline on standard output."""
    sys.stdout.write(json.dumps(result, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def report_error(error: ToolchainError, as_json: bool) -> int:
    """Print `error` where it belongs; returns the exit code it stands for.

    Where standard output takes no object, the error goes to standard error.
    """
    if as_json:
        detail = {"kind": type(error).__name__, "what": error.what, **error.details()}
        try:
            emit_json({"error": detail | {"exit_code": error.exit_code}})
            return error.exit_code
        except OSError:
            discard_stdout()
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def discard_stdout() -> None:
    """Let what standard output could not take vanish; Python would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(line: str = "") -> None:
    """Print one line of the account that a verb gives of itself, on standard error."""
    print(line, file=sys.stderr, flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on standard output; columns of numbers are right-aligned."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[str(cell) for cell in row] for row in rows]
    grid = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        numbers = index > 0 and all(_NUMBER.match(row[index]) for row in cells)
        grid.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        # As text, not as markup: "[rtx]" is part of a name here.
        grid.add_row(*(Text(cell) for cell in row))
    console = Console()
    # A pipe has no width; tables for a log must not be folded at 80 columns.
    console.width = console.width if console.is_terminal else 140
    console.print(grid)
