"""Attention, rotary embedding, cache update."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.interpreter.kinds.call import Bound, Call
from runtime.interpreter.kinds.host import free_to_read


def attention(call: Call) -> Bound:
    """softmax(q k^T [+ mask]) v without a scale; inputs q, k, v, mask, key lengths."""
    q, k = call.tensor(0), call.tensor(1)
    causal = call.attribute("causal")
    if causal not in ("NONE", "UPPER_LEFT", "LOWER_RIGHT"):
        raise call.unknown("causal kind", causal)
    rows, columns = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    has_mask, has_lengths = call.has(3), call.has(4)
    fixed: torch.Tensor | None = None
    if causal != "NONE":
        shift = columns - rows if causal == "LOWER_RIGHT" else 0
        fixed = torch.ones(rows, columns, dtype=torch.bool, device=call.device).tril(shift)
    column = torch.arange(columns, device=call.device)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        mask = rest[0] if has_mask else fixed
        if has_lengths:
            inside = (column < rest[-1].reshape(-1, 1)).reshape(-1, 1, 1, columns)
            if mask is None:
                mask = inside
            elif mask.dtype == torch.bool:
                mask = mask & inside
            else:
                mask = mask.masked_fill(~inside, float("-inf"))
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=1.0, enable_gqa=grouped
        )

    optional = tuple(i for i in (3, 4) if call.has(i))
    return Bound(run, (0, 1, 2, *optional))


def rotary_embedding(call: Call) -> Bound:
    """Rotate the first channels; inputs x, cos, sin and optionally positions."""
    x = call.tensor(0)
    width = int(call.attribute("rotary_dim")) or x.shape[-1]
    half = width // 2
    interleaved = call.attribute("interleaved")
    whole = width == x.shape[-1]
    dtype = call.out_dtypes[0]
    by_position = call.has(3)

    def run(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *positions: torch.Tensor
    ) -> torch.Tensor:
        if by_position:
            rows = positions[0].reshape(-1)
            sizes = (*positions[0].shape, half)
            cos = cos.index_select(0, rows).reshape(sizes)
            sin = sin.index_select(0, rows).reshape(sizes)
        cos, sin = cos.unsqueeze(1).float(), sin.unsqueeze(1).float()
        turned = x.narrow(-1, 0, width).float()
        if interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.narrow(-1, 0, half), turned.narrow(-1, half, half)
        left, right = first * cos - second * sin, second * cos + first * sin
        if interleaved:
            result = torch.stack((left, right), -1).flatten(-2).to(dtype)
            return (
                result
                if whole
                else torch.cat((result, x.narrow(-1, width, x.shape[-1] - width)), -1)
            )
        if whole:
            return torch.cat((left, right), -1).to(dtype)
        rest = x.narrow(-1, width, x.shape[-1] - width)
        return torch.cat((left.to(dtype), right.to(dtype), rest), -1)

    return Bound(run, (0, 1, 2, 3) if by_position else (0, 1, 2))


def kv_cache_update(call: Call) -> Bound:
    """cache[b, :, w[b] + s] = update[b, :, s], in place; returns the cache itself."""
    cache, update = call.tensor(0), call.tensor(1)
    batch, heads, length, dim = cache.shape
    steps = update.shape[2]
    if update.shape != (batch, heads, steps, dim) or update.dtype != cache.dtype:
        raise call.unknown("cache update", f"{update.dtype} {list(update.shape)}")
    device = call.device
    base = torch.arange(batch * heads, device=device).reshape(batch, heads, 1) * length
    rows = base + torch.arange(steps, device=device)
    slot = torch.arange(batch, device=device).reshape(batch, 1)
    step = torch.arange(steps, device=device)

    def run(cache: torch.Tensor, update: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        # Elsewhere the scheduler owns the bound.
        if free_to_read(write):
            low, high = torch.aminmax(write)
            if int(low) < 0 or int(high) + steps > length:
                raise IndexError(
                    f"rows {int(low)}..{int(high) + steps - 1} of a cache of {length} rows"
                )
        if cache.is_contiguous():
            target = (rows + write.reshape(batch, 1, 1)).reshape(-1)
            cache.view(-1, dim).index_copy_(0, target, update.reshape(-1, dim))
        else:
            where = write.reshape(batch, 1) + step
            cache.transpose(1, 2).index_put_((slot, where), update.transpose(1, 2))
        return cache

    return Bound(run, (0, 1, 2))
