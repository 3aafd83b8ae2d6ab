"""Plugin operations: run by the project's own, or by implementations that the caller brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runtime.interpreter.kinds.call import Bound, Call, Result


def plugin(call: Call) -> Bound:
    """Call the operation's implementation with all inputs and its attributes."""
    op = str(call.attribute("op"))
    values = dict(call.attribute("values"))
    function = _implementation(call, op, values)
    present = tuple(i for i in range(len(call.values)) if call.has(i))
    count = len(call.values)

    def run(*tensors: torch.Tensor) -> Result:
        inputs: list[torch.Tensor | None] = [None] * count
        for position, value in zip(present, tensors, strict=True):
            inputs[position] = value
        results = function(tuple(inputs))
        return results[0] if len(results) == 1 else results

    return Bound(run, present)


def _implementation(
    call: Call, op: str, values: dict[str, Any]
) -> Callable[[tuple[torch.Tensor | None, ...]], tuple[torch.Tensor, ...]]:
    given = call.plugin_ops.get(op)
    if given is not None:
        return lambda inputs: given(inputs, values)
    # Only programs with plugins need the kernels and their compiler.
    from plugins.operations import implementation

    return implementation(op, values)
