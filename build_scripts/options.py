"""Arguments and options that several verbs share, so that they read the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from plugins.support.errors import UsageError

# Longest side of a tensor that TensorRT's interfaces take.
_LARGEST = 2**31 - 1
# More threads than any machine for conversions has cores; their memory is announced per worker.
_MOST_WORKERS = 1024


class Dtype(StrEnum):
    """Element type of a converted checkpoint."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Quantize(StrEnum):
    """What plain weights become."""

    nvfp4 = "nvfp4"
    fp8 = "fp8"
    fp8_block = "fp8-block"


class Only(StrEnum):
    """Which weights are quantised."""

    experts = "experts"
    mlp = "mlp"
    all = "all"


class KvCache(StrEnum):
    """What the caches of keys and values are declared to be."""

    fp8 = "fp8"
    none = "none"


class Flavor(StrEnum):
    """Which TensorRT builds the engines."""

    auto = "auto"
    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt_rtx"


class Weights(StrEnum):
    """Where an engine finds its weights."""

    auto = "auto"
    inputs = "inputs"
    embedded = "embedded"


class Pooling(StrEnum):
    """What an embedding is made of."""

    mean = "mean"
    last = "last"


class ExecutorChoice(StrEnum):
    """What executes an engine directory."""

    auto = "auto"
    interpreter = "interpreter"
    tensorrt = "tensorrt"


HfDir = Annotated[Path, typer.Argument(metavar="HF_DIR", help="Hugging Face checkpoint directory.")]
EngineDir = Annotated[Path, typer.Argument(metavar="ENGINE_DIR", help="Output of `build`.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option("--dtype", help="Element type; default: the checkpoint's own.")
]
QuantizeOption = Annotated[
    Quantize | None,
    typer.Option("--quantize", help="Quantise plain weights; default: keep what is stored."),
]
OnlyOption = Annotated[
    Only | None,
    typer.Option(
        "--only",
        help="What --quantize applies to: routed experts (the default); mlp: and shared experts; "
        "all: and the projections of attention and n-gram blocks.",
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="DIR",
        help="Model Optimizer's export with the activation scales for what --quantize makes, "
        "and with scales of caches.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        max=_MOST_WORKERS,
        help="Tensors that are converted at a time; default: one per core.",
    ),
]
MaxBatchSize = Annotated[
    int,
    typer.Option(
        "--max-batch-size", min=1, max=_LARGEST, help="Sequences served at the same time."
    ),
]
MaxSeqLen = Annotated[
    int | None,
    typer.Option(
        "--max-seq-len",
        min=1,
        help="Prompt plus output of one sequence, in tokens; default: the model's own maximum.",
    ),
]
MaxInputLen = Annotated[
    int | None,
    typer.Option(
        "--max-input-len", min=1, help="Longest prompt, in tokens; default: --max-seq-len less 1."
    ),
]
FlavorOption = Annotated[
    Flavor,
    typer.Option("--flavor", help="auto: tensorrt where it is installed, otherwise tensorrt_rtx."),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="CC,CC,…",
        help="Compute capabilities the engines must run on, such as 8.0,8.6,8.9,12.0.",
    ),
]
WeightsOption = Annotated[
    Weights,
    typer.Option(
        "--weights",
        help="inputs: bound at load from the weights file; embedded: inside the engine file; "
        "auto: large tensors inputs, small ones embedded.",
    ),
]
Executor = Annotated[
    ExecutorChoice,
    typer.Option("--executor", help="auto: TensorRT where a usable GPU is, else interpreter."),
]
Device = Annotated[
    str, typer.Option("--device", help="auto, cpu or cuda[:N]: where the executor works.")
]
TokenizerDir = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="DIR", help="Tokenizer files, if the engine has none."),
]
MaxDraftLen = Annotated[
    int,
    typer.Option(
        "--max-draft-len",
        min=0,
        help="Draft tokens per generation step; the generation engine takes 1 + this many.",
    ),
]
PoolingOption = Annotated[
    Pooling | None,
    typer.Option(
        "--pooling",
        help="Let the engine make embeddings too: from the mean of the hidden states of all "
        "tokens, or from the last one; default: none.",
    ),
]
ChunkSize = Annotated[
    int,
    typer.Option(
        "--chunk-size",
        min=64,
        help="Tokens of one sequence per call of the context engine; a multiple of 64.",
    ),
]
MaxNumTokens = Annotated[
    int,
    typer.Option(
        "--max-num-tokens",
        min=64,
        max=_LARGEST,
        help="Tokens of one context call, all sequences together; bounds the engine's memory.",
    ),
]


def scope(only: Only | None, quantize: Quantize | None) -> str:
    """What --quantize applies to. Raises UsageError for a scope of nothing."""
    if only is not None and quantize is None:
        raise UsageError(
            "--only says what --quantize applies to, and there is no --quantize",
            found=f"--only {only.value}",
            fix="add --quantize nvfp4, fp8 or fp8-block, or leave --only out",
        )
    return (only or Only.experts).value


def targets(text: str | None) -> tuple[str, ...] | None:
    """Split "8.0,8.9" at its commas; None (build for the flavor's defaults) stays None.

    Raises UsageError when the list is empty.
    """
    if text is None:
        return None
    found = tuple(item.strip() for item in text.split(",") if item.strip())
    if not found:
        raise UsageError("no compute capability is given", where="--target", expected="8.9,12.0")
    return found
