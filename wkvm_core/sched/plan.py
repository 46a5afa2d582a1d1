"""What to run in one step, and what came out: plain values without tensors, the only words between scheduler and
runner. Slots, lanes and blocks are integers; token ids are u32 little-endian bytes."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from wkvm_core.state.slots import SINK_SLOT, ZERO_SLOT
from wkvm_proto.sampling import Sampling

NO_LANE = -1


class Zero(msgspec.Struct, frozen=True, tag=True):
    """Clear a slot."""

    slot: int


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy a slot onto another."""

    source: int
    target: int


class Read(msgspec.Struct, frozen=True, tag=True):
    """Bank -> host: a slot's bytes into a block of the host arena."""

    slot: int
    block: int


class Write(msgspec.Struct, frozen=True, tag=True):
    """Host -> bank: a block of the host arena into a slot."""

    block: int
    slot: int


Move: TypeAlias = Zero | Copy | Read | Write


class LaneImage(msgspec.Struct, frozen=True):
    """The whole sampler of a running request: enough to seat it on any lane, also after it was parked."""

    sampling: Sampling
    sample: int = 0
    """Index within the request's n."""
    prompt: bytes = b""
    """u32 column: ids that the repetition penalty counts besides the output; empty when it is off."""
    output: bytes = b""
    """u32 column: ids sampled so far; their number is the RNG position, the last one is the lane's next token."""
    halt_set: int = -1
    """Which halt set of the runner applies; -1 = none."""


class Seat(msgspec.Struct, frozen=True):
    """Load a lane before the rows of this step."""

    lane: int
    image: LaneImage


class HaltSet(msgspec.Struct, frozen=True):
    """Tell the runner a halt set before the first lane that uses it: a bitmap over the vocabulary, bit t%8 of byte
    t//8. A set replaced under the same index is not used any more."""

    index: int
    bitmap: bytes


class Row(msgspec.Struct, frozen=True):
    """One request's share of a step: read `read`, consume tokens, write `write`, perhaps sample.

    A lane that is halted or done at the start of the step turns its row into a no-op that writes the sink.
    """

    request: int
    """The scheduler's number of the row's owner; comes back in the result."""
    read: int
    write: int
    lane: int = NO_LANE
    tokens: bytes = b""
    """u32 column: ids to consume, in order."""
    feed: bool = False
    """Consume the lane's next token (the one sampled last) instead of `tokens`."""
    sample: bool = False
    """Sample from the logits of the last consumed token."""
    go: bool = False
    """Lift the lane's halt first."""
    pause: bool = False
    """Halt after this step's sample whatever it is."""
    adapter: int = 0


class StepPlan(msgspec.Struct, frozen=True):
    """One step: halt sets, then moves in order, then seats, then all rows at once.

    Within the rows no slot is written by one and read by another, none is written twice (the sink apart), and the
    zero slot is never written.
    """

    step: int
    rows: tuple[Row, ...] = ()
    moves: tuple[Move, ...] = ()
    seats: tuple[Seat, ...] = ()
    halt_sets: tuple[HaltSet, ...] = ()

    def check(self) -> None:
        """Asserts the promise above."""
        written = [row.write for row in self.rows if row.write != SINK_SLOT]
        writers = set(written)
        assert len(written) == len(writers), f"step {self.step}: a slot is written twice: {sorted(written)}"
        assert ZERO_SLOT not in writers, f"step {self.step}: the zero slot is written"
        for row in self.rows:
            assert row.read != SINK_SLOT, f"step {self.step}: request {row.request} reads the sink"
            if row.read in writers and row.read != row.write:
                raise AssertionError(f"step {self.step}: slot {row.read} is read by {row.request}, written by another")


RAN = 1
"""The row consumed its tokens and wrote its state (clear: the lane was halted or done; nothing happened)."""
STOPPED = 2
"""Sampled one of the lane's stop ids: the lane is done."""
EXHAUSTED = 4
"""Sampled the last token that `max_tokens` allows: the lane is done."""
HALTED = 8
"""Sampled a token of the halt set, or was told to pause: the lane waits for `go`."""
FAULT = 16
"""The logits are not finite: nothing was sampled, the row wrote the sink, the lane is done."""


class RowLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one sampled token in the raw distribution; `top_ids` and `top` are the k best."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """What a step brought, a place for each row of its plan, in order."""

    step: int
    flags: tuple[int, ...]
    tokens: tuple[int, ...]
    """The sampled id, or -1. (Several ids a row a step: `more`.)"""
    more: dict[int, tuple[int, ...]] = {}
    """Row index -> further ids of that row, for models that bring several a step."""
    logprobs: dict[int, RowLogprobs] = {}
    """Row index -> log-probabilities, of the rows that asked."""
