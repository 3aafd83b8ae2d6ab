"""What a conversion would make of a checkpoint, told with everything that is wrong with it.

The steps are those of `plan_conversion`; where that raises, the error is kept and the next step is
taken as far as it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from converters.checkpoint.config import Quantization
from converters.checkpoint.convert import check_declared_dtype, most_stored_dtype
from converters.checkpoint.match import Problem, problem_lines
from converters.checkpoint.resolve import resolve
from converters.checkpoint.source import SourceCheckpoint
from converters.checkpoint.tokenizer_files import TokenizerFiles
from converters.quantization.declared import Claims, Comparison, compare, read_claims
from converters.quantization.summary import summarise
from converters.registry import family_for, model_type_of
from plugins.support.dtypes import COMPUTE_DTYPES
from plugins.support.errors import InputError

REFUSED = "not supported"


@dataclass(frozen=True)
class Stored:
    """How one matrix lies on disk.

    Attributes:
        module: its name on disk.
        algorithm: TensorRT-LLM's name, "plain" or "not supported".
        group_size: columns per scale.
    """

    module: str
    algorithm: str
    group_size: int | None = None


@dataclass
class Examination:
    """What was decided and found.

    Attributes:
        stored: every matrix that belongs to the model.
        quantization: of the checkpoint that a conversion writes, without names of modules.
        left_out: reason -> tensors that are not converted.
        errors: what a conversion refuses.
        notes: disagreements that do no harm.
    """

    stored: list[Stored] = field(default_factory=list)
    quantization: Quantization = field(default_factory=Quantization)
    left_out: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def examine(source: SourceCheckpoint) -> Examination:
    """Decide how every matrix is stored, as a conversion without options does.

    Reads headers, configurations, tokenizer files and small samples. Raises InputError for a model
    type without a converter.
    """
    family = family_for(model_type_of(source), str(source.config_file))
    result = Examination()
    try:
        dtype = most_stored_dtype(source)
        config = family.plan_config(source, dtype)
        plan = family.plan_tensors(source, config)
    except InputError as error:
        result.errors.append(error.one_line())
        return result
    problems: list[Problem] = []
    checks: list[Callable[[], object]] = [
        lambda: check_declared_dtype(source, dtype),
        lambda: TokenizerFiles.find(source.directory, config.vocab_size),
    ]
    for check in checks:
        try:
            check()
        except InputError as error:
            problems.append(Problem("", error))
    claims: list[Claims] | None = None
    try:
        claims = read_claims(source, plan.canonical)
    except InputError as error:
        problems.append(Problem("", error))
    resolved = resolve(source, plan, dtype, strict=True, claims=claims or ())
    compared = Comparison([], [])
    if claims is not None:
        compared = compare(claims, resolved.modules, source.tensors, plan.canonical)
    for module in resolved.modules:
        kind = module.stored, module.stored_group_size
        result.stored += [_stored(source, plan.names, name, *kind) for name in module.source]
    result.stored += [
        Stored(_weight(plan.names, problem.module)[0], REFUSED)
        for problem in resolved.findings.refused
        if problem.module
    ]
    summary, _ = summarise(resolved.modules, resolved.caches.algorithm)
    result.quantization = summary.model_copy(update={"exclude_modules": []})
    result.left_out = {group.reason: len(group.names) for group in plan.ignored}
    problems += resolved.findings.refused
    result.errors += problem_lines(problems)
    result.errors += resolved.findings.lines()
    result.errors += problem_lines(compared.contradictions)
    result.notes += [*compared.notes, *resolved.caches.notes]
    return result


def _stored(
    source: SourceCheckpoint,
    names: Mapping[str, str],
    module: str,
    algorithm: str | None,
    group_size: int | None,
) -> Stored:
    disk, weight = _weight(names, module)
    if algorithm is None:
        # What must stay precise and does not is a finding, and no plain matrix.
        is_plain = source.tensors[weight].dtype.name in COMPUTE_DTYPES
        algorithm = "plain" if is_plain else REFUSED
    return Stored(disk, algorithm, group_size)


def _weight(names: Mapping[str, str], module: str) -> tuple[str, str]:
    """A module's and its weight's name as spelled on disk; stacked experts have no suffix.

    A weight that is missing has its canonical name.
    """
    for suffix in (".weight", "", ".weight_packed"):
        found = names.get(f"{module}{suffix}")
        if found is not None:
            return found.removesuffix(suffix), found
    return module, module
