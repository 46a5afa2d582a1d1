"""The rows whose sampling a launch leaves to be done op by op."""

from __future__ import annotations

import torch

from wkvm_core.exec.gpu_sampler import GpuSampler
from wkvm_core.exec.sampler import Logprobs
from wkvm_core.sched.plan import Row


class Leftover:
    """Typical-p and log-probabilities, after the launch whose logits they need and before the next one."""

    def __init__(self, sampler: GpuSampler) -> None:
        self._sampler = sampler
        self._rows: tuple[Row, ...] = ()
        self._places: tuple[int, ...] = ()
        self.served = 0
        """Rows so far."""

    def serve(self, rows: tuple[Row, ...], logits: torch.Tensor, out: torch.Tensor) -> Logprobs | None:
        """rows: those of the launch; logits: float32 `[at least rows, vocab]`; out: int64 `[2, at least rows]`, tokens
        and flags, to be completed."""
        if rows is not self._rows:
            sampled = [place for place, row in enumerate(rows) if row.sample]
            left = self._sampler.left_over([rows[place].lane for place in sampled])
            self._rows, self._places = rows, tuple(sampled[at] for at in left)
        if not self._places:
            return None
        self.served += len(self._places)
        some = [rows[place] for place in self._places]
        return self._sampler.rest(logits, self._places, [row.lane for row in some], [row.pause for row in some], out)
