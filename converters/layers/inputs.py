"""The inputs of a network that works on several slots, chunks or streams at once."""

from __future__ import annotations

from converters.definition import Definition, Dims, InputKind
from plugins.trt.network import Network
from plugins.trt.types import Tensor


class Inputs:
    """Adds inputs [B, ...] and remembers what they are and how large they may be.

    Args:
        net: that gets them.
        most: largest B.
        best: B to optimise for; the smallest is 1.
    """

    def __init__(self, net: Network, most: int, best: int) -> None:
        self._net, self._most, self._best = net, most, best
        self._kinds: dict[str, InputKind] = {}
        self._profile: dict[str, tuple[Dims, Dims, Dims]] = {}

    def add(
        self,
        name: str,
        kind: InputKind,
        dtype: str,
        dims: Dims = (),
        ranges: tuple[Dims, ...] | None = None,
    ) -> Tensor:
        """An input [B, *dims]; `ranges` are the smallest, best and largest dims."""
        least, best, most = ranges or (dims, dims, dims)
        self._kinds[name] = kind
        self._profile[name] = ((1, *least), (self._best, *best), (self._most, *most))
        return self._net.input(name, dtype, (-1, *dims))

    def add_length(self, name: str, least: int, most: int) -> Tensor:
        """An input [N] of which only the length matters."""
        self._kinds[name] = "token"
        self._profile[name] = ((least,), (most,), (most,))
        return self._net.input(name, "int32", (-1,))

    def definition(self) -> Definition:
        """What the caller of `define` gets."""
        return Definition(kinds=self._kinds, profile=self._profile)
