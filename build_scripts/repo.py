"""`build-engine repo`: engine directory to Triton model repository."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from build_scripts import options, output
from plugins.support.errors import UsageError


class GenerationChoice(StrEnum):
    """Where the tokens of a repository come from."""

    engine = "engine"
    echo = "echo"


def command(
    engine_dir: Annotated[
        Path,
        typer.Argument(metavar="ENGINE_DIR", help="Output of `build`; left out for an echo."),
    ],
    repo_dir: Annotated[
        Path | None,
        typer.Argument(metavar="REPO_DIR", help="Directory to create; must not exist."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="DIR",
            help="Tokenizer files, if the engine has none; `bytes` for one id per UTF-8 byte.",
        ),
    ] = None,
    generation: Annotated[
        GenerationChoice,
        typer.Option("--generation", help="echo: answer with what arrived, without an engine."),
    ] = GenerationChoice.engine,
    executor: options.Executor = options.ExecutorChoice.auto,
    device: options.Device = "auto",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of the served models, e.g. decoupled=false; value as JSON or text.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Write a Triton model repository that serves an engine directory.

    Models: preprocessing, tensorrt_llm (decoupled), postprocessing, ensemble, tensorrt_llm_bls.

    [bold]Examples[/bold]

      build-engine repo engine model_repository
      build-engine repo engine model_repository --tokenizer Qwen3.8-Flash-Next
      build-engine repo engine model_repository --set exclude_input_in_output=true
      build-engine repo --generation echo --tokenizer bytes echo_repository
    """
    from triton_repo.generate import MODELS, parse_options, write_repository

    echo = generation is GenerationChoice.echo
    source, target = (None, engine_dir) if echo and repo_dir is None else (engine_dir, repo_dir)
    if target is None:
        raise UsageError("REPO_DIR is missing", fix="build-engine repo ENGINE_DIR REPO_DIR")
    chosen = parse_options([f"executor={executor.value}", f"device={device}", *(settings or [])])
    with output.reserved_stdout(json):
        written = write_repository(
            source, target, tokenizer=tokenizer, generation=generation.value, options=chosen
        )
    if json:
        output.emit_json({"repo_dir": str(written), "models": list(MODELS)})
    else:
        print(f"{written}: {', '.join(MODELS)}")
