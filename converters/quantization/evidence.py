"""Decides how each weight is stored by looking at its tensors, never at what a file claims.

Configurations describe the exporter's intentions: exclusion lists name linear layers but not the
table beside them, one name covers several storages, and entries are spelled in many ways. The
element types and the scales beside a weight leave no choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from converters.checkpoint.header import Shape, TensorEntry
from converters.checkpoint.match import Findings
from converters.checkpoint.recipe import Operation, Output, Part, Recipe, Wanted
from converters.quantization import formats, fp8
from converters.quantization.formats import Component, Format
from plugins.support.dtypes import BY_NAME, COMPUTE_DTYPES
from plugins.support.errors import InputError


class Names:
    """The tensors of a checkpoint by canonical name, and which of them have been used.

    Attributes:
        names: canonical name -> name on disk.
        used: names on disk.
    """

    def __init__(self, names: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> None:
        self.names = names
        self.used: list[str] = []
        self._entries = {name: tensors[disk] for name, disk in names.items()}
        self._members: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self._entries.items():
            module, suffix = _split(name)
            members = self._members.get(module)
            if members is None:
                self._members[module] = {suffix: entry}
            elif name == f"{module}.{suffix}":
                members[suffix] = entry
            else:
                members.setdefault(suffix, entry)

    def find(self, name: str) -> TensorEntry | None:
        """The tensor of a canonical name."""
        return self._entries.get(name)

    def use(self, entry: TensorEntry) -> TensorEntry:
        """Mark a tensor as used."""
        self.used.append(entry.name)
        return entry

    def use_name(self, name: str) -> None:
        """Mark the tensor of a canonical name as used."""
        self.used.append(self.names[name])

    def use_module(self, module: str) -> None:
        """Mark whatever belongs to a module as used."""
        self.used += [entry.name for entry in self.members(module).values()]

    def members(self, module: str) -> Mapping[str, TensorEntry]:
        """A module's tensors by suffix: "weight" and what lies beside it.

        Stacked experts have no `.weight`; what belongs to them follows a dot or an underscore.
        """
        return self._members.get(module, {})

    def spelled(self, module: str, suffix: str) -> str:
        """Canonical name of a module's tensor; one that is missing is named as its neighbours."""
        candidates = [f"{module}.{suffix}", f"{module}_{suffix}"]
        if suffix == "weight":
            candidates = [f"{module}.weight", module]
        for name in candidates:
            if name in self._entries:
                return name
        return candidates[module in self._entries]


def _split(name: str) -> tuple[str, str]:
    """Module and suffix of a tensor; the weight of stacked experts is named as their module."""
    module, _, suffix = name.rpartition(".")
    if suffix in _SUFFIXES:
        return module, suffix
    if suffix.endswith(_JOINED):
        joined = next(end for end in _JOINED if suffix.endswith(end))
        return name.removesuffix(joined), joined[1:]
    return name, "weight"


_SUFFIXES = {"weight", formats.NVFP4_PACKED.codes.suffix, *formats.SCALE_SUFFIXES}
_JOINED = tuple(f"_{suffix}" for suffix in sorted(_SUFFIXES - {"weight"}))


def module_of(part: Part) -> str:
    """The module that a weight belongs to."""
    return part.name.removesuffix(".weight")


