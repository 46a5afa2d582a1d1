"""A device in plain Python: runs plans on states that are (tokens consumed, hash of them)."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from wkvm_core.sched.plan import (
    EXHAUSTED,
    FAULT,
    HALTED,
    NO_LANE,
    RAN,
    STOPPED,
    Copy,
    LaneImage,
    Read,
    StepPlan,
    StepResult,
    Write,
    Zero,
)
from wkvm_core.state.slots import SINK_SLOT, ZERO_SLOT
from wkvm_proto.sampling import Sampling

MASK = 2**64 - 1
State = tuple[int, int]
EMPTY: State = (0, 0)


def consume(state: State, token: int) -> State:
    """The state after one more token."""
    count, digest = state
    return count + 1, (digest * 6364136223846793005 + token + 1442695040888963407) & MASK


def next_token(state: State, sampling: Sampling, sample: int, position: int, vocab_size: int) -> int:
    """Depends on everything that the state has read; with a temperature also on seed, sample index and position."""
    count, digest = state
    value = digest ^ (count * 0x9E3779B97F4A7C15)
    if sampling.temperature > 0:
        value ^= (
            sampling.seed * 0xBF58476D1CE4E5B9 + sample * 0x94D049BB133111EB + position * 0xD6E8FEB86659FD93
        ) & MASK
    value = (value ^ (value >> 31)) * 0xFF51AFD7ED558CCD & MASK
    return (value >> 33) % vocab_size


@dataclass
class Lane:
    """A sampler on the device."""

    image: LaneImage
    output: list[int] = field(default_factory=list)
    halted: bool = False
    done: bool = False


class Device:
    """Executes a plan when it is launched and hands the result out later, in order, as a real device would."""

    def __init__(self, num_slots: int, num_blocks: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.slots: list[State] = [EMPTY] * (num_slots + 2)
        self.blocks: list[State] = [EMPTY] * num_blocks
        self.lanes: dict[int, Lane] = {}
        self.halt_sets: dict[int, bytes] = {}
        self.poisoned: set[int] = set()
        """Tokens whose logits come out as NaN once consumed."""
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Runs the plan."""
        plan.check()
        for halt_set in plan.halt_sets:
            self.halt_sets[halt_set.index] = halt_set.bitmap
        for move in plan.moves:
            match move:
                case Zero(slot):
                    self.slots[slot] = EMPTY
                case Copy(source, target):
                    self.slots[target] = self.slots[source]
                case Read(slot, block):
                    assert slot not in (ZERO_SLOT, SINK_SLOT)
                    self.blocks[block] = self.slots[slot]
                case Write(block, slot):
                    assert slot not in (ZERO_SLOT, SINK_SLOT)
                    self.slots[slot] = self.blocks[block]
        for seat in plan.seats:
            self.lanes[seat.lane] = Lane(seat.image, list(array("I", seat.image.output)))
        states = [self.slots[row.read] for row in plan.rows]
        flags, tokens = [], []
        for row, state in zip(plan.rows, states, strict=True):
            lane = self.lanes[row.lane] if row.lane != NO_LANE else None
            if lane is not None and row.go:
                lane.halted = False
            if lane is not None and (lane.halted or lane.done):
                flags.append(0)
                tokens.append(-1)
                continue
            ids: Ids[int] = [lane.output[-1]] if row.feed and lane is not None else array("I", row.tokens)
            assert len(ids), f"row of request {row.request} has no tokens"
            for token in ids:
                assert token < self.vocab_size
                state = consume(state, token)
            self.slots[row.write] = state
            flag, token = RAN, -1
            if row.sample:
                assert lane is not None
                if self.poisoned.intersection(ids):
                    lane.done = True
                    flag |= FAULT
                else:
                    token, more = self._sample(lane, state, row.pause)
                    flag |= more
            flags.append(flag)
            tokens.append(token)
        assert self.slots[ZERO_SLOT] == EMPTY, "the zero slot was written"
        self._results.append(StepResult(plan.step, tuple(flags), tuple(tokens)))

    def collect(self) -> StepResult:
        """The oldest result."""
        return self._results.popleft()

    def _sample(self, lane: Lane, state: State, pause: bool) -> tuple[int, int]:
        sampling = lane.image.sampling
        token = next_token(state, sampling, lane.image.sample, len(lane.output), self.vocab_size)
        stops = array("I", sampling.stop_ids)
        while len(lane.output) < sampling.min_tokens and token in stops:
            token = (token + 1) % self.vocab_size
        lane.output.append(token)
        flag = 0
        if token in stops:
            flag |= STOPPED
            lane.done = True
        if len(lane.output) >= sampling.max_tokens:
            flag |= EXHAUSTED
            lane.done = True
        bitmap = self.halt_sets[lane.image.halt_set] if lane.image.halt_set >= 0 else b""
        if pause or (bitmap and bitmap[token // 8] >> (token % 8) & 1):
            flag |= HALTED
            lane.halted = True
        return token, flag
