"""Tables in Markdown of the results of scripts/bench-gpu, beside the peers' figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

MANY_KERNELS = 12


def markdown(document: dict, peers: dict) -> str:
    """Everything that the results hold; parts that were not run have no table."""
    about = document["about"]
    lines = [
        f"{about['card']}, torch {about['torch']}, triton {about['triton']}, Python {about['python']}, "
        f"{about['cpus']} CPU cores, commit {about['commit'] or '?'}, {about['begun']}.",
        "",
    ]
    for make in (checks, decode, prefill, http, itl, kernels, memory, failures):
        lines += make(document["jobs"], peers)
    return "\n".join(lines)


def precision(state_dtype: str) -> str:
    """The column of the peers' figures: they have one kind of 16-bit state."""
    return "float32" if state_dtype == "float32" else "16-bit"


def peer_rates(peers: dict, table: str, model: str, state_dtype: str) -> dict[int, float]:
    """By rows; empty where there is no figure."""
    found = peers[table].get(model, {}).get(precision(state_dtype), [])
    return dict(zip(peers["rows"], found, strict=False))


def decode_rates(jobs: list[dict], part: str) -> dict[tuple[str, str], dict[int, float]]:
    """Tokens a second by (model, state dtype) and rows; of two runs the later."""
    rates: dict[tuple[str, str], dict[int, float]] = {}
    for job in of(jobs, part):
        own = rates.setdefault((job["model"], job["state_dtype"]), {})
        own.update({int(result["rows"]): result["tokens_per_s"] for result in job["results"] if "rows" in result})
    return rates


def of(jobs: list[dict], part: str) -> Iterator[dict]:
    """Jobs of a part that found something."""
    return (job for job in jobs if job["part"] == part and job.get("results"))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], numbers_from: int = 1) -> list[str]:
    """Lines of a table and an empty one; numbers stand to the right."""
    rule = ["---" if place < numbers_from else "---:" for place in range(len(head))]
    return [f"| {' | '.join(map(str, row))} |" for row in (head, rule, *rows)] + [""]


def number(value: float | None, unit: str = ",.0f") -> str:
    return "" if value is None else format(value, unit)


def ratio(value: float | None, reference: float | None) -> str:
    return "" if not value or not reference else f"{value / reference:.2f}"


def checks(jobs: list[dict], peers: dict) -> list[str]:
    rows = [
        (result["state_dtype"], f"{result['logits']:.1e}", f"{max(result['states'].values()):.1e}")
        for job in of(jobs, "check")
        for result in job["results"]
    ]
    head = ("state", "logits", "states")
    return ["Relative error against float32 on the CPU:", "", *table(head, rows)] if rows else []


def decode(jobs: list[dict], peers: dict) -> list[str]:
    greedy, sampled = decode_rates(jobs, "decode"), decode_rates(jobs, "sampled")
    lines = []
    for model, state_dtype in dict.fromkeys((*greedy, *sampled)):
        own, drawn = greedy.get((model, state_dtype), {}), sampled.get((model, state_dtype), {})
        peer, limit = (peer_rates(peers, name, model, state_dtype) for name in ("decode", "limits"))
        rows = [
            (
                count,
                number(own.get(count)),
                number(drawn.get(count)),
                number(peer.get(count)),
                ratio(own.get(count), peer.get(count)),
                number(limit.get(count)),
                ratio(own.get(count), limit.get(count)),
            )
            for count in sorted({*own, *drawn})
        ]
        head = ("rows", "greedy tok/s", "sampled tok/s", peers["peer"], "times it", "limit", "share of it")
        lines += [f"Decode, {model}, {state_dtype} state, through the engine loop:", "", *table(head, rows, 0)]
    if lines:
        lines += [f"{peers['peer']}: {peers['source']}. Limit: {peers['limits_source']}.", ""]
    return lines


