"""The attention permissions that the families have in common."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.attention import Allowlist, Component, Row
from plugins.trt.types import Flavor

_ADVICE = "compare its first answers with --executor interpreter --device cpu"
_ENGINES: tuple[tuple[Flavor, str], ...] = (
    ("tensorrt_rtx", f"was built, but has not run on a GPU yet: {_ADVICE}"),
    ("tensorrt", f"has neither been built nor run yet: {_ADVICE}"),
)
_CUDA = f"has not been run yet: {_ADVICE}"


def allowlist(model: str, components: Sequence[Component], *, ran_on_cuda: bool) -> Allowlist:
    """The interpreter on the CPU, where every family is verified, and on a GPU; the engines.

    Args:
        model: `model_type`.
        components: of the model.
        ran_on_cuda: whether the interpreter has run this family on a GPU.
    """
    rows = []
    for part in components:
        told = None if ran_on_cuda else _CUDA
        rows += [
            Row(component=part, implementation="interpreter", device="cpu"),
            Row(component=part, implementation="interpreter", device="cuda", recent=told),
        ]
        rows += [
            Row(
                component=part,
                implementation="tensorrt",
                device="cuda",
                flavors=(flavor,),
                recent=text,
            )
            for flavor, text in _ENGINES
        ]
    return Allowlist(model=model, rows=tuple(rows))
