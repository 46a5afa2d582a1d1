"""The text of /metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from wkvm_frontend.metrics.exposition import exposition, with_label
from wkvm_frontend.metrics.meter import Meter, labelled
from wkvm_proto.messages import Metrics
from wkvm_proto.metrics import merged


def samples(text: str) -> dict[str, float]:
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_prometheus_reader_understands_every_series() -> None:
    meter = Meter()
    meter.add(labelled("wkvm_http_requests_total", route='/a"b\\c\n', status="200"), 2)
    meter.move("wkvm_http_streams_open", 1)
    seconds = meter.histogram("wkvm_http_request_seconds")
    for value in (0.00005, 0.02, 1000.0):
        seconds.observe(value)
    read = samples(exposition(meter.snapshot()))
    assert read["wkvm_http_requests_total[('route', '/a\"b\\\\c\\n'), ('status', '200')]"] == 2
    assert read["wkvm_http_streams_open[]"] == 1
    assert read["wkvm_http_request_seconds_count[]"] == 3
    assert read["wkvm_http_request_seconds_bucket[('le', '0.0001')]"] == 1
    assert read["wkvm_http_request_seconds_bucket[('le', '0.025')]"] == 2
    assert read["wkvm_http_request_seconds_bucket[('le', '300.0')]"] == 2
    assert read["wkvm_http_request_seconds_bucket[('le', '+Inf')]"] == 3


def test_equal_series_are_added_up() -> None:
    one = Metrics({"a_total": 1}, {"g": 2}, {"s_seconds": ((1,) + (0,) * 20, 0.1)})
    both = merged([one, one, Metrics({"b_total": 5})])
    assert both.counters == {"a_total": 2, "b_total": 5}
    assert both.gauges == {"g": 4}
    assert both.histograms["s_seconds"][0][0] == 2


def test_a_label_is_put_before_the_others() -> None:
    metrics = with_label(Metrics({"a_total": 1, 'b_total{x="y"}': 2}), "core", "c")
    assert metrics.counters == {'a_total{core="c"}': 1, 'b_total{core="c",x="y"}': 2}


def test_series_that_dashboards_know_are_shown_under_their_names_too() -> None:
    read = samples(exposition(Metrics({}, {"wkvm_requests_running": 3})))
    assert read["wkvm_requests_running[]"] == read["vllm:num_requests_running[]"] == 3
