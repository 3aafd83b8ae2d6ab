"""Mixture of experts: routing, and two exact ways to run the chosen experts.

TensorRT's own expert layer builds for few targets, so both forms are made of ordinary layers.
`gather_experts` reads the matrices of every chosen expert once per token, which suits few tokens.
`capacity_experts` sorts tokens by expert and runs all experts as one batched product, in as many
rounds as the fullest expert needs, which suits many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from converters.layers.linear import linear, stored_weight, swiglu
from converters.layers.stored import gathered_matrices, stored_matrix
from plugins.support.dtypes import dtype
from plugins.trt.network import Dim, Network
from plugins.trt.types import Tensor

# Tokens per expert and round are a multiple of this, so that products fill tensor-core tiles.
_TILE = 16
# Room per expert and round, relative to an even spread of the tokens.
_SLACK = 2
# Copies of expert matrices that a step may hold.
_GATHER_LIMIT_BYTES = 1 << 30
# Up to here reading the weights takes longer than the products, so room to spare costs nothing.
_ONE_ROUND_TOKENS = 128
# A rank that no round reaches.
_NEVER = 1 << 30


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer, each a gated two-matrix network.

    Attributes:
        name: module name; the checkpoint holds `{name}.gate_up` [E, 2I, H] (gate rows first) and
            `{name}.down` [E, H, I].
        count: E.
        chosen: experts per token, K.
        hidden: H.
        intermediate: I.
    """

    name: str
    count: int
    chosen: int
    hidden: int
    intermediate: int

    def gate_up(self, net: Network, kind: str, ids: Tensor | None = None) -> Tensor:
        """[E, 2I, H], or [N, K, 2I, H] of the ids [N, K]."""
        return self._matrices(net, "gate_up", (2 * self.intermediate, self.hidden), 2, kind, ids)

    def down(self, net: Network, kind: str, ids: Tensor | None = None) -> Tensor:
        """[E, H, I], or [N, K, H, I] of the ids [N, K]."""
        return self._matrices(net, "down", (self.hidden, self.intermediate), 1, kind, ids)

    def _matrices(
        self,
        net: Network,
        part: str,
        matrix: tuple[int, int],
        pieces: int,
        kind: str,
        ids: Tensor | None,
    ) -> Tensor:
        name, shape = f"{self.name}.{part}", (self.count, *matrix)
        if ids is None:
            return stored_matrix(net, name, shape, kind, pieces=pieces)
        return gathered_matrices(net, name, shape, kind, ids, pieces=pieces)


def softmax_router(
    net: Network, x: Tensor, name: str, experts: Experts, *, normalize: bool
) -> tuple[Tensor, Tensor]:
    """The K most probable experts of each token.

    Args:
        x: [N, H].
        name: module of the router matrix [E, H].
        normalize: divide the chosen probabilities by their sum.

    Returns:
        Expert ids int32 [N, K] and their weights [N, K], float32 values rounded to x's type.
    """
    logits = net.cast(linear(net, x, name, experts.count), "float32")
    weights, ids = net.topk(net.softmax(logits, 1), experts.chosen, axis=1)
    if normalize:
        weights = net.div(weights, net.reduce_sum(weights, axes=[1]))
    return ids, net.cast(weights, net.dtype(x))


