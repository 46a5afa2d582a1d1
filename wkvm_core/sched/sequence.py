"""One line of tokens, read into one slot: a sample of a request, or the part that its samples fork from."""

from __future__ import annotations

from array import array
from enum import Enum, auto

from wkvm_core.sched.outcomes import Finish
from wkvm_core.sched.plan import NO_LANE, LaneImage, Row, RowLogprobs
from wkvm_core.sched.request import Request
from wkvm_core.sched.stops import StopMatcher
from wkvm_core.state.slots import ZERO_SLOT

TRUNK = -1
"""Index of the sequence that reads a prompt for several samples."""


class Phase(Enum):
    """Where a sequence is. It says nothing of prefill or decode: those are one thing."""

    WAITING = auto()  # in the queue, without a slot
    RUNNING = auto()  # has a slot, may have rows
    LEAVING = auto()  # gets no new rows; will be parked once no step in flight holds it
    KEEPING = auto()  # ended; its state is brought to the last kept token and read to the host
    DONE = auto()


class Fork:
    """The state that the samples of a request start from: its prompt but the last token.

    It lies in the slot that the trunk had, or in a host block after that slot was needed, until the last sample has
    read it; in neither when there is nothing before the last token.
    """

    __slots__ = ("block", "readers", "slot")

    def __init__(self) -> None:
        self.slot: int | None = None
        self.block: int | None = None
        self.readers: list[Sequence] = []
        """Samples that have not read it yet."""


class Sequence:
    """A row's owner. `consumed` and `issued` count the steps in flight as done; `output` holds what was committed."""

    __slots__ = (
        "block", "candidate", "candidate_consumed", "consumed", "delivered", "ending", "fork", "go", "held_logprobs",
        "index", "issued", "keep_read", "keep_to", "lane", "matcher", "max_tokens", "number", "output", "owner",
        "paused", "pending", "phase", "reads", "request", "row", "seated_at", "slot", "spare_wanted", "total_prompt",
        "unread",
    )  # fmt: skip

    def __init__(self, number: int, request: Request, index: int, fork: Fork | None = None) -> None:
        self.number = number
        self.request = request
        self.index = index
        self.owner = (request, index)
        self.fork = fork
        self.phase = Phase.WAITING
        self.max_tokens = request.sampling.max_tokens
        self.total_prompt = request.prompt_tokens - (1 if index == TRUNK else 0)
        """Prompt tokens on the way to this sequence's end, those before a fork included."""
        self.consumed = self.total_prompt - 1 if fork is not None and index != TRUNK else 0
        self.output: array[int] = array("I")
        self.issued = 0
        """Samples planned."""
        self.pending = 0
        """Steps in flight that hold a row of it."""
        self.slot: int | None = None
        self.block: int | None = None
        """Host block of the parked state."""
        self.lane = NO_LANE
        self.reads = ZERO_SLOT
        """Slot that the next row reads; its own, but for a first row and after a spare was taken."""
        self.unread = True
        """No row was planned since it got its slot."""
        self.row: Row | None = None
        """The decode row of a steady sequence, the same step after step."""
        self.seated_at = 0
        """`consumed` when it got its slot."""
        self.matcher: StopMatcher | None = None
        self.delivered = 0
        self.held_logprobs: list[RowLogprobs] = []
        """Of the tokens that are not delivered yet."""
        self.paused = False
        """A row in flight halts the lane whatever it samples."""
        self.go = False
        """The lane is halted and may go on."""
        self.spare_wanted = False
        """The next row must leave the slot as it is and write a spare."""
        self.candidate: int | None = None
        """Slot with the state before the possible text stop, and the tokens it has consumed."""
        self.candidate_consumed = 0
        self.ending: Finish | None = None
        """What to report once the state is kept."""
        self.keep_to = 0
        self.keep_read = False
        if index != TRUNK and request.stops is not None and request.vocabulary is not None:
            self.matcher = StopMatcher(request.stops.automaton, request.vocabulary, request.sampling.min_tokens)

    @property
    def committed(self) -> int:
        """Tokens that the state has consumed for sure: all but the last sampled one."""
        return self.total_prompt + len(self.output) - 1

    @property
    def halts(self) -> bool:
        """Its lane has a halt set: the state before a possible text stop must not be overwritten."""
        return self.matcher is not None and self.request.keep

    @property
    def parkable(self) -> bool:
        """Slot and lane tell everything: no first row is owed, no text stop is possible, nothing is being kept."""
        return (
            self.phase is Phase.RUNNING
            and not self.unread
            and self.candidate is None
            and not (self.paused or self.go or self.spare_wanted)
        )

    def ids(self, start: int, end: int) -> bytes:
        """u32 column of the tokens from `start` to `end`, prompt and output in one line."""
        border = self.total_prompt
        if end <= border:
            return self.request.prompt[4 * start : 4 * end]
        tail = self.output[max(start - border, 0) : end - border].tobytes()
        return self.request.prompt[4 * start : 4 * border] + tail if start < border else tail

    def image(self, halt_set: int) -> LaneImage:
        """The sampler of this sequence as it stands after the last committed step."""
        sampling = self.request.sampling
        return LaneImage(
            sampling=sampling,
            sample=self.index,
            prompt=self._penalised_prompt() if sampling.repetition_penalty != 1.0 else b"",
            output=self.output.tobytes(),
            halt_set=halt_set,
        )

    def _penalised_prompt(self) -> bytes:
        origin = self.request.origin
        kept = origin.segment.flatten() if origin is not None and origin.segment is not None else b""
        return kept + self.request.prompt
