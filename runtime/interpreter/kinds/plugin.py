"""Plugin operations: run by implementations that the caller brings along."""

from __future__ import annotations

import torch

from plugins.support.errors import CapabilityError
from runtime.interpreter.kinds.call import Bound, Call


def plugin(call: Call) -> Bound:
    """Call the operation's implementation with all inputs and its attributes."""
    op = str(call.attribute("op"))
    values = dict(call.attribute("values"))
    function = call.plugin_ops.get(op)
    if function is None:
        raise CapabilityError(
            "the interpreter has no implementation of a plugin operation",
            where=call.node.name,
            found=op,
            expected=", ".join(sorted(call.plugin_ops)) or "none is registered",
        )
    present = tuple(i for i in range(len(call.values)) if call.has(i))
    count = len(call.values)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs: list[torch.Tensor | None] = [None] * count
        for position, value in zip(present, tensors, strict=True):
            inputs[position] = value
        return tuple(function(tuple(inputs), values))

    return Bound(run, present)
