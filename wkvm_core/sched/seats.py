"""Slots and lanes: who has one, who may have one. Admission is counting, and it is exact."""

from __future__ import annotations

from collections import deque

from wkvm_core.sched.plan import NO_LANE
from wkvm_core.sched.sequence import TRUNK, Sequence
from wkvm_core.state.arena import Arena

_ROWS_PER_SPARE = 16


class Seats:
    """Slots of the arena and lanes of the device, and the spare slots that rows with text stops may need.

    One spare is kept for each 16 rows whose state must survive a possible text stop, at least one while there is any.
    """

    def __init__(self, arena: Arena, num_lanes: int) -> None:
        self.arena = arena
        self._lanes = deque(range(num_lanes))
        self._halting = 0
        self._spares_out = 0

    @property
    def free_lanes(self) -> int:
        """Lanes that nobody holds."""
        return len(self._lanes)

    def fits(self, sequence: Sequence) -> bool:
        """There is a slot, a lane if it samples, and the spares of everybody seated remain."""
        halting = self._halting + (1 if sequence.halts else 0)
        reserve = max(-(-halting // _ROWS_PER_SPARE) - self._spares_out, 0)
        if sequence.index != TRUNK and not self._lanes:
            return False
        return self.arena.free - reserve >= 1

    def sit(self, sequence: Sequence, slot: int | None = None) -> None:
        """Gives it a slot (this one, if it takes over another's) and a lane if it samples."""
        assert sequence.slot is None, f"sequence {sequence.number} sits already"
        sequence.slot = self.arena.acquire() if slot is None else slot
        if sequence.index != TRUNK:
            sequence.lane = self._lanes.popleft()
        if sequence.halts:
            self._halting += 1

    def leave_lane(self, sequence: Sequence) -> None:
        """It samples no more."""
        if sequence.lane != NO_LANE:
            self._lanes.append(sequence.lane)
            sequence.lane = NO_LANE
            if sequence.halts:
                self._halting -= 1

    def leave(self, sequence: Sequence) -> None:
        """Gives back its lane, its slot and its candidate."""
        self.leave_lane(sequence)
        self.drop_candidate(sequence)
        if sequence.slot is not None:
            self.arena.release(sequence.slot)
            sequence.slot = None

    def take_spare(self, sequence: Sequence) -> bool:
        """Its slot becomes the candidate and a spare its slot; False when there is no spare now."""
        assert sequence.candidate is None and sequence.slot is not None
        if not self.arena.free:
            return False
        sequence.candidate, sequence.slot = sequence.slot, self.arena.acquire()
        self._spares_out += 1
        return True

    def drop_candidate(self, sequence: Sequence) -> None:
        """The possible text stop did not come: the state before it is not wanted."""
        if sequence.candidate is not None:
            self.arena.release(sequence.candidate)
            sequence.candidate = None
            self._spares_out -= 1

    def return_to_candidate(self, sequence: Sequence) -> None:
        """The text stop came: the state before it is the sequence's state."""
        assert sequence.candidate is not None and sequence.slot is not None
        self.arena.release(sequence.slot)
        sequence.slot, sequence.candidate = sequence.candidate, None
        self._spares_out -= 1
