"""`build-engine repo`: engine directory to Triton model repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from build_scripts import options, output


def command(
    engine_dir: options.EngineDir,
    repo_dir: Annotated[
        Path, typer.Argument(metavar="REPO_DIR", help="Directory to create; must not exist.")
    ],
    tokenizer: options.TokenizerDir = None,
    executor: options.Executor = options.ExecutorChoice.auto,
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Write a Triton model repository that serves an engine directory.

    Models: preprocessing, tensorrt_llm (decoupled), postprocessing, ensemble, tensorrt_llm_bls.

    [bold]Examples[/bold]

      build-engine repo engine model_repository
      build-engine repo engine model_repository --tokenizer Qwen3.8-Flash-Next
    """
    from triton_repo.generate import MODELS, RepositoryOptions, write_repository

    chosen = RepositoryOptions(executor=executor.value, device=device)
    with output.reserved_stdout(json):
        written = write_repository(engine_dir, repo_dir, tokenizer=tokenizer, options=chosen)
    if json:
        output.emit_json({"repo_dir": str(written), "models": list(MODELS)})
    else:
        print(f"{written}: {', '.join(MODELS)}")
