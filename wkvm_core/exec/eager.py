"""Rows op by op, results at once."""

from __future__ import annotations

import torch

from wkvm_core.exec.bank import StateBank
from wkvm_core.exec.lanes import Lanes
from wkvm_core.exec.sampler import Sampler
from wkvm_core.exec.staging import Staged, stage
from wkvm_core.exec.stepper import Done
from wkvm_core.models.protocol import Model
from wkvm_core.sched.plan import NO_LANE, RAN, Row, RowLogprobs, StepPlan, StepResult


class EagerStepper:
    """The CPU's stepper."""

    def __init__(self, model: Model, bank: StateBank, lanes: Lanes, sampler: Sampler) -> None:
        self._model = model
        self._bank = bank
        self._lanes = lanes
        self._sampler = sampler
        self._steady: Staged | None = None
        """Rows of the last pure decode step, all active: they come again until somebody joins, leaves or halts."""

    def launch(self, plan: StepPlan) -> Done:
        """See `Stepper.launch`."""
        return Done(self._run(plan))

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        rows = plan.rows
        steady = self._steady
        if steady is not None and rows == steady.rows:
            staged, places = steady, None
        else:
            rows, places = self._active(rows)
            staged = stage(rows, self._bank.device)
            if places is None and all(row.feed and row.sample and not row.go for row in rows):
                self._steady = staged
        flags, tokens, logprobs = self._launch(staged)
        if flags.count(RAN) != len(flags):
            self._steady = None  # a lane halted or is done: if its row comes again, it must do nothing
        if places is None:
            return StepResult(plan.step, flags, tokens, logprobs=logprobs)
        wide_flags, wide_tokens = [0] * len(plan.rows), [-1] * len(plan.rows)
        for place, flag, token in zip(places, flags, tokens, strict=True):
            wide_flags[place], wide_tokens[place] = flag, token
        named = {places[index]: value for index, value in logprobs.items()}
        return StepResult(plan.step, tuple(wide_flags), tuple(wide_tokens), logprobs=named)

    def _active(self, rows: tuple[Row, ...]) -> tuple[tuple[Row, ...], tuple[int, ...] | None]:
        """The rows whose lanes are neither halted nor done, and their places; None = all of them."""
        going = [row.lane for row in rows if row.go]
        if going:
            self._lanes.go(torch.tensor(going, dtype=torch.int64))
        laned = [index for index, row in enumerate(rows) if row.lane != NO_LANE]
        lanes = torch.tensor([rows[index].lane for index in laned], dtype=torch.int64)
        active = self._lanes.active(lanes).tolist()
        if all(active):
            return rows, None
        out = {index for index, is_active in zip(laned, active, strict=True) if not is_active}
        places = tuple(index for index in range(len(rows)) if index not in out)
        return tuple(rows[index] for index in places), places

    def _launch(self, staged: Staged) -> tuple[tuple[int, ...], tuple[int, ...], dict[int, RowLogprobs]]:
        count = len(staged.rows)
        if not count:
            return (), (), {}
        logits = self._model.forward(staged.batch(self._lanes), self._bank.families)
        if not staged.sampling:
            return (RAN,) * count, (-1,) * count, {}
        sampled = self._sampler.sample(logits, staged.lanes, staged.pause)
        tokens, flags = sampled.packed.tolist()
        logprobs = sampled.logprobs.by_row() if sampled.logprobs is not None else {}
        if len(staged.sampling) == count:
            return tuple(flags), tuple(tokens), logprobs
        all_flags, all_tokens = [RAN] * count, [-1] * count
        for row, flag, token in zip(staged.sampling, flags, tokens, strict=True):
            all_flags[row], all_tokens[row] = flag, token
        return tuple(all_flags), tuple(all_tokens), {staged.sampling[at]: value for at, value in logprobs.items()}
