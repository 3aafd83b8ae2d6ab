"""The draft layer's input in a network: plugin layers where the flavour has them, native elsewhere.

`embed_norms` is one operation; `embed_then_norms` is the unfused order, for tables of which a rank
cannot look up rows by itself. Both give the same values to the last bit.
"""

from __future__ import annotations

from typing import Literal

from plugins.mtp import lowering
from plugins.trt.network import Network
from plugins.trt.norms import rms_norm
from plugins.trt.types import Tensor


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
    """Lookup, zero at position 0, and both norms.

    Args:
        net: the network.
        ids, positions: int32 [B, S].
        table: [V, D].
        hidden: [B, S, D].
        embed_weight, hidden_weight: [D].
        eps: added to the mean squares.

    Returns:
        [B, S, 2D], the embedding's half first.
    """
    if not net.capability.has_plugins:
        return lowering.embed_norms(
            net, ids, positions, table, hidden, embed_weight, hidden_weight, eps
        )
    tensors = {
        "ids": ids,
        "positions": positions,
        "table": table,
        "hidden": hidden,
        "embed_weight": embed_weight,
        "hidden_weight": hidden_weight,
    }
    return _added(net, "embed_norms", tensors, hidden, eps)["joined"]


def embed_then_norms(
    net: Network,
    ids: Tensor,
    positions: Tensor,
    table: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
) -> Tensor:
    """As `embed_norms`, one step after the other."""
    embedded = lowering.looked_up(net, ids, positions, table)
    halves = ((embedded, embed_weight), (hidden, hidden_weight))
    return net.concat([_norm(net, x, weight, eps) for x, weight in halves], 2)


def _norm(net: Network, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not net.capability.has_plugins:
        return rms_norm(net, x, weight, eps, centered=False)
    tensors = {"x": x, "weight": weight}
    return _added(net, "rms_norm", tensors, x, eps)["normed"]


def _added(
    net: Network,
    name: Literal["embed_norms", "rms_norm"],
    tensors: dict[str, Tensor],
    rows: Tensor,
    eps: float,
) -> dict[str, Tensor]:
    # Only networks with plugin layers need Triton.
    from plugins.aot import layer
    from plugins.mtp.plan import Rows
    from plugins.mtp.plugin import EMBED_NORMS, RMS_NORM, row_attributes

    operation = EMBED_NORMS if name == "embed_norms" else RMS_NORM
    attributes = row_attributes(Rows(net.shape(rows)[-1], eps, net.dtype(rows)))
    return layer.add(net, operation, tensors, attributes)
