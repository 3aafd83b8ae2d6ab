"""Which implementations may compute a model's attention: one declared list per model.

A family declares the rows of its models. Building, running, serving and verifying ask the same
list: what has no row is refused before anything is built or opened. A row may say what is not known
of it yet; whoever chooses it is told so once per process, and nobody else is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from plugins.support.errors import CapabilityError
from plugins.trt.types import FLAVORS, Flavor

Component = Literal["decoder", "audio_encoder"]
# "tensorrt": kernels that TensorRT compiled into an engine; "interpreter": the engine's network
# with torch.
Implementation = Literal["tensorrt", "interpreter"]
Device = Literal["cpu", "cuda"]

# Whose attention is in the engine of a phase.
COMPONENTS: dict[str, Component] = {
    "context": "decoder",
    "generation": "decoder",
    "draft": "decoder",
    "audio": "audio_encoder",
}


@dataclass(frozen=True)
class Choice:
    """One implementation.

    Attributes:
        implementation: who computes.
        device: where.
        flavor: of the TensorRT that the networks are defined with.
    """

    implementation: Implementation
    device: Device
    flavor: Flavor

    def __str__(self) -> str:
        return f"{self.implementation} on {self.device} ({self.flavor})"


class Row(BaseModel):
    """A permission.

    Attributes:
        component: part of the model.
        implementation, device: who computes its attention, and where.
        flavors: with networks of these flavours.
        recent: what is not known of it yet, as the end of a sentence; None where it is in use.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    component: Component
    implementation: Implementation
    device: Device
    flavors: tuple[Flavor, ...] = FLAVORS
    recent: str | None = None

    def permits(self, component: Component, choice: Choice) -> bool:
        """Whether `component` may be computed by `choice`."""
        return (
            self.component == component
            and (self.implementation, self.device) == (choice.implementation, choice.device)
            and choice.flavor in self.flavors
        )


class Allowlist(BaseModel):
    """What computes the attention of one model.

    Attributes:
        model: `model_type`.
        rows: permissions; what has none is refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    rows: tuple[Row, ...]

    def of_flavor(self, flavor: Flavor) -> Allowlist:
        """The part of it that engines of one flavour need."""
        return Allowlist(model=self.model, rows=tuple(r for r in self.rows if flavor in r.flavors))

    def refusal(self, phases: Iterable[str], choice: Choice) -> CapabilityError | None:
        """Why the engines of `phases` may not be computed by `choice`; None when they may."""
        refused = [c for c in _components(phases) if self._row(c, choice) is None]
        if not refused:
            return None
        allowed = dict.fromkeys(
            f"{row.implementation} on {row.device}"
            for row in self.rows
            if row.component in refused and choice.flavor in row.flavors
        )
        return CapabilityError(
            f"the attention of {self.model} has no such implementation",
            where=", ".join(refused),
            expected=", ".join(allowed) or f"another flavour than {choice.flavor}",
            found=str(choice),
            fix="choose with --executor, --device and, when building, --flavor",
        )

    def require(self, phases: Iterable[str], choice: Choice) -> None:
        """Raise CapabilityError unless the engines of `phases` may be computed by `choice`."""
        refusal = self.refusal(phases, choice)
        if refusal is not None:
            raise refusal

    def notices(self, phases: Iterable[str], choice: Choice) -> list[str]:
        """Lines about `choice` that this process has not been given yet, one per component."""
        lines = []
        for component in _components(phases):
            row = self._row(component, choice)
            key = (self.model, component, choice)
            if row is None or row.recent is None or not _first_time(key):
                continue
            lines.append(f"{self.model}, {component}: attention by {choice} {row.recent}")
        return lines

    def _row(self, component: Component, choice: Choice) -> Row | None:
        return next((row for row in self.rows if row.permits(component, choice)), None)


def _components(phases: Iterable[str]) -> list[Component]:
    return list(dict.fromkeys(COMPONENTS[phase] for phase in phases))


_given: set[tuple[str, Component, Choice]] = set()
_lock = threading.Lock()


def _first_time(key: tuple[str, Component, Choice]) -> bool:
    with _lock:
        new = key not in _given
        _given.add(key)
    return new
