"""The engine without HTTP: rates, latencies, and the time of each part of a step."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wkvm_core.bench.runs import Decode, Prefill, RunFailed, Runs
from wkvm_core.daemon.boot import describe, open_engine
from wkvm_core.daemon.config import CoreConfig, Places
from wkvm_core.daemon.notify import Notifier
from wkvm_core.errors import DeviceLost, Refused

ROWS = [1, 4, 16, 64]


def main(argv: list[str] | None = None) -> None:
    """Runs the real loop, scheduler, runner and mail in this process; requests come from another process."""
    given = arguments(argv)
    results: list[dict[str, Any]] = []
    try:
        for result in measure(given):
            results.append(result)
            print(line(result), flush=True)
            if given.json is not None:  # after each: what was found stays when a later one fails or is stopped
                given.json.write_text(json.dumps(results, indent=1) + "\n")
    except (Refused, RunFailed, DeviceLost) as error:
        sys.exit(f"wkvm bench engine: {error}")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line. `rows` is set unless only prefills are asked for."""
    parser = argparse.ArgumentParser(prog="wkvm bench engine", description=__doc__)
    parser.add_argument("--model", default="demo", help="demo, counting, random:1.5b, a folder or a file")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights")
    parser.add_argument("--state-dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--threads", type=_positive)
    parser.add_argument("--rows", type=_positive, nargs="+", help="batch sizes, one after another")
    parser.add_argument("--tokens", type=_positive, default=200, help="least output tokens of each request")
    parser.add_argument("--seconds", type=float, default=1.5, help="least time to measure a batch size")
    parser.add_argument("--prompt", type=_positive, default=8, help="prompt tokens of each request")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="each of them for all batch sizes")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of prompts and sampling")
    parser.add_argument(
        "--flood", type=_count, nargs="+", default=[0], metavar="TOKENS", help="prompts meanwhile; 0: none"
    )
    parser.add_argument("--prefill", type=_shape, nargs="+", default=[], metavar="ROWSxTOKENS")
    parser.add_argument("--rounds", type=_positive, default=5, help="of each prefill")
    parser.add_argument("--overlap", type=int, choices=[0, 1, 2])
    parser.add_argument(
        "--buckets", type=_positive, nargs="+", help="batch sizes to capture; those of --rows unless told"
    )
    parser.add_argument("--slots", type=_positive, help="as many as rows and a few unless told")
    parser.add_argument("--step-tokens", type=_positive)
    parser.add_argument("--chunk-tokens", type=_positive)
    parser.add_argument("--mixed-tokens", type=_positive)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    if given.rows is None:
        given.rows = [] if given.prefill else ROWS
    return given


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Result by result, all on one engine. Raises Refused, RunFailed, DeviceLost."""
    with tempfile.TemporaryDirectory(prefix="wkvm-") as folder:
        where = Places(Path(folder), Path(folder) / "c.sock")
        started = time.monotonic()
        with open_engine(config(given), where, lambda _: None, Notifier(None)) as engine:
            ready = f"ready after {time.monotonic() - started:.1f} s"
            print(*describe(engine.card, engine.capacity, where), *engine.lines, ready, sep="\n", file=sys.stderr)
            runs = Runs(engine, where.address)
            for temperature in given.temperature:
                for flood in given.flood:
                    for rows in given.rows:
                        yield runs.decode(
                            Decode(
                                rows=rows,
                                tokens=given.tokens,
                                prompt=given.prompt,
                                temperature=temperature,
                                top_p=given.top_p,
                                seed=given.seed,
                                seconds=given.seconds,
                                flood=flood,
                            )
                        )
            for rows, tokens in given.prefill:
                yield runs.prefill(Prefill(rows, tokens, given.rounds, given.seed))


def config(given: argparse.Namespace) -> CoreConfig:
    """Of an engine with room for every run: a prompt that loads meanwhile takes a row, too."""
    flooded = max(given.rows, default=0) + any(given.flood)
    most = max([flooded, *(rows for rows, _ in given.prefill)])
    return CoreConfig(
        model=given.model,
        device=given.device,
        dtype=given.dtype,
        state_dtype=given.state_dtype,
        deterministic=given.deterministic,
        threads=given.threads,
        slots=given.slots if given.slots is not None else most,
        max_rows=most,
        buckets=tuple(sorted(set(given.buckets or given.rows))),
        step_tokens=given.step_tokens,
        chunk_tokens=given.chunk_tokens,
        mixed_tokens=given.mixed_tokens,
        overlap=given.overlap,
        lease_s=3600.0,
    )


def line(result: dict[str, Any]) -> str:
    """A result for people."""
    if "prefill" in result:
        return (
            f"prefill {result['prefill']:>8}  {result['tokens_per_s']:>9.0f} tok/s  TTFT {result['ttft_ms']:.1f} ms, "
            f"last {result['ttft_max_ms']:.1f} ms; median of {result['rounds']} rounds"
        )
    how = f"temperature {result['temperature']:g}  " if result["temperature"] else ""
    flood = f"; {result['prompt_tokens_per_s']:.0f} prompt tok/s meanwhile" if result["flood"] else ""
    gap, itl = ("p50 {:.0f} p99 {:.0f} max {:.0f} us".format(*_spread(result, name)) for name in ("gap", "itl"))
    return (
        f"rows {result['rows']:>4}  {how}{result['tokens_per_s']:>9.0f} tok/s  step {result['step_us']:>7.0f} us"
        f" = launch {result['launch_us']:.0f} + wait {result['wait_us']:.0f} + plan {result['plan_us']:.0f}"
        f" + commit {result['commit_us']:.0f} + deliver {result['deliver_us']:.0f} + inbox {result['inbox_us']:.0f};"
        f" mail thread {result['mail_us']:.0f}; host work {result['host_us']:.0f};"
        f" gap {gap}; ITL {itl}{flood}; {result['steps']} steps in {result['seconds']:.1f} s;"
        f" {result['resident_mib']:.0f} MiB resident"
    )


def _spread(result: dict[str, Any], name: str) -> list[float]:
    return [result[f"{name}_{part}_us"] for part in ("p50", "p99", "max")]


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens")
    return int(text)


def _shape(text: str) -> tuple[int, int]:
    rows, times, tokens = text.partition("x")
    if not times:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxTOKENS")
    return _positive(rows), _positive(tokens)
