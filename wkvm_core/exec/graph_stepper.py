"""The stepper of a GPU: rows of one token by captured steps, rows of several by captured readings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from wkvm_core.exec.bank import StateBank
from wkvm_core.exec.decode import Decode
from wkvm_core.exec.device_lanes import DeviceLanes
from wkvm_core.exec.gpu_sampler import GpuSampler
from wkvm_core.exec.graphs import Capture, CudaGraphs, as_it_is
from wkvm_core.exec.launched import Launched
from wkvm_core.exec.reading import Reading
from wkvm_core.exec.ring import Fence, Passed
from wkvm_core.exec.table import is_single
from wkvm_core.models.protocol import Model
from wkvm_core.sched.plan import Row, RowLogprobs, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step on the device. Its result may be asked for once."""

    step: int
    num_rows: int
    launches: tuple[Launched, ...]
    fence: Fence

    def result(self) -> StepResult:
        """See `Pending`."""
        self.fence.synchronize()
        if len(self.launches) == 1:  # its rows are the plan's, in order
            tokens, flags, logprobs = self.launches[0].open()
            return StepResult(self.step, tuple(flags), tuple(tokens), logprobs=logprobs)
        all_tokens, all_flags = [-1] * self.num_rows, [0] * self.num_rows
        told: dict[int, RowLogprobs] = {}
        for launch in self.launches:
            tokens, flags, logprobs = launch.open()
            for place, token, flag in zip(launch.places, tokens, flags, strict=True):
                all_tokens[place], all_flags[place] = token, flag
            told |= logprobs
        return StepResult(self.step, tuple(all_flags), tuple(all_tokens), logprobs=told)


class GraphStepper:
    """Starts a step and comes back at once; the host learns its tokens when it asks for the result."""

    @staticmethod
    def open(
        model: Model,
        bank: StateBank,
        lanes: DeviceLanes,
        sampler: GpuSampler,
        max_tokens: int,
        buckets: Sequence[int],
        readings: Sequence[tuple[int, int]],
        *,
        tell: Callable[[str], None] = lambda _: None,
    ) -> GraphStepper:
        """Captures every bucket and reading; `tell` hears what comes next. `model.reserve` was called for `max_tokens`
        and the rows of the sampler, which has room for one row more than the largest bucket."""
        capture: Capture = CudaGraphs(bank.device) if bank.device.type == "cuda" else as_it_is
        decode = Decode(model, bank, lanes, sampler, buckets)
        reading = Reading(model, bank, lanes, sampler, max_tokens, sampler.max_rows - 1, readings)
        with torch.inference_mode():
            reading.capture(capture, lambda size: tell(f"reading {size[0]} tokens of {size[1]} rows"))
            decode.capture(capture, lambda bucket: tell(f"a step of {bucket} rows"))
        return GraphStepper(decode, reading, torch.cuda.Event if bank.device.type == "cuda" else Passed)

    def __init__(self, decode: Decode, reading: Reading, fence: Callable[[], Fence]) -> None:
        """fence: makes a point in the work of the current stream."""
        self._decode = decode
        self._reading = reading
        self._fence = fence
        self._steady: tuple[tuple[Row, ...], tuple[int, ...]] = (), ()
        """Rows of the last step, all of one token, and their places."""

    @property
    def eager_rows(self) -> int:
        """Rows that were sampled op by op."""
        return self._decode.leftover.served + self._reading.leftover.served

    @property
    def eager_launches(self) -> int:
        """Readings for which nothing was captured."""
        return self._reading.eager_launches

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        """See `Stepper.launch`."""
        launches = self._launch(plan.rows)
        fence = self._fence()
        fence.record()
        return InFlight(plan.step, len(plan.rows), tuple(launches), fence)

    def _launch(self, rows: tuple[Row, ...]) -> list[Launched]:
        if not rows:
            return []
        if rows == self._steady[0]:
            return [self._decode.launch(*self._steady)]
        singles = tuple(place for place, row in enumerate(rows) if is_single(row))
        if len(singles) == len(rows) <= self._decode.max_rows:
            self._steady = rows, singles
            return [self._decode.launch(rows, singles)]
        launches = [
            self._decode.launch(tuple(rows[place] for place in some), some)
            for some in _pieces(singles, self._decode.max_rows)
        ]
        others = [place for place, row in enumerate(rows) if not is_single(row)]
        launches += self._reading.launches([rows[place] for place in others], others)
        return launches


def _pieces(places: tuple[int, ...], most: int) -> Sequence[tuple[int, ...]]:
    return [places[start : start + most] for start in range(0, len(places), most)]
