"""A launch whose rows are on their way."""

from __future__ import annotations

from dataclasses import dataclass

from wkvm_core.exec.envelope import Envelope, Envelopes
from wkvm_core.exec.sampler import Logprobs
from wkvm_core.sched.plan import RowLogprobs


@dataclass(frozen=True, slots=True)
class Launched:
    """One of the launches of a step."""

    places: tuple[int, ...]
    """Of its rows in the plan."""
    size: int
    """Rows of the launch, padding included."""
    envelope: Envelope
    envelopes: Envelopes
    """Where the envelope belongs."""
    logprobs: Logprobs | None

    def open(self) -> tuple[list[int], list[int], dict[int, RowLogprobs]]:
        """Tokens, flags, and log-probabilities by place in the plan. The device is done with it; to be called once."""
        tokens, flags = self.envelope.outcome(len(self.places), self.size)
        self.envelopes.give(self.envelope)
        if self.logprobs is None:
            return tokens, flags, {}
        told = self.logprobs.by_row()
        return tokens, flags, {self.places[row]: value for row, value in told.items() if tokens[row] >= 0}
