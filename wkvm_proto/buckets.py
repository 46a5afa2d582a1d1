"""Upper bounds of the histogram buckets, by metric name, so that every process counts into the same ones."""

from __future__ import annotations

_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0,
)  # fmt: skip
_TOKENS = tuple(float(4**k) for k in range(11))
_ROWS = tuple(float(2**k) for k in range(11))


def bounds(series: str) -> tuple[float, ...]:
    """Upper bounds for a series; the last bucket, above them all, has none. Chosen by the name's unit."""
    name = series.partition("{")[0]
    if name.endswith("_seconds"):
        return _SECONDS
    return _ROWS if name.endswith("_rows") else _TOKENS
