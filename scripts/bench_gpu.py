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
from gpu_targets import precision

SCRIPTS = Path(__file__).parent
PARTS = ("check", "decode", "sampled", "prefill", "itl", "http", "kernels", "memory")
"""In the order in which they run; those of ENGINE together, in one process a model and state dtype."""
ENGINE = ("decode", "sampled", "prefill")
DEEP = ("itl", "http", "kernels", "memory")
ROWS = [1, 8, 32, 64, 128, 256, 512, 1024]
KERNEL_ROWS = (1, 64, 512)
PREFILLS = ["1x4096", "16x1024"]
TEMPERATURES = {"decode": "0", "sampled": "0.8"}
TOP_P = "0.95"
FLOOD = "100000"
WORDS = ("counting", "demo")
"""Models that are no size; for a run on a CPU that shows that everything works."""
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


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench-gpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--models", nargs="+", default=["1.5b", "7.2b"], help="sizes; see --model")
    parser.add_argument("--deep", type=int, default=1, help="http, itl, kernels and memory take so many of the models")
    parser.add_argument("--dtype", default="float16", help="of the weights")
    parser.add_argument("--state-dtypes", nargs="+", default=["float16", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--tokens", type=int, default=192, help="least output tokens of a decode rate")
    parser.add_argument("--measure-s", type=float, default=1.0, help="least time to measure a decode rate")
    parser.add_argument("--prefills", nargs="+", default=PREFILLS, metavar="ROWSxTOKENS")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256, 1024], help="over HTTP")
    parser.add_argument("--frontends", type=int, default=6)
    parser.add_argument("--workers", type=int, default=6, help="load processes over HTTP")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=530.0, help="for everything")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path("results/gpu.json"))
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print the tables of a file of results instead")
    return parser.parse_args(argv)


def main() -> None:
    given = parsed()
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
    """What is held against a target comes first; within that the models in the order given."""
    chosen = [part for part in PARTS if part in given.only]
    engine = ["engine"] if any(part in ENGINE for part in chosen) else []
    bound = peers()["targets"]["decode"]

    def of(part: str, models: list[str], *, bounded: bool | None = None) -> Iterator[Job]:
        for model in models:
            for state_dtype in given.state_dtypes:
                if bounded in (None, precision(state_dtype) in bound.get(model, {})):
                    for command, limit_s in commands(part, model, state_dtype, given):
                        yield Job(part, model, state_dtype, command, limit_s)

    if "check" in chosen:
        yield from of("check", ["-"])
    for part in engine:
        yield from of(part, given.models, bounded=True)
    for part in (part for part in DEEP if part in chosen):
        yield from of(part, given.models[: given.deep])
    for part in engine:
        yield from of(part, given.models, bounded=False)


def commands(part: str, model: str, state_dtype: str, given: argparse.Namespace) -> Iterator[tuple[list[str], float]]:
    """Arguments of Python, and seconds."""
    on = ["--device", given.device, "--dtype", given.dtype, "--state-dtype", state_dtype]
    name = model if model in WORDS else f"random:{model}"
    named = ["--model", name, *on]
    engine = ["-m", "wkvm_core.bench", *named, "--tokens", str(given.tokens), "--seconds", str(given.measure_s)]
    forward, http = str(SCRIPTS / "gpu_forward.py"), str(SCRIPTS / "gpu_http.py")
    rows = [str(count) for count in given.rows]
    if part == "check":
        yield [forward, "--check", *on], 90
    elif part == "engine":
        temperatures = [TEMPERATURES[kind] for kind in ("decode", "sampled") if kind in given.only]
        work = ["--rows", *rows, "--temperature", *temperatures, "--top-p", TOP_P] if temperatures else []
        work += ["--prefill", *given.prefills] if "prefill" in given.only else []
        yield [*engine, *work], 180
    elif part == "itl":
        work = ["--rows", "64", "--flood", "0", FLOOD, "--prefill", f"1x{FLOOD}", "--rounds", "2"]
        yield [*engine, *work, "--seconds", str(3 * given.measure_s)], 90
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
        "dtype": given.dtype,
        "rows": given.rows,
    }


if __name__ == "__main__":
    main()
