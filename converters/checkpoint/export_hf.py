"""TensorRT-LLM checkpoint -> Hugging Face checkpoint in Model Optimizer's unified layout.

The inverse of conversion: every tensor is cut where conversion joined it, codes and scales keep
their bytes, and the quantisation is declared twice, in `hf_quant_config.json` and inline, because
the engines that read such checkpoints look in different places.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors.torch import save

from converters.checkpoint.collector import collector_paused
from converters.checkpoint.config import TOKENIZER_DIR, WEIGHTS_FILE
from converters.checkpoint.copying import copy, copy_memory
from converters.checkpoint.disk import require_space
from converters.checkpoint.header import Shape, TensorEntry, read_header
from converters.checkpoint.hf_layout import HfLayout
from converters.checkpoint.match import Findings
from converters.checkpoint.partial import resumable_directory, work_directory
from converters.checkpoint.recipe import Output, Part, Recipe, Wanted
from converters.checkpoint.source import INDEX_FILE, QUANT_CONFIG
from converters.checkpoint.write import (
    OutputFile,
    cut_of,
    memory_line,
    peak_bytes,
    run_tasks,
    split_tasks,
    worker_count,
    written_line,
)
from converters.quantization import formats, kv_cache
from converters.quantization.evidence import module_of, target_name, target_shape
from converters.quantization.exported import WEIGHT_ONLY_FP8, Storage, declare, limits
from converters.quantization.formats import Component, Format
from converters.quantization.kv_cache import Cached
from converters.registry import layout_of, read_checkpoint_config
from plugins.support.atomic import refuse_existing
from plugins.support.errors import InputError, UsageError
from plugins.support.progress import progress
from plugins.support.units import size

_FILE_BYTES = 5 * 10**9
_WEIGHT_ONLY = {"NVFP4": "W4A16_NVFP4", "FP8": WEIGHT_ONLY_FP8}
_CONSTANTS_FILE = "model-constants.safetensors"


@dataclass(frozen=True)
class ExportReport:
    """A finished export.

    Attributes:
        directory: the Hugging Face checkpoint.
        algorithm: of its quantisation, None when all weights are plain.
        notes: which engines cannot read it.
        tensors, bytes, files: what was written.
        seconds: of the execution.
    """

    directory: Path
    algorithm: str | None
    notes: list[str]
    tensors: int
    bytes: int
    files: int
    seconds: float

    def outcome(self) -> list[str]:
        """What the plan did not say, for people."""
        return [written_line(self.directory, self.seconds, self.bytes)]

    def as_dict(self) -> dict[str, Any]:
        """The result, for programs."""
        return {
            "directory": str(self.directory),
            "quant_algo": self.algorithm,
            "notes": self.notes,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "files": self.files,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class ExportPlan:
    """A validated export. Nothing has been written.

    Attributes:
        ckpt_dir: the converted checkpoint.
        stamp: bytes and time of the last change of its weights when they were looked at.
        layout: what the family's checkpoint looks like.
        groups: how the tensors are cut out, per file; neighbours of one type are one recipe.
        algorithm, separate, inline: the declarations, see `declare`.
        notes: which engines cannot read them.
        workers: tensors at a time.
    """

    ckpt_dir: Path
    stamp: tuple[int, int]
    layout: HfLayout
    groups: list[list[Recipe]]
    algorithm: str | None
    separate: dict[str, Any] | None
    inline: dict[str, Any] | None
    notes: list[str]
    workers: int

    @property
    def bytes_written(self) -> int:
        """Bytes of all tensors."""
        return sum(output.nbytes for group in self.groups for output in _outputs(group))

    @property
    def files(self) -> list[str]:
        """Names of the weight files."""
        count = len(self.groups)
        return [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]

    @property
    def file_count(self) -> int:
        """Weight files with the one of the layout's constants."""
        return len(self.groups) + bool(self.layout.constants)

    @property
    def peak_bytes(self) -> int:
        """Most memory beyond the program itself: buffers of the workers, and the plan."""
        recipes = [recipe for group in self.groups for recipe in group]
        tensors = sum(len(recipe.sources) for recipe in recipes)
        return peak_bytes(self.workers, tensors, max(map(copy_memory, recipes), default=0))

    def lines(self) -> list[str]:
        """What will happen, for people."""
        count = sum(len(_outputs(group)) for group in self.groups) + len(self.layout.constants)
        return [
            f"{count} tensors ({size(self.bytes_written)}) in {self.file_count} files, "
            f"quantisation: {self.algorithm or 'none'}",
            memory_line(self.peak_bytes, self.workers),
            *(f"note: {note}" for note in self.notes),
        ]


