"""`build-engine build`: TensorRT-LLM checkpoint to engine directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from build_scripts import options, output


def command(
    ckpt_dir: Annotated[Path, typer.Argument(metavar="CKPT_DIR", help="Output of `convert`.")],
    engine_dir: Annotated[
        Path, typer.Argument(metavar="ENGINE_DIR", help="Directory to create; must not exist.")
    ],
    max_batch_size: options.MaxBatchSize = 8,
    max_seq_len: options.MaxSeqLen = None,
    max_input_len: options.MaxInputLen = None,
    max_draft_len: options.MaxDraftLen = 0,
    pooling: options.PoolingOption = None,
    chunk_size: options.ChunkSize = 512,
    max_num_tokens: options.MaxNumTokens = 8192,
    flavor: options.FlavorOption = options.Flavor.auto,
    target: options.Target = None,
    weights: options.WeightsOption = options.Weights.auto,
    json: options.Json = False,
) -> None:
    """Build the context and the generation engine of a checkpoint.

    Needs no GPU with the flavor tensorrt_rtx. Prints the limits it builds for and an estimate of
    the memory before it starts; every listed compute capability is built and checked.

    [bold]Examples[/bold]

      build-engine build checkpoint engine
      build-engine build checkpoint engine --max-batch-size 8 --max-seq-len 4096
      build-engine build checkpoint engine --target 8.9,12.0 --weights embedded
    """
    from build_scripts import engines

    with output.reserved_stdout(json):
        result = engines.build(
            ckpt_dir,
            engine_dir,
            engines.Request(
                max_batch_size=max_batch_size,
                max_seq_len=max_seq_len,
                max_input_len=max_input_len,
                max_draft_len=max_draft_len,
                pooling=pooling.value if pooling else None,
                chunk_size=chunk_size,
                max_num_tokens=max_num_tokens,
                flavor=flavor.value,
                targets=options.targets(target),
                weights=weights.value,
            ),
        )
    if json:
        output.emit_json(result.as_dict())
    else:
        result.print()
