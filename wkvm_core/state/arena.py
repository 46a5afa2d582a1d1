"""Who sits where: integers only."""

from __future__ import annotations

from collections import deque

from wkvm_core.state.slots import RESERVED_SLOTS


class Arena:
    """Seats for states. Every slot is free or held by one owner, never both; the reserved ones are never handed out."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots` are handed out, numbered from 2; slots 0 and 1 come on top."""
        assert num_slots >= 1, num_slots
        self.num_slots = num_slots
        self._free = deque(range(RESERVED_SLOTS, RESERVED_SLOTS + num_slots))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots that somebody holds."""
        return len(self._held)

    def acquire(self) -> int:
        """A free slot; its content is whatever the last owner left. The caller counted `free` before."""
        slot = self._free.popleft()
        self._held.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back."""
        assert slot in self._held, f"slot {slot} released, but nobody holds it"
        self._held.remove(slot)
        self._free.append(slot)  # to the back: a just-released state stays intact longest


class Blocks:
    """Places for snapshots in host memory, by number, counted by reference: forks share a snapshot's bytes."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._references: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody refers to."""
        return len(self._free)

    def acquire(self) -> int:
        """A free block with one reference. The caller counted `free` before."""
        block = self._free.popleft()
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        """One more reference to a held block."""
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One reference less; the block is free when none is left."""
        assert self._references.get(block, 0) > 0, f"block {block} released, but nobody refers to it"
        self._references[block] -= 1
        if not self._references[block]:
            del self._references[block]
            self._free.append(block)
