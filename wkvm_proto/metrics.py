"""Sums of metrics: what several processes counted, as one."""

from __future__ import annotations

from collections.abc import Iterable

from wkvm_proto.messages import Metrics


def merged(parts: Iterable[Metrics]) -> Metrics:
    """The sum, series by series; a histogram with other buckets than the first of its name is left out."""
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    histograms: dict[str, tuple[tuple[int, ...], float]] = {}
    for part in parts:
        for name, value in part.counters.items():
            counters[name] = counters.get(name, 0.0) + value
        for name, value in part.gauges.items():
            gauges[name] = gauges.get(name, 0.0) + value
        for name, (counts, total) in part.histograms.items():
            before, sum_before = histograms.get(name, ((0,) * len(counts), 0.0))
            if len(before) == len(counts):
                summed = tuple(left + right for left, right in zip(before, counts, strict=True))
                histograms[name] = (summed, sum_before + total)
    return Metrics(counters, gauges, histograms)
