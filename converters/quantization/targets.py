"""What `--quantize` makes of plain weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from converters.checkpoint.header import TensorEntry
from converters.checkpoint.match import Findings
from converters.checkpoint.recipe import Operation, Output, Recipe, Wanted
from converters.quantization import formats
from converters.quantization.evidence import target_name, target_shape
from converters.quantization.formats import Format
from plugins.support.dtypes import BY_NAME
from plugins.support.errors import UsageError

Algorithm = Literal["nvfp4", "fp8", "fp8-block"]
Scope = Literal["experts", "mlp", "all"]

_FORMATS: dict[str, tuple[Format, Operation]] = {
    "nvfp4": (formats.NVFP4, "nvfp4"),
    "fp8": (formats.FP8, "fp8"),
    "fp8-block": (formats.FP8_BLOCK, "fp8_block"),
}
# Each scope contains the ones before it.
_SCOPES: tuple[str, ...] = get_args(Scope)


@dataclass(frozen=True)
class Quantize:
    """A request to quantise.

    Draft layers stay as they are: their part of the time is small and their acceptance is not.
    """

    algorithm: Algorithm
    only: Scope

    @classmethod
    def parse(cls, algorithm: str, only: str) -> Quantize:
        """From the command line's words. Raises UsageError."""
        if algorithm not in _FORMATS:
            raise UsageError("unknown quantisation", expected=", ".join(_FORMATS), found=algorithm)
        if only not in _SCOPES:
            raise UsageError(
                "unknown choice of weights to quantise", expected=", ".join(_SCOPES), found=only
            )
        return cls(algorithm, only)  # type: ignore[arg-type]

    @property
    def format(self) -> Format:
        """How the weights will be stored."""
        return _FORMATS[self.algorithm][0]

    @property
    def operation(self) -> Operation:
        """What is done to a matrix."""
        return _FORMATS[self.algorithm][1]

    def covers(self, wanted: Wanted) -> bool:
        """Whether a tensor is to be quantised."""
        if wanted.quantize is None or wanted.precise or wanted.target.startswith("mtp."):
            return False
        return self.covers_scope(wanted.quantize)

    def covers_scope(self, scope: str | None) -> bool:
        """Whether tensors of a scope are to be quantised."""
        return scope is not None and _SCOPES.index(scope) <= _SCOPES.index(self.only)


def quantized_recipes(
    wanted: Wanted, entries: list[TensorEntry], quantize: Quantize, findings: Findings
) -> list[Recipe]:
    """One recipe that makes codes and scales; a width that blocks do not divide is a finding."""
    format_ = quantize.format
    columns = wanted.shape[-1]
    if wanted.parts[0].room is not None:
        findings.wrong[entries[0].name] = (
            "FP8 blocks, for which this checkpoint's dense MLPs are padded",
            "a plain weight that is to be quantised otherwise",
        )
        return []
    if format_.algorithm == "NVFP4" and columns % (format_.group_size or 1):
        findings.wrong[entries[0].name] = (
            f"columns divisible by {format_.group_size} to quantise them",
            f"{columns} columns",
        )
        return []
    outputs = []
    for component in format_.components:
        name = "float32" if component.kind != "rows" else component.dtypes[0]
        outputs.append(
            Output(
                target_name(wanted.target, component),
                BY_NAME[name],
                target_shape(wanted, component),
            )
        )
    matrices = wanted.shape[0] if wanted.matrices else 1
    recipe = Recipe(
        tuple(outputs),
        tuple(entries),
        quantize.operation,
        matrices=matrices,
        pieces=wanted.pieces,
        matrix_shape=(wanted.shape[-2], columns),
    )
    return [recipe]
