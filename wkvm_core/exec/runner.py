"""Runs plans: halt sets, moves, seats, then the rows through model and sampler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from wkvm_core.errors import DeviceLost
from wkvm_core.exec.bank import StateBank
from wkvm_core.exec.lanes import Lanes
from wkvm_core.exec.stepper import Pending, Stepper
from wkvm_core.sched.plan import Copy, Read, StepPlan, StepResult, Write, Zero


class Runner:
    """Executes plans in the order of their launch; results come out in the same order, perhaps later."""

    def __init__(
        self, bank: StateBank, lanes: Lanes, stepper: Stepper, host_block: Callable[[int], memoryview]
    ) -> None:
        """`host_block` gives the bytes of a block of the host arena."""
        self._bank = bank
        self._lanes = lanes
        self._stepper = stepper
        self._host_block = host_block
        self._launched: deque[Pending] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Starts a plan; what it does is seen by every plan launched later. Raises DeviceLost when the device is of no
        use any more, and anything else when this plan could not be run."""
        with self._watched():
            for halt_set in plan.halt_sets:
                self._lanes.set_halt_set(halt_set.index, halt_set.bitmap)
            for move in plan.moves:
                match move:
                    case Zero():
                        self._bank.zero(move.slot)
                    case Copy():
                        self._bank.copy(move.source, move.target)
                    case Read():
                        self._bank.read(move.slot, self._host_block(move.block))
                    case Write():
                        self._bank.write(self._host_block(move.block), move.slot)
            for seat in plan.seats:
                self._lanes.seat(seat.lane, seat.image)
            self._launched.append(self._stepper.launch(plan))

    def collect(self) -> StepResult:
        """The result of the oldest plan that was not collected; waits for it. Raises DeviceLost."""
        with self._watched():
            return self._launched.popleft().result()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A device that cannot even wait after an error has a sticky one."""
        try:
            yield
        except RuntimeError as error:
            if self._bank.device.type == "cuda":
                try:
                    torch.cuda.synchronize(self._bank.device)
                except RuntimeError as sticky:
                    raise DeviceLost(f"the device failed: {str(sticky).splitlines()[0]}") from error
            raise
