"""The draft layer's input as plugin layers of full TensorRT.

`embed_norms` is the whole input in one kernel; `rms_norm` is what the unfused order takes, twice.
"""

from __future__ import annotations

from typing import Any

from plugins.aot.quick import Attributes, Operation
from plugins.mtp import plan
from plugins.mtp.plan import Rows

NAMESPACE = "mtp"
_ATTRIBUTES = {"width": int, "eps": float, "dtype": str}


def row_attributes(rows: Rows) -> dict[str, Any]:
    """The attributes by which a plugin layer knows its rows."""
    return {"width": rows.width, "eps": rows.eps, "dtype": rows.dtype}


def _rows(attributes: Attributes) -> Rows:
    return Rows(**{name: attributes[name] for name in _ATTRIBUTES})


EMBED_NORMS = Operation(
    id=f"{NAMESPACE}::embed_norms",
    attributes=_ATTRIBUTES,
    spec=lambda a: plan.embed_norms(_rows(a)),
    example=row_attributes(Rows()),
    outputs=lambda s, a: {"joined": (s["ids"][0], s["ids"][1], 2 * a["width"])},
    values=lambda s, a: {"V": s["table"][0], "rows": s["ids"][0] * s["ids"][1]},
)
RMS_NORM = Operation(
    id=f"{NAMESPACE}::rms_norm",
    attributes=_ATTRIBUTES,
    spec=lambda a: plan.rms_norm(_rows(a)),
    example=row_attributes(Rows()),
    outputs=lambda s, a: {"normed": (s["x"][0], s["x"][1], a["width"])},
    values=lambda s, a: {"rows": s["x"][0] * s["x"][1]},
)
OPERATIONS = (EMBED_NORMS, RMS_NORM)
