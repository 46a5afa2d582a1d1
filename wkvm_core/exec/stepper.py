"""What runs the rows of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wkvm_core.sched.plan import StepPlan, StepResult


class Pending(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Its result; waits for it."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was over when its launch returned."""

    value: StepResult

    def result(self) -> StepResult:
        """See `Pending`."""
        return self.value


class Stepper(Protocol):
    """Runs the rows of a plan on the device."""

    def launch(self, plan: StepPlan) -> Pending:
        """Starts every row at once, or in launches of its own choosing; the result has a place for each row. Results
        are asked for in the order of the launches."""
        ...
