"""The gated delta rule, token by token and in chunks.

Per head, with state M [Dk, Dv], and for every token: M <- e^gamma M; r = k^T M;
M <- M + k (beta (v - r))^T; o = q^T M. All of it in float32. Tokens with gamma = 0 and beta = 0
leave the state exactly as it is, which is how padding is told.
"""

from __future__ import annotations

import torch

from plugins.trt.network import Network
from plugins.trt.types import Tensor

CHUNK = 64


def delta_rule_steps(
    net: Network,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gamma: Tensor,
    beta: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """A fixed small number of tokens, unrolled.

    Args:
        query, key: float32 [B, T, H, Dk], normalised; T static.
        value: float32 [B, T, H, Dv].
        gamma, beta: float32 [B, T, H].
        state: float32 [B, H, Dk, Dv].

    Returns:
        Outputs float32 [B, T, H, Dv] and the state after the last token.
    """
    tokens, heads, width = net.shape(query)[1:]
    depth = net.shape(value)[3]
    batch = net.dim(query, 0)
    decay = net.exp(gamma)
    outputs = []
    for token in range(tokens):

        def at(x: Tensor, *dims: int, token: int = token) -> Tensor:
            row = x if tokens == 1 else net.narrow(x, 1, token, 1)
            return net.reshape(row, [batch, heads, *dims])

        key_column = at(key, width, 1)
        state = net.mul(state, at(decay, 1, 1))
        predicted = net.reduce_sum(net.mul(state, key_column), axes=[2])
        error = net.mul(net.sub(at(value, 1, depth), predicted), at(beta, 1, 1))
        state = net.add(state, net.mul(key_column, error))
        read = net.reduce_sum(net.mul(state, at(query, width, 1)), axes=[2])
        outputs.append(net.reshape(read, [batch, 1, heads, depth]))
    return outputs[0] if tokens == 1 else net.concat(outputs, axis=1), state


def delta_rule_chunks(
    net: Network,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gamma: Tensor,
    beta: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Any multiple of 64 tokens, in chunks of 64: what is inside a chunk becomes matrix products.

    Inside a chunk, with G the running sum of gamma and D[i,j] = e^(G_i - G_j) for j <= i:
    A = (I + strictly_lower(beta k k^T * D))^-1, W = A (beta k e^G), U = A (beta v). Then chunk by
    chunk: V = U - W M; o = (q e^G) M + (q k^T * D) V; M <- e^G_last M + (k e^(G_last - G))^T V.

    Arguments and results as in `delta_rule_steps`, T dynamic.
    """
    heads, width = net.shape(query)[2:]
    depth = net.shape(value)[3]
    batch, tokens = net.dim(query, 0), net.dim(query, 1)
    chunks = net.dim_floor_div(tokens, CHUNK)

    def split(x: Tensor, *dims: int) -> Tensor:
        """[B, S, H, ...] to [chunks, B, H, 64, ...]."""
        cut = net.reshape(x, [batch, chunks, CHUNK, heads, *dims])
        return net.transpose(cut, (1, 0, 3, 2, *range(4, 4 + len(dims))))

    q, k, v = split(query, width), split(key, width), split(value, depth)
    strength = split(beta, 1)
    total = net.cumsum(split(gamma, 1), axis=3)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()[None, None, None]
    # Positive differences above the diagonal would overflow; they are removed before exp.
    spread = net.sub(total, net.transpose(total, (0, 1, 2, 4, 3)))
    decay = net.exp(net.select(net.literal(lower), spread, -1e30))
    grown = net.exp(total)
    weak_key = net.mul(k, strength)
    system = net.mul(net.matmul(weak_key, k, transpose_b=True), decay)
    inverse = _unit_lower_inverse(net, system)
    read_state = net.matmul(inverse, net.mul(weak_key, grown))
    new_values = net.matmul(inverse, net.mul(v, strength))
    inside = net.mul(net.matmul(q, k, transpose_b=True), decay)
    last = net.narrow(total, 3, CHUNK - 1, 1)
    key_to_end = net.mul(k, net.exp(net.sub(last, total)))
    query_from_start = net.mul(q, grown)
    chunk_decay = net.exp(last)

    with net.loop(chunks) as loop:
        memory = loop.carry(state)

        def now(x: Tensor) -> Tensor:
            return loop.iterate(x, 0)

        written = net.sub(now(new_values), net.matmul(now(read_state), memory))
        output = net.add(
            net.matmul(now(query_from_start), memory), net.matmul(now(inside), written)
        )
        following = net.add(
            net.mul(memory, now(chunk_decay)),
            net.matmul(now(key_to_end), written, transpose_a=True),
        )
        loop.update(memory, following)
        final = loop.last(memory)
        stacked = loop.stack(output, 0)
    joined = net.transpose(stacked, (1, 0, 3, 2, 4))
    return net.reshape(joined, [batch, tokens, heads, depth]), final


def _unit_lower_inverse(net: Network, system: Tensor) -> Tensor:
    """(I + strictly lower part of `system`)^-1 for [..., 64, 64].

    Diagonal blocks are inverted first and merged pairwise: with X the inverse of the blocks of one
    size and L what joins two of them, the inverse of the next size is X - X L X. Unlike powers of
    the matrix, nothing here grows beyond the inverse itself: tokens that repeat make the powers
    exceed 1e17 and cancel.
    """
    row = torch.arange(CHUNK)[:, None]
    column = torch.arange(CHUNK)[None]
    inverse = net.literal(torch.eye(CHUNK)[None, None, None])
    size = 1
    while size < CHUNK:
        joins = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        link = net.mul(system, net.literal(joins.float()[None, None, None]))
        if size == 1:
            inverse = net.sub(inverse, link)
        else:
            correction = net.matmul(net.matmul(inverse, link), inverse)
            inverse = net.sub(inverse, correction)
        size *= 2
    return inverse
