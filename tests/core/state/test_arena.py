from __future__ import annotations

import pytest

from wkvm_core.state.arena import Arena, Blocks


def test_slots_are_handed_out_once_and_the_reserved_ones_never() -> None:
    arena = Arena(5)
    slots = [arena.acquire() for _ in range(5)]
    assert sorted(slots) == [2, 3, 4, 5, 6]
    assert (arena.free, arena.used) == (0, 5)


def test_a_released_slot_is_the_last_to_be_handed_out_again() -> None:
    arena = Arena(3)
    first = arena.acquire()
    arena.release(first)
    assert [arena.acquire() for _ in range(3)][-1] == first


def test_a_slot_released_twice_is_caught() -> None:
    arena = Arena(2)
    slot = arena.acquire()
    arena.release(slot)
    with pytest.raises(AssertionError, match=f"slot {slot}"):
        arena.release(slot)


def test_a_block_is_free_when_its_last_reference_is_given_back() -> None:
    blocks = Blocks(1)
    block = blocks.acquire()
    blocks.retain(block)
    blocks.release(block)
    assert blocks.free == 0
    blocks.release(block)
    assert blocks.free == 1
    with pytest.raises(AssertionError, match=f"block {block}"):
        blocks.release(block)
