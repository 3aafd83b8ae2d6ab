"""Hugging Face checkpoint -> TensorRT-LLM checkpoint: plan, validate, execute, publish.

Everything that headers and configurations can tell is checked before the first byte is converted;
after that a tensor at a time is streamed in bounded memory into a directory that appears whole.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from converters.checkpoint.collector import collector_paused
from converters.checkpoint.config import (
    QUANT_FILE,
    TOKENIZER_DIR,
    WEIGHTS_FILE,
    CheckpointConfig,
    ComputeDType,
    write_config,
)
from converters.checkpoint.disk import require_space
from converters.checkpoint.match import Ignored, grouped
from converters.checkpoint.partial import resumable_directory, work_directory
from converters.checkpoint.recipe import Module, Output, Recipe
from converters.checkpoint.resolve import resolve, stored_elements
from converters.checkpoint.source import SourceCheckpoint
from converters.checkpoint.tokenizer_files import TokenizerFiles
from converters.checkpoint.write import (
    OutputFile,
    Task,
    cut_of,
    memory_line,
    peak_bytes,
    run_tasks,
    split_tasks,
    worker_count,
    written_line,
)
from converters.quantization.calibration import Calibration
from converters.quantization.declared import compare, read_claims
from converters.quantization.operations import OPERATIONS, task_memory
from converters.quantization.summary import summarise
from converters.quantization.targets import Quantize
from converters.registry import family_for, model_type_of
from plugins.support.atomic import refuse_existing
from plugins.support.errors import InputError, UsageError
from plugins.support.progress import progress
from plugins.support.units import size

_COMPUTE: tuple[str, ...] = get_args(ComputeDType)


@dataclass(frozen=True)
class ConversionPlan:
    """A validated conversion. Nothing has been written.

    Attributes:
        source: the opened checkpoint.
        stamps: of its files when it was opened.
        config: of the result.
        quantized_layers: content of `quant_cfg.json`, None when none is needed.
        recipes: how each tensor is made, in the order of the model.
        ignored: tensors that are left out on purpose.
        notes: disagreements in the checkpoint that do no harm.
        tokenizer: files that go along.
        workers: tasks at a time.
        calibration: checkpoint whose activation scales are taken.
    """

    source: SourceCheckpoint
    stamps: tuple[tuple[str, int, int], ...]
    config: CheckpointConfig
    quantized_layers: dict[str, Any] | None
    recipes: tuple[Recipe, ...]
    ignored: tuple[Ignored, ...]
    notes: tuple[str, ...]
    tokenizer: TokenizerFiles
    workers: int
    calibration: SourceCheckpoint | None = None

    @property
    def outputs(self) -> list[Output]:
        """Tensors of the result in file order.

        Wide elements come first, so that every tensor begins at a multiple of its element size.
        """
        outputs = [output for recipe in self.recipes for output in recipe.outputs]
        return sorted(outputs, key=lambda output: -output.dtype.bits)

    @property
    def bytes_read(self) -> int:
        """Bytes of all source tensors that are used."""
        return sum(entry.nbytes for recipe in self.recipes for entry in recipe.sources)

    @property
    def bytes_written(self) -> int:
        """Bytes of all target tensors."""
        return sum(output.nbytes for output in self.outputs)

    @property
    def peak_bytes(self) -> int:
        """Most memory beyond the program itself: buffers of the workers, and the plan."""
        task = max(map(task_memory, self.recipes), default=0)
        return peak_bytes(self.workers, len(self.source.tensors), task)

    def lines(self) -> list[str]:
        """What will happen, for people."""
        used = sum(len(recipe.sources) for recipe in self.recipes)
        kinds = sorted({output.dtype.name for output in self.outputs})
        result = [
            f"{self.config.architecture}: {used} tensors ({size(self.bytes_read)}) -> "
            f"{len(self.outputs)} tensors ({size(self.bytes_written)}), {', '.join(kinds)}",
            memory_line(self.peak_bytes, self.workers),
        ]
        if self.config.quantization.quant_algo:
            result.append(f"quantisation: {self.config.quantization.quant_algo}")
        result += [f"left out: {len(g.names)} tensors ({g.reason})" for g in self.ignored]
        result += [f"note: {note}" for note in self.notes]
        if not self.tokenizer.files:
            result.append(
                "no tokenizer files: the result runs by token ids; "
                "`build-engine repo` will ask for --tokenizer DIR"
            )
        return result

    def as_dict(self) -> dict[str, Any]:
        """What will happen, for programs."""
        return {
            "architecture": self.config.architecture,
            "dtype": self.config.dtype,
            "source_tensors": sum(len(recipe.sources) for recipe in self.recipes),
            "tensors": len(self.outputs),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "peak_bytes": self.peak_bytes,
            "quantization": self.config.quantization.model_dump(),
            "notes": list(self.notes),
            "ignored": {group.reason: len(group.names) for group in self.ignored},
            "tokenizer_files": [path.name for path in self.tokenizer.files],
        }


@dataclass(frozen=True)
class ConversionReport:
    """A finished conversion.

    Attributes:
        plan: what was done.
        directory: the TensorRT-LLM checkpoint.
        seconds: of the execution.
        small_values: tensor -> values that a narrower type made subnormal or zero.
        zeroed_values: tensor -> values that quantisation made zero with their whole block.
    """

    plan: ConversionPlan
    directory: Path
    seconds: float
    small_values: dict[str, int]
    zeroed_values: dict[str, int]

    def lines(self) -> list[str]:
        """The plan and the result, for people."""
        return [*self.plan.lines(), *self.outcome()]

    def outcome(self) -> list[str]:
        """What the plan did not say, for people."""
        result = [written_line(self.directory, self.seconds, self.plan.bytes_read)]
        if self.small_values:
            result.append(
                f"{sum(self.small_values.values())} values in {len(self.small_values)} tensors "
                f"became subnormal or zero in {self.plan.config.dtype}"
            )
        if self.zeroed_values:
            result.append(
                f"{sum(self.zeroed_values.values())} values in {len(self.zeroed_values)} tensors "
                "became zero: their blocks are too small beside the largest value of the matrix"
            )
        return result

    def as_dict(self) -> dict[str, Any]:
        """The result, for programs."""
        return {
            **self.plan.as_dict(),
            "directory": str(self.directory),
            "seconds": self.seconds,
            "small_values": self.small_values,
            "zeroed_values": self.zeroed_values,
        }


@collector_paused()
def plan_conversion(
    hf_dir: Path,
    ckpt_dir: Path,
    dtype: str | None = None,
    *,
    quantize: str | None = None,
    only: str = "experts",
    kv_cache: str | None = None,
    calibration: Path | None = None,
    workers: int | None = None,
) -> ConversionPlan:
    """Check everything and say what would be done.

    Args:
        hf_dir: Hugging Face checkpoint directory.
        ckpt_dir: where the result would go; must not exist, and not be `hf_dir`.
        dtype: "float32", "float16" or "bfloat16"; the checkpoint's own when None.
        quantize: "nvfp4", "fp8" or "fp8-block": what plain weights become.
        only: which of them: "experts" (routed), "mlp" (and shared experts) or "all" (and the
            projections of attention and n-gram blocks).
        kv_cache: "fp8": keys and values are declared as cached in FP8, with the scales that are
            known; "none": they are not; None: as the checkpoint has it.
        calibration: checkpoint directory of Model Optimizer with the activation scales of what is
            quantised, and scales of caches.
        workers: tensors that are converted at a time; None: one per core.

    Raises UsageError for wrong arguments, InputError for anything wrong in the checkpoint.
    """
    count = worker_count(workers)
    if dtype is not None and dtype not in _COMPUTE:
        raise UsageError("unknown dtype", expected=", ".join(_COMPUTE), found=dtype)
    if kv_cache not in (None, "fp8", "none"):
        raise UsageError("unknown type of caches", expected="fp8, none", found=kv_cache)
    if calibration is not None and quantize in (None, "fp8-block") and kv_cache != "fp8":
        raise UsageError(
            "nothing takes the scales of the calibration result",
            expected="--quantize nvfp4, --quantize fp8 or --kv-cache fp8",
            found=f"--quantize {quantize}" if quantize else "neither",
            fix="leave --calibration out, or ask for something that takes its scales",
        )
    if hf_dir.resolve() == ckpt_dir.resolve():
        raise UsageError("input and output are the same directory", where=str(ckpt_dir))
    refuse_existing(ckpt_dir, "checkpoint directory")
    source = SourceCheckpoint.open(hf_dir)
    stamps = source.stamps()
    family = family_for(model_type_of(source), str(source.config_file))
    stored = most_stored_dtype(source)
    check_declared_dtype(source, stored)
    config = family.plan_config(source, dtype or stored)  # type: ignore[arg-type]
    tokenizer = TokenizerFiles.find(hf_dir, config.vocab_size)
    tensors = family.plan_tensors(source, config)
    request = None if quantize is None else Quantize.parse(quantize, only)
    # A method that is not supported is told by its name, not by the tensors that it has or lacks.
    claims = read_claims(source, tensors.canonical)
    calibrated = None
    if calibration is not None:
        calibrated = Calibration.open(calibration, tensors.canonical)
    resolved = resolve(
        source,
        tensors,
        config.dtype,
        strict=dtype is None,
        quantize=request,
        kv_cache=kv_cache,
        claims=claims,
        calibration=calibrated,
    )
    resolved.findings.raise_if_any(str(hf_dir))
    compared = compare(claims, resolved.modules, source.tensors, tensors.canonical)
    compared.raise_if_any()
    notes = compared.notes
    if request is not None:
        notes += _kept_formats(resolved.modules, request, hf_dir)
    notes += resolved.caches.notes
    notes += calibrated.notes() if calibrated else []
    quantization, layers = summarise(resolved.modules, resolved.caches.algorithm)
    config = config.model_copy(update={"quantization": quantization})
    plan = ConversionPlan(
        source,
        stamps,
        config,
        layers,
        tuple(resolved.recipes),
        tuple(tensors.ignored),
        tuple(notes),
        tokenizer,
        count,
        calibrated.source if calibrated else None,
    )
    files = sum(path.stat().st_size for path in tokenizer.files)
    require_space(ckpt_dir, work_directory(ckpt_dir), plan.bytes_written + files)
    return plan


def convert(
    hf_dir: Path,
    ckpt_dir: Path,
    dtype: str | None = None,
    *,
    quantize: str | None = None,
    only: str = "experts",
    kv_cache: str | None = None,
    calibration: Path | None = None,
    workers: int | None = None,
) -> ConversionReport:
    """Plan and execute; see `plan_conversion` for the arguments and errors.

    When the process is killed, the same call continues where it stopped and the result is the same
    to the last byte.
    """
    plan = plan_conversion(
        hf_dir,
        ckpt_dir,
        dtype,
        quantize=quantize,
        only=only,
        kv_cache=kv_cache,
        calibration=calibration,
        workers=workers,
    )
    return execute(plan, ckpt_dir)


def execute(plan: ConversionPlan, ckpt_dir: Path) -> ConversionReport:
    """Write the checkpoint of a plan to `ckpt_dir`."""
    start = time.monotonic()
    with collector_paused():
        tasks = split_tasks(plan.recipes)
        fingerprint = _fingerprint(plan, tasks)
    with resumable_directory(ckpt_dir, fingerprint, "checkpoint directory") as partial:
        with (
            OutputFile(partial.work / WEIGHTS_FILE, plan.outputs) as file,
            progress("convert", plan.bytes_read, "bytes") as bar,
        ):
            counts = run_tasks(
                tasks, partial, file, operations=OPERATIONS, workers=plan.workers, bar=bar
            )
        # Samples miss a change between them, times one that was set back.
        if plan.source.stamps() != plan.stamps or plan.source.identity() != plan.config.source:
            raise InputError(
                "the source checkpoint changed while it was converted",
                where=str(plan.source.directory),
                fix="convert again when nothing writes to it",
            )
        plan.tokenizer.copy_to(partial.work / TOKENIZER_DIR)
        write_config(partial.work, plan.config)
        if plan.quantized_layers is not None:
            text = json.dumps(plan.quantized_layers, indent=2)
            (partial.work / QUANT_FILE).write_text(text + "\n")
    seconds = time.monotonic() - start
    return ConversionReport(plan, ckpt_dir, seconds, dict(counts.small), dict(counts.zeroed))


def most_stored_dtype(source: SourceCheckpoint) -> ComputeDType:
    """The type that most of the weights' elements have. Raises InputError when none can be used."""
    elements = stored_elements(source)
    if not elements:
        raise InputError(
            "no tensor of the checkpoint has a floating-point type that can be computed in",
            where=str(source.directory),
            expected=", ".join(_COMPUTE),
        )
    return max(get_args(ComputeDType), key=lambda name: elements.get(name, 0))


