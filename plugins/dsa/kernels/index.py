"""Index scores: how much each query wants each cached token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_tokens(
    index_query,
    index_keys,
    head_weights,
    past,
    new,
    S,
    C,
    N,
    run,
    scores,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """sum_h w[s, h] relu(q[s, h] . k[t]) (Hi Di)^-1/2 for BLOCK_Q queries and `run` tokens.

    Grid (token runs, query blocks, B). index_query [B, S, Hi, Di]; index_keys [B, 1, C, Di];
    head_weights [B, S, Hi]; past, new int32 [B]; run is a multiple of BLOCK_N. scores float32
    [B, S, N]: of a query only the visible tokens' scores mean anything; tiles that no query of the
    block sees are not written.
    """
    slot = tl.program_id(2)
    first_query = tl.program_id(1) * BLOCK_Q
    first = tl.program_id(0) * run
    queries = tl.minimum(tl.load(new + slot), S)
    # The last query of the block sees the most.
    newest = tl.minimum(first_query + BLOCK_Q, queries)
    seen = tl.where(first_query < queries, tl.load(past + slot) + newest, 0)
    last = tl.minimum(tl.minimum(first + run, seen), N)

    lanes = tl.arange(0, BLOCK_D)
    # Columns of the product: BLOCK_Q queries times BLOCK_H heads.
    column = tl.arange(0, BLOCK_Q * BLOCK_H)
    query = first_query + column // BLOCK_H
    head = column % BLOCK_H
    live = (query < queries) & (head < HEADS)
    at = (slot.to(tl.int64) * S + query) * HEADS + head
    q = tl.load(
        index_query + at[:, None] * WIDTH + lanes[None, :],
        mask=live[:, None] & (lanes < WIDTH)[None, :],
        other=0.0,
    ).to(DOT)
    weight = tl.load(head_weights + at, mask=live, other=0.0).to(tl.float32)
    weight *= (HEADS * WIDTH) ** -0.5
    keys = index_keys + slot.to(tl.int64) * C * WIDTH
    out_query = first_query + tl.arange(0, BLOCK_Q)
    out_row = scores + (slot.to(tl.int64) * S + out_query) * N
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK_N)
        key = tl.load(
            keys + token.to(tl.int64)[:, None] * WIDTH + lanes[None, :],
            mask=(token < last)[:, None] & (lanes < WIDTH)[None, :],
            other=0.0,
        ).to(DOT)
        dots = tl.dot(key, tl.trans(q))
        mixed = tl.maximum(dots, 0.0) * weight[None, :]
        result = tl.sum(tl.reshape(mixed, (BLOCK_N, BLOCK_Q, BLOCK_H)), axis=2)
        tl.store(
            out_row[None, :] + token[:, None],
            result,
            mask=(token < last)[:, None] & (out_query < queries)[None, :],
        )
