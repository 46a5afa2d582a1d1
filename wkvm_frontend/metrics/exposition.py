"""Metrics in the Prometheus text format, under our names and under those that vLLM dashboards read."""

from __future__ import annotations

from itertools import accumulate

from wkvm_frontend.metrics.meter import labelled
from wkvm_proto.buckets import bounds
from wkvm_proto.messages import Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Ours -> the name that existing dashboards read. Gauges come from the core, the rest from the frontends.
VLLM_NAMES = {
    "wkvm_requests_running": "vllm:num_requests_running",
    "wkvm_requests_waiting": "vllm:num_requests_waiting",
    "wkvm_http_prompt_tokens_total": "vllm:prompt_tokens_total",
    "wkvm_http_cached_tokens_total": "vllm:prompt_tokens_cached_total",
    "wkvm_http_generation_tokens_total": "vllm:generation_tokens_total",
    "wkvm_http_finished_total": "vllm:request_success_total",
    "wkvm_http_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "wkvm_http_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "wkvm_http_generation_seconds": "vllm:e2e_request_latency_seconds",
}


def with_label(metrics: Metrics, label: str, value: str) -> Metrics:
    """The same series with one more label."""

    def named(series: str) -> str:
        name, brace, labels = series.partition("{")
        extra = labelled("", **{label: value})
        return f"{name}{extra[:-1]},{labels}" if brace else name + extra

    return Metrics(
        {named(series): figure for series, figure in metrics.counters.items()},
        {named(series): figure for series, figure in metrics.gauges.items()},
        {named(series): figure for series, figure in metrics.histograms.items()},
    )


def exposition(metrics: Metrics) -> str:
    """The text of /metrics; each family once, its series together."""
    families: dict[tuple[str, str], list[str]] = {}
    for kind, table in (("counter", metrics.counters), ("gauge", metrics.gauges)):
        for series, value in sorted(table.items()):
            for name, labels in _names(series):
                families.setdefault((name, kind), []).append(f"{name}{labels} {_number(value)}")
    for series, (counts, total) in sorted(metrics.histograms.items()):
        limits = bounds(series)
        if len(counts) != len(limits) + 1:
            continue  # of a program with other buckets
        for name, labels in _names(series):
            lines = families.setdefault((name, "histogram"), [])
            inside = labels[1:-1] + "," if labels else ""
            for limit, count in zip((*limits, float("inf")), accumulate(counts), strict=True):
                lines.append(f'{name}_bucket{{{inside}le="{_number(limit)}"}} {count}')
            lines += [f"{name}_sum{labels} {_number(total)}", f"{name}_count{labels} {sum(counts)}"]
    out: list[str] = []
    for (name, kind), lines in families.items():
        out += [f"# TYPE {name} {kind}", *lines]
    return "\n".join(out) + "\n"


def _names(series: str) -> list[tuple[str, str]]:
    name, brace, labels = series.partition("{")
    also = VLLM_NAMES.get(name)
    return [(each, brace + labels) for each in (name, also) if each is not None]


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(float(value))
