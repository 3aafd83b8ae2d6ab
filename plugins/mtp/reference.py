"""The input of a draft layer in torch: the definition of right.

Names of sizes: B slots, S tokens per slot, V rows of the draft layer's own embedding table, D
hidden width. The draft layer reads, at position i, the embedding of the token at i + 1 and the text
model's hidden state at i:

    joined = [ RMS(e) * embed_weight | RMS(h) * hidden_weight ],  RMS(x) = x / sqrt(mean(x^2) + eps)

with e = table[min(id, V - 1)], and e = 0 at position 0 (the hidden state stays). Norms are computed
in float32 and rounded once, to the type of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's type."""
    wide = x.float()
    mean = (wide * wide).mean(-1, keepdim=True)
    normed = wide * torch.reciprocal(torch.sqrt(mean + eps)) * weight.float()
    return normed.to(x.dtype)


def embed_norms(
    ids: Tensor,
    positions: Tensor,
    table: Tensor,
    hidden: Tensor,
    embed_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
) -> Tensor:
    """The joined rows [B, S, 2D].

    Args:
        ids: int32 [B, S], the tokens one position on.
        positions: int32 [B, S].
        table: [V, D].
        hidden: [B, S, D], table's type.
        embed_weight, hidden_weight: [D], table's type.
        eps: added to the mean squares.
    """
    embedded = table[ids.clamp(max=table.shape[0] - 1).long()]
    embedded = torch.where((positions == 0)[..., None], 0.0, embedded)
    first = rms_norm(embedded, embed_weight, eps)
    return torch.cat([first, rms_norm(hidden, hidden_weight, eps)], dim=-1)
