"""The benchmark of a GPU: parts in processes of their own, and tables of what they found; see scripts/bench-gpu."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_report import markdown

SCRIPTS = Path(__file__).parent
PARTS = ("check", "decode", "http", "prefill", "sampled", "itl", "kernels", "memory")
"""In the order in which they run."""
ROWS = [1, 8, 32, 64, 128, 256, 512, 1024]
KERNEL_ROWS = (1, 64, 512)
PREFILLS = ["1x4096", "16x1024"]
SAMPLED = ["--temperature", "0.8", "--top-p", "0.95"]
LEAST_S = 15.0
"""A job that would get less than this is not begun."""


@dataclass(frozen=True)
class Job:
    """One process, which writes a JSON list to the file after `--json`."""

    part: str
    model: str
    state_dtype: str
    command: list[str]
    limit_s: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench-gpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--models", nargs="+", default=["1.5b", "7.2b", "2.9b", "0.4b"], help="sizes; see --model")
    parser.add_argument("--deep", type=int, default=1, help="http, itl, kernels and memory take so many of the models")
    parser.add_argument("--state-dtypes", nargs="+", default=["float16", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--tokens", type=int, default=192, help="output tokens of each request of a decode rate")
    parser.add_argument("--prefills", nargs="+", default=PREFILLS, metavar="ROWSxTOKENS")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256, 1024], help="over HTTP")
    parser.add_argument("--frontends", type=int, default=6)
    parser.add_argument("--workers", type=int, default=6, help="load processes over HTTP")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=530.0, help="for everything")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path("results/gpu.json"))
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print the tables of a file of results instead")
    given = parser.parse_args()
    if given.markdown:
        print(markdown(json.loads(given.markdown.read_text()), peers()))
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"about": about(given), "jobs": []}
    deadline = time.monotonic() + given.seconds
    for job in jobs(given):
        limit = min(job.limit_s, deadline - time.monotonic())
        done = run(job, limit) if limit >= min(LEAST_S, job.limit_s) else {"failure": "not begun: no time left"}
        named = {"part": job.part, "model": job.model, "state_dtype": job.state_dtype}
        document["jobs"].append(named | {"command": " ".join(job.command)} | done)
        given.out.write_text(json.dumps(document, indent=1) + "\n")
        said = done.get("failure", f"done in {done.get('seconds', 0):.0f} s")
        print(f"## {' '.join(named.values())}: {said}", flush=True)
    tables = markdown(document, peers())
    given.out.with_suffix(".md").write_text(tables + "\n")
    print(tables)
    if any("failure" in job for job in document["jobs"]):
        sys.exit(1)


def peers() -> dict:
    return json.loads((SCRIPTS / "gpu_peers.json").read_text())


def jobs(given: argparse.Namespace) -> Iterator[Job]:
    """Part by part; within a part the models in the order given."""
    for part in (part for part in PARTS if part in given.only):
        single = part in ("http", "itl", "kernels", "memory")
        models = ["-"] if part == "check" else given.models[: given.deep] if single else given.models
        for model in models:
            for state_dtype in given.state_dtypes:
                for command, limit_s in commands(part, model, state_dtype, given):
                    yield Job(part, model, state_dtype, command, limit_s)


def commands(part: str, model: str, state_dtype: str, given: argparse.Namespace) -> Iterator[tuple[list[str], float]]:
    """Arguments of Python, and seconds."""
    on = ["--device", given.device, "--state-dtype", state_dtype]
    named = ["--model", f"random:{model}", *on]
    engine = ["-m", "wkvm_core.bench", *named]
    forward, http = str(SCRIPTS / "gpu_forward.py"), str(SCRIPTS / "gpu_http.py")
    rows = [str(count) for count in given.rows]
    if part == "check":
        yield [forward, "--check", *on], 90
    elif part == "decode":
        yield [*engine, "--rows", *rows, "--tokens", str(given.tokens)], 120
    elif part == "sampled":
        yield [*engine, "--rows", *rows, "--tokens", str(given.tokens), *SAMPLED], 120
    elif part == "prefill":
        yield [*engine, "--prefill", *given.prefills], 60
    elif part == "itl":
        load = ["--rows", "64", "--tokens", "1500"]
        yield [*engine, *load], 60
        yield [*engine, *load, "--flood", "100000"], 60
    elif part == "kernels":
        some = [str(count) for count in KERNEL_ROWS if count in given.rows] or rows
        yield [forward, *named, "--rows", *some], 90
    elif part == "http":
        streams = ["--concurrency", *map(str, given.streams)]
        yield [http, *named, *streams, "--frontends", str(given.frontends), "--workers", str(given.workers)], 150
    elif part == "memory":
        yield [http, *named, "--concurrency", "--frontends", "1"], 60


def run(job: Job, limit_s: float) -> dict:
    """What came of a job: `results`, and `failure` with the end of its output when it did not end well."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wkvm-") as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        command = [sys.executable, "-W", "ignore", *job.command, "--json", str(out)]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                failure = f"exit code {process.wait(limit_s)}" if process.wait(limit_s) else ""
            except subprocess.TimeoutExpired:
                failure = f"stopped after {limit_s:.0f} s"
            finally:
                end(process)
        said = log.read_text(errors="replace")
        print(said[-3000 if failure else -1200 :], end="", flush=True)
        found: dict = {"seconds": time.monotonic() - started, "results": []}
        with contextlib.suppress(OSError, ValueError):  # it may have been stopped before or while it wrote
            found["results"] = json.loads(out.read_text())
        return found | ({"failure": failure, "output": said[-4000:]} if failure else {})


def end(process: subprocess.Popen[bytes]) -> None:
    """Nothing that the job started goes on."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def about(given: argparse.Namespace) -> dict:
    """What is measured, on what."""
    import torch

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    on_gpu = torch.cuda.is_available() and given.device.startswith("cuda")
    commit = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        said = subprocess.run(commit, cwd=SCRIPTS, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        said = ""
    return {
        "card": torch.cuda.get_device_name() if on_gpu else given.device,
        "torch": torch.__version__,
        "triton": triton_version,
        "python": sys.version.split()[0],
        "cpus": len(os.sched_getaffinity(0)),
        "commit": given.commit or said,
        "begun": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "rows": given.rows,
    }


if __name__ == "__main__":
    main()
