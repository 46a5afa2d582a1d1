"""A request as the scheduler sees it: already checked, with ids only."""

from __future__ import annotations

from typing import Any

import msgspec

from wkvm_core.sched.stops import CompiledStops, VocabularyBytes
from wkvm_core.state.snapshot import Snapshot
from wkvm_proto.sampling import Sampling


class Request(msgspec.Struct, frozen=True, eq=False):
    """One turn: read the prompt, sample `n` continuations."""

    number: int
    """The core's own, never reused."""
    client: Any
    """Whoever gets the outcomes; opaque here."""
    tenant: str
    prompt: bytes
    """u32 column, at least one id."""
    sampling: Sampling
    n: int = 1
    stops: CompiledStops | None = None
    vocabulary: VocabularyBytes | None = None
    """Present when `stops` is."""
    priority: int = 0
    deadline: float | None = None
    """On the scheduler's clock, seconds."""
    origin: Snapshot | None = None
    """Start from it; the request holds one reference to its block."""
    keep: bool = False
    """The state at the end is wanted (n = 1)."""
    arrived: float = 0.0
    adapter: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Ids in the prompt."""
        return len(self.prompt) // 4
