"""The stepper of a GPU: rows of one token by captured steps, rows of several by captured readings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


@dataclass(frozen=True, slots=True)
class Side:
    """What works on one kind of launches: a model with room of its own, `reserve`d, and a sampler with its own."""

    model: Model
    sampler: GpuSampler

    @staticmethod
    def open(model: Model, lanes: DeviceLanes, max_tokens: int, max_rows: int) -> Side:
        """Allocates for launches of so many tokens and rows."""
        model.reserve(max_tokens, max_rows)
        return Side(model, GpuSampler(lanes, max_rows))


class Beside:
    """A stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """What is launched inside begins after all that the current stream has got so far, and runs beside what it gets
        until `join`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the current stream gets from now on comes after what was launched inside."""
        torch.cuda.current_stream().wait_stream(self._stream)


class InLine:
    """The stand-in where there is no other stream."""

    def __call__(self) -> AbstractContextManager[None]:
        """In the order of the calls."""
        return nullcontext()

    def join(self) -> None:
        """Nothing to wait for."""


class GraphStepper:
    """Starts a step and comes back at once; the host learns its tokens when it asks for the result."""

    @staticmethod
    def open(
        decoding: Side,
        reading: Side,
        bank: StateBank,
        lanes: DeviceLanes,
        max_tokens: int,
        buckets: Sequence[int],
        readings: Sequence[tuple[int, int]],
        *,
        tell: Callable[[str], None] = lambda _: None,
    ) -> GraphStepper:
        """Captures every bucket and reading; `tell` hears what comes next. `reading` has room for `max_tokens` tokens
        and a row of padding."""
        device = bank.device
        decode = Decode(decoding.model, bank, lanes, decoding.sampler, buckets)
        reader = Reading(
            reading.model, bank, lanes, reading.sampler, max_tokens, reading.sampler.max_rows - 1, readings
        )
        # Each kind has a stream and a pool of its own: one of either may run at a time.
        with torch.inference_mode():
            reader.capture(_capture(device), lambda size: tell(f"reading {size[0]} tokens of {size[1]} rows"))
            decode.capture(_capture(device), lambda bucket: tell(f"a step of {bucket} rows"))
        if device.type == "cuda":
            return GraphStepper(decode, reader, torch.cuda.Event, Beside(device))
        return GraphStepper(decode, reader, Passed, InLine())

    def __init__(self, decode: Decode, reading: Reading, fence: Callable[[], Fence], beside: Beside | InLine) -> None:
        """fence: makes a point in the work of the current stream; beside: where readings go in a step that also
        decodes, which is bound by memory where they are not."""
        self._beside = beside
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
        others = [place for place, row in enumerate(rows) if not is_single(row)]
        several = [rows[place] for place in others]
        if not singles:
            return list(self._reading.launches(several, others))
        with self._beside():
            launches = list(self._reading.launches(several, others))
        launches += [
            self._decode.launch(tuple(rows[place] for place in some), some)
            for some in _pieces(singles, self._decode.max_rows)
        ]
        self._beside.join()
        return launches


def _capture(device: torch.device) -> Capture:
    return CudaGraphs(device) if device.type == "cuda" else as_it_is


def _pieces(places: tuple[int, ...], most: int) -> Sequence[tuple[int, ...]]:
    return [places[start : start + most] for start in range(0, len(places), most)]
