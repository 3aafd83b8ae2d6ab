"""`build-engine convert`: Hugging Face checkpoint to TensorRT-LLM checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from build_scripts import options, output


def command(
    hf_dir: options.HfDir,
    ckpt_dir: Annotated[
        Path, typer.Argument(metavar="CKPT_DIR", help="Directory to create; must not exist.")
    ],
    dtype: options.DtypeOption = None,
    quantize: options.QuantizeOption = None,
    only: options.OnlyOption = None,
    kv_cache: Annotated[
        options.KvCache | None,
        typer.Option(
            "--kv-cache",
            help="fp8: caches of keys and values are FP8 (qwen4_exp with full TensorRT, and "
            "engines that load the exported checkpoint); none: they are not, which TensorRT for "
            "RTX needs; default: as the checkpoint has it.",
        ),
    ] = None,
    calibration: options.CalibrationOption = None,
    workers: options.Workers = None,
    json: options.Json = False,
) -> None:
    """Convert a Hugging Face checkpoint into a TensorRT-LLM checkpoint.

    Reads configs and headers first and refuses what it cannot convert before a single weight is
    read; then streams the weights, so that memory does not grow with the checkpoint. A killed
    conversion is continued by the same command.

    [bold]Examples[/bold]

      build-engine convert Qwen3.8-Flash-Next checkpoint
      build-engine convert Qwen3.8-Flash-Next checkpoint --dtype float32
      build-engine convert Qwen3.8-Flash-Next checkpoint --quantize nvfp4 --only mlp
      build-engine convert Qwen3.8-Flash-Next checkpoint --quantize fp8 --kv-cache fp8
    """
    from converters.checkpoint.convert import execute, plan_conversion

    with output.reserved_stdout(json):
        plan = plan_conversion(
            hf_dir,
            ckpt_dir,
            dtype.value if dtype else None,
            quantize=quantize.value if quantize else None,
            only=options.scope(only, quantize),
            kv_cache=kv_cache.value if kv_cache else None,
            calibration=calibration,
            workers=workers,
        )
        for line in plan.lines():
            output.say(line)
        report = execute(plan, ckpt_dir)
    if json:
        output.emit_json(report.as_dict())
    else:
        print("\n".join(report.outcome()))
