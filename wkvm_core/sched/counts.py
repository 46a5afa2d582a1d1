"""What the scheduler did since the start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Running totals."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    halts: int = 0
    """Halted rows that the host decided on: one idle step each where steps overlap."""
    spare_waits: int = 0
    """Times a row waited for a spare slot."""
    parks: int = 0
    resumes: int = 0
    forks: int = 0
    faults: int = 0
