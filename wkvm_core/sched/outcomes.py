"""What a step meant for the requests: tokens to deliver, ends, failures."""

from __future__ import annotations

from dataclasses import dataclass, field

from wkvm_core.sched.plan import RowLogprobs
from wkvm_core.sched.request import Request
from wkvm_core.state.snapshot import Snapshot
from wkvm_proto.names import ErrorCode, FinishReason


@dataclass(frozen=True, slots=True)
class Finish:
    """A sample ended in good order."""

    request: Request
    sample: int
    reason: FinishReason
    generated: int
    """Tokens sampled, those of a stop included."""
    delivered: int
    consumed: int
    """Tokens that the kept state has read since the zero state (the running one's when none is kept)."""
    tail: bytes = b""
    stop_text: bytes = b""
    stop_id: int = -1
    snapshot: Snapshot | None = None
    """The kept state, with one reference to its block that the receiver takes over."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request ended without a result, with all its samples."""

    request: Request
    code: ErrorCode
    message: str
    retry_after_s: float = 0.0


@dataclass(slots=True)
class Outcomes:
    """Since the last take, in order. `owners[i]` got the id `ids[i]`."""

    owners: list[tuple[Request, int]] = field(default_factory=list)
    """Request and sample, one entry a token."""
    ids: list[int] = field(default_factory=list)
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    """Index into `ids` -> log-probabilities, for the tokens of requests that asked."""
    finished: list[Finish] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ids or self.finished or self.failed)
