"""A request with all its sequences."""

from __future__ import annotations

from wkvm_core.sched.request import Request
from wkvm_core.sched.sequence import Fork, Sequence


class Group:
    """The trunk, if there is one, and the samples of one request that are not done."""

    __slots__ = ("estimate", "fork", "keep_block", "live", "request", "started", "unfinished")

    def __init__(self, request: Request, estimate: float, keep_block: int | None) -> None:
        self.request = request
        self.estimate = estimate
        self.keep_block = keep_block
        """Host block for the kept state, held from submission on: a kept state always has its place."""
        self.live: dict[int, Sequence] = {}
        """By index."""
        self.unfinished = set(range(request.n))
        """Samples that were not reported yet; before the fork they are not live."""
        self.fork: Fork | None = None
        self.started = False
        """Its first sequence left the queue."""