def detect(names: Names, part: Part) -> Format | None:
    """The format of one weight; None when it is plain or not there.

    Raises InputError for scales that do not fit the weight's type, and for formats that are
    recognised but not supported.
    """
    module = module_of(part)
    members = names.members(module)
    if formats.NVFP4_PACKED.codes.suffix in members:
        return formats.NVFP4_PACKED
    weight = members.get("weight")
    if weight is None:
        return None
    if weight.dtype.name == "uint8":
        return formats.NVFP4
    scales = {s: members[s] for s in formats.SCALE_SUFFIXES if s in members}
    where = f"{weight.file}: {names.spelled(module, 'weight')}"
    if weight.dtype.name in COMPUTE_DTYPES:
        if scales:
            raise InputError(
                "a plain weight has scales beside it",
                where=where,
                expected="no scales, or a quantised weight",
                found=f"{weight.dtype.name} with {', '.join(scales)}",
                fix="take the scales away if the weight is right, or use another copy of it",
            )
        return None
    if weight.dtype.name != "float8_e4m3fn":
        return None
    scale = scales.get("weight_scale_inv", scales.get("weight_scale"))
    if scale is None or ("weight_scale_inv" not in scales and _is_one_scale(scale, part)):
        return formats.FP8
    _refuse_other_groups(part, scale, where)
    if "weight_scale_inv" in scales:
        # A grid of blocks has two dimensions, whatever their sizes.
        is_grid = len(scale.shape) > 1 or math.prod(scale.shape) != 1
        return formats.FP8_BLOCK if is_grid else formats.FP8_TRANSFORMERS
    if len(part.shape) == 3 and math.prod(scale.shape) in (part.shape[0], 2 * part.shape[0]):
        return formats.FP8
    return formats.FP8_BLOCK_MODELOPT


def _is_one_scale(scale: TensorEntry, part: Part) -> bool:
    """Whether a scale is one for a whole matrix; one for its only block has more dimensions."""
    is_block = len(scale.shape) > 1 and max(part.shape[-2:]) <= fp8.BLOCK
    return math.prod(scale.shape) == 1 and not is_block


def has_scales(names: Names, part: Part) -> bool:
    """Whether any scale lies beside a weight."""
    members = names.members(module_of(part))
    return any(suffix in members for suffix in formats.SCALE_SUFFIXES)


def is_there(names: Names, part: Part) -> bool:
    """Whether a weight is in the checkpoint, in any format."""
    members = names.members(module_of(part))
    return "weight" in members or formats.NVFP4_PACKED.codes.suffix in members


