"""The draft layer's input out of native layers, as one norm of both halves."""

from __future__ import annotations

from plugins.trt.network import Network
from plugins.trt.norms import rms_norm
from plugins.trt.types import Tensor


def looked_up(net: Network, ids: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rows of the table [B, S, D], zero at position 0.

    Args:
        ids, positions: int32 [B, S].
        table: [V, D].
    """
    last = net.shape(table)[0] - 1
    rows = net.gather(table, net.minimum(ids, last), 0)
    return net.select(net.equal(net.unsqueeze(positions, [2]), 0), 0.0, rows)


def embed_norms(
    net: Network,
    ids: Tensor,
    positions: Tensor,
    table: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
) -> Tensor:
    """Lookup and both norms as one reduction over rows [B, S, 2, D]; see `reference.embed_norms`.

    Returns:
        [B, S, 2D].
    """
    embedded = looked_up(net, ids, positions, table)
    pair = net.concat([net.unsqueeze(x, [2]) for x in (embedded, hidden)], 2)
    weights = net.concat([net.unsqueeze(w, [0]) for w in (embed_weight, hidden_weight)], 0)
    normed = rms_norm(net, pair, weights, eps, centered=False)
    width = 2 * net.shape(hidden)[2]
    return net.reshape(normed, [net.dim(hidden, 0), net.dim(hidden, 1), width])
