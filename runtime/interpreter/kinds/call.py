"""What a kind sees when it prepares one node, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from plugins.support.errors import CapabilityError, InputError
from runtime.interpreter.program import Node

Result = torch.Tensor | tuple[torch.Tensor, ...]
Function = Callable[..., Result]
# (input tensors, attributes) -> output tensors; None marks an absent optional input.
PluginOp = Callable[[tuple[torch.Tensor | None, ...], dict[str, Any]], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Bound:
    """A prepared node: `function` takes the inputs at positions `arguments`."""

    function: Function
    arguments: tuple[int, ...]


@dataclass
class Call:
    """One node with the operands it has in the call shapes being prepared.

    Attributes:
        node: the node.
        values: operands, None where absent; shapes and types hold for every later run, values
            only where `constant`.
        constant: which operands have the same values in every run with these shapes.
        names: our dtype names of the operands, as declared by the network.
        out_dtypes: torch types of the results, after promotion.
        out_names: dtype names of the results, as declared by the network.
        device: where results live.
        plugin_ops: implementations of plugin operations.
    """

    node: Node
    values: list[torch.Tensor | None]
    constant: list[bool]
    names: list[str | None]
    out_dtypes: list[torch.dtype]
    out_names: list[str]
    device: torch.device
    plugin_ops: Mapping[str, PluginOp] = field(default_factory=dict)

    def attribute(self, name: str) -> Any:
        """An attribute. Raises InputError when the program does not carry it."""
        try:
            return self.node.attributes[name]
        except KeyError:
            raise InputError(
                "a layer of the program lacks an attribute", where=self.node.name, expected=name
            ) from None

    def tensor(self, index: int) -> torch.Tensor:
        """Operand `index`. Raises InputError when it is absent."""
        value = self.values[index] if index < len(self.values) else None
        if value is None:
            raise InputError(
                "a layer of the program lacks an input",
                where=self.node.name,
                expected=f"input {index}",
            )
        return value

    def has(self, index: int) -> bool:
        """Whether operand `index` is present."""
        return index < len(self.values) and self.values[index] is not None

    def host(self, index: int) -> list[int]:
        """Values of an operand that shapes results; flat.

        Raises CapabilityError when it depends on data rather than on shapes.
        """
        value = self.tensor(index)
        if not self.constant[index]:
            raise CapabilityError(
                "a shape depends on computed values, which no engine supports",
                where=self.node.name,
                found=f"input {index}",
            )
        return [int(v) for v in value.reshape(-1).tolist()]

    def unknown(self, what: str, found: object) -> CapabilityError:
        """An error for a variant of this kind that the interpreter lacks."""
        return CapabilityError(
            f"the interpreter does not know this {what}", where=self.node.name, found=str(found)
        )