@collector_paused()
def plan_export(ckpt_dir: Path, out_dir: Path, *, workers: int | None = None) -> ExportPlan:
    """Check everything and say what would be done.

    Raises UsageError for wrong arguments, InputError for a checkpoint that is not whole or a disk
    that is too small.
    """
    count = worker_count(workers)
    if ckpt_dir.resolve() == out_dir.resolve():
        raise UsageError("input and output are the same directory", where=str(out_dir))
    refuse_existing(out_dir, "checkpoint directory")
    config = read_checkpoint_config(ckpt_dir)
    stamp = _stamp(ckpt_dir)
    entries = read_header(ckpt_dir / WEIGHTS_FILE)
    layout = layout_of(config)(config, entries)
    tables = {layout.disk_name(w.scale_owner) for w in layout.wanted if w.scale_owner}
    modules = _declared(layout, entries)
    declared = declare(modules, tables, config.quantization)
    modelopt = declared[1] is not None
    recipes = _recipes(layout, entries, ckpt_dir, modelopt=modelopt)
    notes = limits(modules, config.quantization, modelopt=modelopt)
    plan = ExportPlan(ckpt_dir, stamp, layout, list(_groups(recipes)), *declared, notes, count)
    tokenizer = ckpt_dir / TOKENIZER_DIR
    files = sum(p.stat().st_size for p in tokenizer.iterdir()) if tokenizer.is_dir() else 0
    require_space(out_dir, work_directory(out_dir), plan.bytes_written + files)
    return plan


def export_hf(ckpt_dir: Path, out_dir: Path, *, workers: int | None = None) -> ExportReport:
    """Write the Hugging Face form of a converted checkpoint to the new directory `out_dir`.

    The vision tower is not part of a converted checkpoint, so a text-only model comes out. Killed
    work is continued as in a conversion. Errors as in `plan_export`.
    """
    return execute(plan_export(ckpt_dir, out_dir, workers=workers), out_dir)


def execute(plan: ExportPlan, out_dir: Path) -> ExportReport:
    """Write the checkpoint of a plan to `out_dir`."""
    start = time.monotonic()
    total = plan.bytes_written
    sources = [(recipe.outputs, recipe.sources) for group in plan.groups for recipe in group]
    groups = [split_tasks(group) for group in plan.groups]
    cuts = [cut_of(tasks) for tasks in groups]
    facts = (plan.stamp, sources, plan.layout.config, plan.inline, cuts)
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
    with (
        resumable_directory(out_dir, fingerprint, "checkpoint directory") as partial,
        progress("export", total, "bytes") as bar,
    ):
        first = 0
        for name, group, tasks in zip(plan.files, plan.groups, groups, strict=True):
            with OutputFile(partial.work / name, _outputs(group)) as file:
                run_tasks(
                    tasks,
                    partial,
                    file,
                    operations={"copy": copy},
                    workers=plan.workers,
                    bar=bar,
                    first=first,
                )
            first += len(tasks)
        if _stamp(plan.ckpt_dir) != plan.stamp:
            raise InputError(
                "the checkpoint changed while it was exported",
                where=str(plan.ckpt_dir / WEIGHTS_FILE),
                fix="export again when nothing writes to it",
            )
        index = {
            output.name: name
            for name, group in zip(plan.files, plan.groups, strict=True)
            for output in _outputs(group)
        }
        _write_rest(partial.work, plan.layout, index, total, plan.inline)
        if plan.separate is not None:
            _write_json(partial.work / QUANT_CONFIG, plan.separate)
        _copy_tokenizer(plan.ckpt_dir / TOKENIZER_DIR, partial.work)
    count = len(index) + len(plan.layout.constants)
    seconds = time.monotonic() - start
    found = plan.algorithm, plan.notes
    return ExportReport(out_dir, *found, count, total, plan.file_count, seconds)


def _stamp(ckpt_dir: Path) -> tuple[int, int]:
    """Bytes and time of the last change of the weights. Raises InputError when there are none."""
    path = ckpt_dir / WEIGHTS_FILE
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(
            "the checkpoint has no weights", where=str(path), found=error.strerror or str(error)
        ) from error
    return status.st_size, status.st_mtime_ns


