"""Activation scales from a calibrated checkpoint, for weights that are quantised here.

A calibration result is a checkpoint directory in Model Optimizer's layout. Of its tensors only
`input_scale` and the scales of caches are read; they depend on the model's activations alone. An
`input_scale` counts in the format of its own weight (largest activation / 448 for FP8, / 2688 for
NVFP4), so both must be of one format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from converters.checkpoint.header import TensorEntry
from converters.checkpoint.match import Findings, canonical_names, grouped
from converters.checkpoint.recipe import Output, Part, Recipe, Wanted
from converters.checkpoint.source import SourceCheckpoint
from converters.quantization.declared import MIXED, read_claims
from converters.quantization.evidence import (
    Names,
    detect,
    module_of,
    scalar_shape,
    target_name,
)
from converters.quantization.formats import Format
from plugins.support.dtypes import BY_NAME
from plugins.support.errors import InputError

_SUFFIX = "input_scale"
# What a stacked tensor of all experts is made of, when they lie one by one.
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Calibration:
    """An opened calibration result.

    Attributes:
        source: the checkpoint directory.
        names: its tensors.
        declared: algorithm of the whole model, None when only tensors or modules tell.
        shared: modules without a scale of their own, which got the largest of their layer.
    """

    source: SourceCheckpoint
    names: Names
    declared: str | None
    shared: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, directory: Path, canonical: Callable[[str], str]) -> Calibration:
        """Read headers and declarations. Raises InputError as for any checkpoint, and when there
        are no activation scales and no scales of caches.
        """
        source = SourceCheckpoint.open(directory)
        names, _ = canonical_names(source, canonical)
        if not any(name.endswith((_SUFFIX, ".k_scale")) for name in names):
            raise InputError(
                "the calibration result has no scales of activations",
                where=str(directory),
                expected=f"tensors named *.{_SUFFIX}, as Model Optimizer exports them",
                fix="calibrate with a forward loop; without one no scales are written",
            )
        wholes = [claim.whole for claim in read_claims(source, canonical) if claim.whole]
        algorithms = {whole.algorithm for whole in wholes} - {MIXED}
        declared = algorithms.pop() if len(algorithms) == 1 else None
        return cls(source, Names(names, source.tensors), declared)

    def activation(self, wanted: Wanted, format_: Format, findings: Findings) -> list[Recipe]:
        """The recipe of a quantised tensor's activation scales; none where its format has none.

        Experts that calibration never reached get the largest scale of their layer, see `shared`.
        """
        if format_.activation is None:
            return []
        modules = list(_modules(wanted))
        found = [self._scale(module, format_, findings) for module in modules]
        known = [entry for entry in found if entry is not None]
        if not known:
            findings.missing.append(f"{modules[0]}.{_SUFFIX} (calibration)")
            return []
        if len(known) < len(found):
            self.shared.extend(m for m, e in zip(modules, found, strict=True) if e is None)
            largest = max(known, key=self._value)
            known = [entry or largest for entry in found]
        output = Output(
            target_name(wanted.target, format_.activation), BY_NAME["float32"], scalar_shape(wanted)
        )
        return [Recipe((output,), tuple(known), positive=True)]

    def notes(self) -> list[str]:
        """What people should know after all scales were taken."""
        used = set(self.names.used)
        unused = [
            name
            for name, disk in self.names.names.items()
            if name.endswith(f".{_SUFFIX}") and disk not in used
        ]
        notes = [f"calibrated, but not quantised: {line}" for line in grouped(unused)]
        return notes + [
            f"never reached by calibration, takes its layer's largest scale: {line}"
            for line in grouped(self.shared)
        ]

    def _scale(self, module: str, format_: Format, findings: Findings) -> TensorEntry | None:
        entry = self.names.members(module).get(_SUFFIX)
        if entry is None:
            return None
        self.names.use(entry)
        stored = detect(self.names, Part(f"{module}.weight", (1, 1)))
        algorithm = stored.algorithm if stored else self.declared
        name = self.names.spelled(module, _SUFFIX)
        if algorithm != format_.algorithm:
            findings.wrong[f"{name} (calibration)"] = (
                f"the activation scale of a {format_.algorithm} weight",
                f"that of {algorithm or 'an unknown format'}",
            )
        elif entry.dtype.name != "float32" or entry.shape not in ((), (1,)):
            kind = f"{entry.dtype.name} {list(entry.shape)}"
            findings.wrong[f"{name} (calibration)"] = ("one float32 scale", kind)
        return entry

    def _value(self, entry: TensorEntry) -> float:
        return float(self.source.read(entry.name).float().max())


def _modules(wanted: Wanted) -> Iterator[str]:
    """The linear modules of a tensor, in the order of its scales."""
    if not (wanted.matrices and len(wanted.parts) == 1):
        yield from (module_of(part) for part in wanted.parts)
        return
    base, _, kind = module_of(wanted.parts[0]).rpartition(".")
    for expert in range(wanted.shape[0]):
        for projection in _STACKED.get(kind, (kind,)):
            yield f"{base}.{expert}.{projection}"
