"""A CUDA device: everything is allocated and captured at start, and nothing afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from wkvm_core.daemon import capacity
from wkvm_core.daemon.capacity import Capacity
from wkvm_core.daemon.config import CoreConfig
from wkvm_core.daemon.hardware import DEFAULT_DTYPES, Machinery, Say, refused_when_full
from wkvm_core.daemon.memory import available_bytes
from wkvm_core.exec.bank import StateBank
from wkvm_core.exec.device_lanes import DeviceLanes
from wkvm_core.exec.gpu_sampler import GpuSampler
from wkvm_core.exec.graph_stepper import GraphStepper, Side
from wkvm_core.exec.pinned import pin
from wkvm_core.exec.reading import sizes
from wkvm_core.models.protocol import Model
from wkvm_core.store.host import HostArena

_MIB = 2**20
_READING_ROWS = 256
"""Rows of a reading at most; more are read in several launches."""
_SPARE_BYTES = 256 * _MIB
"""Left for what libraries take later."""
_BAR_WIDTH = 24
_BAR_S = 1.0
"""Between two lines of progress."""


class Tags:
    """Device memory by what it is for, bytes: weights, lanes, work (of forward passes and samplers), states, graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: dict[str, int] = {}

    @contextmanager
    def of(self, tag: str) -> Iterator[None]:
        """What is taken from the device meanwhile belongs to the tag."""
        before = self.free
        yield
        torch.cuda.synchronize(self._device)
        self.bytes[tag] = self.bytes.get(tag, 0) + before - self.free

    @property
    def free(self) -> int:
        """Bytes that nobody has taken from the device."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free


class Cuda:
    """A `Hardware`."""

    default_dtype = DEFAULT_DTYPES["cuda"]

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        _, self._total = torch.cuda.mem_get_info(device)
        self._tags = Tags(device)
        self._at_start = self._tags.free

    def build(self, config: CoreConfig, model: Model, progress: Say) -> Machinery:
        """See `Hardware`."""
        tags, device = self._tags, self.device
        torch.cuda.empty_cache()
        tags.bytes["weights"] = self._at_start - tags.free
        lane_bytes = (DeviceLanes.bytes_for(1024, model.vocab_size, 1024) >> 10) + GpuSampler.bytes_for(
            1, model.vocab_size
        )
        limits = capacity.resolve_limits(config, gpu_bytes=self._total, lane_bytes=lane_bytes)
        buckets = capacity.resolve_buckets(config, limits.max_rows)
        reading_rows = min(limits.max_rows, _READING_ROWS)
        readings = sizes(limits.step_tokens, reading_rows)
        slot_bytes = model.layout.slot_bytes
        with refused_when_full():
            with tags.of("lanes"):
                lanes = DeviceLanes(limits.max_rows, model.vocab_size, device, limits.max_rows)
            with tags.of("work"):
                sides = (
                    Side.open(model, lanes, limits.max_rows, limits.max_rows),
                    Side.open(model.twin(), lanes, limits.step_tokens, reading_rows + 1),
                )
            progress("compiling kernels")
            graph_bytes = self._measure(model, sides, lanes, limits.step_tokens, buckets, readings)
            kept_back = int((1.0 - config.gpu_memory_utilization) * self._total) + graph_bytes + _SPARE_BYTES
            num_slots = capacity.resolve_slots(config, slot_bytes, max(tags.free - kept_back, 0))
            with tags.of("states"):
                bank = StateBank(model.layout, num_slots, device)
            host = HostArena(capacity.resolve_blocks(config, slot_bytes, available_bytes() // 2), slot_bytes)
            pin(host.whole)
            bar = Bar(len(buckets) + len(readings), progress)
            with tags.of("graphs"):
                stepper = GraphStepper.open(*sides, bank, lanes, limits.step_tokens, buckets, readings, tell=bar.next)
        bar.close()
        resolved = Capacity(
            num_slots=num_slots,
            num_blocks=host.num_blocks,
            limits=limits,
            overlap=capacity.resolve_overlap(config, on_gpu=True),
            threads=capacity.resolve_threads(config, 0, len(os.sched_getaffinity(0))),
            buckets=buckets,
        )
        torch.set_num_threads(resolved.threads)
        parts = ", ".join(f"{tag} {size / _MIB:.0f}" for tag, size in tags.bytes.items())
        lines = [
            f"device   {torch.cuda.get_device_name(device)}, MiB: {parts}, free {tags.free / _MIB:.0f}",
            f"graphs   steps of {', '.join(map(str, buckets))} rows; {len(readings)} sizes of reading up to "
            f"{max((tokens for tokens, _ in readings), default=0)} tokens",
        ]

        def gauges() -> dict[str, float]:
            held = {f"wkvm_device_{tag}_bytes": float(size) for tag, size in tags.bytes.items()}
            eager = {"wkvm_eager_rows": stepper.eager_rows, "wkvm_eager_launches": stepper.eager_launches}
            return held | {name: float(count) for name, count in eager.items()}

        return Machinery(resolved, bank, lanes, host, stepper, lines, gauges)

    def _measure(
        self,
        model: Model,
        sides: tuple[Side, Side],
        lanes: DeviceLanes,
        step_tokens: int,
        buckets: tuple[int, ...],
        readings: tuple[tuple[int, int], ...],
    ) -> int:
        """Bytes that capturing everything will take: it is done for the two largest of each kind over a bank of one
        slot, after which all kernels that they share are compiled and loaded, too."""
        torch.cuda.empty_cache()
        bank = StateBank(model.layout, 1, self.device)
        some, largest = buckets[-2:], readings[-2:]
        before = self._tags.free
        stepper = GraphStepper.open(*sides, bank, lanes, step_tokens, some, largest)
        torch.cuda.synchronize(self.device)
        taken = before - self._tags.free
        del stepper, bank
        torch.cuda.empty_cache()
        return taken * (len(buckets) + len(readings)) // (len(some) + len(largest))


class Bar:
    """Progress of many small parts in few lines."""

    def __init__(self, total: int, progress: Say) -> None:
        self._total, self._progress = total, progress
        self._done = 0
        self._started = self._told = time.monotonic()

    def next(self, what: str) -> None:
        """A part begins."""
        now = time.monotonic()
        if not self._done or now - self._told >= _BAR_S:
            filled = _BAR_WIDTH * self._done // self._total
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            self._progress(f"capturing [{bar}] {self._done}/{self._total}: {what}")
            self._told = now
        self._done += 1

    def close(self) -> None:
        """All is done."""
        seconds = time.monotonic() - self._started
        self._progress(f"capturing [{'#' * _BAR_WIDTH}] {self._total}/{self._total} in {seconds:.1f} s")
