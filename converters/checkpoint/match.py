"""Compares what a family wants with what a checkpoint holds, before any byte is converted."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from converters.checkpoint.header import TensorEntry
from converters.checkpoint.source import SourceCheckpoint
from plugins.support.errors import InputError

_SAMPLES = 3


@dataclass(frozen=True)
class Ignored:
    """Tensors that are left out, and why; printed with the plan."""

    reason: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """An error about one module, so that equal ones of many modules can be told in one line.

    Attributes:
        module: canonical name; empty when it is about the whole checkpoint.
        error: what a conversion raises.
        place: file and key of a declaration that takes part in it.
    """

    module: str
    error: InputError
    place: str | None = None


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """One line per error and pattern of module names."""
    groups: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        error = problem.error
        if problem.module:
            # Without the place of one tensor among many.
            error = InputError(
                error.what, where=problem.place, expected=error.expected, found=error.found
            )
        groups[error.one_line()].append(problem.module)
    lines = []
    for text, names in groups.items():
        lines += [f"{text}: {line}" if line else text for line in grouped(names)]
    return lines


@dataclass
class Findings:
    """Everything that is wrong with a checkpoint's tensors.

    Attributes:
        missing: canonical names that the family needs.
        unexpected: names on disk that nobody asked for.
        wrong: name -> (expected, found) for shapes and types.
        refused: what is stored in a way that nothing can be said of its tensors.
    """

    missing: list[str]
    unexpected: list[str]
    wrong: dict[str, tuple[str, str]]
    refused: list[Problem] = field(default_factory=list)

    def lines(self) -> list[str]:
        """One line per pattern of names, without what is refused."""
        lines = [f"missing: {line}" for line in grouped(self.missing)]
        lines += [f"unexpected: {line}" for line in grouped(self.unexpected)]
        by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, reason in self.wrong.items():
            by_reason[reason].append(name)
        for (expected, found), names in by_reason.items():
            lines += [f"expected {expected}, found {found}: {line}" for line in grouped(names)]
        return lines

    def raise_if_any(self, where: str) -> None:
        """Raise the first refusal, else one InputError with all lines."""
        for problem in self.refused:
            raise problem.error
        lines = self.lines()
        if lines:
            count = len(self.missing) + len(self.unexpected) + len(self.wrong)
            raise InputError(
                f"{count} tensors of the checkpoint are not as the model needs them",
                where=where,
                found="\n" + "\n".join(f"    {line}" for line in lines),
                fix=_probable_reason(self),
            )


def grouped(names: Iterable[str]) -> list[str]:
    """One line per pattern (numbers become `*`) with a count and the first names."""
    patterns: dict[str, list[str]] = defaultdict(list)
    for name in names:
        patterns[re.sub(r"\d+", "*", name)].append(name)
    lines = []
    for pattern, group in sorted(patterns.items()):
        if len(group) == 1:
            lines.append(group[0])
            continue
        rest = ", …" if len(group) > _SAMPLES else ""
        samples = ", ".join(sorted(group, key=natural_order)[:_SAMPLES])
        lines.append(f"{len(group)} × {pattern} ({samples}{rest})")
    return lines


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key with numbers by value: shard_2 before shard_10."""
    return [
        (int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)
    ]


def canonical_names(
    source: SourceCheckpoint,
    canonical: Callable[[str], str],
    ignore: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], list[Ignored]]:
    """The tensors of a checkpoint under the names that a family knows them by.

    Args:
        source: the checkpoint.
        canonical: removes the prefixes of classes and exporters from a name.
        ignore: pattern of canonical names to leave out -> the reason.

    Returns:
        Canonical name -> name on disk, and the tensors left out.

    Raises:
        InputError: two names mean the same tensor.
    """
    names: dict[str, str] = {}
    ignored: dict[str, list[str]] = defaultdict(list)
    rules = [(re.compile(rule), why) for rule, why in (ignore or {}).items()]
    # One look at each name: hardly any is left out.
    any_rule = re.compile("|".join(f"(?:{rule})" for rule in ignore or {}) or r"(?!)")
    for name in source.tensors:
        short = canonical(name)
        if any_rule.fullmatch(short):
            reason = next(why for rule, why in rules if rule.fullmatch(short))
            ignored[reason].append(name)
            continue
        if short in names:
            raise InputError(
                "two tensors of the checkpoint mean the same one",
                where=str(source.directory),
                found=f"{names[short]} and {name}",
            )
        names[short] = name
    return names, [Ignored(why, tuple(group)) for why, group in ignored.items()]


def unexpected_names(
    tensors: Mapping[str, TensorEntry], used: Iterable[str], ignored: Iterable[Ignored]
) -> list[str]:
    """Names that are neither used nor ignored for a stated reason."""
    known = set(used)
    for group in ignored:
        known.update(group.names)
    return sorted(tensors.keys() - known)


def _probable_reason(findings: Findings) -> str:
    if findings.missing and findings.unexpected:
        return "the names do not fit: is this another model type or a newer layout?"
    if findings.missing:
        return "the download may be incomplete; nothing was converted"
    return "check that config.json belongs to these weights; nothing was converted"
