"""A tiny deterministic language in the place of a network, for tests of everything around it.

It reads and writes the same inputs, caches and states as a real text engine does, so that a wrong
slot, a stale state, a missed cache row or a lost host input changes the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from runtime.contract import EngineConfig, Phase
from runtime.slots import SlotMemory
from tests.runtime.engines import VOCAB, WIDTH

# The logits of a sequence whose newest token is this id are NaN.
POISON = 13
GARBAGE = 999.0


def compute(inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
    """One call, in the layout of the engines in `tests.runtime.engines`.

    Outputs must hold `logits` and `recurrent_state.1.next`; caches are changed in place.
    """
    ids, past, new = inputs["input_ids"], inputs["past_lengths"], inputs["new_lengths"]
    cache, index = inputs["key_cache.0"], inputs["index_key_cache.0"]
    state, following = inputs["recurrent_state.1"], outputs["recurrent_state.1.next"]
    rows = cache.shape[2]
    columns = ids.shape[1]
    span = inputs["attention_span"].shape[0] if "attention_span" in inputs else rows
    following[...] = state
    outputs["logits"][...] = 0
    for b in range(ids.shape[0]):
        if new[b] == 0:
            # A padding slot writes to the scrap rows at the end.
            cache[b, :, rows - columns :, :] = GARBAGE
            continue
        assert past[b] + new[b] <= span <= rows
        # Trailing padding writes behind the valid rows.
        cache[b, :, past[b] : past[b] + columns, :] = -GARBAGE
        results = []
        for s in range(new[b]):
            token, place = int(ids[b, s]), past[b] + s
            cache[b, :, place, :] = token
            index[b, 0, place // 4, :] = token
            rolled = (following[b, 0, 0] * 31 + token + 1) % 97
            following[b, 0, 0] = np.nan if token == POISON else rolled
            if token == POISON:
                cache[b, :, place, :] = np.nan
            results.append(_next(cache[b], place + 1, following[b, 0, 0], inputs, b, s))
        assert not inputs["ple_embeddings.1"][b, new[b] :].any()
        for row, position in enumerate(inputs["logits_positions"][b]):
            if position < new[b]:
                outputs["logits"][b, row] = results[position]


def _next(
    cache: np.ndarray,
    length: int,
    rolled: float,
    inputs: Mapping[str, np.ndarray],
    b: int,
    s: int,
) -> np.ndarray:
    # Masked rows meet probability 0, as in attention: NaN anywhere in the cache would spread.
    weights = np.arange(cache.shape[1]) < length
    attended = (cache[0, :, 0] * weights).sum()
    embedded = np.abs(inputs["ple_embeddings.1"][b, s, 2 * WIDTH]) * 1000 // 1
    return scores(float(attended), float(rolled), float(embedded))


def scores(attended: float, rolled: float, embedded: float) -> np.ndarray:
    """Logits over the vocabulary, with one clear winner that is never the poison."""
    total = attended * 3 + rolled * 5 + embedded
    if not np.isfinite(total):
        return np.full(VOCAB, np.nan, dtype=np.float32)
    winner = int(total) % VOCAB
    winner = winner + 1 if winner == POISON else winner
    distance = np.abs((np.arange(VOCAB) - winner + VOCAB // 2) % VOCAB - VOCAB // 2)
    return (-0.5 * distance).astype(np.float32)


def logits_of(tokens: Sequence[int], embed: Callable[[Sequence[int]], np.ndarray]) -> np.ndarray:
    """Logits [len(tokens), VOCAB] straight from the definition; `embed` gives [len, 4 * WIDTH]."""
    embedding = embed(tokens)
    rolled, attended, result = 0.0, 0.0, []
    for position, token in enumerate(tokens):
        rolled = (rolled * 31 + token + 1) % 97
        attended += token
        embedded = np.abs(embedding[position, 2 * WIDTH]) * 1000 // 1
        result.append(scores(attended, rolled, float(embedded)))
    return np.stack(result)


class LanguageExecutor:
    """`runtime.executors.Executor` that speaks the language.

    Args:
        config: of an engine from `tests.runtime.engines`.
        fail_when: called with phase and inputs before every call; True makes the call raise.
    """

    name = "interpreter"
    device = torch.device("cpu")

    def __init__(
        self,
        config: EngineConfig,
        fail_when: Callable[[Phase, Mapping[str, torch.Tensor]], bool] | None = None,
    ) -> None:
        slots = config.build_config.max_batch_size
        self.generation_widths: Sequence[int] = range(1, slots + 1)
        self._memory = SlotMemory(
            config.engines["context"].of_kind("cache", "state"), slots, self.device
        )
        self._fail_when = fail_when
        self.calls: list[tuple[Phase, tuple[int, ...]]] = []
        self.occupied: set[int] = set()

    def begin(self, slot: int) -> None:
        assert slot not in self.occupied
        self.occupied.add(slot)
        self._memory.begin(slot)

    def end(self, slot: int, poisoned: bool = False) -> None:
        self.occupied.remove(slot)
        self._memory.end(slot, poisoned)

    def step(self, phase: Phase, first: int, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        count, columns = inputs["input_ids"].shape
        self.calls.append((phase, (count, columns)))
        if self._fail_when is not None and self._fail_when(phase, inputs):
            raise RuntimeError("the device fell over")
        arrays = {name: t.numpy() for name, t in inputs.items()}
        arrays |= {name: t.numpy() for name, t in self._memory.inputs(first, count).items()}
        following = self._memory.next_states(first, count)
        logits = torch.zeros(count, inputs["logits_positions"].shape[1], VOCAB)
        compute(
            arrays,
            {
                "logits": logits.numpy(),
                "recurrent_state.1.next": following["recurrent_state.1"].numpy(),
            },
        )
        self._memory.commit(first, count)
        return logits

    def close(self) -> None:
        pass
