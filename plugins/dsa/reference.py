"""DSA (token-sparse attention over MLA latents) in torch: the definition of right.

Names of sizes: B slots, S queries per slot, C cached rows per slot, H attention heads, L latent
width, R rotary width, Hi index heads, Di index width, K tokens a query may keep, W window.
Everything is computed in float32 and rounded once, to the dtype of the queries.

Rows. Query t of slot b stands at position past_lengths[b] + t and is real when
t < new_lengths[b]; it sees the past_lengths[b] + t + 1 tokens up to and including its own. Any
other query is padding: it sees nothing, keeps nothing and its output is zero, whatever the caches
hold.

Selection. The min(K, visible) visible tokens with the highest index score are kept, for all
attention heads alike. Equal scores (exact zeros are common behind the ReLU): the lower token index
is kept. Kept tokens are listed in ascending order.

Latent form. A cached row is [c | k_rope]: the normed and rescaled latent, then the one rotary key
that all heads share. Scores are q_latent . c + q_rope . k_rope times the scale of the *expanded*
head, (nope + rope)^-1/2; values are c itself. The head-wise gate is one scalar per head, so it
commutes with the value up-projection and is applied to the latent output here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Queries handled at once; bounds the gathered latents at real sizes.
_QUERY_TILE = 16


@dataclass(frozen=True)
class Expanded:
    """Keys and values of every head, as `W_kvb c` gives them.

    Attributes:
        key: [B, C, H, nope], without the rotary part.
        value: [B, C, H, V].
    """

    key: Tensor
    value: Tensor


def visible_counts(past_lengths: Tensor, new_lengths: Tensor, queries: int) -> Tensor:
    """Tokens that each query sees: int32 [B, S], 0 for padding queries."""
    step = torch.arange(queries, device=past_lengths.device)
    counts = past_lengths[:, None] + step + 1
    return torch.where(step < new_lengths[:, None], counts, 0).to(torch.int32)


def index_scores(index_query: Tensor, index_keys: Tensor, head_weights: Tensor) -> Tensor:
    """Score of every cached token for every query.

    I[s, t] = sum_h w[s, h] Hi^-1/2 relu(q[s, h] . k[t] Di^-1/2), signed weights, no softmax.

    Args:
        index_query: [B, S, Hi, Di].
        index_keys: [B, C, Di], one key per token for all index heads.
        head_weights: [B, S, Hi], as projected.

    Returns:
        float32 [B, S, C], visibility not yet applied.
    """
    heads, width = index_query.shape[-2:]
    dots = torch.einsum("bshd,btd->bsht", index_query.float(), index_keys.float())
    mixed = torch.einsum("bsht,bsh->bst", dots.relu(), head_weights.float())
    return mixed * (heads * width) ** -0.5


def select_tokens(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """The `count` best visible tokens of each query.

    Args:
        scores: float [B, S, C].
        visible: int [B, S], how many leading tokens may be chosen.
        count: K.

    Returns:
        int32 [B, S, K], ascending, -1 behind the last. Equal scores: the lower index is kept.
    """
    tokens = scores.shape[-1]
    ids = torch.arange(tokens, device=scores.device)
    masked = scores.masked_fill(ids >= visible[..., None], float("-inf"))
    # A stable descending sort keeps equal scores in the order of their indices.
    order = masked.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    kept = torch.arange(order.shape[-1], device=scores.device) < visible[..., None]
    order = order.masked_fill(~kept, tokens).sort(dim=-1).values
    if order.shape[-1] < count:
        order = torch.nn.functional.pad(order, (0, count - order.shape[-1]), value=tokens)
    return order.masked_fill(order == tokens, -1).to(torch.int32)


def window_rows(
    past_lengths: Tensor,
    new_lengths: Tensor,
    window_base: Tensor,
    *,
    queries: int,
    window: int,
    rows: int,
) -> Tensor:
    """Cache rows in each query's window (itself and the W - 1 tokens before it).

    The token at position p lives in row (p - window_base) mod rows.

    Returns:
        int32 [B, S, W], in the order of positions, -1 where there is no token.
    """
    newest = past_lengths[:, None] + torch.arange(queries, device=past_lengths.device)
    positions = newest[..., None] + torch.arange(1 - window, 1, device=past_lengths.device)
    real = visible_counts(past_lengths, new_lengths, queries)[..., None] > 0
    found = (positions - window_base[:, None, None]).remainder(rows)
    return torch.where(real & (positions >= 0), found, -1).to(torch.int32)


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    token_ids: Tensor,
    *,
    scale: float,
    gate: Tensor | None = None,
) -> Tensor:
    """Absorbed attention of each query over its own list of cached rows, optionally gated.

    Args:
        q_latent: [B, S, H, L], the query taken through the key up-projection.
        q_rope: [B, S, H, R], rotated.
        cache: [B, C, L + R].
        token_ids: int32 [B, S, n], -1 = unused, any order.
        scale: factor on the dot products.
        gate: [B, S, H]; the output of a head is multiplied by its logistic function.

    Returns:
        [B, S, H, L] in q_latent's dtype; rows without any token are zero.
    """
    out, _ = latent_part(q_latent, q_rope, cache, token_ids, scale=scale)
    return _gated(out, gate).to(q_latent.dtype)


def latent_part(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, token_ids: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over some of each query's rows, to be joined with that over the others.

    Args:
        as for `latent_attention`.

    Returns:
        float32 [B, S, H, L], and the base-2 logarithm of the sum of exponentials, float32
        [B, S, H], -inf without any row.
    """
    width = q_latent.shape[-1]
    out = torch.zeros_like(q_latent, dtype=torch.float32)
    lse = q_latent.new_zeros(q_latent.shape[:3], dtype=torch.float32)
    for b in range(q_latent.shape[0]):
        for start in range(0, q_latent.shape[1], _QUERY_TILE):
            tile = slice(start, start + _QUERY_TILE)
            ids = token_ids[b, tile]
            used = ids >= 0
            # Rows of unused entries are cleared, so that garbage in the cache cannot spread.
            rows = cache[b, ids.clamp_min(0).long()].float()
            rows = rows.masked_fill(~used[..., None], 0.0)
            query = torch.cat([q_latent[b, tile], q_rope[b, tile]], dim=-1).float()
            logits = torch.einsum("shd,snd->shn", query, rows) * scale
            out[b, tile] = torch.einsum(
                "shn,snl->shl", _softmax(logits, used[:, None]), rows[..., :width]
            )
            kept = logits.masked_fill(~used[:, None], float("-inf"))
            lse[b, tile] = torch.logsumexp(kept, dim=-1) / math.log(2)
    return out, lse


