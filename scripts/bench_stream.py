"""The server beside the `rwkv` package; see scripts/bench-stream."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

STREAMS = (1, 16)
TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench-stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--package", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.package:
        print(package_rate(given.package))
        return
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="wkvm-") as scratch, Served(Path(scratch)) as served:
        print(f"embedded model ready {served.ready_s:.1f} s after `wkvm serve`", flush=True)
        for _ in range(given.rounds):
            for threads in (1, 2):
                command = [sys.executable, "-W", "ignore", __file__, "--package", str(threads)]
                rate = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                rates.setdefault(f"rwkv package, 1 stream, {threads} threads", []).append(rate)
            for streams in STREAMS:
                rates.setdefault(f"engine, {streams} streams", []).append(engine_rate(Path(scratch), streams))
                rates.setdefault(f"HTTP, {streams} streams", []).append(served.rate(Path(scratch), streams))
    reference = max(statistics.median(values) for name, values in rates.items() if "package" in name)
    for name, values in rates.items():
        rate = statistics.median(values)
        spread = " ".join(f"{value:.0f}" for value in sorted(values))
        print(f"{name:36} {rate:8.0f} tok/s  {rate / reference:5.2f}x the package's better stream  ({spread})")


def package_rate(threads: int) -> float:
    import torch
    from bench_cpu import package_jobs

    from wkvm_core.models.open import DEMO_MODEL

    torch.set_num_threads(threads)
    decode = package_jobs(DEMO_MODEL)["decode 1"][1]
    for _ in range(50):
        decode()
    started = time.perf_counter()
    for _ in range(TOKENS):
        decode()
    return TOKENS / (time.perf_counter() - started)


def engine_rate(scratch: Path, streams: int) -> float:
    out = scratch / "engine.json"
    command = [sys.executable, "-m", "wkvm_core.bench", "--model", "demo", "--rows", str(streams)]
    subprocess.run([*command, "--tokens", str(TOKENS), "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
    return float(json.loads(out.read_text())[0]["tokens_per_s"])


class Served:
    """`wkvm serve` over the embedded model, one frontend."""

    def __init__(self, scratch: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "wkvm_frontend.cli.main",
            "serve",
            "--port",
            "0",
            "--store",
            str(scratch / "s"),
        ]
        started = time.monotonic()
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            found = re.search(r"ready after .* at (\S+)$", line)
            if found:
                break
        else:
            sys.exit("".join(lines))
        self.url = found[1]
        self.ready_s = time.monotonic() - started
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    def rate(self, scratch: Path, streams: int) -> float:
        out = scratch / "http.json"
        command = [sys.executable, "-m", "wkvm_frontend.cli.main", "bench", "serve", "--url", self.url, "--ignore-eos"]
        command += ["--concurrency", str(streams), "--requests", str(2 * streams), "--output-tokens", str(TOKENS)]
        command += ["--input-tokens", "8", "--workers", "1", "--json", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        result = json.loads(out.read_text())
        return float(result["figures"]["output_tokens_per_s"])

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


if __name__ == "__main__":
    main()
