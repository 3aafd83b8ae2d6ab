"""What a token and a sequence cost in device memory, per group of equal layers.

The plan is read off the engine's own cache and state inputs, so it cannot disagree with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict

from plugins.support.dtypes import dtype


class SlotTensor(Protocol):
    """A cache or state input of an engine; dimension 0 is the slot."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> str: ...


class LayerGroup(BaseModel):
    """Layers whose tensors of one name have one shape.

    Attributes:
        name: tensor name without the layer number, for example `key_cache`.
        kind: "cache" grows with the sequence, "state" does not.
        layers: layer numbers.
        dtype: element type.
        shape: dimensions of one layer and one slot.
        tokens_per_row: tokens that share a row of a cache (the compression ratio); 0 for a state.
        bytes_per_token: of one sequence, all layers of the group; 0 for a state.
        bytes_per_sequence: of one slot, all layers of the group, as allocated.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Literal["cache", "state"]
    layers: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]
    tokens_per_row: int
    bytes_per_token: float
    bytes_per_sequence: int


class CachePlan(BaseModel):
    """Memory of all caches and states.

    Attributes:
        max_batch_size: slots.
        max_seq_len: tokens that a sequence may have.
        cache_rows: rows of an uncompressed cache: max_seq_len rounded up, and scrap rows.
        groups: layer groups, in the order of the engine's inputs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_batch_size: int
    max_seq_len: int
    cache_rows: int
    groups: tuple[LayerGroup, ...]

    @classmethod
    def from_tensors(
        cls, tensors: Iterable[SlotTensor], max_batch_size: int, max_seq_len: int
    ) -> CachePlan:
        """Plan of an engine's inputs; those that are neither cache nor state are passed over.

        Cache shapes are [slots, heads, rows, width], state shapes [slots, ...].
        """
        found: dict[tuple[str, str, tuple[int, ...]], tuple[str, list[int]]] = {}
        for tensor in tensors:
            if tensor.kind not in ("cache", "state"):
                continue
            name, _, layer = tensor.name.rpartition(".")
            key = (name, tensor.dtype, tuple(tensor.shape[1:]))
            found.setdefault(key, (tensor.kind, []))[1].append(int(layer))
        rows = max((key[2][1] for key, (kind, _) in found.items() if kind == "cache"), default=0)
        groups = tuple(
            _group(name, kind, layers, element, shape, rows)
            for (name, element, shape), (kind, layers) in found.items()
        )
        return cls(
            max_batch_size=max_batch_size, max_seq_len=max_seq_len, cache_rows=rows, groups=groups
        )

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more token of one sequence fills."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes that one slot takes, as allocated."""
        return sum(group.bytes_per_sequence for group in self.groups)

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots, without the second copy that ping-pong states need."""
        return self.max_batch_size * self.bytes_per_sequence

    def rows(self) -> list[tuple[str, ...]]:
        """Table for people: group, layers, dtype, bytes per token, per sequence, all slots."""
        lines: list[tuple[str, ...]] = [
            ("group", "layers", "dtype", "bytes/token", "bytes/sequence", "all slots")
        ]
        for group in self.groups:
            lines.append(
                (
                    group.name,
                    str(len(group.layers)),
                    group.dtype,
                    f"{group.bytes_per_token:,.0f}" if group.kind == "cache" else "-",
                    f"{group.bytes_per_sequence:,}",
                    f"{group.bytes_per_sequence * self.max_batch_size:,}",
                )
            )
        per_token, per_sequence = f"{self.bytes_per_token:,.0f}", f"{self.bytes_per_sequence:,}"
        lines.append(("total", "", "", per_token, per_sequence, f"{self.total_bytes:,}"))
        return lines

    def table(self) -> str:
        """`rows` as aligned text."""
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column in (0, 2) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def _group(
    name: str, kind: str, layers: list[int], element: str, shape: tuple[int, ...], rows: int
) -> LayerGroup:
    per_layer = dtype(element, name).nbytes(prod(shape))
    tokens_per_row = rows // shape[1] if kind == "cache" else 0
    return LayerGroup(
        name=name,
        kind="cache" if kind == "cache" else "state",
        layers=tuple(layers),
        dtype=element,
        shape=shape,
        tokens_per_row=tokens_per_row,
        bytes_per_token=len(layers) * per_layer / rows if kind == "cache" else 0,
        bytes_per_sequence=len(layers) * per_layer,
    )
