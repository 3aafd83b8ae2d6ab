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

    Of a Hugging Face checkpoint: how each matrix is stored, as a conversion would decide, and as
    findings what would stop one before it writes, and declarations that disagree or match
    nothing. Reads configs, headers, tokenizer files and small samples, never a whole weight.

    [bold]Examples[/bold]

      build-engine inspect engine
      build-engine inspect checkpoint --json
      build-engine inspect model
    """
    from build_scripts import artefact

    with output.reserved_stdout(json):
        found = artefact.describe(path)
    if json:
        output.emit_json(found.as_dict())
    else:
        found.print()
