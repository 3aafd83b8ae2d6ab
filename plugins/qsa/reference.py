"""QSA (block-sparse attention with mean-pooled index keys) in torch: the definition of right.

Names of sizes: B sequences, S queries per sequence, C cached tokens, R tokens per block ("ratio"),
NB blocks, K blocks a query may keep, Hq/Hk attention query/key heads, Hi index query heads, D and
Di head widths. A token's position is its rank in its sequence; a query position of -1 marks
padding. Everything is computed in float32 and rounded once, to the dtype of the inputs.

A query at position p sees the (p + 1) // R complete blocks up to and including its own token,
keeps the K of them with the highest index score, and always the incomplete tail: the (p + 1) % R
newest tokens. Equal scores: the lower block id is kept. A query without any token gives zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Queries handled at once by `attend`; bounds the gathered keys at real sizes.
_QUERY_TILE = 64


@dataclass(frozen=True)
class Selection:
    """What one layer keeps per query.

    Attributes:
        ratio: tokens per block (R).
        blocks: blocks a query may keep (K = token budget / R).
    """

    ratio: int
    blocks: int

    @property
    def row_width(self) -> int:
        """Tokens in the widest row: K whole blocks and the longest tail."""
        return self.blocks * self.ratio + self.ratio - 1


@dataclass(frozen=True)
class Prepared:
    """One layer's projections, split, normed and rotated.

    Attributes:
        query: [B, Hq, S, D].
        gate: [B, S, Hq * D], before the logistic function.
        key, value: [B, Hk, S, D].
        index_query: [B, Hi, S, Di].
        index_key: [B, S, Di], raw: neither normed nor rotated.
    """

    query: Tensor
    gate: Tensor
    key: Tensor
    value: Tensor
    index_query: Tensor
    index_key: Tensor


def centered_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight) over the last axis, in float32, cast back to x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype)


def rotary_tables(positions: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of integer positions [...]: float32 [..., rotary_dim / 2]."""
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * (1.0 / theta ** (exponent / rotary_dim))
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of x [..., D] in half-split pairs (i, i + rotary_dim / 2).

    cos and sin broadcast to [..., rotary_dim / 2]; the other channels pass unchanged.
    """
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype).float(), sin.to(x.dtype).float()
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    wide_first, wide_second = first.float(), second.float()
    rotated = torch.cat(
        [wide_first * cos - wide_second * sin, wide_second * cos + wide_first * sin], dim=-1
    )
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def prepare(
    q_gate: Tensor,
    key: Tensor,
    value: Tensor,
    index_qk: Tensor,
    *,
    q_norm: Tensor,
    k_norm: Tensor,
    index_q_norm: Tensor,
    positions: Tensor,
    rotary_dim: int,
    index_rotary_dim: int,
    theta: float,
    eps: float,
) -> Prepared:
    """From the four projections of a layer to what the attention reads and the caches store.

    Args:
        q_gate: [B, S, Hq * 2D], per head D query columns then D gate columns.
        key, value: [B, S, Hk * D].
        index_qk: [B, S, (Hi + 1) * Di], index query heads then the one index key head.
        q_norm, k_norm: [D], centred norm weights (1 is added here).
        index_q_norm: [Di], the same for the index query heads.
        positions: int [B, S].
        rotary_dim, index_rotary_dim: channels that are rotated in D and in Di.
        theta: base of the rotary frequencies.
        eps: added to the mean square.
    """
    return prepare_turned(
        (q_gate, key, value, index_qk),
        (q_norm, k_norm, index_q_norm),
        rotary_tables(positions, rotary_dim, theta),
        rotary_tables(positions, index_rotary_dim, theta),
        eps,
    )


def prepare_turned(
    projections: tuple[Tensor, Tensor, Tensor, Tensor],
    norms: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    index_angles: tuple[Tensor, Tensor],
    eps: float,
) -> Prepared:
    """`prepare` with the cosines and sines themselves, each [B, S, rotated channels / 2]."""
    q_gate, key, value, index_qk = projections
    q_norm, k_norm, index_q_norm = norms
    batch, tokens, _ = q_gate.shape
    width, index_width = q_norm.shape[0], index_q_norm.shape[0]

    def turned(heads: Tensor, weight: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = (table[:, :, None] for table in angles)
        return rotate(centered_rms_norm(heads, weight, eps), cos, sin).transpose(1, 2)

    heads = q_gate.reshape(batch, tokens, -1, 2 * width)
    keys = key.reshape(batch, tokens, -1, width)
    index_heads = index_qk[..., :-index_width].reshape(batch, tokens, -1, index_width)
    return Prepared(
        query=turned(heads[..., :width], q_norm, angles),
        gate=heads[..., width:].reshape(batch, tokens, -1),
        key=turned(keys, k_norm, angles),
        value=value.reshape(batch, tokens, -1, width).transpose(1, 2),
        index_query=turned(index_heads, index_q_norm, index_angles),
        index_key=index_qk[..., -index_width:],
    )


def pool_index_keys(
    raw: Tensor,
    weight: Tensor,
    *,
    ratio: int,
    rotary_dim: int,
    theta: float,
    eps: float,
    first_block: int = 0,
) -> Tensor:
    """Block keys of the complete blocks in `raw`.

    Mean of R raw keys in float32, rounded, centred norm, rotated at the block's first position.

    Args:
        raw: [B, T, Di]; its first row is the first token of block `first_block`.
        weight: [Di], centred norm weight.

    Returns:
        [B, T // R, Di].
    """
    batch, tokens, width = raw.shape
    blocks = tokens // ratio
    members = raw[:, : blocks * ratio].reshape(batch, blocks, ratio, width)
    starts = (torch.arange(blocks, device=raw.device) + first_block) * ratio
    return pool_blocks(members, weight, rotary_tables(starts, rotary_dim, theta), eps)


def pool_blocks(
    members: Tensor, weight: Tensor, angles: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """Keys [..., Di] of blocks of raw keys [..., R, Di].

    angles: cosines and sines at each block's first position, [..., rotated channels / 2].
    """
    mean = members.float().mean(-2)
    return rotate(centered_rms_norm(mean.to(members.dtype), weight, eps), *angles)


def block_scores(index_query: Tensor, block_keys: Tensor) -> Tensor:
    """Score of every block for every query: sum over heads of relu(q . k) / sqrt(Di).

    Args:
        index_query: [B, Hi, S, Di].
        block_keys: [B, NB, Di].

    Returns:
        float32 [B, S, NB], visibility not yet applied.
    """
    dots = index_query.float() @ block_keys.float()[:, None].transpose(-1, -2)
    return dots.relu().sum(1) / index_query.shape[-1] ** 0.5


def visible_blocks(positions: Tensor, ratio: int) -> Tensor:
    """Complete blocks that a query at each position sees: (p + 1) // R, 0 for padding (-1)."""
    return (positions + 1) // ratio


def select_blocks(scores: Tensor, visible: Tensor, blocks: int) -> Tensor:
    """The `blocks` best visible blocks of each query.

    Args:
        scores: float [B, S, NB].
        visible: int [B, S], how many leading blocks may be chosen.
        blocks: K.

    Returns:
        int32 [B, S, K], block ids ascending, -1 behind the last. Equal scores: lower id wins.
    """
    count = scores.shape[-1]
    ids = torch.arange(count, device=scores.device)
    masked = scores.masked_fill(ids >= visible[..., None], float("-inf"))
    # A stable descending sort keeps equal scores in the order of their ids.
    order = masked.sort(dim=-1, descending=True, stable=True).indices[..., :blocks]
    kept = torch.arange(order.shape[-1], device=scores.device) < visible[..., None]
    order = order.masked_fill(~kept, count).sort(dim=-1).values
    if order.shape[-1] < blocks:
        order = torch.nn.functional.pad(order, (0, blocks - order.shape[-1]), value=count)
    return order.masked_fill(order == count, -1).to(torch.int32)


def expand_tokens(block_ids: Tensor, positions: Tensor, ratio: int) -> Tensor:
    """Token positions that each query attends to: its blocks' tokens and the incomplete tail.

    Args:
        block_ids: int32 [B, S, K], -1 = none.
        positions: int [B, S].

    Returns:
        int32 [B, S, K * R + R - 1], -1 = none, in the order of `block_ids`, tail last.
    """
    lanes = torch.arange(ratio, device=block_ids.device)
    tokens = block_ids[..., None] * ratio + lanes
    tokens = tokens.masked_fill(block_ids[..., None] < 0, -1).flatten(-2)
    tail = (visible_blocks(positions, ratio) * ratio)[..., None] + lanes[:-1]
    tail = tail.masked_fill(tail > positions[..., None], -1)
    return torch.cat([tokens, tail.to(tokens.dtype)], dim=-1).to(torch.int32)


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    token_ids: Tensor,
    *,
    scale: float,
    gate: Tensor | None = None,
) -> Tensor:
    """Softmax attention of each query over its own token list, optionally gated.

    Args:
        query: [B, Hq, S, D].
        key_cache, value_cache: [B, Hk, C, D]; query head h reads key head h // (Hq / Hk).
        token_ids: int32 [B, S, W], -1 = unused, any order.
        scale: factor on the dot products.
        gate: [B, S, Hq * D]; the output is multiplied by its logistic function.

    Returns:
        [B, S, Hq * D] in query's dtype; rows without any token are zero.
    """
    flat = attend_part(query, key_cache, value_cache, token_ids, scale=scale)[0].flatten(2)
    if gate is not None:
        flat = flat * torch.sigmoid(gate.float())
    return flat.to(query.dtype)


