"""A model served over HTTP on a GPU: rates and latencies at several numbers of streams, and the memory it takes."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

READY = re.compile(r"ready after .* at (\S+)$")
SLOTS = re.compile(r"slots +(\d+) of (\d+) bytes")
SPARE_SLOTS = 16


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_http.py", description=__doc__)
    parser.add_argument("--model", default="random:1.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16", help="of the weights")
    parser.add_argument("--state-dtype", default="float16")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 64, 256, 1024], help="none: memory only")
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--frontends", type=int, default=6)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    result = {
        "model": given.model,
        "dtype": given.dtype,
        "state_dtype": given.state_dtype,
        "frontends": given.frontends,
        "workers": given.workers,
        "input_tokens": given.input_tokens,
        "output_tokens": given.output_tokens,
        "streams": [],
    }
    with tempfile.TemporaryDirectory(prefix="wkvm-") as scratch, Served(given, Path(scratch)) as served:
        result |= {"ready_s": served.ready_s, "slots": served.slots, "slot_bytes": served.slot_bytes}
        result["device_mib"] = device_mib()
        print(json.dumps(result), flush=True)
        for streams in given.concurrency:
            result["streams"].append(served.load(given, streams, Path(scratch) / "load.json"))
            result["device_mib_after"] = device_mib()
            print(result["streams"][-1], flush=True)
            given.json.write_text(json.dumps([result], indent=1) + "\n")
    given.json.write_text(json.dumps([result], indent=1) + "\n")


def device_mib() -> int | None:
    """Memory in use on the first device by everybody, MiB; None where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        return int(said.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


class Served:
    """`wkvm serve` on a free port."""

    def __init__(self, given: argparse.Namespace, scratch: Path) -> None:
        command = [sys.executable, "-m", "wkvm_frontend.cli.main", "serve", "--model", given.model, "--port", "0"]
        command += ["--device", given.device, "--dtype", given.dtype, "--state-dtype", given.state_dtype]
        command += ["--frontends", str(given.frontends), "--store", str(scratch / "store")]
        if given.concurrency:
            rows = max(given.concurrency)
            command += ["--max-rows", str(rows), "--slots", str(rows + SPARE_SLOTS)]
        started = time.monotonic()
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        self.slots = self.slot_bytes = 0
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            if found := SLOTS.search(line):
                self.slots, self.slot_bytes = int(found[1]), int(found[2])
            if found := READY.search(line.rstrip()):
                self.url = found[1]
                break
        else:
            sys.exit("".join(lines[-30:]))
        self.ready_s = time.monotonic() - started
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    def load(self, given: argparse.Namespace, streams: int, out: Path) -> dict:
        """As many requests as keep all streams busy for four answers; twice as long for a single one."""
        command = [sys.executable, "-m", "wkvm_frontend.cli.main", "bench", "serve", "--url", self.url]
        command += ["--endpoint", "completions", "--ignore-eos", "--concurrency", str(streams)]
        command += ["--requests", str(4 * streams if streams > 1 else 8), "--workers", str(given.workers)]
        command += ["--input-tokens", str(given.input_tokens), "--output-tokens", str(given.output_tokens)]
        done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{streams} streams: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        figures = json.loads(out.read_text())["figures"]
        kept = ("completed", "failed", "seconds", "output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
        kept += ("prompt_tokens", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
        return {"concurrency": streams} | {name: figures[name] for name in kept}

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    main()
