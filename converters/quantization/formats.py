"""The storage formats of a quantised weight, as data.

A module (`layers.3.mlp.experts.7.up_proj`) lies on disk as several tensors with one suffix each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from converters.checkpoint.header import Shape
from converters.quantization import fp8, nvfp4
from plugins.support.dtypes import COMPUTE_DTYPES

# rows: as many rows as the weight; blocks: one value per 128 x 128; scalar: one per matrix.
Kind = Literal["rows", "blocks", "scalar"]


@dataclass(frozen=True)
class Component:
    """One tensor of a module.

    Attributes:
        suffix: of the name on disk.
        target: of the name in the TensorRT-LLM checkpoint.
        dtypes: accepted element types.
        kind: how the tensor grows with the weight.
        per: weight columns that share one column of this tensor, for kind "rows".
        reciprocal: the file holds 1 / x.
        spread: of blocks, on disk [block rows, 1, block columns, 1].
    """

    suffix: str
    target: str
    dtypes: tuple[str, ...]
    kind: Kind
    per: int = 1
    reciprocal: bool = False
    spread: bool = False

    def shape(self, rows: int, columns: int) -> Shape:
        """The tensor's shape for one weight matrix."""
        if self.kind == "rows":
            return (rows, columns // self.per)
        if self.kind == "blocks":
            return (-(-rows // fp8.BLOCK), -(-columns // fp8.BLOCK))
        return ()

    def disk_shape(self, rows: int, columns: int) -> Shape:
        """The tensor's shape in a Hugging Face checkpoint."""
        shape = self.shape(rows, columns)
        return (shape[0], 1, shape[1], 1) if self.spread else shape


@dataclass(frozen=True, eq=False)
class Format:
    """One way of storing a module; there is one object of each.

    Attributes:
        name: for messages.
        algorithm: TensorRT-LLM's name.
        group_size: weight columns per scale.
        codes: the weight itself.
        scales: all of them are needed.
        activation: scale of the layer's input; either all matrices of a tensor have one or none.
    """

    name: str
    algorithm: str
    group_size: int | None
    codes: Component
    scales: tuple[Component, ...]
    activation: Component | None

    @property
    def components(self) -> tuple[Component, ...]:
        """What is always there."""
        return (self.codes, *self.scales)


_BLOCK_SCALE = "weights_scaling_factor"
_GLOBAL_SCALE = "weights_scaling_factor_2"
_ACTIVATION = "activation_scaling_factor"
_FLOATS = ("float32", "bfloat16")
_FP8_CODES = Component("weight", "weight", ("float8_e4m3fn",), "rows")
_INPUT_SCALE = Component("input_scale", _ACTIVATION, ("float32",), "scalar")

NVFP4 = Format(
    "NVFP4",
    "NVFP4",
    nvfp4.BLOCK,
    Component("weight", "weight", ("uint8",), "rows", per=2),
    (
        Component("weight_scale", _BLOCK_SCALE, ("float8_e4m3fn",), "rows", per=nvfp4.BLOCK),
        Component("weight_scale_2", _GLOBAL_SCALE, ("float32",), "scalar"),
    ),
    _INPUT_SCALE,
)
# The same codes and block scales; the global scales are stored as reciprocals.
NVFP4_PACKED = Format(
    "nvfp4-pack-quantized",
    "NVFP4",
    nvfp4.BLOCK,
    Component("weight_packed", "weight", ("uint8",), "rows", per=2),
    (
        Component("weight_scale", _BLOCK_SCALE, ("float8_e4m3fn",), "rows", per=nvfp4.BLOCK),
        Component("weight_global_scale", _GLOBAL_SCALE, ("float32",), "scalar", reciprocal=True),
    ),
    Component("input_global_scale", _ACTIVATION, ("float32",), "scalar", reciprocal=True),
)
FP8 = Format(
    "FP8 with one scale",
    "FP8",
    None,
    _FP8_CODES,
    (Component("weight_scale", _BLOCK_SCALE, _FLOATS, "scalar"),),
    _INPUT_SCALE,
)
# As transformers writes it; despite its name the value is multiplied, here and in blocks.
FP8_TRANSFORMERS = Format(
    "FP8 with one scale",
    "FP8",
    None,
    _FP8_CODES,
    (Component("weight_scale_inv", _BLOCK_SCALE, _FLOATS, "scalar"),),
    Component("activation_scale", _ACTIVATION, _FLOATS, "scalar"),
)
FP8_BLOCK = Format(
    "FP8 with 128 x 128 block scales",
    "FP8_BLOCK_SCALES",
    fp8.BLOCK,
    _FP8_CODES,
    (Component("weight_scale_inv", _BLOCK_SCALE, _FLOATS, "blocks"),),
    None,
)
# Model Optimizer's spelling of the same.
FP8_BLOCK_MODELOPT = Format(
    "FP8 with 128 x 128 block scales",
    "FP8_BLOCK_SCALES",
    fp8.BLOCK,
    _FP8_CODES,
    (Component("weight_scale", _BLOCK_SCALE, _FLOATS, "blocks", spread=True),),
    None,
)

# Not quantised: what it is made of, for code that treats all storages alike.
PLAIN = Component("weight", "weight", COMPUTE_DTYPES, "rows")

# Every suffix that belongs to a quantised weight, whatever the format.
SCALE_SUFFIXES = (
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "activation_scale",
)
