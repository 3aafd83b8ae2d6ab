"""Hashed n-gram rows of the per-layer embedding table (PLE) of Qwen3.8-Flash-Next.

Every token of a sequence picks one row per hash head: the ids of the token and of the one or two
before it are multiplied by odd constants, mixed with exclusive or, and reduced modulo the prime
size of the head. Conversion recomputes the constants to check the stored ones; the runtime computes
row ids. All values are exact integers, so both sides and the reference must agree to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_INT64_MAX = (1 << 63) - 1
# Distance of the seeds of two PLE layers.
_LAYER_STEP = 10007

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class NgramConstants:
    """Constants of one PLE layer.

    Attributes:
        multipliers: one odd multiplier per position of the n-gram, newest token first.
        sizes: rows of each hash head, primes; heads of order 2 first, then order 3, ...
        offsets: first row of each head in the joined table.
        rows: rows of the joined table, the sum of the sizes rounded up.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int

    @property
    def ngram_size(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def heads_per_ngram(self) -> int:
        """Hash heads of each n-gram order."""
        return len(self.sizes) // (self.ngram_size - 1)

    @cached_property
    def heads(self) -> tuple[Int64, Int64]:
        """Sizes and offsets, int64 [n-gram orders, heads of each]."""
        shape = (self.ngram_size - 1, self.heads_per_ngram)
        sizes, offsets = np.array(self.sizes, np.int64), np.array(self.offsets, np.int64)
        return sizes.reshape(shape), offsets.reshape(shape)


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 output function, element-wise on uint64 (its additive constant included)."""
    z = values + np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def layer_constants(
    *,
    vocab_size: int,
    ngram_size: int,
    heads_per_ngram: int,
    ngram_vocab_size_base: int,
    divisor: int,
    seed: int,
    layer_number: int,
) -> NgramConstants:
    """Constants of the PLE layer `layer_number` (its place among the PLE layers, from 0)."""
    half = max(1, _INT64_MAX // vocab_size // 2)
    # The constant is added here once per position and once more inside splitmix64.
    seeds = [
        (seed + _LAYER_STEP * layer_number + _GAMMA * (position + 1)) & _MASK64
        for position in range(ngram_size)
    ]
    hashed = splitmix64(np.array(seeds, dtype=np.uint64))
    multipliers = tuple(2 * (int(value) % half) + 1 for value in hashed)

    heads = (ngram_size - 1) * heads_per_ngram
    primes = _primes_from(ngram_vocab_size_base, (layer_number + 1) * heads)
    sizes = tuple(primes[layer_number * heads :])
    offsets = tuple(int(total) for total in np.cumsum((0, *sizes[:-1])))
    rows = -(-sum(sizes) // divisor) * divisor
    return NgramConstants(multipliers, sizes, offsets, rows)


def row_ids(
    tokens: npt.ArrayLike,
    constants: NgramConstants,
    eos: int,
    context: npt.ArrayLike | None = None,
) -> Int64:
    """Table rows that each token looks up.

    Args:
        tokens: ids of one or several sequences, int [..., T], each in [0, vocab_size).
        constants: of the PLE layer.
        eos: the text model's end id (`text_config.eos_token_id`, its first entry). Going back from
            a token, the first EOS and everything before it count as EOS.
        context: the `ngram_size - 1` ids before `tokens`, oldest first, int [..., N-1], with `eos`
            where the sequence had not started; None at the start of a sequence.

    Returns:
        int64 [..., T, heads], rows of the joined table.
    """
    current = np.asarray(tokens, dtype=np.int64)
    before = constants.ngram_size - 1
    length = current.shape[-1]
    if context is None:
        past = np.full((*current.shape[:-1], before), eos, dtype=np.int64)
    else:
        past = np.asarray(context, dtype=np.int64)
    history = np.concatenate([past, current], axis=-1)

    mixed = current * constants.multipliers[0]
    barrier = np.zeros(current.shape, dtype=np.bool_)
    hashes = np.empty((*current.shape, before, 1), dtype=np.int64)
    for distance in range(1, before + 1):
        older = history[..., before - distance : before - distance + length]
        barrier |= older == eos
        mixed = mixed ^ (np.where(barrier, eos, older) * constants.multipliers[distance])
        hashes[..., distance - 1, 0] = mixed
    sizes, offsets = constants.heads
    rows = hashes % sizes
    rows += offsets
    return rows.reshape(*current.shape, sizes.size)


def next_context(tokens: npt.ArrayLike, ngram_size: int, context: npt.ArrayLike) -> Int64:
    """The `context` for the call after `tokens`: its last N-1 ids, int64 [..., N-1]."""
    history = np.concatenate(
        [np.asarray(context, dtype=np.int64), np.asarray(tokens, dtype=np.int64)], axis=-1
    )
    return history[..., history.shape[-1] - (ngram_size - 1) :]


def _primes_from(start: int, count: int) -> list[int]:
    """The first `count` primes that are at least `start`."""
    primes: list[int] = []
    candidate = max(2, start)
    while len(primes) < count:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return primes


def _is_prime(number: int) -> bool:
    if number < 4:
        return number >= 2
    if number % 2 == 0:
        return False
    divisors = np.arange(3, int(number**0.5) + 2, 2, dtype=np.int64)
    return bool(np.all(number % divisors != 0)) or number in (3, 5, 7)