def attend_part(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, token_ids: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over some of each query's tokens, to be joined with that over the others.

    Args:
        as for `attend`.

    Returns:
        float32 [B, S, Hq, D], and the base-2 logarithm of the sum of exponentials, float32
        [B, S, Hq], -inf without any token.
    """
    batch, heads, queries, width = query.shape
    kv_heads = key_cache.shape[1]
    out = query.new_zeros((batch, queries, heads, width), dtype=torch.float32)
    lse = query.new_zeros((batch, queries, heads), dtype=torch.float32)
    for b in range(batch):
        for start in range(0, queries, _QUERY_TILE):
            tile = slice(start, min(start + _QUERY_TILE, queries))
            ids = token_ids[b, tile]
            used = ids >= 0
            index = ids.clamp_min(0).long()
            keys = key_cache[b][:, index].float()
            values = value_cache[b][:, index].float()
            grouped = query[b, :, tile].float().reshape(kv_heads, heads // kv_heads, -1, width)
            logits = torch.einsum("kgsd,kswd->kgsw", grouped, keys) * scale
            logits = logits.masked_fill(~used, float("-inf"))
            # An all-masked row is -inf - -inf = nan under softmax; it is zero by definition.
            weights = torch.nan_to_num(torch.softmax(logits, dim=-1), nan=0.0)
            mixed = torch.einsum("kgsw,kswd->skgd", weights, values)
            out[b, tile] = mixed.reshape(-1, heads, width)
            total = torch.logsumexp(logits, dim=-1) / math.log(2)
            lse[b, tile] = total.permute(2, 0, 1).reshape(-1, heads)
    return out, lse


def sparse_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    index_query: Tensor,
    block_keys: Tensor,
    positions: Tensor,
    *,
    selection: Selection,
    scale: float,
    gate: Tensor | None = None,
) -> Tensor:
    """The whole operation over caches that already hold the new tokens.

    Args:
        query: [B, Hq, S, D]; key_cache, value_cache: [B, Hk, C, D].
        index_query: [B, Hi, S, Di]; block_keys: [B, NB, Di].
        positions: int [B, S], -1 = padding query.
        selection: ratio and budget.
        scale, gate: as in `attend`.

    Returns:
        [B, S, Hq * D].
    """
    scores = block_scores(index_query, block_keys)
    visible = visible_blocks(positions, selection.ratio)
    chosen = select_blocks(scores, visible, selection.blocks)
    tokens = expand_tokens(chosen, positions, selection.ratio)
    return attend(query, key_cache, value_cache, tokens, scale=scale, gate=gate)