def _format_of(wanted: Wanted, entries: Mapping[str, TensorEntry]) -> Format | None:
    """The storage of a converted tensor, by the tensors beside it."""
    weight = entries[wanted.target].dtype.name
    scale = entries.get(target_name(wanted.target, formats.NVFP4.scales[0]))
    if scale is None:
        return None
    if weight == "uint8":
        return formats.NVFP4
    blocks = target_shape(wanted, formats.FP8_BLOCK.scales[0])
    one = (1,) if wanted.scale_owner else target_shape(wanted, formats.FP8.scales[0])
    # A single block and a single scale look alike; the number of dimensions tells them apart.
    return formats.FP8_BLOCK if scale.shape == blocks and len(blocks) > len(one) else formats.FP8


def _recipes(
    layout: HfLayout, entries: Mapping[str, TensorEntry], ckpt_dir: Path, *, modelopt: bool
) -> list[Recipe]:
    findings = Findings([], [], {})
    recipes: list[Recipe] = []
    used: set[str] = set()
    for wanted in layout.wanted:
        if wanted.target not in entries:
            findings.missing.append(wanted.target)
            continue
        format_ = _format_of(wanted, entries)
        if format_ is formats.FP8_BLOCK and modelopt and not wanted.matrices:
            # Model Optimizer's name for linear layers; experts have the released one everywhere.
            format_ = formats.FP8_BLOCK_MODELOPT
        components = [formats.PLAIN] if format_ is None else list(format_.components)
        if format_ is not None and format_.activation is not None:
            name = target_name(wanted.target, format_.activation)
            components += [format_.activation] if name in entries else []
        for component in components:
            name = target_name(wanted.target, component) if format_ else wanted.target
            entry = entries.get(name)
            if entry is None:
                findings.missing.append(name)
                continue
            used.add(name)
            shape = _shape(wanted, component)
            if _is_unfit(entry, component.dtypes, shape, findings):
                continue
            recipes += _cut(wanted, component, entry, layout.disk_name)
    for layer in layout.caches:
        entry = entries.get(layer.name)
        if entry is not None:
            used.add(layer.name)
            if _is_unfit(entry, ("float32",), (2,), findings):
                continue
            recipes += _cache_scales(layer, entry, layout.disk_name)
    findings.unexpected = sorted(entries.keys() - used)
    findings.raise_if_any(str(ckpt_dir))
    return recipes


def _shape(wanted: Wanted, component: Component) -> Shape:
    """Shape of a component in the converted checkpoint."""
    if component.kind == "scalar" and wanted.scale_owner is not None:
        return (1,)
    return wanted.shape if component is formats.PLAIN else target_shape(wanted, component)


def _is_unfit(
    entry: TensorEntry, dtypes: Collection[str], shape: Shape, findings: Findings
) -> bool:
    unfit = entry.dtype.name not in dtypes or entry.shape != shape
    if unfit:
        expected = f"{' or '.join(dtypes)} {list(shape)}"
        findings.wrong[entry.name] = (expected, f"{entry.dtype.name} {list(entry.shape)}")
    return unfit


def _cut(
    wanted: Wanted, component: Component, entry: TensorEntry, disk_name: Callable[[str], str]
) -> Iterator[Recipe]:
    """One recipe per part: a slice of the joined tensor under the part's own name."""
    if component.kind == "scalar" and wanted.scale_owner is not None:
        name = disk_name(f"{wanted.scale_owner}.{component.suffix}")
        yield Recipe((Output(name, entry.dtype, entry.shape),), (entry,))
        return
    position = entry.offset
    for part in wanted.parts:
        # Padding stays: the layout's configuration says how wide the matrices are.
        shape = part.room or part.shape
        if component is not formats.PLAIN:
            shape = (*shape[:-2], *component.disk_shape(*shape[-2:]))
        name = disk_name(_name(part, component))
        piece = entry._replace(shape=shape, offset=position)
        position += entry.dtype.nbytes(math.prod(shape))
        yield Recipe((Output(name, entry.dtype, shape),), (piece,))
    if position != entry.offset + entry.nbytes:
        raise InputError(
            "a tensor of the checkpoint has another size than its parts together",
            where=f"{entry.file}: {entry.name}",
            expected=f"{position - entry.offset} bytes",
            found=f"{entry.nbytes} bytes",
        )


