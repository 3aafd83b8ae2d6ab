"""`build-engine repo`: engine directory to Triton model repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from build_scripts import options


def command(
    engine_dir: options.EngineDir,
    repo_dir: Annotated[
        Path, typer.Argument(metavar="REPO_DIR", help="Directory to create; must not exist.")
    ],
    tokenizer: options.TokenizerDir = None,
    json: options.Json = False,
) -> None:
    """Write a Triton model repository that serves an engine directory.

    Models: preprocessing, tensorrt_llm (decoupled), postprocessing, ensemble, tensorrt_llm_bls.

    [bold]Examples[/bold]

      build-engine repo engine model_repository
      build-engine repo engine model_repository --tokenizer Qwen3.8-Flash-Next
    """
