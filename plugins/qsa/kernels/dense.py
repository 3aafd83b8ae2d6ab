# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Prefill attention of the queries whose whole context fits in the budget.

Their selection is everything that they see, so nothing is gathered: causal attention over
neighbouring cache rows. A line is one query of one head; the lines of a key head are numbered
query by query, so that a tile of lines belongs to few queries and has hardly any masked tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plugins.qsa.kernels.attention import LOG2_E, LOWEST


@triton.jit
def first_sparse(past_length, count, K: tl.constexpr, RATIO: tl.constexpr):
    """Steps before it see at most K blocks, which makes their attention dense."""
    return tl.minimum(tl.maximum(K * RATIO + RATIO - 1 - past_length, 0), count)


@triton.jit
def attend_dense(
    q,
    k_cache,
    v_cache,
    past,
    new,
    gate,
    together,
    S,
    C,
    out,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    GATE_OFFSET: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Causal attention of the steps before `first_sparse`; other rows of `out` are left alone.

    Grid (cdiv(S * HQ / HK, M), HK, B). `together`, the same tensor as `out`, holds what the sparse
    kernels stored. Other arguments as in `attention.attend_whole`.
    """
    GROUP: tl.constexpr = HQ // HK
    # The last lines have the most keys: they go first.
    first_line = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    kv_head = tl.program_id(1)
    slot = tl.program_id(2)
    past_length = tl.load(past + slot)
    end = first_sparse(past_length, tl.minimum(tl.load(new + slot), S), K, RATIO)
    if first_line >= end * GROUP:
        return
    line = first_line + tl.arange(0, M)
    step = line // GROUP
    head = kv_head * GROUP + line % GROUP
    live = (step < end)[:, None]
    position = past_length + step
    newest = past_length + tl.minimum((first_line + M - 1) // GROUP, end - 1)
    dims = tl.arange(0, D)
    lanes = tl.arange(0, TOKENS)
    query_at = ((slot * HQ + head).to(tl.int64) * S + step)[:, None] * D + dims[None, :]
    query = tl.load(q + query_at, mask=live, other=0.0).to(DOT)
    cache_at = (slot * HK + kv_head).to(tl.int64) * C * D
    keys = k_cache + cache_at
    values = v_cache + cache_at
    maximum = tl.full((M,), LOWEST, tl.float32)
    normalizer = tl.zeros((M,), tl.float32)
    total = tl.zeros((M, D), tl.float32)
    for start in tl.range(0, newest + 1, TOKENS, num_stages=STAGES):
        token = start + lanes
        offset = token[:, None].to(tl.int64) * D + dims[None, :]
        there = (token <= newest)[:, None]
        key = tl.load(keys + offset, mask=there, other=0.0).to(DOT)
        score = tl.dot(query, tl.trans(key)) * (SCALE * LOG2_E)
        score = tl.where(token[None, :] <= position[:, None], score, LOWEST)
        highest = tl.maximum(maximum, tl.max(score, axis=1))
        decay = tl.exp2(maximum - highest)
        # Token 0 is seen by every line: the maximum is a score, and masked weights are 0.
        weight = tl.exp2(score - highest[:, None])
        normalizer = normalizer * decay + tl.sum(weight, axis=1)
        value = tl.load(values + offset, mask=there, other=0.0).to(DOT)
        total = tl.dot(weight.to(DOT), value, acc=total * decay[:, None])
        maximum = highest
    at = (slot.to(tl.int64) * S + step) * HQ + head
    gate_at = at[:, None] * GATE_STRIDE + GATE_OFFSET + dims[None, :]
    opened = tl.sigmoid(tl.load(gate + gate_at, mask=live, other=0.0).to(tl.float32))
    result = total * (V_SCALE / normalizer)[:, None] * opened
    tl.store(out + at[:, None] * D + dims[None, :], result.to(out.dtype.element_ty), mask=live)