def check_declared_dtype(source: SourceCheckpoint, stored: str) -> None:
    """Raise InputError where the configuration declares another type than weights have."""
    text = source.config.get("text_config")
    for block, place in ((source.config, "config.json"), (text, "config.json: text_config")):
        declared = block.get("dtype", block.get("torch_dtype")) if isinstance(block, dict) else None
        if declared is not None and declared != stored:
            raise InputError(
                "the configuration declares another type than the weights have",
                where=f"{source.directory}: {place}",
                expected=f"{stored}, as most weights are",
                found=f"dtype {declared}",
                fix="correct dtype in config.json; --dtype then converts to another type",
            )


def _kept_formats(modules: Sequence[Module], request: Quantize, hf_dir: Path) -> list[str]:
    """What a request to quantise leaves as it is, because it is quantised already.

    Raises InputError when that is everything.
    """
    scoped = [module for module in modules if request.covers_scope(module.scope)]
    stored = [module for module in scoped if module.stored]
    formats = sorted({module.stored for module in stored if module.stored})
    if not any(module.algorithm and not module.stored for module in modules):
        raise InputError(
            f"--quantize {request.algorithm} --only {request.only} has nothing to quantise",
            where=str(hf_dir),
            expected="plain weights",
            found=f"{', '.join(formats)} already" if formats else "no such weights",
            fix="leave --quantize out; quantised weights keep their codes and scales",
        )
    return [
        f"{name} already and kept: {line}"
        for name in formats
        for line in grouped(module.source[0] for module in stored if module.stored == name)
    ]


def _fingerprint(plan: ConversionPlan, tasks: Sequence[Task]) -> str:
    """Changes with the source, the target layout, the type and the tasks that the journal counts,
    not with the number of workers.
    """
    digest = hashlib.sha256(plan.config.model_dump_json().encode())
    for recipe in plan.recipes:
        outputs = [(output.name, output.dtype.name, output.shape) for output in recipe.outputs]
        digest.update(repr((outputs, recipe.operation, recipe.matrices)).encode())
        for entry in (*recipe.sources, *recipe.peers):
            digest.update(f"{entry.name}\0{entry.file.name}\0{entry.offset}\0".encode())
    if plan.calibration is not None:
        digest.update(plan.calibration.identity().digest.encode())
    digest.update(repr(plan.stamps).encode())
    digest.update(cut_of(tasks).encode())
    return digest.hexdigest()
