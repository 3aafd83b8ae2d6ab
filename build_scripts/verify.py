"""`build-engine verify`: compare an engine's networks with the transformers implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from build_scripts import options, output
from plugins.support.errors import EXIT_OK, EXIT_VERIFICATION_FAILED


def command(
    engine_dir: options.EngineDir,
    against: Annotated[
        Path,
        typer.Option("--against", metavar="HF_DIR", help="Checkpoint the engine was made from."),
    ],
    json: options.Json = False,
) -> int:
    """Compare every layer and the logits of an engine's networks with transformers, in float32.

    Executes the very networks that were built, on the interpreter. Then makes typical mistakes
    on purpose and shows that the comparison catches each. Ends with exit code 5 when a bound is
    exceeded or a mistake goes unnoticed.

    [bold]Examples[/bold]

      build-engine verify engine --against Qwen3.8-Flash-Next
      build-engine verify engine --against Qwen3.8-Flash-Next --json
    """
    from build_scripts import verification

    with output.reserved_stdout(json):
        result = verification.verify(engine_dir, against)
    if json:
        output.emit_json(result.as_dict())
    else:
        result.print()
    return EXIT_OK if result.passed else EXIT_VERIFICATION_FAILED