def expanded_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    expanded: Expanded,
    k_rope: Tensor,
    visible: Tensor,
    *,
    scale: float,
    window: int | None = None,
    first: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Dense causal or windowed attention over expanded keys and values, optionally gated.

    Args:
        q_nope: [B, S, H, nope]; q_rope: [B, S, H, R], rotated.
        expanded: keys and values of the C tokens, in the order of their positions.
        k_rope: [B, C, R], the shared rotary keys.
        visible: int [B, S], leading tokens that a query sees.
        scale: factor on the dot products.
        window: a query sees only the last `window` of its visible tokens; None = all.
        first: int [B], rows before it belong to no token; None = 0.
        gate: as in `latent_attention`.

    Returns:
        [B, S, H, V] in q_nope's dtype; rows without any token are zero.
    """
    logits = torch.einsum("bshd,bthd->bhst", q_nope.float(), expanded.key.float())
    logits = (logits + torch.einsum("bshd,btd->bhst", q_rope.float(), k_rope.float())) * scale
    ids = torch.arange(k_rope.shape[1], device=k_rope.device)
    seen = ids < visible[..., None]
    if window is not None:
        seen &= ids >= visible[..., None] - window
    if first is not None:
        seen &= ids >= first[:, None, None]
    weights = _softmax(logits, seen[:, None])
    # Rows that no query sees are cleared, so that garbage behind the tokens cannot spread.
    value = expanded.value.float().masked_fill(~seen.any(1)[..., None, None], 0.0)
    mixed = torch.einsum("bhst,bthv->bshv", weights, value)
    return _gated(mixed, gate).to(q_nope.dtype)


def _softmax(logits: Tensor, used: Tensor) -> Tensor:
    # An all-masked row is -inf - -inf = nan under softmax; it is zero by definition.
    weights = torch.softmax(logits.masked_fill(~used, float("-inf")), dim=-1)
    return torch.nan_to_num(weights, nan=0.0)


def _gated(out: Tensor, gate: Tensor | None) -> Tensor:
    return out if gate is None else out * torch.sigmoid(gate.float())[..., None]
