"""How a tensor of the TensorRT-LLM checkpoint is made, as data.

Row-major tensors that are stacked or joined by rows lie one after another in memory, so joining
the shards of a table, stacking experts and putting gate rows above up rows are all one operation:
write the source tensors in the given order, cast where the type differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from converters.checkpoint.header import Shape, TensorEntry
from plugins.support.dtypes import DType

Operation = Literal["copy", "reciprocal", "ones", "nvfp4", "fp8", "fp8_block"]


@dataclass(frozen=True)
class Part:
    """A source tensor by its canonical name, and the shape it must have.

    Attributes:
        room: rows and columns that a matrix takes in the target, zeros behind its own; by default
            its shape.
    """

    name: str
    shape: Shape
    room: Shape | None = None


@dataclass(frozen=True)
class Wanted:
    """A tensor of the target, made of parts in order.

    Attributes:
        target: name in the TensorRT-LLM checkpoint.
        shape: of the target; holds as many elements as the parts (their rooms) together.
        parts: the sources.
        matrices: leading dimensions of the target that count whole matrices (0 for a plain
            matrix, 1 for stacked experts).
        pieces: projections that lie one below the other in each matrix (2 for gate and up).
        keep_float32: a float32 source stays float32 whatever the checkpoint's type.
        may_widen: a float32 source among narrower weights is expected, and is cast.
        quantize: which `--only` class the tensor belongs to, None when it is never quantised.
        precise: a source may hold it quantised, but it is not quantised here.
        fused: name that tensors share which engines join into one product: such a product has one
            global scale, so they get the same.
        scale_owner: module that holds the one scale of all parts, when they share it.
    """

    target: str
    shape: Shape
    parts: tuple[Part, ...]
    matrices: int = 0
    pieces: int = 1
    keep_float32: bool = False
    may_widen: bool = False
    quantize: Literal["experts", "mlp", "all"] | None = None
    precise: bool = False
    fused: str | None = None
    scale_owner: str | None = None

    def __post_init__(self) -> None:
        elements = sum(math.prod(part.room or part.shape) for part in self.parts)
        if elements != math.prod(self.shape):
            raise ValueError(f"{self.target}: parts hold {elements} elements, not {self.shape}")


def routed_experts(
    target: str,
    source: str,
    count: int,
    hidden: int,
    inner: int,
    is_stacked: Callable[[str], bool],
) -> list[Wanted]:
    """Experts' matrices [count, 2 * inner, hidden] (gate above up) and [count, hidden, inner].

    Args:
        target, source: prefixes of the names in the result and in the source.
        count: experts.
        hidden, inner: channels of the model and within an expert.
        is_stacked: whether the source holds one tensor of all experts under a name, such as
            "...experts.gate_up_proj"; else each projection of each expert is one.
    """
    wanted = []
    for name, projections, rows, columns in (
        ("gate_up", ("gate_proj", "up_proj"), inner, hidden),
        ("down", ("down_proj",), hidden, inner),
    ):
        shape = (count, len(projections) * rows, columns)
        stacked = f"{source}.{name}_proj"
        parts: tuple[Part, ...] = (Part(stacked, shape),)
        if not is_stacked(stacked):
            parts = tuple(
                Part(f"{source}.{expert}.{projection}.weight", (rows, columns))
                for expert in range(count)
                for projection in projections
            )
        wanted.append(
            Wanted(
                f"{target}.{name}.weight",
                shape,
                parts,
                matrices=1,
                pieces=len(projections),
                quantize="experts",
            )
        )
    return wanted


@dataclass(frozen=True)
class Module:
    """How one matrix is stored in the source, of which declarations speak, and in the result.

    Attributes:
        target: module name in the TensorRT-LLM checkpoint.
        source: canonical names of its source modules.
        algorithm: in the result, TensorRT-LLM's name, None for a plain matrix.
        group_size: columns per scale in the result.
        stored, stored_group_size: the same in the source.
        activation: whether a scale of its input comes with it.
        scope: `--only` class; None for what is never quantised.
        is_stacked: the source holds several matrices in one tensor.
        is_table: looked up by row, not multiplied.
    """

    target: str
    source: tuple[str, ...]
    algorithm: str | None
    group_size: int | None
    stored: str | None
    stored_group_size: int | None
    activation: bool
    scope: str | None
    is_stacked: bool
    is_table: bool


@dataclass(frozen=True)
class Output:
    """One tensor in the output file."""

    name: str
    dtype: DType
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.nbytes(math.prod(self.shape))


@dataclass(frozen=True)
class Recipe:
    """Outputs, the sources they are made of, and how.

    Attributes:
        outputs: of a copy, one, or several of one type that lie one after another in the file;
            weight, block scales and global scales for a quantisation.
        sources: tensors in order; none for a constant.
        operation: what happens to the elements.
        matrices: whole matrices in the sources; each is quantised with its own global scale.
        pieces: projections in each matrix.
        matrix_shape: rows and columns of each matrix that is quantised.
        positive: every value must be finite and above zero (scales).
        peers: further tensors whose largest magnitude counts for the global scale.
        room: of a copy: rows and columns that each source, a matrix, takes in the output.
    """

    outputs: tuple[Output, ...]
    sources: tuple[TensorEntry, ...]
    operation: Operation = "copy"
    matrices: int = 1
    pieces: int = 1
    matrix_shape: tuple[int, int] = (0, 0)
    positive: bool = False
    peers: tuple[TensorEntry, ...] = ()
    room: Shape | None = None