def sigmoid_router(
    net: Network, x: Tensor, name: str, experts: Experts, *, normalize: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """The K experts with the largest biased score; their weights are the scores without bias.

    Logits, scores and weights are float32 whatever x's type: a rounded logit would choose others.

    Args:
        x: [N, H].
        name: module of the router: `{name}.weight` [E, H] and `{name}.bias` float32 [E].
        normalize: divide the chosen scores by their sum.
        scaling: factor on the weights.

    Returns:
        Expert ids int32 [N, K] and their weights float32 [N, K].
    """
    matrix = stored_weight(net, f"{name}.weight", net.dtype(x), (experts.count, experts.hidden))
    logits = net.matmul(net.cast(x, "float32"), net.cast(matrix, "float32"), transpose_b=True)
    scores = net.sigmoid(logits)
    bias = stored_weight(net, f"{name}.bias", "float32", (experts.count,))
    biased = net.add(scores, net.unsqueeze(net.cast(bias, "float32"), [0]))
    _, ids = net.topk(biased, experts.chosen, axis=1)
    weights = net.gather_elements(scores, ids, 1)
    if normalize:
        weights = net.div(weights, net.add(net.reduce_sum(weights, axes=[1]), 1e-20))
    return ids, net.mul(weights, scaling) if scaling != 1.0 else weights


def run_experts(
    net: Network,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    *,
    valid: Tensor,
    max_tokens: int | None,
) -> Tensor:
    """Sum over a token's experts of weight * expert(token), in the form that suits the size.

    Args:
        x: [N, H].
        ids: int32 [N, K].
        weights: [N, K], x's type.
        valid: bool [N], false for padding, whose result is unspecified but finite.
        max_tokens: largest N where N is small, None where it is not.

    Returns:
        float32 [N, H].
    """
    if max_tokens is not None:
        values = 3 * experts.intermediate * experts.hidden * experts.chosen * max_tokens
        if dtype(net.dtype(x)).nbytes(values) <= _GATHER_LIMIT_BYTES:
            return gather_experts(net, x, ids, weights, experts)
        if max_tokens <= _ONE_ROUND_TOKENS:
            return capacity_experts(net, x, ids, weights, experts, valid, max_tokens=max_tokens)
    return capacity_experts(net, x, ids, weights, experts, valid)


def gather_experts(
    net: Network, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts
) -> Tensor:
    """The sum of `run_experts` by reading the matrices of every chosen expert once per token."""
    kind = net.dtype(x)
    row = net.unsqueeze(x, [1, 2])
    both = net.matmul(row, experts.gate_up(net, kind, ids), transpose_b=True)
    hidden = _activate(net, both, experts.intermediate)
    out = net.matmul(hidden, experts.down(net, kind, ids), transpose_b=True)
    factor = net.unsqueeze(net.cast(weights, "float32"), [2])
    weighted = net.mul(net.cast(net.squeeze(out, [2]), "float32"), factor)
    return net.reduce_sum(weighted, axes=[1], keepdims=False)


def capacity_experts(
    net: Network,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    valid: Tensor,
    *,
    max_tokens: int | None = None,
) -> Tensor:
    """The sum of `run_experts` by collecting each expert's tokens in a table of limited room.

    The tokens of an expert are ranked in their order; round r serves ranks from r * room on. The
    number of rounds comes from the fullest expert, so that no token is dropped. With `max_tokens`
    there is room for that many tokens in every expert, hence one round and no loop.
    """
    tokens = net.dim(x, 0)
    pairs = net.dim_mul(tokens, experts.chosen)
    room: Dim
    if max_tokens is not None:
        room = -(-max_tokens // _TILE) * _TILE
    else:
        even_spread = net.dim_floor_div(net.dim_mul(pairs, _SLACK), experts.count)
        room = net.dim_mul(net.dim_add(net.dim_floor_div(even_spread, _TILE), 1), _TILE)
    slots = net.dim_mul(room, experts.count)
    rank, fullest = _ranks(net, ids, valid, experts.count)

    kind = net.dtype(x)
    gate_up, down = experts.gate_up(net, kind), experts.down(net, kind)
    first_slot = net.mul(ids, _operand(net, room, 2))
    token_ids = net.expand(net.unsqueeze(net.iota(tokens), [1]), [tokens, experts.chosen])
    token_ids = net.reshape(token_ids, [pairs])
    factor = net.unsqueeze(net.cast(weights, "float32"), [2])
    empty = net.expand(net.literal(torch.zeros(1, dtype=torch.int32)), [net.dim_add(slots, 1)])

    def served_by_round(place: Tensor) -> Tensor:
        """float32 [N, H] of the pairs whose place int32 [N, K] is inside the table."""
        served = net.logical_and(
            net.less(place, _operand(net, room, 2)), net.logical_not(net.less(place, 0))
        )
        # The pairs of other rounds share one slot behind the table.
        slot = net.select(served, net.add(first_slot, place), _operand(net, slots, 2))
        table = net.scatter_elements(empty, net.reshape(slot, [pairs]), token_ids, 0)
        rows = net.gather(x, net.narrow(table, 0, 0, slots), 0)
        rows = net.reshape(rows, [experts.count, room, experts.hidden])
        hidden = _activate(net, net.matmul(rows, gate_up, transpose_b=True), experts.intermediate)
        out = net.matmul(hidden, down, transpose_b=True)
        out = net.reshape(out, [slots, experts.hidden])
        mine = net.gather(out, net.minimum(slot, _operand(net, net.dim_sub(slots, 1), 2)), 0)
        share = net.mul(net.cast(mine, "float32"), factor)
        share = net.select(net.unsqueeze(served, [2]), share, 0.0)
        return net.reduce_sum(share, axes=[1], keepdims=False)

    if max_tokens is not None:
        return served_by_round(rank)
    rounds = net.floor_div(
        net.add(fullest, _operand(net, net.dim_sub(room, 1), 2)), _operand(net, room, 2)
    )
    nothing = net.expand(net.literal(torch.zeros(1, 1)), [tokens, experts.hidden])
    with net.loop(net.reshape(net.cast(rounds, "int64"), [1])) as loop:
        done = loop.carry(net.literal(torch.zeros(1, 1, dtype=torch.int32)))
        total = loop.carry(nothing)
        loop.update(total, net.add(total, served_by_round(net.sub(rank, done))))
        loop.update(done, net.add(done, _operand(net, room, 2)))
        return loop.last(total)


def _ranks(net: Network, ids: Tensor, valid: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rank of each pair among its expert's pairs, int32 [N, K], and the largest load, [1, 1]."""
    tokens = net.dim(ids, 0)
    present = net.cast(net.unsqueeze(valid, [1]), "int32")
    ones = net.expand(present, [tokens, net.dim(ids, 1)])
    zeros = net.expand(net.literal(torch.zeros(1, 1, dtype=torch.int32)), [tokens, count])
    chosen = net.scatter_elements(zeros, ids, ones, 1)
    rank = net.gather_elements(net.cumsum(chosen, 0, exclusive=True), ids, 1)
    rank = net.select(net.unsqueeze(valid, [1]), rank, _NEVER)
    return rank, net.reduce_max(net.reduce_sum(chosen, axes=[0]), axes=[1])


def _activate(net: Network, both: Tensor, intermediate: int) -> Tensor:
    """silu(gate) * up of [..., 2I] with the gate first."""
    gate = net.narrow(both, -1, 0, intermediate)
    return swiglu(net, gate, net.narrow(both, -1, intermediate, intermediate))


def _operand(net: Network, size: Dim, rank: int) -> Tensor | int:
    """A dimension as int32 operand of the given rank."""
    if isinstance(size, int):
        return size
    return net.reshape(net.cast(size, "int32"), [1] * rank)
