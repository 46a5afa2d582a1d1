"""The engine without HTTP: rate, and the time of each part of a step."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from wkvm_core.bench.parts import Parts, measured
from wkvm_core.daemon.boot import open_engine
from wkvm_core.daemon.config import CoreConfig, Places
from wkvm_core.daemon.memory import resident_bytes
from wkvm_core.daemon.notify import Notifier


def main(argv: list[str] | None = None) -> None:
    """Runs the real loop, scheduler, runner and mail in this process; requests come from another process."""
    parser = argparse.ArgumentParser(prog="wkvm bench engine", description=__doc__)
    parser.add_argument("--model", default="demo", help="demo, counting, random:1.5b, a folder or a file")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64], help="batch sizes, one run each")
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each request")
    parser.add_argument("--prompt", type=int, default=8, help="prompt tokens of each request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--overlap", type=int, default=None)
    parser.add_argument("--flood", type=int, default=0, metavar="TOKENS", help="prompts of so many tokens meanwhile")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    given = parser.parse_args(argv)
    results = []
    for rows in given.rows:
        result = run(given, rows)
        results.append(result)
        print(_line(result), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


def run(given: argparse.Namespace, rows: int) -> dict[str, float]:
    """One batch size; times in microseconds, medians over steps that were full."""
    with tempfile.TemporaryDirectory(prefix="wkvm-") as folder:
        where = Places(Path(folder), Path(folder) / "c.sock")
        config = CoreConfig(
            model=given.model,
            dtype=given.dtype,
            deterministic=given.deterministic,
            threads=given.threads,
            max_rows=max(rows + 2, 8),
            slots=max(rows + 2, 8),
            step_tokens=max(512, rows + 2),
            overlap=given.overlap,
            lease_s=3600.0,
        )
        with open_engine(config, where, lambda _: None, Notifier(None)) as engine:
            parts = measured(engine)
            command = [sys.executable, "-m", "wkvm_core.bench.caller", "--address", where.address]
            load = [*command, "--rows", str(rows), "--tokens", str(given.tokens), "--prompt", str(given.prompt)]
            load += ["--temperature", str(given.temperature), "--top-p", str(given.top_p)]
            floods = []
            if given.flood:
                flood = [*command, "--rows", "1", "--tokens", "1", "--seconds", "3600", "--prompt", str(given.flood)]
                floods.append(subprocess.Popen(flood, stdout=subprocess.DEVNULL, env=os.environ))
            process = subprocess.Popen(load, env=os.environ)
            try:
                while process.poll() is None:
                    engine.loop.turn()
                    parts.end_turn(engine.mail.cpu_s)
            finally:
                for other in (process, *floods):
                    other.kill()
                    other.wait()
            if process.returncode not in (0, -9):
                sys.exit(process.returncode)
            return _result(parts, rows, given)


def _result(parts: Parts, rows: int, given: argparse.Namespace) -> dict[str, float]:
    full = [turn for turn in parts.turns if turn.rows >= rows]
    steady = full[len(full) // 5 :]
    if len(steady) < 10:
        sys.exit(f"only {len(steady)} full steps: ask for more --tokens")

    def middle(values: list[float]) -> float:
        return 1e6 * statistics.median(values)

    gaps = sorted(b.started - a.started for a, b in pairwise(steady))
    wall = steady[-1].started - steady[0].started
    mail = (steady[-1].mail_cpu_s - steady[0].mail_cpu_s) / len(steady)
    host = statistics.median([turn.plan + turn.commit + turn.deliver + turn.inbox for turn in steady])
    return {
        "rows": rows,
        "tokens_per_s": rows * (len(steady) - 1) / wall,
        "step_us": 1e6 * wall / (len(steady) - 1),
        "inbox_us": middle([turn.inbox for turn in steady]),
        "plan_us": middle([turn.plan for turn in steady]),
        "run_us": middle([turn.run for turn in steady]),
        "commit_us": middle([turn.commit for turn in steady]),
        "deliver_us": middle([turn.deliver for turn in steady]),
        "mail_us": 1e6 * mail,
        "host_us": 1e6 * (host + mail),
        "gap_p50_us": 1e6 * gaps[len(gaps) // 2],
        "gap_p99_us": 1e6 * gaps[int(len(gaps) * 0.99)],
        "resident_mib": resident_bytes() / 2**20,
        "measured_at": time.time(),
    }


def _line(result: dict[str, float]) -> str:
    return (
        f"rows {result['rows']:>4.0f}  {result['tokens_per_s']:>9.0f} tok/s  step {result['step_us']:>7.0f} us"
        f" = run {result['run_us']:.0f} + plan {result['plan_us']:.0f} + commit {result['commit_us']:.0f}"
        f" + deliver {result['deliver_us']:.0f} + inbox {result['inbox_us']:.0f}; mail thread {result['mail_us']:.0f};"
        f" host work {result['host_us']:.0f}; gap p50 {result['gap_p50_us']:.0f} p99 {result['gap_p99_us']:.0f} us;"
        f" {result['resident_mib']:.0f} MiB resident"
    )
