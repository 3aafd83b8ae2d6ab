"""`build-engine inspect`: say what a directory is and what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from build_scripts import options, output


def command(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Any artefact of the chain.")],
    json: options.Json = False,
) -> None:
    """Print what is in a Hugging Face checkpoint, a checkpoint, an engine or a repository.

    Reads configs and headers only, never a weight.

    [bold]Examples[/bold]

      build-engine inspect engine
      build-engine inspect checkpoint --json
    """
    from build_scripts import artefact

    with output.reserved_stdout(json):
        found = artefact.describe(path)
    if json:
        output.emit_json(found.as_dict())
    else:
        found.print()