def _refuse_other_groups(part: Part, scale: TensorEntry, where: str) -> None:
    """Raise InputError for e4m3 codes with scales of a form that is known and not supported."""
    *matrix, columns = part.shape
    fix = "use a checkpoint in BF16, FP8 or NVFP4"
    if scale.dtype.name in ("uint8", "float8_e8m0fnu") and scale.shape[-1:] == (-(-columns // 32),):
        raise InputError(
            "MXFP8 weights are not supported",
            where=where,
            found=f"float8_e4m3fn with {scale.dtype.name} scales per 32 columns",
            fix=fix,
        )
    blocks = formats.FP8_BLOCK.scales[0].shape(matrix[-1], columns)
    if math.prod(scale.shape) == math.prod(matrix) > math.prod((*matrix[:-1], *blocks)):
        raise InputError(
            "FP8 weights with one scale per row are not supported",
            where=where,
            found=f"float8_e4m3fn with scales {list(scale.shape)}",
            fix=fix,
        )


def carry_over(
    wanted: Wanted,
    format_: Format,
    names: Names,
    findings: Findings,
    odd: frozenset[str] = frozenset(),
) -> tuple[Recipe, ...]:
    """Recipes that keep the exact codes and scales of a quantised tensor.

    Everything that is missing or does not fit goes to `findings`; of the parts named in `odd`,
    which have another format, nothing is said any more.
    """
    recipes = []
    if wanted.shape[-1] % (format_.group_size or 1) and format_.algorithm == "NVFP4":
        findings.wrong[wanted.parts[0].name] = (
            f"columns divisible by {format_.group_size}",
            str(wanted.shape[-1]),
        )
    for component in format_.components:
        recipes += _recipe(wanted, component, names, findings, odd, required=True)
    if format_.activation is not None and wanted.scale_owner is None:
        recipes += _recipe(wanted, format_.activation, names, findings, odd, required=False)
    return tuple(recipes)


def _recipe(
    wanted: Wanted,
    component: Component,
    names: Names,
    findings: Findings,
    odd: frozenset[str],
    *,
    required: bool,
) -> list[Recipe]:
    found: list[TensorEntry] = []
    missing: list[str] = []
    shared = component.kind == "scalar" and wanted.scale_owner is not None
    parts: Sequence[Part] = (
        (Part(f"{wanted.scale_owner}.weight", (1, 1)),) if shared else wanted.parts
    )
    for part in parts:
        if part.name in odd:
            continue
        module = module_of(part)
        entry = names.members(module).get(component.suffix)
        if entry is None:
            missing.append(names.spelled(module, component.suffix))
            continue
        names.use(entry)
        if entry.dtype.name not in component.dtypes:
            name = names.spelled(module, component.suffix)
            findings.wrong[name] = (" or ".join(component.dtypes), entry.dtype.name)
            continue
        pieces = _pieces(wanted, part, component, entry, shared=shared)
        if isinstance(pieces, _Unfit):
            findings.wrong[names.spelled(module, component.suffix)] = pieces
        else:
            found += pieces
    if missing:
        if required or found:
            findings.missing += missing
        return []
    kinds = {entry.dtype.name for entry in found}
    if len(kinds) > 1:
        findings.wrong[found[-1].name] = ("one type for all scales", " and ".join(sorted(kinds)))
    if not found or len(kinds) > 1:
        return []
    output = Output(
        target_name(wanted.target, component),
        BY_NAME[kinds.pop()],
        (1,) if shared else target_shape(wanted, component),
    )
    room = _room(wanted, component)
    if math.prod(output.shape) != sum(math.prod(room or entry.shape) for entry in found):
        return []  # a wrong shape, reported above
    is_scale = component.target != "weight"
    operation: Operation = "reciprocal" if component.reciprocal else "copy"
    return [Recipe((output,), tuple(found), operation, positive=is_scale, room=room)]


def _room(wanted: Wanted, component: Component) -> Shape | None:
    """What each part of a padded matrix takes in the component's tensor."""
    room = wanted.parts[0].room
    return None if room is None or component.kind == "scalar" else component.shape(*room)


class _Unfit(NamedTuple):
    expected: str
    found: str


def _pieces(
    wanted: Wanted, part: Part, component: Component, entry: TensorEntry, *, shared: bool
) -> list[TensorEntry] | _Unfit:
    """The source tensors, or slices of one, in the order of the target."""
    *stack, rows, columns = part.shape
    if component.kind == "scalar":
        count = math.prod(stack) * (wanted.pieces if stack else 1)
        elements = math.prod(entry.shape)
        if shared and elements != 1:
            return _Unfit("one scale", str(list(entry.shape)))
        if shared or count == elements:
            return [entry]
        if stack and elements in (1, stack[0]):
            # One scale for a whole expert, or for all: written once for each that it covers.
            repeat = count // elements
            return [_element(entry, index // repeat) for index in range(count)]
        return _Unfit(f"{count} scales", str(list(entry.shape)))
    if component.kind == "blocks" and stack and rows // wanted.pieces % fp8.BLOCK:
        return _Unfit("stacked experts whose rows fill whole blocks", f"{rows} rows")
    expected = (*stack, *component.shape(rows, columns))
    if entry.shape != expected and _squeezed(entry.shape) != _squeezed(expected):
        return _Unfit(f"shape {list(expected)}", str(list(entry.shape)))
    return [entry]


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _element(entry: TensorEntry, index: int) -> TensorEntry:
    return entry._replace(shape=(), offset=entry.offset + entry.dtype.nbytes(index))


def target_name(weight: str, component: Component) -> str:
    """Name of a component in the target, from the weight's target name."""
    return f"{weight.removesuffix('.weight')}.{component.target}"


def scalar_shape(wanted: Wanted) -> Shape:
    """Shape of a target tensor with one value per matrix: [E, 2] for gate and up of experts."""
    return (*wanted.shape[: wanted.matrices], wanted.pieces)


def target_shape(wanted: Wanted, component: Component) -> Shape:
    """Shape of a component in the target.

    Blocks never straddle two projections: those of the gate come first, then those of up.
    """
    if component.kind == "rows":
        return (*wanted.shape[:-1], wanted.shape[-1] // component.per)
    if component.kind == "blocks":
        rows, columns = component.shape(wanted.shape[-2] // wanted.pieces, wanted.shape[-1])
        return (*wanted.shape[: wanted.matrices], wanted.pieces * rows, columns)
    return scalar_shape(wanted)
