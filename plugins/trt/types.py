"""Element types and tensors as TensorRT names them, next to the project's names."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from plugins.support.errors import BuildError

# An ITensor of whichever TensorRT module is loaded; the bindings carry no usable type stubs.
Tensor: TypeAlias = Any

Flavor = Literal["tensorrt", "tensorrt_rtx"]
FLAVORS: tuple[Flavor, ...] = get_args(Flavor)

# The packed four-bit type has no row in the table of storage dtypes: on disk it is uint8,
# two values per byte, low nibble first.
FLOAT4 = "float4_e2m1fn"

_MEMBERS = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int8": "INT8",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOL",
    "uint8": "UINT8",
    "float8_e4m3fn": "FP8",
    FLOAT4: "FP4",
    "float8_e8m0fnu": "E8M0",
}
_NAMES = {member: name for name, member in _MEMBERS.items()}


def stored_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape in a file of a tensor with that logical dtype and shape."""
    if dtype == FLOAT4:
        return "uint8", (*shape[:-1], shape[-1] // 2)
    return dtype, shape


def readable_as(stored: str, declared: str) -> bool:
    """Whether stored elements can be bound as `declared`: equal types, or FP8 as its bytes, for
    GPUs without the type.
    """
    return stored == declared or (declared == "uint8" and stored == "float8_e4m3fn")


FLOATS = ("float32", "float16", "bfloat16")
INTS = ("int32", "int64")


def is_known(dtype: str) -> bool:
    """Whether TensorRT has an element type of our name."""
    return dtype in _MEMBERS


def to_trt(trt: Any, dtype: str, where: str | None = None) -> Any:
    """The `trt.DataType` of our dtype name. Raises BuildError when TensorRT has none."""
    try:
        return getattr(trt.DataType, _MEMBERS[dtype])
    except KeyError:
        raise BuildError(
            "TensorRT has no such element type",
            where=where,
            expected=", ".join(_MEMBERS),
            found=dtype,
        ) from None


def from_trt(dtype: Any) -> str:
    """Our name of a `trt.DataType` member."""
    return _NAMES[dtype.name]
