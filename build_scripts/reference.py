"""Writes docs/cli.md from the command itself: `python -m build_scripts.reference > docs/cli.md`."""

from __future__ import annotations

import re
import sys
from typing import Any

import typer.main

from build_scripts.cli import app

HEADER = """# `build-engine`: every verb and option

Written by `make docs` from the command's own help; a test compares the two.

Exit codes are in [exit_codes.md](exit_codes.md).
"""


def _prose(text: str) -> str:
    """Help text as markdown: headings, and examples as fenced blocks."""
    out: list[str] = []
    examples: list[str] = []
    for line in re.sub(r"\[/?bold\]", "**", text).splitlines():
        line = line.replace("\b", "").rstrip()
        if line.strip().startswith("build-engine "):
            examples.append(line.strip())
        elif line.strip() or not examples:
            out.append(line.strip())
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()
    body = body.removesuffix("**Examples**").strip()
    if examples:
        body += "\n\n```sh\n" + "\n".join(examples) + "\n```"
    return body


def _row(parameter: Any) -> str:
    flags = " ".join(f"`{flag}`" for flag in parameter.opts)
    if parameter.param_type_name == "argument":
        flags = f"`{parameter.metavar or parameter.name}`"
    default = parameter.default
    if default is None or parameter.required or default is False:
        shown = ""
    else:
        shown = f"`{getattr(default, 'value', default)}`"
    return f"| {flags} | {shown} | {parameter.help or ''} |"


def render() -> str:
    """The whole of docs/cli.md."""
    group: Any = typer.main.get_command(app)
    parts = [HEADER]
    for name, verb in group.commands.items():
        rows = [_row(p) for p in verb.params if p.name != "help"]
        table = "\n".join(["| argument | default | meaning |", "|---|---|---|", *rows])
        parts.append(f"## build-engine {name}\n\n{_prose(verb.help)}\n\n{table}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render())
