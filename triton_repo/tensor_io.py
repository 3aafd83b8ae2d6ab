"""Between Triton's tensors and Python values; the only module that knows both."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from triton_repo.frontend.problems import problem
from triton_repo.tensors import RESPONSE, Field, Tensor

Array = npt.NDArray[Any]
Row = dict[str, Any]

NUMPY: dict[str, Any] = {
    "STRING": np.object_, "BOOL": np.bool_, "INT32": np.int32, "INT64": np.int64,
    "UINT64": np.uint64, "FP32": np.float32, "UINT8": np.uint8,
}  # fmt: skip
# Parameters that clients and the server set beside a model's own.
KNOWN_PARAMETERS = frozenset(
    {
        "id",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "binary_data_output",
    }
)
# Fields whose bytes are data, not text.
BINARY_FIELDS = frozenset({"image_bytes_input", "video_bytes_input"})
# Fields that stay arrays: too many values to be made Python numbers.
ARRAY_FIELDS = frozenset({"audio_samples", "input_features"})
_ONE_VALUE = (1, 1)


def read_rows(tensors: Mapping[str, Array], fields: Mapping[str, Field]) -> list[Row]:
    """One dict per batch row with public field names, from tensors of shape [batch, …].

    `fields` has the field of each tensor by the tensor's name. Raises UsageError naming the field
    for a wrong shape, text that is not UTF-8, or a number that is not finite.
    """
    first = next(iter(tensors.values()), None)
    batch = first.shape[0] if first is not None and first.ndim else 1
    rows: list[Row] = [{} for _ in range(batch)]
    for tensor_name, array in tensors.items():
        field = fields[tensor_name]
        if field.scalar and array.shape == _ONE_VALUE and batch == 1:
            rows[0][field.name] = _element(field, array.item())
            continue
        if array.ndim < 1 or array.shape[0] != batch:
            raise problem(field.name, "has the wrong shape", expected=f"[{batch}, …]",
                          found=list(array.shape))  # fmt: skip
        if field.scalar and array.size == batch:
            for row, value in zip(rows, array.ravel().tolist(), strict=True):
                row[field.name] = _element(field, value)
            continue
        for row, values in zip(rows, array, strict=True):
            row[field.name] = _value(field, values)
    return rows


def _value(field: Field, values: Array) -> Any:
    if field.name in ARRAY_FIELDS:
        return values
    if field.dtype == "UINT8":
        return values.tobytes()
    if field.scalar:
        raise problem(field.name, "must be one value", found=f"{values.size} values")
    flat = values.ravel().tolist()
    if field.dtype not in ("STRING", "FP32"):
        return flat
    return [_element(field, v) for v in flat]


def _element(field: Field, value: Any) -> Any:
    if field.dtype == "STRING":
        return value if field.name in BINARY_FIELDS else _text(field.name, value)
    if field.dtype == "FP32":
        # The shortest decimal that is this float32: 0.9 and not 0.8999999761581421.
        return _finite(field.name, float(str(np.float32(value))))
    return value


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError:
        raise problem(name, "is not valid UTF-8") from None


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise problem(name, "is not a finite number", found=value)
    return value


def check_parameters(text: str, fields: Sequence[str]) -> None:
    """Refuse request parameters that look like a mistyped field.

    The generate endpoint turns every unknown JSON key into a parameter and would ignore it.
    """
    if len(text) <= 2:
        return
    for name in json.loads(text):
        if name in KNOWN_PARAMETERS or name.startswith("triton_"):
            continue
        close = get_close_matches(name, fields, n=1)
        hint = f"a field of this model, perhaps {close[0]}" if close else "a field of this model"
        raise problem(name[:60], "is not known", expected=hint)


_RESPONSE = {t.name: t for t in RESPONSE}


def array_of(tensor: Tensor, value: Any) -> Array:
    """One row's value as an array of the tensor's type and rank, without batch dimension."""
    if tensor.dtype == "STRING":
        items = value if isinstance(value, list) else [value]
        encoded = [v.encode("utf-8", "replace") if isinstance(v, str) else v for v in items]
        return np.array(encoded, dtype=np.object_)
    array = np.asarray(value, dtype=NUMPY[tensor.dtype])
    if array.ndim == len(tensor.dims):
        return array
    # An empty list has lost its inner dimensions.
    return array.reshape([d if d > 0 else (array.size if i == 0 else 0)
                          for i, d in enumerate(tensor.dims)])  # fmt: skip


def batch_of(tensor: Tensor, rows: Sequence[Any], fill: Any = 0) -> Array:
    """Rows of unequal length as one array [batch, …], filled at the end."""
    if len(rows) == 1:
        return array_of(tensor, rows[0])[np.newaxis]
    arrays = [array_of(tensor, row) for row in rows]
    shape = tuple(max(sizes) for sizes in zip(*(a.shape for a in arrays), strict=True))
    filler = b"" if tensor.dtype == "STRING" else fill
    out = np.full((len(arrays), *shape), filler, dtype=NUMPY[tensor.dtype])
    for row, array in zip(out, arrays, strict=True):
        row[tuple(slice(0, n) for n in array.shape)] = array
    return out


def response_tensor(name: str) -> Tensor:
    """The public output of that name."""
    return _RESPONSE[name]
