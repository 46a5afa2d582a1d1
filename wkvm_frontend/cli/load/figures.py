"""Figures made of results: latencies with their percentiles, throughput, failures by kind."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from wkvm_frontend.cli.load.job import Result


class Spread(msgspec.Struct, frozen=True):
    """Of a set of durations, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Figures(msgspec.Struct, frozen=True):
    """Latencies are those of whole answers; tokens and failures those of all requests."""

    requests: int
    completed: int
    failed: int
    failures: dict[str, int]
    """By kind."""
    examples: dict[str, str]
    """The first message of each kind that had one."""
    seconds: float
    """From the first request's start to the last one's end."""
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    """Completed ones."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread
    """From the request's start, connecting included, to its first token."""
    tpot_ms: Spread
    """(last token - first token) / (tokens - 1), of answers of two tokens and more."""
    itl_ms: Spread
    """Between the arrivals of two tokens; 0 for tokens that arrived together."""
    e2e_ms: Spread
    """To the end of the stream."""


def spread(seconds: Iterable[float]) -> Spread:
    """Percentiles by nearest rank; all zero of nothing."""
    ordered = sorted(value * 1000.0 for value in seconds)
    if not ordered:
        return Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def rank(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Spread(len(ordered), math.fsum(ordered) / len(ordered), rank(0.5), rank(0.9), rank(0.99), ordered[-1])


def figures(results: Sequence[Result]) -> Figures:
    """Of one or more requests."""
    whole = [result for result in results if not result.failure]
    examples: dict[str, str] = {}
    for result in results:
        if result.failure and result.detail:
            examples.setdefault(result.failure, result.detail)
    seconds = max(result.ended for result in results) - min(result.started for result in results)
    per_s = 1.0 / seconds if seconds > 0 else 0.0
    output = sum(result.tokens for result in results)
    prompt = sum(result.prompt_tokens for result in results)
    gaps = array("f", b"".join(result.gaps for result in whole))
    return Figures(
        requests=len(results),
        completed=len(whole),
        failed=len(results) - len(whole),
        failures=dict(Counter(result.failure for result in results if result.failure).most_common()),
        examples=examples,
        seconds=seconds,
        prompt_tokens=prompt,
        output_tokens=output,
        requests_per_s=len(whole) * per_s,
        output_tokens_per_s=output * per_s,
        total_tokens_per_s=(output + prompt) * per_s,
        ttft_ms=spread(result.first - result.started for result in whole if result.first),
        tpot_ms=spread((r.last - r.first) / (r.tokens - 1) for r in whole if r.tokens > 1),
        itl_ms=spread(gaps),
        e2e_ms=spread(result.ended - result.started for result in whole),
    )


def table(found: Figures) -> str:
    """For people."""
    lines = [
        f"requests         {found.requests} in {found.seconds:.2f} s; {found.completed} completed, {found.failed} not",
        f"request rate     {found.requests_per_s:,.2f} /s",
        f"output tokens    {found.output_tokens:,} = {found.output_tokens_per_s:,.1f} /s",
        f"prompt tokens    {found.prompt_tokens:,}; with output {found.total_tokens_per_s:,.1f} /s",
        "",
        f"{'milliseconds':16} {'mean':>10} {'p50':>10} {'p90':>10} {'p99':>10} {'max':>10}",
    ]
    named = (("TTFT", found.ttft_ms), ("TPOT", found.tpot_ms), ("ITL", found.itl_ms), ("E2E", found.e2e_ms))
    for name, own in named:
        values = (own.mean, own.p50, own.p90, own.p99, own.max)
        lines.append(f"{name:16} " + " ".join(f"{value:10.2f}" if own.count else f"{'-':>10}" for value in values))
    for kind, count in found.failures.items():
        example = found.examples.get(kind, "")
        lines.append(f"failed           {count} x {kind}" + (f": {example}" if example else ""))
    return "\n".join(lines)
