"""What `verify` found, as tables for people and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from build_scripts import output
from build_scripts.scores import KL_BOUND, RELATIVE_BOUND, Difference, LogitsScore, Score, finite
from runtime.contract import PHASES, Phase


@dataclass(frozen=True)
class Control:
    """One mistake made on purpose; `noticed` says that the comparison failed, as it must."""

    name: str
    worst_tap: str
    relative: float
    kl: float
    argmax: float
    noticed: bool


@dataclass(frozen=True)
class Result:
    """What `verify` found.

    Attributes:
        engine_dir, reference: what was compared.
        tokens: how many were compared.
        dtype: the engine's own type.
        definition: per phase, in float32; this is what the bounds are for.
        as_built: per phase, in the engine's type.
        controls: mistakes made on purpose; none were made where the definition is out of bounds.
        audio: taps of the audio engine, if there is one.
        quantised: logits of the decoded weights against those of the weights that were quantised,
            both in transformers; None where nothing was quantised or the original is quantised.
    """

    engine_dir: Path
    reference: Path
    tokens: int
    dtype: str
    definition: dict[Phase, Score]
    as_built: dict[Phase, Score]
    controls: list[Control] = field(default_factory=list)
    audio: dict[str, Difference] = field(default_factory=dict)
    quantised: LogitsScore | None = None

    @property
    def passed(self) -> bool:
        """Whether the definition holds and every mistake was noticed."""
        return (
            all(score.within for score in self.definition.values())
            and all(finite(d.relative) <= RELATIVE_BOUND for d in self.audio.values())
            and all(control.noticed for control in self.controls)
        )

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "passed": self.passed,
            "engine_dir": str(self.engine_dir),
            "against": str(self.reference),
            "tokens": self.tokens,
            "dtype": self.dtype,
            "bounds": {"relative": RELATIVE_BOUND, "kl": KL_BOUND, "argmax": 1.0},
            "definition": {phase: asdict(score) for phase, score in self.definition.items()},
            "as_built": {phase: asdict(score) for phase, score in self.as_built.items()},
            "audio": {tap: asdict(difference) for tap, difference in self.audio.items()},
            "quantised": asdict(self.quantised) if self.quantised else None,
            "negative_controls": [asdict(control) for control in self.controls],
        }

    def print(self) -> None:
        """For people, on standard output."""
        output.table(
            f"Layers in float32, {self.tokens} tokens (largest difference / relative to the "
            f"largest value; bound {RELATIVE_BOUND:.0e})",
            ("tap", *(f"{phase} {what}" for phase in PHASES for what in ("max abs", "relative"))),
            list(self._tap_rows()),
        )
        if self.audio:
            output.table(
                f"Audio engine in float32 (bound {RELATIVE_BOUND:.0e})",
                ("tap", "max abs", "relative"),
                [(t, _short(d.max_abs), _short(d.relative)) for t, d in self.audio.items()],
            )
        output.table(
            f"Logits (bounds: divergence {KL_BOUND:.0e}, every argmax equal)",
            ("engine", "max abs", "KL divergence", "same argmax", "verdict"),
            list(self._logits_rows()),
        )
        if self.controls:
            self._print_controls()
        output.say("verification passed" if self.passed else "verification FAILED")

    def _print_controls(self) -> None:
        output.table(
            "Mistakes made on purpose; each must be noticed",
            ("mistake", "worst tap", "relative", "KL divergence", "same argmax", "verdict"),
            [
                (
                    c.name,
                    c.worst_tap,
                    _short(c.relative),
                    _short(c.kl),
                    f"{100 * c.argmax:.1f} %",
                    "noticed" if c.noticed else "NOT NOTICED",
                )
                for c in self.controls
            ],
        )

    def _tap_rows(self) -> Iterator[tuple[str, ...]]:
        for tap in self.definition["context"].taps:
            cells = []
            for phase in PHASES:
                difference = self.definition[phase].taps[tap]
                cells += [_short(difference.max_abs), _short(difference.relative)]
            yield (tap, *cells)

    def _logits_rows(self) -> Iterator[tuple[str, ...]]:
        for phase in self.definition:
            exact, built = self.definition[phase], self.as_built[phase]
            verdict = "within" if exact.within else "OUT OF BOUNDS"
            yield (f"{phase}, float32", *_cells(exact.logits), verdict)
            yield (f"{phase}, {self.dtype} as built", *_cells(built.logits), "for information")
        if self.quantised is not None:
            cells = _cells(self.quantised)
            yield ("quantised weights against the checkpoint's", *cells, "for information")


def _cells(logits: LogitsScore) -> tuple[str, str, str]:
    return _short(logits.max_abs), _short(logits.kl), f"{100 * logits.argmax:.1f} %"


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
