"""Slots: which sequence has which rows of the caches and states, and the tensors themselves."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import torch

from plugins.support.dtypes import BY_NAME
from runtime.contract import EngineConfig, Phase, TensorSpec


class SlotPool:
    """Free slots. The lowest free one is given out, so that running slots stay close together.

    Args:
        slots: how many there are.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The lowest free slot. Raises IndexError when none is free."""
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        """Make `slot` free again. Raises ValueError when it is."""
        if slot in self._free:
            raise ValueError(f"slot {slot} is free already")
        heapq.heappush(self._free, slot)


class SlotMemory:
    """Cache and state tensors of all slots, [slots, ...] each.

    Caches are written in place. A state is read from one tensor and written to another, since a
    fused kernel may read and write in any order; `commit` makes the written one current.

    Args:
        tensors: specs of kind cache and state.
        slots: dimension 0.
        device: where they live.
    """

    def __init__(self, tensors: Iterable[TensorSpec], slots: int, device: torch.device) -> None:
        # Zeros, not empty: a masked cache row still meets a probability of 0, and 0 * NaN is NaN.
        allocated = {
            spec.name: (
                spec.kind,
                torch.zeros(
                    (slots, *spec.shape[1:]), dtype=BY_NAME[spec.dtype].torch, device=device
                ),
            )
            for spec in tensors
        }
        self._slots = slots
        self._caches = {name: t for name, (kind, t) in allocated.items() if kind == "cache"}
        self._states = {name: t for name, (kind, t) in allocated.items() if kind == "state"}
        self._next = {name: torch.zeros_like(t) for name, t in self._states.items()}
        self._occupied: set[int] = set()
        self.swapped = False

    def inputs(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """Caches and current states of slots first .. first+count-1, by input name (views)."""
        both = self._caches | self._states
        return {name: tensor[first : first + count] for name, tensor in both.items()}

    def caches(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """Caches of a range of slots (views)."""
        return {name: tensor[first : first + count] for name, tensor in self._caches.items()}

    def next_states(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """Where the next states of a range of slots are to be written (views)."""
        return {name: tensor[first : first + count] for name, tensor in self._next.items()}

    def commit(self, first: int, count: int) -> None:
        """Make the next states of a range of slots current.

        Swaps the two sets where the range covers every occupied slot, copies the range otherwise.
        """
        last = first + count
        if all(first <= slot < last for slot in self._occupied):
            self._states, self._next = self._next, self._states
            self.swapped = not self.swapped
            return
        for name, tensor in self._next.items():
            self._states[name][first:last].copy_(tensor[first:last])

    def begin(self, slot: int) -> None:
        """Prepare `slot` for a new sequence: all states zero. Caches need no clearing."""
        self._occupied.add(slot)
        for tensor in self._states.values():
            tensor[slot].zero_()

    def end(self, slot: int, poisoned: bool = False) -> None:
        """Free `slot`; after a failure (`poisoned`) its caches and states are cleared too.

        NaN that stays in a cache row would reach the next sequence through masked attention.
        """
        self._occupied.discard(slot)
        if poisoned:
            for group in (self._caches, self._states, self._next):
                for tensor in group.values():
                    tensor[slot].zero_()

    def nbytes(self) -> int:
        """Bytes allocated, both copies of the states included."""
        tensors = [*self._caches.values(), *self._states.values(), *self._next.values()]
        return sum(tensor.nbytes for tensor in tensors)


def open_memory(config: EngineConfig, device: torch.device) -> dict[Phase, SlotMemory]:
    """Memory of the text engines under "context", and of the draft engine where there is one."""
    slots = config.build_config.max_batch_size
    phases: tuple[Phase, ...] = ("context", "draft")
    return {
        phase: SlotMemory(config.engines[phase].of_kind("cache", "state"), slots, device)
        for phase in phases
        if phase in config.engines
    }
