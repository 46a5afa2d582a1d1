"""Who holds a slot: admission from the queue, forks, parking for somebody else, and coming back."""

from __future__ import annotations

from wkvm_core.sched.counts import Counts
from wkvm_core.sched.halts import HaltSets
from wkvm_core.sched.limits import Limits
from wkvm_core.sched.plan import NO_LANE, Read, Seat, Write
from wkvm_core.sched.queue import FairQueue
from wkvm_core.sched.seats import Seats
from wkvm_core.sched.sequence import TRUNK, Fork, Phase, Sequence
from wkvm_core.sched.step import Step
from wkvm_core.state.arena import Arena, Blocks
from wkvm_core.state.slots import ZERO_SLOT


class Seating:
    """The seated sequences, the queue before them, and the resident states that samples fork from.

    A seat is given only with a slot, a lane and the spares of everybody else still there. Somebody seated is parked
    for a waiting one of higher priority, and, after its slice, for one whose tenant was served no more than its own.
    """

    def __init__(self, arena: Arena, blocks: Blocks, limits: Limits, counts: Counts) -> None:
        self.seats = Seats(arena, limits.max_rows)
        self.queue = FairQueue()
        self.seated: dict[int, Sequence] = {}
        self._arena = arena
        self._blocks = blocks
        self._limits = limits
        self._counts = counts
        self._halt_sets = HaltSets(limits.max_rows)
        self._leaving: list[Sequence] = []
        self._forks: list[Fork] = []

    def admit(self, step: Step) -> None:
        """Parks those who are due, then seats waiting sequences in the queue's order while they fit."""
        for leaver in self._leaving[:]:
            if leaver.phase is not Phase.LEAVING:
                self._leaving.remove(leaver)
            elif not leaver.pending:
                self._leaving.remove(leaver)
                self._park(leaver, step)
        while (sequence := self.queue.peek()) is not None:
            if self._try_to_seat(sequence, step):
                continue
            if not self._make_room(sequence, step) and not self._seat_a_reader(step):
                return

    def _try_to_seat(self, sequence: Sequence, step: Step) -> bool:
        if len(self.seated) >= self._limits.max_rows:
            return False
        if self._takes_over(sequence, step):
            self.queue.remove(sequence)
            self._sit_in_fork(sequence, step)
        elif self.seats.fits(sequence) and self._fork_may_begin(sequence):
            self.queue.remove(sequence)
            self._sit(sequence, step)
        else:
            return False
        return True

    def _seat_a_reader(self, step: Step) -> bool:
        """Somebody before them waits for a slot, and resident forks hold some: their samples go first, or neither would
        ever sit."""
        return any(self._try_to_seat(fork.readers[0], step) for fork in self._forks)

    def end_trunk(self, trunk: Sequence) -> None:
        """The last row of a trunk is planned: its slot now holds the state that the samples fork from."""
        assert trunk.fork is not None
        trunk.fork.slot, trunk.slot = trunk.slot, None
        self._forks.append(trunk.fork)
        trunk.phase = Phase.DONE
        del self.seated[trunk.number]

    def leave_lane(self, sequence: Sequence) -> None:
        """It samples no more, but keeps its slot."""
        if sequence.lane != NO_LANE and sequence.halts:
            assert sequence.request.stops is not None
            self._halt_sets.release(sequence.request.stops.halt_bitmap)
        self.seats.leave_lane(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It ends: everything it holds but its host block is given back, wherever it is."""
        if sequence.phase is Phase.WAITING:
            self.queue.forget()
        else:
            self.leave_lane(sequence)
            self.seats.leave(sequence)
            del self.seated[sequence.number]
        sequence.phase = Phase.DONE
        sequence.row = None

    def _fork_may_begin(self, sequence: Sequence) -> bool:
        """Trunks and resident forks never hold every slot: their samples need one to make them go away."""
        trunks = sum(seated.index == TRUNK for seated in self.seated.values())
        return sequence.index != TRUNK or trunks + len(self._forks) + 2 <= self._arena.num_slots

    def drop_fork(self, fork: Fork) -> None:
        """Nobody will read it: its slot is free."""
        if fork.slot is not None:
            self._arena.release(fork.slot)
            fork.slot = None
            self._forks.remove(fork)

    # ------------------------------------------------------------------------------------------ sitting down

    def _takes_over(self, sequence: Sequence, step: Step) -> bool:
        """The last sample of a fork may write over the state it starts from, unless a sibling reads it in this step."""
        fork = sequence.fork
        return (
            fork is not None
            and fork.slot is not None
            and fork.slot not in step.fork_slots
            and fork.readers == [sequence]
            and self.seats.free_lanes > 0
        )

    def _sit_in_fork(self, sequence: Sequence, step: Step) -> None:
        fork = sequence.fork
        assert fork is not None and fork.slot is not None
        self.seats.sit(sequence, fork.slot)
        sequence.reads = fork.slot
        self._forks.remove(fork)
        fork.slot = None
        fork.readers.clear()
        self._counts.forks += 1
        self._seat_lane(sequence, step)

    def _sit(self, sequence: Sequence, step: Step) -> None:
        self.seats.sit(sequence)
        assert sequence.slot is not None
        fork, origin = sequence.fork, sequence.request.origin
        sequence.reads = sequence.slot
        if sequence.block is not None:
            step.moves.append(Write(sequence.block, sequence.slot))
            step.blocks.append(sequence.block)
            sequence.block = None
            self._counts.resumes += 1
        elif sequence.index != TRUNK and fork is not None and (fork.slot is not None or fork.block is not None):
            self._read_fork(sequence, fork, step)
        elif origin is not None:
            step.moves.append(Write(origin.block, sequence.slot))
        else:
            sequence.reads = ZERO_SLOT
        self._seat_lane(sequence, step)

    def _read_fork(self, sequence: Sequence, fork: Fork, step: Step) -> None:
        assert sequence.slot is not None
        fork.readers.remove(sequence)
        self._counts.forks += 1
        if fork.slot is not None:
            sequence.reads = fork.slot
            step.fork_slots.add(fork.slot)
            if not fork.readers:
                step.slots.append(fork.slot)
                fork.slot = None
                self._forks.remove(fork)
        else:
            assert fork.block is not None
            step.moves.append(Write(fork.block, sequence.slot))
            if not fork.readers:
                step.blocks.append(fork.block)
                fork.block = None

    def _seat_lane(self, sequence: Sequence, step: Step) -> None:
        sequence.phase = Phase.RUNNING
        sequence.seated_at = sequence.consumed
        sequence.unread = True
        sequence.row = None
        self.seated[sequence.number] = sequence
        step.seated.append(sequence)
        if sequence.lane != NO_LANE:
            halt_set = -1
            if sequence.halts:
                assert sequence.request.stops is not None
                halt_set, news = self._halt_sets.acquire(sequence.request.stops.halt_bitmap)
                if news is not None:
                    step.halt_sets.append(news)
            step.seats.append(Seat(sequence.lane, sequence.image(halt_set)))

    # ------------------------------------------------------------------------------------------ making room

    def _make_room(self, sequence: Sequence, step: Step) -> bool:
        """Something was freed for a waiting sequence, now. (Or nothing yet: a victim may have rows in flight.)"""
        if not self._blocks.free:
            return False
        if len(self.seated) < self._limits.max_rows:
            for fork in self._forks:
                if fork.slot is not None and fork.slot not in step.fork_slots:
                    fork.block = self._blocks.acquire()
                    step.moves.append(Read(fork.slot, fork.block))
                    self.drop_fork(fork)
                    return True
        if self._leaving:
            return False
        victim = self._victim(sequence)
        if victim is None:
            return False
        if victim.pending:
            victim.phase = Phase.LEAVING
            victim.row = None
            self._leaving.append(victim)
            return False
        self._park(victim, step)
        return True

    def _victim(self, waiting: Sequence) -> Sequence | None:
        priority, slice_tokens = waiting.request.priority, self._limits.slice_tokens
        served = self.queue.served(waiting.request.tenant)
        lower: list[Sequence] = []
        sliced: list[Sequence] = []
        for sequence in self.seated.values():
            if not sequence.parkable:
                continue
            if sequence.request.priority < priority:
                lower.append(sequence)
            elif (
                slice_tokens
                and sequence.request.priority == priority
                and sequence.consumed - sequence.seated_at >= slice_tokens
                and self.queue.served(sequence.request.tenant) >= served
            ):
                sliced.append(sequence)
        if lower:
            return min(lower, key=lambda s: (s.request.priority, -s.number))
        if sliced:
            return max(sliced, key=lambda s: (self.queue.served(s.request.tenant), s.consumed - s.seated_at))
        return None

    def _park(self, sequence: Sequence, step: Step) -> None:
        """Its state goes to the host, its seat to somebody else; its lane can be told from what it sampled."""
        if not self._blocks.free:
            sequence.phase = Phase.RUNNING
            return
        assert sequence.slot is not None and not sequence.pending
        sequence.block = self._blocks.acquire()
        step.moves.append(Read(sequence.slot, sequence.block))
        self.leave_lane(sequence)
        self.seats.leave(sequence)
        del self.seated[sequence.number]
        sequence.phase = Phase.WAITING
        sequence.row = None
        self.queue.push(sequence)
        self._counts.parks += 1
