"""`build-engine export-hf`: TensorRT-LLM checkpoint back to a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from build_scripts import options, output


def command(
    ckpt_dir: Annotated[Path, typer.Argument(metavar="CKPT_DIR", help="Output of `convert`.")],
    out_dir: Annotated[
        Path, typer.Argument(metavar="OUT_DIR", help="Directory to create; must not exist.")
    ],
    workers: options.Workers = None,
    json: options.Json = False,
) -> None:
    """Write a checkpoint in the Hugging Face layout that other engines load.

    Codes and scales keep their bytes; quantisation is declared as Model Optimizer does, in
    hf_quant_config.json and inline; what some engines cannot read of it is printed. Holds the
    text model; the vision tower is not converted.

    [bold]Examples[/bold]

      build-engine export-hf checkpoint exported
      build-engine export-hf checkpoint exported --workers 8
    """
    from converters.checkpoint.export_hf import execute, plan_export

    with output.reserved_stdout(json):
        plan = plan_export(ckpt_dir, out_dir, workers=workers)
        for line in plan.lines():
            output.say(line)
        report = execute(plan, out_dir)
    if json:
        output.emit_json(report.as_dict())
    else:
        print("\n".join(report.outcome()))
