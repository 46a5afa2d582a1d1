"""A plan under construction, then in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from wkvm_core.sched.plan import HaltSet, Move, Row, Seat, StepPlan
from wkvm_core.sched.sequence import Sequence


@dataclass(slots=True)
class Step:
    """The parts of a plan, and what is owed when it is planned and when it is done."""

    number: int
    moves: list[Move] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)
    halt_sets: list[HaltSet] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    owners: list[Sequence] = field(default_factory=list)
    seated: list[Sequence] = field(default_factory=list)
    kept: list[Sequence] = field(default_factory=list)
    """Sequences whose state this step reads into their keep block."""
    blocks: list[int] = field(default_factory=list)
    """References to host blocks, given back when the step is done."""
    tokens: int = 0
    """Tokens that its rows consume."""
    slots: list[int] = field(default_factory=list)
    """Slots given back when the plan is complete, so that no row of this plan writes them."""
    fork_slots: set[int] = field(default_factory=set)
    """Slots that a first row of this plan reads."""

    def plan(self) -> StepPlan:
        """The value for the runner."""
        return StepPlan(self.number, tuple(self.rows), tuple(self.moves), tuple(self.seats), tuple(self.halt_sets))
