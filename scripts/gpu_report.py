"""Tables in Markdown of the results of scripts/bench-gpu, beside the peers' figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpu_targets import Flood, all_targets, decode_bounds, decode_results, floods, precision

MANY_KERNELS = 12


def markdown(document: dict, peers: dict) -> str:
    """Everything that the results hold; parts that were not run have no table."""
    about = document["about"]
    lines = [
        f"{about['card']}, torch {about['torch']}, triton {about['triton']}, Python {about['python']}, "
        f"{about['cpus']} CPU cores, commit {about['commit'] or '?'}, {about['begun']}; weights {about['dtype']}.",
        "",
    ]
    for make in (checks, targets, decode, prefill, http, itl, kernels, memory, failures):
        lines += make(document["jobs"], peers)
    return "\n".join(lines)


def peer_rates(peers: dict, table: str, model: str, state_dtype: str) -> dict[int, float]:
    """By rows; empty where there is no figure."""
    found = peers[table].get(model, {}).get(precision(state_dtype), [])
    return dict(zip(peers["rows"], found, strict=False))


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


def targets(jobs: list[dict], peers: dict) -> list[str]:
    found = list(all_targets(jobs, peers))
    rows = [
        (
            target.what,
            f"{'≤' if target.at_most else '≥'} {number(target.bound, target.unit)}",
            number(target.found, target.unit),
            target.met,
        )
        for target in found
    ]
    met = sum(target.met == "yes" for target in found)
    head = ("what", "target", "found", "met")
    return [f"Targets, {met} of {len(found)} met:", "", *table(head, rows)] if found else []


def decode(jobs: list[dict], peers: dict) -> list[str]:
    greedy, sampled = (decode_results(jobs, sampled=drawn) for drawn in (False, True))
    lines = []
    for model, state_dtype in dict.fromkeys((*greedy, *sampled)):
        own, drawn = greedy.get((model, state_dtype), {}), sampled.get((model, state_dtype), {})
        peer, limit = (peer_rates(peers, name, model, state_dtype) for name in ("decode", "limits"))
        bounds = decode_bounds(peers, model, state_dtype)
        rows = [
            (
                count,
                number(own.get(count)),
                number(drawn.get(count)),
                ratio(drawn.get(count), own.get(count)),
                number(peer.get(count)),
                ratio(own.get(count), peer.get(count)),
                number(limit.get(count)),
                ratio(own.get(count), limit.get(count)),
                number(bounds.get(count)),
                "" if not (bounds.get(count) and own.get(count)) else "yes" if own[count] >= bounds[count] else "no",
            )
            for count in sorted({*own, *drawn})
        ]
        head = ("rows", "greedy tok/s", "sampled tok/s", "of greedy", peers["peer"], "times it")
        head += ("limit", "share of it", "target", "met")
        lines += [f"Decode, {model}, {state_dtype} state, through the engine loop:", "", *table(head, rows, 0)]
        lines += steps(jobs, model, state_dtype)
    if lines:
        lines += [f"{peers['peer']}: {peers['source']}. Limit: {peers['limits_source']}.", ""]
    return lines


def steps(jobs: list[dict], model: str, state_dtype: str) -> list[str]:
    """Where the time of a step goes."""
    parts = ("step", "launch", "wait", "plan", "commit", "deliver", "inbox", "mail")
    rows = [
        (
            result["rows"],
            "sampled" if result["temperature"] else "greedy",
            *(number(result[f"{part}_us"]) for part in parts),
            result["steps"],
            number(result["seconds"], ".1f"),
            number(result.get("device_mib")),
        )
        for job in of(jobs, "engine")
        if (job["model"], job["state_dtype"]) == (model, state_dtype)
        for result in job["results"]
        if "step_us" in result
    ]
    head = ("rows", "", *(f"{part} µs" for part in parts), "steps measured", "in s", "device MiB")
    return [f"Steps, {model}, {state_dtype} state:", "", *table(head, rows, 2)] if rows else []


def prefill(jobs: list[dict], peers: dict) -> list[str]:
    rows = []
    for job in (*of(jobs, "engine"), *of(jobs, "itl")):
        model, state_dtype = job["model"], job["state_dtype"]
        known = peers["prefill"].get(model, {}).get(precision(state_dtype), {})
        bounds = peers["targets"]["prefill"].get(model, {})
        limit = peers["prefill_limits"].get(model)
        for result in (found for found in job["results"] if "prefill" in found):
            shape = str(result["prefill"])
            rate = result["tokens_per_s"]
            beside = (number(known.get(shape)), ratio(rate, known.get(shape)), number(limit), ratio(rate, limit))
            first = number(result.get("ttft_ms"), ".1f")
            met = "" if shape not in bounds else "yes" if rate >= bounds[shape] else "no"
            rows.append((model, state_dtype, shape, number(rate), first, *beside, number(bounds.get(shape)), met))
    head = ("model", "state", "prompts", "tok/s", "TTFT ms", peers["peer"], "times it", "limit", "share of it")
    return ["Prefill:", "", *table((*head, "target", "met"), rows, 3)] if rows else []


def http(jobs: list[dict], peers: dict) -> list[str]:
    rates = decode_results(jobs, sampled=False)
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
        beside = {id(flood.result): flood for flood in floods(jobs, job["model"], job["state_dtype"])}
        for result in (found for found in job["results"] if "rows" in found):
            flood: Flood | None = beside.get(id(result))
            meanwhile = f"prompts of {result['flood']:,} tokens" if result["flood"] else "nothing"
            times = [number(result[f"{name}_us"] / 1000.0, ".2f") for name in ("itl_p50", "itl_p99", "itl_max")]
            gaps = [number(result[f"{name}_us"] / 1000.0, ".2f") for name in ("gap_p50", "gap_p99", "gap_max")]
            latency = number(flood.latency if flood else None, ".2f")
            prompts = number(result["prompt_tokens_per_s"]) if flood else ""
            share = number(flood.share if flood else None, ".0%")
            shown = (job["model"], job["state_dtype"], result["rows"], meanwhile, number(result["tokens_per_s"]))
            rows.append((*shown, *times, latency, *gaps, prompts, share))
    head = ("model", "state", "rows", "meanwhile", "tok/s", "ITL p50 ms", "p99", "max", "p99 by the p50 without")
    head += ("gap of steps p50 ms", "p99", "max", "prompt tok/s", "of its rate alone")
    return ["Latency beside a prompt that loads, as the caller sees it:", "", *table(head, rows, 4)] if rows else []


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
