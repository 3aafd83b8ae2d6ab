"""`build-engine all`: the whole chain from a Hugging Face checkpoint to a model repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from build_scripts import options, output
from plugins.support.errors import EXIT_OK, EXIT_VERIFICATION_FAILED


def command(
    hf_dir: options.HfDir,
    out_dir: Annotated[
        Path,
        typer.Argument(
            metavar="OUT_DIR",
            help="Gets checkpoint/, engine/ and model_repository/; must not hold them yet.",
        ),
    ],
    dtype: options.DtypeOption = None,
    quantize: options.QuantizeOption = None,
    only: options.OnlyOption = None,
    kv_cache: Annotated[
        options.KvCache | None,
        typer.Option(
            "--kv-cache",
            help="fp8: caches of keys and values are FP8 (qwen4_exp with full TensorRT); none: "
            "they are not; default: as the checkpoint has it where the engines can have FP8 "
            "caches, otherwise none.",
        ),
    ] = None,
    calibration: options.CalibrationOption = None,
    workers: options.Workers = None,
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
    tokenizer: options.TokenizerDir = None,
    json: options.Json = False,
) -> int:
    """Convert, build, verify and write the model repository.

    Stops at the first step that fails; what earlier steps finished stays. The repository is
    written only for an engine that passed verification.

    [bold]Examples[/bold]

      build-engine all Qwen3.8-Flash-Next served
      build-engine all Qwen3.8-Flash-Next served --dtype float32 --max-seq-len 4096
    """
    from build_scripts import chain, engines

    request = engines.Request(
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
    )
    with output.reserved_stdout(json):
        result = chain.run(
            hf_dir,
            out_dir,
            chain.Conversion(
                dtype=dtype.value if dtype else None,
                quantize=quantize.value if quantize else None,
                only=options.scope(only, quantize),
                kv_cache=kv_cache.value if kv_cache else None,
                calibration=calibration,
                workers=workers,
            ),
            request,
            tokenizer,
        )
    if json:
        output.emit_json(result.as_dict())
    else:
        result.print()
    return EXIT_OK if result.verification.passed else EXIT_VERIFICATION_FAILED
