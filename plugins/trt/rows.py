"""Rows that a call leaves for the next one."""

from __future__ import annotations

from plugins.trt.network import Network
from plugins.trt.types import Tensor


def last_rows(net: Network, rows: Tensor, new_lengths: Tensor, count: int) -> Tensor:
    """The `count` rows before row `count + new_lengths[b]`, that is the next state of each slot.

    `rows` are the `count` rows of the old state followed by this call's tokens; of these only the
    first new_lengths[b] are real, so that padding leaves no trace and 0 keeps the state.

    Args:
        rows: [B, count + S, C].
        new_lengths: int32 [B].

    Returns:
        [B, count, C].
    """
    first = net.unsqueeze(new_lengths, [1])
    index = net.add(first, net.unsqueeze(net.iota(count), [0]))
    return net.gather(rows, index, axis=1, elementwise_dims=1)
