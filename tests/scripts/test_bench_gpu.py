from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench_gpu import Job, peers, run
from gpu_report import markdown
from plot_bench import plot

ROWS = [1, 8, 32, 64, 128, 256, 512, 1024]


def job(program: str) -> Job:
    return Job("decode", "1.5b", "float16", ["-c", program], 60.0)


def measured(model: str, state_dtype: str, rates: dict[int, float], part: str = "decode") -> dict[str, Any]:
    results = [{"rows": rows, "tokens_per_s": rate} for rows, rate in rates.items()]
    return {"part": part, "model": model, "state_dtype": state_dtype, "command": "", "results": results}


def document(*jobs: dict[str, Any]) -> dict[str, Any]:
    about = {name: name for name in ("card", "torch", "triton", "python", "cpus", "commit", "begun")}
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


def test_a_rate_stands_beside_the_peer_and_the_limit() -> None:
    text = markdown(
        document(measured("1.5b", "bfloat16", {8: 6248.0}), measured("1.5b", "bfloat16", {8: 9.0}, "sampled")), peers()
    )
    assert "| 8 | 6,248 | 9 | 3,124 | 2.00 | 11,898 | 0.53 |" in text
    assert "Prefill" not in text


def test_a_model_without_known_figures_has_its_own() -> None:
    assert "| 8 | 5,000 |  |  |  |  |  |" in markdown(document(measured("0.4b", "float32", {8: 5000.0})), peers())


def test_a_part_that_failed_is_named() -> None:
    failed = measured("7.2b", "float32", {}) | {"failure": "stopped after 3 s"}
    assert markdown(document(failed), peers()).endswith("* decode 7.2b float32: stopped after 3 s")


def test_every_column_of_the_peers_figures_has_all_rows() -> None:
    known = peers()
    assert known["rows"] == ROWS
    for name in ("decode", "limits"):
        for model, columns in known[name].items():
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
