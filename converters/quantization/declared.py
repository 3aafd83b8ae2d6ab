"""What a checkpoint claims about its quantisation, compared with what its tensors are.

The tensors decide. A claim about a named module, about the table or about the whole model that the
tensors contradict is an error that states both. Exclusion patterns only express what an exporter
left alone, often in another spelling, so a pattern that disagrees or matches nothing is reported;
so is what a claim about the whole model does not cover.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from converters.checkpoint.config import QUANT_FILE
from converters.checkpoint.match import Problem, grouped
from converters.checkpoint.recipe import Module
from converters.checkpoint.source import QUANT_CONFIG, SourceCheckpoint
from plugins.support.errors import InputError

MIXED = "MIXED_PRECISION"
_ALIASES = {
    "FP8_PB_WO": "FP8_BLOCK_SCALES",
    "FP8_PB": "FP8_BLOCK_SCALES",
    "W4A16_NVFP4": "NVFP4",
}
_TABLE_TYPES = {"float8_e4m3fn": "FP8", "nvfp4": "NVFP4"}
# compressed-tensors' name of the class of all linear layers.
_ALL = "Linear"
_KNOWN = ("NVFP4", "FP8", "FP8_BLOCK_SCALES", MIXED)
_CORRECT = "correct the configuration; the tensors decide, it only has to agree with them"
_USE_ANOTHER = "use a checkpoint in BF16, FP8 or NVFP4"


@dataclass(frozen=True)
class Declared:
    """A format by name; `group_size` (columns per scale) is None where nothing is said of it."""

    algorithm: str
    group_size: int | None = None

    def is_of(self, module: Module) -> bool:
        """Whether a module is stored as declared."""
        sizes = {self.group_size, module.stored_group_size} - {None}
        return self.algorithm == module.stored and len(sizes) <= 1

    def __str__(self) -> str:
        return self.algorithm + (f" in groups of {self.group_size}" if self.group_size else "")


@dataclass(frozen=True)
class Claims:
    """One declaration.

    Attributes:
        where: file and key.
        whole: of the whole model, None when only modules are named.
        modules: canonical module name -> format; covers everything below it.
        excluded: patterns of modules that are said to be plain.
        groups: patterns of modules, or "Linear" for all others, and their format.
        suffixes: an excluded name also means every module whose name ends in it.
        included: parts of names of modules that are said to be quantised although they are not
            linear layers.
        all_linears: whether `whole` speaks of every linear layer that is not excluded.
        activations: whether scales of activations belong to the weights.
        table: algorithm of the n-gram table.
        kv_cache: algorithm of the key and value cache.
    """

    where: str
    whole: Declared | None
    modules: Mapping[str, Declared] = field(default_factory=dict)
    excluded: Sequence[str] = ()
    groups: Sequence[tuple[Sequence[str], Declared]] = ()
    suffixes: bool = False
    included: Sequence[str] = ()
    all_linears: bool = True
    activations: bool = False
    table: str | None = None
    kv_cache: str | None = None


def read_claims(source: SourceCheckpoint, canonical: Callable[[str], str]) -> list[Claims]:
    """All declarations: inline, in the two files that may lie beside, and the table's own key.

    Raises InputError for methods and algorithms that are not supported.
    """
    text = source.config.get("text_config")
    blocks: list[tuple[str, Mapping[str, Any]]] = [("config.json", source.config)]
    if isinstance(text, Mapping):
        blocks.append(("config.json: text_config", text))
    claims = []
    for where, block in blocks:
        inline = block.get("quantization_config")
        if inline is not None:
            place = f"{source.directory / where}: quantization_config"
            claims.append(_inline(_mapping(inline, place), place, canonical))
        table = block.get("ple_embedding_dtype")
        if table is not None:
            place = f"{source.directory / where}: ple_embedding_dtype"
            claims.append(Claims(place, None, table=_table(table, place)))
    separate = source.optional_json(QUANT_CONFIG)
    if separate is not None:
        place = f"{source.directory / QUANT_CONFIG}: quantization"
        # Flat in the newer form.
        inner = separate if "quant_algo" in separate else separate.get("quantization")
        claims.append(_modelopt(_mapping(inner, place), place, canonical))
    overlay = source.optional_json(QUANT_FILE)
    if overlay is not None:
        # TensorRT-LLM's readers lay it over the others.
        claims.append(_modelopt(overlay, str(source.directory / QUANT_FILE), canonical))
    return claims


@dataclass(frozen=True)
class Comparison:
    """What declarations and tensors say of each other.

    Attributes:
        contradictions: that a conversion refuses.
        notes: harmless disagreements.
    """

    contradictions: list[Problem]
    notes: list[str]

    def raise_if_any(self) -> None:
        """Raise the first contradiction."""
        for problem in self.contradictions:
            raise problem.error


def compare(
    claims: Sequence[Claims],
    modules: Sequence[Module],
    all_names: Iterable[str],
    canonical: Callable[[str], str],
) -> Comparison:
    """Hold every declaration against the tensors.

    Args:
        claims: of `read_claims`.
        modules: matrices that were found.
        all_names: names of all tensors on disk, which patterns may mean.
        canonical: removes the prefixes of classes and exporters.
    """
    asked = any(claim.excluded or claim.groups for claim in claims)
    spellings = _Spellings(all_names, canonical) if asked else None
    problems: list[Problem] = []
    notes: list[str] = []
    entries = _Entries(modules)
    for claim in claims:
        problems += _check_named(claim, modules, entries, notes)
        problems += _check_model(claim, modules)
        problems += [
            _contradiction(claim, module, Declared(claim.table))
            for module in modules
            if module.is_table and claim.table is not None and module.stored != claim.table
        ]
        notes += [
            f"exclusion {pattern!r} matches nothing ({claim.where})"
            for pattern in claim.excluded
            if spellings is not None
            and not any(map(spellings.match, _alternatives(pattern, claim)))
        ]
        notes += [
            f"target {pattern!r} matches nothing ({claim.where})"
            for targets, _ in claim.groups
            for pattern in targets
            if spellings is not None and pattern != _ALL and not spellings.match(pattern)
        ]
        excluded = _excluded(claim, modules, canonical)
        problems += _check_groups(claim, modules, excluded)
        notes += _disagreements(claim, modules, entries, excluded)
    notes += _unequal_files(claims, canonical)
    return Comparison(problems, notes + _undeclared(claims, modules))


def _undeclared(claims: Sequence[Claims], modules: Sequence[Module]) -> list[str]:
    """What is quantised although no declaration speaks of it; the table may have one of its own."""
    if any(claim.whole or claim.modules for claim in claims):
        return []
    table = any(claim.table for claim in claims)
    stored = {m.stored for m in modules if m.stored and not (m.is_table and table)}
    return [f"quantised as {', '.join(sorted(stored))}, declared nowhere"] if stored else []


def _check_named(
    claim: Claims, modules: Sequence[Module], entries: _Entries, notes: list[str]
) -> Iterator[Problem]:
    told = set()
    for name, declared in claim.modules.items():
        covered = entries.covered(name)
        if not covered:
            notes.append(f"quantised layer {name!r} matches nothing ({claim.where})")
        for module in covered:
            if not declared.is_of(module) and (module.target, declared) not in told:
                told.add((module.target, declared))
                yield _contradiction(claim, module, declared)
    for part in claim.included:
        covered = [m for m in modules if any(part in source for source in m.source)]
        if not covered:
            notes.append(f"quantised layer {part!r} matches nothing ({claim.where})")
        for module in covered:
            if module.stored is None:
                yield _contradiction(claim, module, Declared(f"FP8 ({part})"))


def _check_model(claim: Claims, modules: Sequence[Module]) -> Iterator[Problem]:
    if claim.whole is None:
        return
    stored = [module for module in modules if module.stored]
    if not stored:
        error = InputError(
            "the configuration declares quantised weights, but all weights are plain",
            where=claim.where,
            expected=claim.whole.algorithm,
            found="no codes and scales",
            fix="take quantization_config away, or the weights that it belongs to",
        )
        yield Problem("", error)
    if claim.whole.algorithm == MIXED:
        return
    for module in stored:
        # One entry for the whole model speaks of linear layers, not of the table.
        if not module.is_table and not claim.whole.is_of(module):
            yield _contradiction(claim, module, claim.whole)


def _excluded(
    claim: Claims, modules: Sequence[Module], canonical: Callable[[str], str]
) -> set[str]:
    """Target names of the linear layers that a declaration excludes."""
    patterns = [
        form
        for pattern in claim.excluded
        for alternative in _alternatives(pattern, claim)
        for form in _forms(alternative, canonical)
    ]
    return {
        module.target
        for module in modules
        if module.scope is not None
        and any(_matches(pattern, _prefixed(module.source[0])) for pattern in patterns)
    }


def _group_of(claim: Claims, module: Module) -> Declared | None:
    """The format of the group that a module is in; names count before the class."""
    spellings = _prefixed(module.source[0])
    for targets, declared in claim.groups:
        if any(_matches(pattern, spellings) for pattern in targets):
            return declared
    return next((declared for targets, declared in claim.groups if _ALL in targets), None)


def _check_groups(
    claim: Claims, modules: Sequence[Module], excluded: Collection[str]
) -> Iterator[Problem]:
    if claim.whole is None or claim.whole.algorithm != MIXED:
        # Groups of one format are a claim about the whole model.
        return
    for module in modules:
        if module.stored and module.scope is not None and module.target not in excluded:
            declared = _group_of(claim, module)
            if declared is not None and not declared.is_of(module):
                yield _contradiction(claim, module, declared)


def _disagreements(
    claim: Claims, modules: Sequence[Module], entries: _Entries, excluded: Collection[str]
) -> list[str]:
    """Linear layers that are not as patterns or one name for the whole model have it."""
    linear = [module for module in modules if module.scope is not None]
    groups = {"excluded but quantised": [m for m in linear if m.stored and m.target in excluded]}
    if claim.whole is not None and claim.whole.algorithm == MIXED and claim.all_linears:
        listed = {m.target for name in claim.modules for m in entries.covered(name)}
        groups["quantised but not listed"] = [
            m for m in linear if m.stored and m.target not in excluded and m.target not in listed
        ]
    elif claim.whole is not None and claim.whole.algorithm != MIXED:
        if claim.all_linears:
            plain = [m for m in linear if m.stored is None and m.target not in excluded]
            groups[f"declared {claim.whole.algorithm} but plain"] = plain
        if claim.activations:
            groups["without scales of activations, which the algorithm declares"] = [
                m for m in linear if m.stored and not m.activation
            ]
    return [
        f"{what}: {line} ({claim.where})"
        for what, found in groups.items()
        for line in grouped(module.source[0] for module in found)
    ]


def _unequal_files(claims: Sequence[Claims], canonical: Callable[[str], str]) -> list[str]:
    """Two declarations that both fit the tensors and still differ."""
    notes = []
    stated = [claim for claim in claims if claim.whole or claim.modules]
    for first, second in pairwise(stated):
        for one, two in ((first, second), (second, first)):
            listed = one.modules.keys() - two.modules.keys()
            excluded = {canonical(pattern) for pattern in one.excluded}
            excluded -= {canonical(pattern) for pattern in two.excluded}
            for what, names in (("lists as quantised", listed), ("excludes", excluded)):
                notes += [f"only {one.where} {what}: {line}" for line in grouped(sorted(names))]
            if one.kv_cache is not None and two.kv_cache is None:
                notes.append(f"only {one.where} declares a cache in {one.kv_cache}")
    return notes


def _contradiction(claim: Claims, module: Module, declared: Declared) -> Problem:
    found = Declared(module.stored, module.stored_group_size) if module.stored else "plain weights"
    error = InputError(
        "the configuration and the tensors contradict each other",
        where=f"{claim.where} and tensors of {module.source[0]}",
        expected=f"{declared}, as declared",
        found=f"{found}, by element types and scales",
        fix="correct the configuration; the tensors were not changed",
    )
    return Problem(module.source[0], error, claim.where)


def _inline(block: Mapping[str, Any], where: str, canonical: Callable[[str], str]) -> Claims:
    method = block.get("quant_method")
    if method == "fp8":
        blocks = block.get("weight_block_size")
        if blocks not in (None, [128, 128]):
            raise InputError(
                "unsupported FP8 block size",
                where=where,
                expected="[128, 128]",
                found=str(blocks),
                fix=_USE_ANOTHER,
            )
        return Claims(
            where,
            Declared("FP8_BLOCK_SCALES" if blocks else "FP8"),
            excluded=_names(block, "modules_to_not_convert", where),
            suffixes=True,
            included=[canonical(name) for name in _names(block, "modules_to_convert", where)],
            activations=block.get("activation_scheme") == "static",
            kv_cache=_cache_scheme(block, where),
        )
    if method == "compressed-tensors":
        return _compressed_tensors(block, where)
    producer = block.get("producer")
    if (
        str(method).startswith("modelopt")
        or (isinstance(producer, Mapping) and producer.get("name") == "modelopt")
        or (method is None and "quant_algo" in block)
    ):
        return _modelopt(block, where, canonical)
    raise InputError(
        "unsupported quantisation method",
        where=where,
        expected="fp8, modelopt or compressed-tensors",
        found=str(method),
        fix=_USE_ANOTHER,
    )


def _modelopt(block: Mapping[str, Any], where: str, canonical: Callable[[str], str]) -> Claims:
    nested = block.get("quantization")
    if nested is not None:
        # The older form, of `hf_quant_config.json`.
        return _modelopt(_mapping(nested, f"{where}.quantization"), where, canonical)
    layers = block.get("quantized_layers") or {}
    modules = {}
    for name, entry in _mapping(layers, f"{where}.quantized_layers").items():
        inner = _mapping(entry, f"{where}.quantized_layers.{name}")
        modules[canonical(name)] = _declared(inner, f"{where}: {name}")
    algorithm = block.get("quant_algo")
    kv_cache = block.get("kv_cache_quant_algo") or _cache_scheme(block, where)
    return Claims(
        where,
        None if algorithm is None else _declared(block, where),
        modules,
        [*_names(block, "ignore", where), *_names(block, "exclude_modules", where)],
        activations=algorithm in ("NVFP4", "FP8"),
        kv_cache=None if kv_cache is None else str(kv_cache),
    )


def _compressed_tensors(block: Mapping[str, Any], where: str) -> Claims:
    groups = _mapping(block.get("config_groups"), f"{where}.config_groups")
    found: list[tuple[list[str], Declared]] = []
    for name, group in groups.items():
        place = f"{where}.config_groups.{name}"
        weights = _mapping(_mapping(group, place).get("weights"), f"{place}.weights")
        key = (weights.get("num_bits"), weights.get("type"), weights.get("strategy"))
        algorithm = _COMPRESSED.get(key)
        if algorithm is None:
            raise InputError(
                "unsupported compressed-tensors weights",
                where=place,
                expected=" or ".join(str(known) for known in _COMPRESSED),
                found=f"{key}, format {group.get('format') or block.get('format')}",
                fix=_USE_ANOTHER,
            )
        size = weights.get("group_size") if algorithm == "NVFP4" else None
        targets = _names(_mapping(group, place), "targets", place)
        found.append((targets, Declared(algorithm, _group_size(size, f"{place}.weights"))))
    formats = {declared for _, declared in found}
    return Claims(
        where,
        formats.pop() if len(formats) == 1 else Declared(MIXED),
        groups=found,
        excluded=_names(block, "ignore", where),
        all_linears=len(found) == 1 and _ALL in found[0][0],
        kv_cache=_cache_scheme(block, where),
    )


def _cache_scheme(block: Mapping[str, Any], where: str) -> str | None:
    """The type of the cache: by bits, or by name where Model Optimizer has no bits for it."""
    scheme = block.get("kv_cache_scheme")
    if scheme is None:
        return None
    if isinstance(scheme, str):
        return scheme.upper()
    inner = _mapping(scheme, f"{where}.kv_cache_scheme")
    kind = (inner.get("num_bits"), inner.get("type"))
    return "FP8" if kind == (8, "float") else f"{kind[0]} bits {kind[1]}"


_COMPRESSED: dict[tuple[Any, Any, Any], str] = {
    (4, "float", "tensor_group"): "NVFP4",
    (8, "float", "tensor"): "FP8",
    (8, "float", "block"): "FP8_BLOCK_SCALES",
}


def _declared(entry: Mapping[str, Any], where: str) -> Declared:
    value = entry.get("quant_algo")
    name = _ALIASES.get(str(value).upper(), str(value).upper())
    if name not in _KNOWN:
        raise InputError(
            "unsupported quantisation algorithm",
            where=where,
            expected=", ".join([*_KNOWN, *_ALIASES]),
            found=str(value),
            fix=_USE_ANOTHER,
        )
    return Declared(name, _group_size(entry.get("group_size"), where))


def _group_size(value: Any, where: str) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise InputError(
            "not a number of columns",
            where=f"{where}.group_size",
            expected="a whole number of at least 1",
            found=repr(value),
            fix=_CORRECT,
        )
    return value


def _table(value: Any, where: str) -> str:
    if value not in _TABLE_TYPES:
        raise InputError(
            "unsupported type of the n-gram table",
            where=where,
            expected=", ".join(_TABLE_TYPES),
            found=str(value),
            fix="correct it, or take the key away: the table's tensors decide",
        )
    return _TABLE_TYPES[value]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(
            "not an object",
            where=where,
            expected="keys and values",
            found=repr(value),
            fix=_CORRECT,
        )
    return value


def _names(block: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = block.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(
            "not a list of names",
            where=f"{where}.{key}",
            expected="a list of strings",
            found=repr(value),
            fix=_CORRECT,
        )
    for pattern in value:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise InputError(
                "a pattern is no regular expression",
                where=f"{where}.{key}",
                found=f"{pattern!r}: {error}",
                fix=_CORRECT,
            ) from error
    return value


class _Entries:
    """Finds the modules that an entry of a declaration speaks of; there may be one per expert.

    An entry speaks of the module of its name, and of all below it that can be quantised. Stacked
    experts stand for their members.
    """

    def __init__(self, modules: Sequence[Module]) -> None:
        self._exact = {source: module for module in modules for source in module.source}
        self._below: dict[str, list[Module]] = defaultdict(list)
        for module in modules:
            if module.scope is not None or module.is_table:
                for parent in {parent for source in module.source for parent in _parents(source)}:
                    self._below[parent].append(module)

    def covered(self, name: str) -> list[Module]:
        """The modules of an entry, in the order of the model."""
        found = [self._exact[name]] if name in self._exact else []
        found += self._below.get(name, [])
        experts = re.sub(r"\.experts\.\d+(\..*)?$", ".experts", name)
        if experts != name:
            found += [m for m in self._below.get(experts, []) if m.is_stacked]
        return found


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _prefixed(canonical: str) -> tuple[str, ...]:
    prefixes = ("", "model.", "model.language_model.", "language_model.", "language_model.model.")
    return tuple(prefix + canonical for prefix in prefixes)


class _Spellings:
    """All names that a pattern may mean: tensors and modules, with and without prefixes.

    One expert stands for all, or released checkpoints would have millions of spellings.
    """

    def __init__(self, names: Iterable[str], canonical: Callable[[str], str]) -> None:
        self._canonical = canonical
        modules = set()
        for name in {_first_expert(name) for name in names}:
            short = canonical(name)
            modules |= {name, short, name.rpartition(".")[0], short.rpartition(".")[0]}
        self._all = sorted({form for module in modules for form in _prefixed(module)})
        # A plain name also means everything below it.
        self._exact = {
            ".".join(parts[:length])
            for parts in (form.split(".") for form in self._all)
            for length in range(1, len(parts) + 1)
        }

    def match(self, pattern: str) -> bool:
        """Whether a pattern means anything."""
        for form in _forms(_first_expert(pattern), self._canonical):
            wild = form.startswith("re:") or any(sign in form for sign in "*?[")
            if form in self._exact or (wild and _matches(form, self._all)):
                return True
        return False


def _first_expert(name: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.0.", name)


def _alternatives(pattern: str, claim: Claims) -> list[str]:
    """A pattern, and what it means besides where names may be suffixes."""
    return [pattern, f"*{pattern}"] if claim.suffixes else [pattern]


def _forms(pattern: str, canonical: Callable[[str], str]) -> set[str]:
    """A pattern as it is and with canonical numbers and prefixes."""
    return {pattern} if pattern.startswith("re:") else {pattern, canonical(pattern)}


def _matches(pattern: str, spellings: Iterable[str]) -> bool:
    """Whether a pattern means a module: exact, a parent of it, with wildcards, or a regex."""
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in spellings)
    return any(
        name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)
        for name in spellings
    )
