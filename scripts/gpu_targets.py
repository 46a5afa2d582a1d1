"""What the results of scripts/bench-gpu are held against: every target of gpu_peers.json, and whether it is met."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

RATE, SHARE, TIMES = ",.0f", ".0%", ".2f"


@dataclass(frozen=True)
class Target:
    """One figure. `found` is None when it was not measured."""

    what: str
    bound: float
    found: float | None
    unit: str
    at_most: bool = False

    @property
    def met(self) -> str:
        """yes, no, or not measured."""
        if self.found is None:
            return "not measured"
        return "yes" if (self.found <= self.bound if self.at_most else self.found >= self.bound) else "no"


def decode_results(jobs: list[dict], *, sampled: bool) -> dict[tuple[str, str], dict[int, float]]:
    """Tokens a second by (model, state dtype) and rows, with nothing loading meanwhile; of two runs the later."""
    rates: dict[tuple[str, str], dict[int, float]] = {}
    for job in jobs:
        for result in job.get("results", []) if job["part"] == "engine" else []:
            if "rows" in result and not result.get("flood") and bool(result.get("temperature")) is sampled:
                own = rates.setdefault((job["model"], job["state_dtype"]), {})
                own[int(result["rows"])] = result["tokens_per_s"]
    return rates


def precision(state_dtype: str) -> str:
    """The column of the figures: they have one kind of 16-bit state."""
    return "float32" if state_dtype == "float32" else "16-bit"


def all_targets(jobs: list[dict], known: dict) -> Iterator[Target]:
    """Those of the jobs that were to be done, whether they found anything or not."""
    parts = {"engine": engine_targets, "itl": flood_targets, "http": http_targets}
    named = dict.fromkeys((job["model"], job["state_dtype"], job["part"]) for job in jobs)
    for model, state_dtype in dict.fromkeys((model, state_dtype) for model, state_dtype, _ in named):
        for part, make in parts.items():
            if (model, state_dtype, part) in named:
                yield from make(jobs, model, state_dtype, known)


def decode_bounds(known: dict, model: str, state_dtype: str) -> dict[int, float]:
    """Tokens a second by rows; empty where nothing is asked for."""
    bounds = known["targets"]["decode"].get(model, {}).get(precision(state_dtype), [])
    return dict(zip(known["rows"], bounds, strict=False))


def engine_targets(jobs: list[dict], model: str, state_dtype: str, known: dict) -> Iterator[Target]:
    """Rates of decode and prefill. Sampled rates are held against the greedy ones of the same run."""
    targets, name = known["targets"], f"{model}, {state_dtype} state"
    greedy, sampled = (decode_results(jobs, sampled=drawn).get((model, state_dtype), {}) for drawn in (False, True))
    bounds = decode_bounds(known, model, state_dtype)
    for rows, bound in bounds.items():
        yield Target(f"{name}: decode, {rows} rows, tok/s", bound, greedy.get(rows), RATE)
    if bounds:
        worst = min((rate / greedy[rows] for rows, rate in sampled.items() if rows in greedy), default=None)
        yield Target(f"{name}: sampled of greedy, the worst", targets["sampled_share"], worst, SHARE)
    for shape, bound in targets["prefill"].get(model, {}).items():
        yield Target(f"{name}: prefill {shape}, tok/s", bound, prefill_rate(jobs, model, state_dtype, shape), RATE)


def of_model(jobs: list[dict], part: str, model: str, state_dtype: str) -> Iterator[dict]:
    """Results of a part, the last ones first."""
    for job in reversed(jobs):
        if (job["part"], job["model"], job["state_dtype"]) == (part, model, state_dtype):
            yield from reversed(job.get("results", []))


def prefill_rate(jobs: list[dict], model: str, state_dtype: str, shape: str) -> float | None:
    """Tokens a second of a shape of prompts, nothing else running."""
    results = (result for part in ("engine", "itl") for result in of_model(jobs, part, model, state_dtype))
    return next((result["tokens_per_s"] for result in results if result.get("prefill") == shape), None)


def http_targets(jobs: list[dict], model: str, state_dtype: str, known: dict) -> Iterator[Target]:
    """A single stream, and the best of all numbers of streams."""
    bounds = known["targets"]["http"].get(model)
    if bounds is None:
        return
    streams = [load for result in of_model(jobs, "http", model, state_dtype) for load in result["streams"]]
    single = next((load["output_tokens_per_s"] for load in streams if load["concurrency"] == 1), None)
    best = max((load["output_tokens_per_s"] for load in streams), default=None)
    yield Target(f"{model}, {state_dtype} state: HTTP, 1 stream, tok/s", bounds["single"], single, RATE)
    yield Target(f"{model}, {state_dtype} state: HTTP, most, tok/s", bounds["peak"], best, RATE)


@dataclass(frozen=True)
class Flood:
    """Rows that decode while prompts load, beside the same with nothing meanwhile."""

    result: dict
    quiet: dict | None
    idle_rate: float | None
    """Tokens a second at which such a prompt loads when nothing else runs."""

    @property
    def latency(self) -> float | None:
        """ITL p99 by the p50 without."""
        return self.result["itl_p99_us"] / self.quiet["itl_p50_us"] if self.quiet else None

    @property
    def share(self) -> float | None:
        """Of the idle rate."""
        return self.result["prompt_tokens_per_s"] / self.idle_rate if self.idle_rate else None


def floods(jobs: list[dict], model: str, state_dtype: str) -> Iterator[Flood]:
    """Those that were run, in order."""
    results = list(of_model(jobs, "itl", model, state_dtype))[::-1]
    quiet = {result["rows"]: result for result in results if "rows" in result and not result["flood"]}
    for result in results:
        if result.get("flood"):
            idle = prefill_rate(jobs, model, state_dtype, f"1x{result['flood']}")
            yield Flood(result, quiet.get(result["rows"]), idle)


def flood_targets(jobs: list[dict], model: str, state_dtype: str, known: dict) -> Iterator[Target]:
    """Latency beside a prompt that loads, and what the prompt still gets."""
    bounds = known["targets"]["flood"].get(model)
    if bounds is None:
        return
    flood = next(floods(jobs, model, state_dtype), None)
    latency, share = (flood.latency, flood.share) if flood else (None, None)
    name = f"{model}, {state_dtype} state"
    yield Target(f"{name}: ITL p99 beside a prompt, times the p50 without", bounds["itl"], latency, TIMES, True)
    yield Target(f"{name}: prompt beside 64 rows, of its rate alone", bounds["prompt_share"], share, SHARE)
