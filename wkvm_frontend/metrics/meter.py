"""Counters, gauges and histograms of this process."""

from __future__ import annotations

from bisect import bisect_left

from wkvm_proto.buckets import bounds
from wkvm_proto.messages import Metrics


class Histogram:
    """Counts by bucket, not cumulative, and the sum."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, series: str) -> None:
        self._bounds = bounds(series)
        self.counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value` so many times."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times


class Meter:
    """All series of this process by name, labels in Prometheus text form."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}

    def add(self, series: str, value: float = 1.0) -> None:
        """Raises a counter."""
        self._counters[series] = self._counters.get(series, 0.0) + value

    def move(self, series: str, by: float) -> None:
        """Moves a gauge."""
        self._gauges[series] = self._gauges.get(series, 0.0) + by

    def histogram(self, series: str) -> Histogram:
        """The histogram of that name; keep it where it is used often."""
        if series not in self._histograms:
            self._histograms[series] = Histogram(series)
        return self._histograms[series]

    def snapshot(self) -> Metrics:
        """The figures now."""
        return Metrics(
            counters=dict(self._counters),
            gauges=dict(self._gauges),
            histograms={name: (tuple(item.counts), item.sum) for name, item in self._histograms.items()},
        )


def labelled(name: str, **labels: str) -> str:
    """The series `name{label="value"}`; label values escaped as Prometheus asks."""
    inside = ",".join(f'{key}="{escaped(value)}"' for key, value in labels.items())
    return f"{name}{{{inside}}}"


def escaped(value: str) -> str:
    """A label's value in Prometheus text form."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