def prefill(jobs: list[dict], peers: dict) -> list[str]:
    rows = []
    for job in of(jobs, "prefill"):
        model, state_dtype = job["model"], job["state_dtype"]
        known = peers["prefill"].get(model, {}).get(precision(state_dtype), {})
        limit = peers["prefill_limits"].get(model)
        for result in (found for found in job["results"] if "prefill" in found):
            shape = str(result["prefill"])
            rate = result["tokens_per_s"]
            beside = (number(known.get(shape)), ratio(rate, known.get(shape)), number(limit), ratio(rate, limit))
            first = number(result.get("ttft_ms"), ".1f")
            rows.append((model, state_dtype, shape, number(rate), first, *beside))
    head = ("model", "state", "prompts", "tok/s", "TTFT ms", peers["peer"], "times it", "limit", "share of it")
    return ["Prefill:", "", *table(head, rows, 3)] if rows else []


def http(jobs: list[dict], peers: dict) -> list[str]:
    rates = decode_rates(jobs, "decode")
    lines = []
    for job in of(jobs, "http"):
        (result,) = job["results"]
        library = peers["library"].get(job["model"], {})
        engine = rates.get((job["model"], job["state_dtype"]), {})
        rows = []
        for load in result["streams"]:
            streams, rate = load["concurrency"], load["output_tokens_per_s"]
            latencies = [number(load[name][part], ".1f") for name in ("ttft_ms", "itl_ms") for part in ("p50", "p99")]
            times = ratio(rate, library.get(str(streams)))
            rows.append((streams, number(rate), ratio(rate, engine.get(streams)), times, *latencies, load["failed"]))
        head = ("streams", "tok/s", "share of the engine's", "times transformers")
        head += ("TTFT p50 ms", "p99", "ITL p50 ms", "p99", "failed")
        lines += [
            f"HTTP, {job['model']}, {job['state_dtype']} state, {result['input_tokens']} tokens in, "
            f"{result['output_tokens']} out, greedy, {result['frontends']} frontends, "
            f"{result['workers']} load processes:",
            "",
            *table(head, rows, 0),
        ]
    return lines


def itl(jobs: list[dict], peers: dict) -> list[str]:
    rows = []
    for job in of(jobs, "itl"):
        meanwhile = "prompts of 100,000 tokens" if "--flood" in job["command"] else "nothing"
        for result in job["results"]:
            gaps = [number(result[name] / 1000.0, ".2f") for name in ("gap_p50_us", "gap_p99_us")]
            rows.append((job["model"], job["state_dtype"], meanwhile, number(result["tokens_per_s"]), *gaps))
    head = ("model", "state", "meanwhile", "tok/s", "gap p50 ms", "p99")
    return ["Between the steps of 64 rows:", "", *table(head, rows, 3)] if rows else []


def kernels(jobs: list[dict], peers: dict) -> list[str]:
    lines = []
    for job in of(jobs, "kernels"):
        head = ("rows", "step µs", "tok/s", "launches", "in kernels µs")
        rows = [
            (
                result["rows"],
                number(result["step_us"]),
                number(result["tokens_per_s"]),
                number(result["launches"]),
                number(sum(kernel["us"] for kernel in result["kernels"])),
            )
            for result in job["results"]
        ]
        lines += [f"The model's step alone, {job['model']}, {job['state_dtype']} state:", "", *table(head, rows, 0)]
        for result in job["results"]:
            top = [
                (f"`{kernel['name']}`", number(kernel["launches"]), number(kernel["us"], ",.1f"))
                for kernel in result["kernels"][:MANY_KERNELS]
            ]
            lines += [f"{result['rows']} rows:", "", *table(("kernel", "launches a step", "µs a step"), top)]
    return lines


def memory(jobs: list[dict], peers: dict) -> list[str]:
    rows = []
    for part in ("http", "memory"):
        for job in of(jobs, part):
            (result,) = job["results"]
            sizes = (number(result["slots"]), number(result["slot_bytes"]), number(result["device_mib"]))
            after = number(result.get("device_mib_after"))
            rows.append((job["model"], job["state_dtype"], *sizes, after, f"{result['ready_s']:.1f}"))
    head = ("model", "state", "slots", "bytes a slot", "device MiB, ready", "after load", "ready after s")
    return ["Memory:", "", *table(head, rows, 2)] if rows else []


def failures(jobs: list[dict], peers: dict) -> list[str]:
    found = [job for job in jobs if "failure" in job]
    return [f"* {job['part']} {job['model']} {job['state_dtype']}: {job['failure']}" for job in found]
