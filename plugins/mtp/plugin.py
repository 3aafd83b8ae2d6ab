"""The draft layer's input as plugin layers of full TensorRT.

`embed_norms` is the whole input in one kernel; `rms_norm` is what the unfused order takes, twice.
"""

from __future__ import annotations

from typing import Any

from plugins.aot.quick import Attributes, Operation
from plugins.mtp import plan
from plugins.mtp.plan import Width

NAMESPACE = "mtp"
_ATTRIBUTES = {"hidden": int, "eps": float, "dtype": str}


def width_attributes(width: Width) -> dict[str, Any]:
    """The attributes by which a plugin layer knows its rows."""
    return {"hidden": width.hidden, "eps": width.eps, "dtype": width.dtype}


def _width(attributes: Attributes) -> Width:
    return Width(**{name: attributes[name] for name in _ATTRIBUTES})


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        id=f"{NAMESPACE}::embed_norms",
        attributes=_ATTRIBUTES,
        spec=lambda a: plan.embed_norms(_width(a)),
        example=width_attributes(Width()),
        outputs=lambda s, a: {"joined": (s["ids"][0], s["ids"][1], 2 * a["hidden"])},
        values=lambda s, a: {"V": s["table"][0], "rows": s["ids"][0] * s["ids"][1]},
    ),
    Operation(
        id=f"{NAMESPACE}::rms_norm",
        attributes=_ATTRIBUTES,
        spec=lambda a: plan.rms_norm(_width(a)),
        example=width_attributes(Width()),
        outputs=lambda s, a: {"normed": (s["x"][0], s["x"][1], a["hidden"])},
        values=lambda s, a: {"rows": s["x"][0] * s["x"][1]},
    ),
)
