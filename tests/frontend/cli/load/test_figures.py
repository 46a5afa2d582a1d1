from __future__ import annotations

from array import array

import pytest

from wkvm_frontend.cli.load.figures import figures, spread, table
from wkvm_frontend.cli.load.job import Result


def result(started: float, first: float, last: float, tokens: int, failure: str = "", detail: str = "") -> Result:
    gaps = array("f", [(last - first) / (tokens - 1)] * (tokens - 1) if tokens > 1 else []).tobytes()
    return Result(started, first, last, last + 0.5 if last else started + 1.0, tokens, 10, gaps, failure, detail)


def test_percentiles_are_by_nearest_rank() -> None:
    found = spread(value / 1000 for value in range(1, 101))
    assert (found.p50, found.p90, found.p99, found.max) == (50.0, 90.0, 99.0, 100.0)
    assert found.mean == pytest.approx(50.5)
    assert spread([0.002]).p99 == 2.0
    assert spread([]).count == 0


def test_latencies_are_those_of_whole_answers_and_failures_are_counted_by_kind() -> None:
    found = figures(
        [
            result(100.0, 101.0, 105.0, 5),
            result(101.0, 103.0, 103.0, 1),
            result(102.0, 0.0, 0.0, 0, "http 429 queue_full", "come later"),
            result(102.0, 102.5, 104.0, 3, "timeout"),
            result(102.0, 0.0, 0.0, 0, "http 429 queue_full", "still later"),
        ]
    )
    assert (found.requests, found.completed, found.failed) == (5, 2, 3)
    assert found.failures == {"http 429 queue_full": 2, "timeout": 1}
    assert found.examples == {"http 429 queue_full": "come later"}
    assert found.seconds == pytest.approx(5.5)
    assert found.output_tokens == 9
    assert found.requests_per_s == pytest.approx(2 / 5.5)
    assert found.output_tokens_per_s == pytest.approx(9 / 5.5)
    assert (found.ttft_ms.count, found.ttft_ms.mean) == (2, pytest.approx(1500.0))
    assert (found.tpot_ms.count, found.tpot_ms.mean) == (1, pytest.approx(1000.0))
    assert found.itl_ms.count == 4
    assert found.e2e_ms.max == pytest.approx(5500.0)
    shown = table(found)
    assert "2 x http 429 queue_full: come later" in shown
    assert "1 x timeout" in shown


def test_figures_of_failures_alone_have_no_latencies() -> None:
    found = figures([result(1.0, 0.0, 0.0, 0, "timeout")])
    assert found.completed == 0
    assert found.ttft_ms.count == 0
    assert "-" in table(found)
