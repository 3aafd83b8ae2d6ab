"""Where QSA stands in a network, and what a layer of it takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from plugins.qsa.geometry import Geometry
from plugins.trt.network import Dim, Network
from plugins.trt.rope import RotaryTable, frequencies
from plugins.trt.types import Tensor


@dataclass(frozen=True)
class Calls:
    """The calls of one engine; the same for all of its layers.

    What follows from them is added to the network when a layer first asks for it.

    Attributes:
        net: the network.
        context: many queries per slot, any number of them; else a fixed few.
        past, new: int32 [B], cached tokens before the call and valid ones in it.
        positions: int32 [B, S], padding included.
        queries: int32 [B, S], the same with -1 for padding.
        active: bool [B], false for padding slots.
        token_row: int32 [B], first cache row to write; behind all visible ones for padding slots.
        span: cache rows that a context call looks at.
        rows: most tokens of a sequence.
        cache_rows: rows of a cache.
        slots, steps: slots and queries per slot of the largest call.
        ratio: tokens per block.
        rotary_dim: rotated channels of a head.
        theta: base of the rotary `frequencies`.
        eps: of the norms.
        dtype: activation type.
    """

    net: Network
    context: bool
    past: Tensor
    new: Tensor
    positions: Tensor
    queries: Tensor
    active: Tensor
    token_row: Tensor
    span: Dim
    rows: int
    cache_rows: int
    slots: int
    steps: int
    ratio: int
    rotary_dim: int
    theta: float
    eps: float
    dtype: str

    @cached_property
    def frequencies(self) -> Tensor:
        """float32 [rotary_dim / 2]."""
        return self.net.literal(frequencies(self.rotary_dim, self.theta), "qsa.frequencies")

    @cached_property
    def rope(self) -> RotaryTable:
        """Of every position that a cache has a row for."""
        return RotaryTable(self.net, self.cache_rows, self.rotary_dim, self.theta, self.dtype)

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Of the call's tokens, padding included."""
        return self.rope.at(self.positions)

    @cached_property
    def first_block(self) -> Tensor:
        """int32 [B], the block that the call's first token belongs to."""
        return self.net.floor_div(self.past, self.ratio)

    @cached_property
    def block_row(self) -> Tensor:
        """int32 [B], where its key is written; behind all visible ones for padding slots."""
        return self.net.select(self.active, self.first_block, self.rows // self.ratio)


@dataclass(frozen=True)
class Site:
    """One layer.

    Attributes:
        calls: of the engine.
        geometry: of the layer.
    """

    calls: Calls
    geometry: Geometry

    @property
    def plugins(self) -> bool:
        """Whether plugin layers are added: the kernels take powers of two."""
        g = self.geometry
        sizes = (g.width, g.index_width, g.blocks, g.ratio)
        powers = all(size & (size - 1) == 0 for size in sizes)
        has_plugins = self.calls.net.capability.has_plugins
        return has_plugins and powers and min(g.width, g.index_width) >= 16


@dataclass(frozen=True)
class Projections:
    """What the linear layers give.

    Attributes:
        q_gate: [B, S, Hq * 2D], per head D query columns, then its D gate columns.
        key, value: [B, S, Hk * D].
        index_qk: [B, S, (Hi + 1) * Di], index query heads, then the one index key head.
    """

    q_gate: Tensor
    key: Tensor
    value: Tensor
    index_qk: Tensor


@dataclass(frozen=True)
class Norms:
    """Centred norm weights: query and key [D], index_query and index_key [Di]."""

    query: Tensor
    key: Tensor
    index_query: Tensor
    index_key: Tensor


@dataclass(frozen=True)
class Memory:
    """Network inputs that a layer reads and writes.

    Attributes:
        keys, values: caches [B, Hk, C, D].
        block_keys: cache [B, 1, NB, Di].
        state: [B, R - 1, Di], the raw index keys of the tokens before the call, newest last.
    """

    keys: Tensor
    values: Tensor
    block_keys: Tensor
    state: Tensor


@dataclass(frozen=True)
class Prepared:
    """What selection and attention read.

    Attributes:
        query: [B, Hq, S, D]; index_query: [B, Hi, S, Di].
        memory: caches with the new tokens, and the next state.
    """

    query: Tensor
    index_query: Tensor
    memory: Memory
