"""The core's counters and histograms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wkvm_proto.buckets import bounds
from wkvm_proto.messages import Metrics
from wkvm_proto.names import ErrorCode, FinishReason


class Meters:
    """Running totals by series, read as one value. One thread."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._buckets: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
        self._sums: dict[str, float] = {}
        self._bounds: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}

    def count(self, name: str, labels: str = "", amount: float = 1.0) -> None:
        """Adds to a counter; `labels` in Prometheus text form without the braces."""
        series = f"{name}{{{labels}}}" if labels else name
        self._counters[series] = self._counters.get(series, 0.0) + amount

    def observe(self, name: str, value: float) -> None:
        """One value of a histogram."""
        self.observe_all(name, (value,))

    def observe_all(self, name: str, values: Sequence[float]) -> None:
        """Many values of a histogram."""
        limits = self._bounds.get(name)
        if limits is None:
            limits = self._bounds[name] = np.array(bounds(name))
            self._buckets[name] = np.zeros(len(limits) + 1, dtype=np.int64)
            self._sums[name] = 0.0
        column = np.array(values)
        self._buckets[name] += np.bincount(np.searchsorted(limits, column), minlength=len(limits) + 1)
        self._sums[name] += float(column.sum())

    def finished(self, reason: FinishReason, generated: int, elapsed_s: float) -> None:
        """A sample ended."""
        self.count("wkvm_samples_finished_total", f'reason="{reason}"')
        self.observe("wkvm_generated_tokens", generated)
        self.observe("wkvm_request_seconds", elapsed_s)

    def failed(self, code: ErrorCode) -> None:
        """A request failed."""
        self.count("wkvm_requests_failed_total", f'code="{code}"')

    def read(self, counters: dict[str, float], gauges: dict[str, float]) -> Metrics:
        """Everything, with further counters and gauges that are counted elsewhere."""
        histograms = {
            name: (tuple(int(n) for n in buckets), self._sums[name]) for name, buckets in self._buckets.items()
        }
        return Metrics(self._counters | counters, gauges, histograms)