def _cache_scales(
    layer: Cached, entry: TensorEntry, disk_name: Callable[[str], str]
) -> Iterator[Recipe]:
    """One recipe for the scale of the keys, one for that of the values."""
    for number, suffix in enumerate(kv_cache.SPELLINGS[0]):
        offset = entry.offset + entry.dtype.nbytes(number)
        piece = entry._replace(shape=(), offset=offset)
        yield Recipe((Output(disk_name(f"{layer.source}.{suffix}"), entry.dtype, ()),), (piece,))


def _name(part: Part, component: Component) -> str:
    if component.suffix == "weight":
        return part.name
    return f"{module_of(part)}.{component.suffix}"


def _declared(layout: HfLayout, entries: Mapping[str, TensorEntry]) -> dict[str, Storage | None]:
    """Module name on disk -> (algorithm, group size), None for a plain matrix.

    Readers take every linear layer for quantised that is not named as plain, hence all matrices.
    """
    modules: dict[str, Storage | None] = {}
    for wanted in layout.wanted:
        if len(wanted.shape) < 2 or wanted.target not in entries:
            continue
        format_ = _format_of(wanted, entries)
        storage = None
        if format_ is not None:
            name = format_.algorithm
            if format_.activation is not None and wanted.scale_owner is None:
                calibrated = target_name(wanted.target, format_.activation) in entries
                name = name if calibrated else _WEIGHT_ONLY[name]
            storage = (name, format_.group_size)
        name = layout.disk_name(_declared_module(wanted))
        modules[name] = _common(modules[name], storage, name) if name in modules else storage
    return modules


def _common(one: Storage | None, other: Storage | None, name: str) -> Storage | None:
    """What can be said of matrices that are declared together."""
    if one == other:
        return one
    for weaker, stronger in ((one, other), (other, one)):
        if weaker and stronger and _WEIGHT_ONLY.get(stronger[0]) == weaker[0]:
            return weaker
    raise InputError(
        "experts of one layer are stored in two formats, which no declaration can say",
        where=name,
        expected="one format for gate, up and down",
        found=" and ".join(storage[0] if storage else "plain" for storage in (one, other)),
    )


def _declared_module(wanted: Wanted) -> str:
    """Experts are declared together, other matrices by their own name."""
    if wanted.scale_owner is not None:
        return wanted.scale_owner
    module = module_of(wanted.parts[0])
    return f"{module.partition('.experts.')[0]}.experts" if wanted.matrices else module


def _groups(recipes: Sequence[Recipe]) -> Iterator[list[Recipe]]:
    """Recipes per file; within a file wide elements first, so that all are aligned."""
    group: list[Recipe] = []
    size = 0
    for recipe in recipes:
        nbytes = recipe.outputs[0].nbytes
        if group and size + nbytes > _FILE_BYTES:
            yield _joined(group)
            group, size = [], 0
        group.append(recipe)
        size += nbytes
    if group:
        yield _joined(group)


def _joined(group: Sequence[Recipe]) -> list[Recipe]:
    """The recipes of a file in order; tensors of one type lie one after another, as if they were
    one: a task costs more than the bytes of a scale.
    """
    ordered = sorted(group, key=lambda recipe: -recipe.outputs[0].dtype.bits)
    runs = groupby(ordered, key=lambda recipe: recipe.outputs[0].dtype)
    return [
        Recipe(tuple(r.outputs[0] for r in members), tuple(r.sources[0] for r in members))
        for members in (list(run) for _, run in runs)
    ]


def _outputs(group: Sequence[Recipe]) -> list[Output]:
    return [output for recipe in group for output in recipe.outputs]


def _write_rest(
    work: Path, layout: HfLayout, index: dict[str, str], total: int, inline: dict[str, Any] | None
) -> None:
    if layout.constants:
        data = save(dict(layout.constants), metadata={"format": "pt"})
        (work / _CONSTANTS_FILE).write_bytes(data)
        index = index | dict.fromkeys(layout.constants, _CONSTANTS_FILE)
    config = layout.config if inline is None else {**layout.config, "quantization_config": inline}
    _write_json(work / "config.json", config)
    metadata = {"total_size": total, **layout.metadata}
    _write_json(work / INDEX_FILE, {"metadata": metadata, "weight_map": index})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _copy_tokenizer(source: Path, target: Path) -> None:
    if source.is_dir():
        for path in sorted(source.iterdir()):
            shutil.copyfile(path, target / path.name)
