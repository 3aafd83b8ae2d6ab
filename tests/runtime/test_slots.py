"""Slots are given out lowest first and never twice; their memory never mixes."""

from __future__ import annotations

import pytest
import torch

from runtime.contract import TensorSpec
from runtime.slots import SlotMemory, SlotPool

SPECS = [
    TensorSpec(name="key_cache.0", dtype="bfloat16", shape=(-1, 1, 8, 2), kind="cache"),
    TensorSpec(name="conv_state.1", dtype="float32", shape=(-1, 3), kind="state"),
]


def _memory(slots: int = 4) -> SlotMemory:
    return SlotMemory(SPECS, slots, torch.device("cpu"))


def _write(memory: SlotMemory, first: int, count: int, value: float) -> None:
    memory.next_states(first, count)["conv_state.1"].fill_(value)
    memory.commit(first, count)


def _states(memory: SlotMemory) -> list[float]:
    return memory.inputs(0, 4)["conv_state.1"][:, 0].tolist()


def test_pool_gives_the_lowest_slot() -> None:
    pool = SlotPool(3)
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, 2]
    pool.give_back(2)
    pool.give_back(0)
    assert pool.take() == 0
    assert len(pool) == 1
    with pytest.raises(ValueError, match="free already"):
        pool.give_back(2)


def test_caches_are_views_of_one_tensor() -> None:
    memory = _memory()
    memory.caches(1, 2)["key_cache.0"].fill_(5)
    everything = memory.inputs(0, 4)["key_cache.0"]
    assert everything[:, 0, 0, 0].tolist() == [0, 5, 5, 0]
    assert memory.caches(1, 2)["key_cache.0"].is_contiguous()
    assert everything.dtype == torch.bfloat16


def test_commit_of_a_part_leaves_the_other_slots() -> None:
    memory = _memory()
    for slot in range(4):
        memory.begin(slot)
    _write(memory, 0, 4, 1.0)
    assert memory.swapped
    _write(memory, 1, 2, 2.0)
    assert memory.swapped
    assert _states(memory) == [1, 2, 2, 1]
    _write(memory, 0, 4, 3.0)
    assert not memory.swapped
    assert _states(memory) == [3, 3, 3, 3]


def test_commit_swaps_when_only_free_slots_are_left_out() -> None:
    memory = _memory()
    memory.begin(0)
    memory.begin(1)
    _write(memory, 0, 2, 4.0)
    assert memory.swapped
    assert _states(memory)[:2] == [4, 4]
    memory.begin(3)
    _write(memory, 0, 2, 5.0)
    assert _states(memory) == [5, 5, 0, 0]


def test_a_new_sequence_finds_zero_states_after_any_number_of_swaps() -> None:
    memory = _memory()
    for swaps in range(3):
        memory.begin(2)
        assert _states(memory)[2] == 0
        for _ in range(swaps):
            _write(memory, 0, 4, 9.0)
        memory.end(2)


def test_a_poisoned_slot_is_clean_again() -> None:
    memory = _memory()
    memory.begin(1)
    memory.caches(1, 1)["key_cache.0"].fill_(float("nan"))
    _write(memory, 0, 4, float("nan"))
    memory.next_states(1, 1)["conv_state.1"].fill_(float("nan"))
    memory.end(1, poisoned=True)
    assert not memory.inputs(1, 1)["key_cache.0"].isnan().any()
    assert not memory.inputs(1, 1)["conv_state.1"].isnan().any()
    assert not memory.next_states(1, 1)["conv_state.1"].isnan().any()


def test_bytes_count_both_copies_of_the_states() -> None:
    assert _memory().nbytes() == 4 * (8 * 2 * 2 + 2 * 3 * 4)
