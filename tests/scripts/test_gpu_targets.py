from __future__ import annotations

from typing import Any

import pytest
from bench_gpu import peers
from gpu_report import markdown
from gpu_targets import Target, all_targets, decode_results, floods

KNOWN: dict[str, Any] = {
    "rows": [1, 8],
    "targets": {
        "decode": {"small": {"16-bit": [100, 500]}},
        "sampled_share": 0.9,
        "prefill": {"small": {"1x4096": 1000}},
        "http": {"small": {"single": 80, "peak": 400}},
        "flood": {"small": {"itl": 3.0, "prompt_share": 0.4}},
    },
}


def job(part: str, *results: dict[str, Any], model: str = "small", state_dtype: str = "float16") -> dict[str, Any]:
    return {"part": part, "model": model, "state_dtype": state_dtype, "results": list(results)}


def decoded(rows: int, rate: float, temperature: float = 0.0, flood: int = 0, **more: float) -> dict[str, Any]:
    return {"rows": rows, "tokens_per_s": rate, "temperature": temperature, "flood": flood, **more}


def verdicts(*jobs: dict[str, Any]) -> dict[str, tuple[float | None, str]]:
    prefix = "small, float16 state: "
    found = {target.what: (target.found, target.met) for target in all_targets(list(jobs), KNOWN)}
    return {what.removeprefix(prefix): verdict for what, verdict in found.items()}


@pytest.mark.parametrize(
    ("found", "at_most", "met"),
    [(5.0, False, "yes"), (4.9, False, "no"), (5.0, True, "yes"), (5.1, True, "no"), (None, True, "not measured")],
)
def test_a_target_is_met_at_its_bound(found: float | None, at_most: bool, met: str) -> None:
    assert Target("", 5.0, found, ".0f", at_most).met == met


def test_rates_of_decode_are_held_against_those_of_their_rows() -> None:
    found = verdicts(job("engine", decoded(1, 101.0), decoded(8, 499.0)))
    assert found["decode, 1 rows, tok/s"] == (101.0, "yes")
    assert found["decode, 8 rows, tok/s"] == (499.0, "no")


def test_the_worst_of_the_sampled_rates_counts() -> None:
    found = verdicts(job("engine", decoded(1, 100.0), decoded(8, 500.0), decoded(1, 95.0, 0.8), decoded(8, 400.0, 0.8)))
    assert found["sampled of greedy, the worst"] == (0.8, "no")


def test_what_was_to_be_measured_and_was_not_is_said() -> None:
    assert verdicts(job("engine")) == {
        "decode, 1 rows, tok/s": (None, "not measured"),
        "decode, 8 rows, tok/s": (None, "not measured"),
        "sampled of greedy, the worst": (None, "not measured"),
        "prefill 1x4096, tok/s": (None, "not measured"),
    }
    assert {met for _, met in verdicts(job("http"), job("itl")).values()} == {"not measured"}


def test_prompts_are_held_against_the_rate_of_their_shape() -> None:
    assert verdicts(job("engine", {"prefill": "1x4096", "tokens_per_s": 1200.0}))["prefill 1x4096, tok/s"] == (
        1200.0,
        "yes",
    )


def test_http_has_a_target_for_one_stream_and_for_the_most() -> None:
    streams = [
        {"concurrency": count, "output_tokens_per_s": rate} for count, rate in ((1, 90.0), (64, 410.0), (256, 300.0))
    ]
    found = verdicts(job("http", {"streams": streams}))
    assert found == {"HTTP, 1 stream, tok/s": (90.0, "yes"), "HTTP, most, tok/s": (410.0, "yes")}


def flooded() -> dict[str, Any]:
    return job(
        "itl",
        decoded(64, 5000.0, itl_p50_us=2000.0, itl_p99_us=2500.0, prompt_tokens_per_s=0.0),
        decoded(64, 3000.0, flood=1000, itl_p50_us=4000.0, itl_p99_us=5000.0, prompt_tokens_per_s=300.0),
        {"prefill": "1x1000", "tokens_per_s": 1000.0},
    )


def test_latency_beside_a_prompt_is_held_against_the_median_without() -> None:
    found = verdicts(flooded())
    assert found["ITL p99 beside a prompt, times the p50 without"] == (2.5, "yes")
    assert found["prompt beside 64 rows, of its rate alone"] == (0.3, "no")


def test_a_flood_without_the_quiet_run_has_no_ratio() -> None:
    alone = flooded()
    alone["results"] = alone["results"][1:2]
    (flood,) = floods([alone], "small", "float16")
    assert (flood.latency, flood.share) == (None, None)


def test_rates_beside_a_flood_are_no_decode_rates() -> None:
    assert decode_results([job("engine", decoded(8, 7.0), decoded(8, 3.0, flood=1000))], sampled=False) == {
        ("small", "float16"): {8: 7.0}
    }


def test_a_model_without_targets_has_none() -> None:
    assert list(all_targets([job("engine", decoded(1, 5.0), model="other")], KNOWN)) == []


def test_the_latencies_have_a_table() -> None:
    run = flooded()
    for result in run["results"][:2]:
        result |= {f"gap_{part}_us": 1000.0 for part in ("p50", "p99", "max")} | {"itl_max_us": 6000.0}
    about = {name: name for name in ("card", "torch", "triton", "python", "cpus", "commit", "begun", "dtype")}
    text = markdown({"about": about, "jobs": [run]}, peers())
    assert "| small | float16 | 64 | nothing | 5,000 | 2.00 | 2.50 | 6.00 |  | 1.00 | 1.00 | 1.00 |  |  |" in text
    assert "| prompts of 1,000 tokens | 3,000 | 4.00 | 5.00 | 6.00 | 2.50 | 1.00 | 1.00 | 1.00 | 300 | 30% |" in text
