from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench_gpu import Job, jobs, parsed, peers, run
from gpu_report import markdown
from plot_bench import plot

from wkvm_core.bench.main import arguments

ROWS = [1, 8, 32, 64, 128, 256, 512, 1024]


def job(program: str) -> Job:
    return Job("engine", "1.5b", "float16", ["-c", program], 60.0)


def measured(model: str, state_dtype: str, rates: dict[int, float], temperature: float = 0.0) -> dict[str, Any]:
    results = [{"rows": rows, "temperature": temperature, "tokens_per_s": rate} for rows, rate in rates.items()]
    return {"part": "engine", "model": model, "state_dtype": state_dtype, "command": "", "results": results}


def document(*jobs: dict[str, Any]) -> dict[str, Any]:
    about = {name: name for name in ("card", "torch", "triton", "python", "cpus", "commit", "begun", "dtype")}
    return {"about": about, "jobs": list(jobs)}


def test_a_job_gives_what_it_wrote() -> None:
    done = run(job("import sys; open(sys.argv[-1], 'w').write('[{\"rows\": 3}]')"), 30.0)
    assert done["results"] == [{"rows": 3}]
    assert "failure" not in done


def test_a_job_that_fails_tells_why_and_keeps_what_it_found() -> None:
    done = run(job("import sys; open(sys.argv[-1], 'w').write('[1]'); sys.exit('no card')"), 30.0)
    assert (done["results"], done["failure"]) == ([1], "exit code 1")
    assert "no card" in done["output"]


def test_a_job_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open({str(started)!r}, "w").write(str(child.pid))
open(sys.argv[-1], "w").write("[{{")
time.sleep(100)
"""
    done = run(job(program), 3.0)
    assert (done["results"], done["failure"]) == ([], "stopped after 3 s")
    child = int(started.read_text())
    end = time.monotonic() + 5
    while time.monotonic() < end and alive(child):
        time.sleep(0.02)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rate_stands_beside_the_sampled_one_the_peer_the_limit_and_the_target() -> None:
    text = markdown(
        document(measured("1.5b", "bfloat16", {8: 6248.0}), measured("1.5b", "bfloat16", {8: 6000.0}, 0.8)), peers()
    )
    assert "| 8 | 6,248 | 6,000 | 0.96 | 3,124 | 2.00 | 11,898 | 0.53 | 4,700 | yes |" in text
    assert "| 1.5b, bfloat16 state: decode, 8 rows, tok/s | ≥ 4,700 | 6,248 | yes |" in text
    assert "HTTP" not in text


def test_a_model_without_known_figures_has_its_own() -> None:
    assert "| 8 | 5,000 |  |  |  |  |  |  |  |  |" in markdown(
        document(measured("0.4b", "float32", {8: 5000.0})), peers()
    )


def planned(*arguments: str) -> list[Job]:
    return list(jobs(parsed(list(arguments))))


def test_one_process_measures_decode_sampled_and_prefill_of_a_model() -> None:
    (job,) = planned("--only", "decode", "sampled", "prefill", "--models", "1.5b", "--state-dtypes", "float16")
    assert job.part == "engine"
    given = arguments(job.command[2:])
    assert (given.model, given.device, given.dtype, given.state_dtype) == ("random:1.5b", "cuda", "float16", "float16")
    assert (given.rows, given.temperature, given.top_p) == (ROWS, [0.0, 0.8], 0.95)
    assert given.prefill == [(1, 4096), (16, 1024)]


def test_latency_is_measured_with_and_without_a_prompt_and_the_prompt_alone() -> None:
    (job,) = planned("--only", "itl", "--state-dtypes", "float16")
    given = arguments(job.command[2:])
    assert (given.rows, given.flood, given.prefill) == ([64], [0, 100_000], [(1, 100_000)])


def test_what_has_a_target_is_measured_first() -> None:
    order = [(job.part, job.model, job.state_dtype) for job in planned("--models", "2.9b", "1.5b", "7.2b")]
    engine = [(model, state_dtype) for part, model, state_dtype in order if part == "engine"]
    bounded = [("1.5b", "float16"), ("1.5b", "float32"), ("7.2b", "float16")]
    assert engine == [*bounded, ("2.9b", "float16"), ("2.9b", "float32"), ("7.2b", "float32")]
    assert [part for part, _, _ in order[:2]] == ["check", "check"]
    assert order.index(("memory", "2.9b", "float32")) < order.index(("engine", "2.9b", "float16"))


def test_every_process_is_told_the_dtype_and_the_device() -> None:
    for job in planned("--dtype", "bfloat16", "--device", "cuda:1"):
        words = job.command
        assert words[words.index("--dtype") + 1] == "bfloat16"
        assert words[words.index("--device") + 1] == "cuda:1"


def test_a_model_that_is_no_size_is_named_as_it_is() -> None:
    (job,) = planned("--only", "decode", "--models", "counting", "--state-dtypes", "float32", "--rows", "2")
    assert arguments(job.command[2:]).model == "counting"


def test_a_part_that_failed_is_named() -> None:
    failed = measured("7.2b", "float32", {}) | {"failure": "stopped after 3 s"}
    assert markdown(document(failed), peers()).endswith("* engine 7.2b float32: stopped after 3 s")


def test_every_column_of_the_known_figures_has_all_rows() -> None:
    known = peers()
    assert known["rows"] == ROWS
    named = {"decode": known["decode"], "limits": known["limits"], "targets": known["targets"]["decode"]}
    for name, tables in named.items():
        for model, columns in tables.items():
            for precision, rates in columns.items():
                assert len(rates) == len(ROWS), (name, model, precision)


@pytest.mark.parametrize(
    ("model", "state_dtype", "curves"), [("1.5b", "float32", 3), ("2.9b", "float32", 2), ("0.4b", "float16", 1)]
)
def test_the_picture_has_a_curve_for_each_column_that_is_known(model: str, state_dtype: str, curves: int) -> None:
    svg = ElementTree.fromstring(plot(document(measured(model, state_dtype, {1: 700.0, 64: 20000.0})), peers()))
    assert len(svg.findall("{http://www.w3.org/2000/svg}polyline")) == curves


def test_results_without_rates_make_no_picture() -> None:
    with pytest.raises(SystemExit):
        plot(document(), peers())
