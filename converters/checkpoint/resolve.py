"""From what a family wants and a checkpoint holds to recipes, and to everything that is wrong."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from converters.checkpoint.header import TensorEntry
from converters.checkpoint.match import Findings, Problem, unexpected_names
from converters.checkpoint.recipe import Module, Output, Recipe, Wanted
from converters.checkpoint.source import SourceCheckpoint
from converters.family import TensorPlan
from converters.quantization.calibration import Calibration
from converters.quantization.declared import Claims
from converters.quantization.evidence import (
    Names,
    carry_over,
    detect,
    has_scales,
    is_there,
    module_of,
    target_name,
)
from converters.quantization.formats import Format
from converters.quantization.kv_cache import CachePlan, plan_caches
from converters.quantization.targets import Quantize, quantized_recipes
from plugins.support.dtypes import BY_NAME, COMPUTE_DTYPES
from plugins.support.errors import InputError


@dataclass(frozen=True)
class Resolved:
    """What becomes of a checkpoint's tensors.

    Attributes:
        recipes: of all tensors; worth nothing while there are findings.
        modules: how each matrix is and ends up stored.
        caches: their type.
        findings: everything that is missing, unexpected or does not fit.
    """

    recipes: list[Recipe]
    modules: list[Module]
    caches: CachePlan
    findings: Findings


def resolve(
    source: SourceCheckpoint,
    plan: TensorPlan,
    dtype: str,
    *,
    strict: bool,
    quantize: Quantize | None = None,
    kv_cache: str | None = None,
    claims: Sequence[Claims] = (),
    calibration: Calibration | None = None,
) -> Resolved:
    """Find the sources of all wanted tensors.

    Args:
        source: the checkpoint.
        plan: what the family wants of it.
        dtype: the checkpoint's computing type.
        strict: a tensor of another floating type than `dtype` is an error unless the family
            expects it; otherwise all are cast.
        quantize: what to quantise of what is not yet.
        kv_cache: "fp8" or "none", None to keep the caches' type.
        claims: what the checkpoint declares.
        calibration: activation scales for what is quantised, and scales of caches.

    Raises UsageError for caches that the family cannot have.
    """
    findings = Findings([], [], {})
    names = Names(plan.names, source.tensors)
    recipes: list[Recipe] = []
    modules: list[Module] = []
    fused: dict[str, list[int]] = defaultdict(list)
    for wanted in plan.wanted:
        try:
            stored, odd = _common_format(wanted, names, findings)
        except InputError as error:
            for part in wanted.parts:
                names.use_module(module_of(part))
                findings.refused.append(Problem(module_of(part), error))
            continue
        format_ = stored
        if stored is not None:
            made = list(carry_over(wanted, stored, names, findings, odd))
        else:
            entries = _plain_sources(wanted, names, findings, dtype, odd, strict=strict)
            if len(entries) < len(wanted.parts):
                continue
            if quantize is not None and quantize.covers(wanted):
                made = quantized_recipes(wanted, entries, quantize, findings)
                format_ = quantize.format
                if wanted.fused is not None:
                    fused[wanted.fused] += range(len(recipes), len(recipes) + len(made))
                if calibration is not None:
                    made = made + calibration.activation(wanted, format_, findings)
            else:
                made = [_copy_recipe(wanted, entries, dtype)]
        recipes += made
        if len(wanted.shape) > 1:
            modules.append(_module(wanted, format_, stored, made))
    sources = [names] if calibration is None else [names, calibration.names]
    try:
        caches = plan_caches(plan.caches, kv_cache, claims, sources, findings)
    except InputError as error:
        findings.refused.append(Problem("", error))
        caches = CachePlan(None)
    recipes += caches.recipes
    findings.unexpected = unexpected_names(source.tensors, names.used, plan.ignored)
    for numbers in fused.values():
        members = [recipes[number].sources for number in numbers]
        for number, own in zip(numbers, members, strict=True):
            peers = tuple(entry for other in members if other is not own for entry in other)
            recipes[number] = replace(recipes[number], peers=peers)
    return Resolved(recipes, modules, caches, findings)


def _module(
    wanted: Wanted, format_: Format | None, stored: Format | None, recipes: Sequence[Recipe]
) -> Module:
    outputs = {output.name for recipe in recipes for output in recipe.outputs}
    activation = format_.activation if format_ else None
    return Module(
        wanted.target.removesuffix(".weight"),
        tuple(module_of(part) for part in wanted.parts),
        format_.algorithm if format_ else None,
        format_.group_size if format_ else None,
        stored.algorithm if stored else None,
        stored.group_size if stored else None,
        activation is not None and target_name(wanted.target, activation) in outputs,
        scope=wanted.quantize,
        is_stacked=any(len(part.shape) > 2 for part in wanted.parts) and wanted.matrices > 0,
        is_table=wanted.scale_owner is not None,
    )


def _common_format(
    wanted: Wanted, names: Names, findings: Findings
) -> tuple[Format | None, frozenset[str]]:
    """The format of most parts, and the names of parts in another one, which are findings.

    Codes without any scale take the format of the rest, so that the missing scale gets its name.
    """
    odd: list[str] = []
    if wanted.quantize is None and wanted.scale_owner is None:
        return None, frozenset()
    found = {part.name: detect(names, part) for part in wanted.parts if is_there(names, part)}
    counts = Counter(found.values())
    if not counts:
        return None, frozenset()
    ((common, _),) = counts.most_common(1)
    for part in wanted.parts:
        format_ = found.get(part.name, common)
        if format_ == common:
            continue
        alike = format_ is not None and common is not None and format_.codes == common.codes
        if not alike or has_scales(names, part):
            odd.append(part.name)
            names.use_module(module_of(part))
            findings.wrong[part.name] = (
                f"{_describe(common)} like the rest of {wanted.target}",
                _describe(format_),
            )
    return common, frozenset(odd)


def _describe(format_: Format | None) -> str:
    return format_.name if format_ else "a plain weight"


def _plain_sources(
    wanted: Wanted,
    names: Names,
    findings: Findings,
    dtype: str,
    odd: frozenset[str],
    *,
    strict: bool,
) -> list[TensorEntry]:
    entries = []
    for part in wanted.parts:
        if part.name in odd:
            continue
        entry = names.find(part.name)
        if entry is None:
            findings.missing.append(part.name)
            continue
        entries.append(names.use(entry))
        kind, wanted_kind = entry.dtype.name, dtype if strict else "a float type"
        if kind not in COMPUTE_DTYPES and has_scales(names, part):
            # Quantised, which this tensor must not be.
            names.use_module(module_of(part))
            findings.wrong[entry.name] = (wanted_kind, f"{kind} with scales")
        elif entry.shape != part.shape:
            findings.wrong[entry.name] = (f"shape {list(part.shape)}", f"{list(entry.shape)}")
        elif not _fits(entry, wanted, dtype, strict=strict):
            findings.wrong[entry.name] = (wanted_kind, kind)
    return entries


def _fits(entry: TensorEntry, wanted: Wanted, dtype: str, *, strict: bool) -> bool:
    name = entry.dtype.name
    if name == dtype:
        return True
    if name not in COMPUTE_DTYPES:
        return False
    widened = (wanted.keep_float32 or wanted.may_widen) and name == "float32"
    return widened or not strict


def _copy_recipe(wanted: Wanted, entries: list[TensorEntry], dtype: str) -> Recipe:
    kept = wanted.keep_float32 and all(entry.dtype.name == "float32" for entry in entries)
    target = BY_NAME["float32" if kept else dtype]
    output = Output(wanted.target, target, wanted.shape)
    return Recipe((output,), tuple(entries), room=wanted.parts[0].room)


def stored_elements(source: SourceCheckpoint) -> dict[str, int]:
    """Elements of the checkpoint's tensors by computing type."""
    elements: Counter[str] = Counter()
    for entry in source.tensors.values():
        if entry.dtype.name in COMPUTE_DTYPES:
            elements[entry.dtype.name] += math.prod(entry.shape)
    return dict(elements)
