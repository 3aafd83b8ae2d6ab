"""Linear maps, small weights and the gated activation."""

from __future__ import annotations

from converters.layers.stored import stored_matrix
from plugins.trt.network import Network
from plugins.trt.types import Tensor


def linear(net: Network, x: Tensor, name: str, out_features: int, *, pieces: int = 1) -> Tensor:
    """y = W x without bias, in x's element type.

    Args:
        x: [..., in].
        name: module name; the checkpoint holds `{name}.weight` [out, in], plain or quantised.
        out_features: rows of W.
        pieces: equal parts of the rows that were quantised apart, as gate and up are.

    Returns:
        [..., out].
    """
    shape = (out_features, net.shape(x)[-1])
    matrix = stored_matrix(net, name, shape, net.dtype(x), pieces=pieces)
    leading = net.rank(x) - 2
    if leading:
        matrix = net.unsqueeze(matrix, list(range(leading)))
    return net.matmul(x, matrix, transpose_b=True)


def stored_weight(net: Network, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A small weight that a checkpoint may keep in float32 or in its own type.

    Args:
        name: full tensor name.
        dtype: the checkpoint's type, also what a missing tensor is reported as.
        shape: declared shape.
    """
    info = net.source.info(name)
    kept = "float32" if info is not None and info.dtype == "float32" else dtype
    return net.weight(name, kept, shape)


def swiglu(net: Network, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32, in the operands' type."""
    wide = net.mul(net.silu(net.cast(gate, "float32")), net.cast(up, "float32"))
    return net.cast(wide, net.dtype(gate))
