from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wkvm_core.bench.main import ROWS, arguments, config, line, main

QUICK = ["--model", "counting", "--device", "cpu", "--seconds", "0.05", "--tokens", "24"]
LATENCIES = [f"{name}_{part}_us" for name in ("gap", "itl") for part in ("p50", "p99", "max")]
TIMES = [
    f"{name}_us" for name in ("step", "inbox", "plan", "run", "launch", "wait", "commit", "deliver", "mail", "host")
]


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    """An engine sets them for its process; the tests after these have theirs."""
    interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    yield
    sys.setswitchinterval(interval)
    torch.set_num_threads(threads)


def bench(tmp_path: Path, *given: str) -> list[dict[str, Any]]:
    out = tmp_path / "out.json"
    main([*QUICK, *given, "--json", str(out)])
    results: list[dict[str, Any]] = json.loads(out.read_text())
    return results


def test_every_batch_size_has_a_result_of_its_own_with_true_counts(tmp_path: Path) -> None:
    results = bench(tmp_path, "--rows", "1", "5", "3", "--overlap", "1")
    assert [result["rows"] for result in results] == [1, 5, 3]
    for result in results:
        assert set(LATENCIES + TIMES) <= set(result)
        assert result["tokens_per_s"] == pytest.approx(result["tokens"] / result["seconds"])
        assert result["tokens"] == result["rows"] * result["steps"]
        assert (result["temperature"], result["flood"], result["prompt_tokens_per_s"]) == (0.0, 0, 0.0)


def test_a_batch_that_is_over_too_soon_gets_more_tokens(tmp_path: Path) -> None:
    (result,) = bench(tmp_path, "--rows", "2", "--seconds", "0.4")
    assert result["steps"] > 24
    assert result["seconds"] > 0.15  # it aims at more than 0.4, from what the first round took


def test_greedy_and_sampled_runs_share_an_engine(tmp_path: Path) -> None:
    results = bench(tmp_path, "--rows", "2", "--temperature", "0", "0.8", "--top-p", "0.95", "--seed", "7")
    assert [(result["temperature"], result["top_p"]) for result in results] == [(0.0, 0.95), (0.8, 0.95)]


def test_a_flood_loads_beside_the_rows_and_is_gone_afterwards(tmp_path: Path) -> None:
    flooded, after = bench(tmp_path, "--rows", "2", "--flood", "20000", "0", "--seconds", "0.3")
    assert (flooded["flood"], after["flood"]) == (20000, 0)
    assert flooded["prompt_tokens_per_s"] > 0.0
    assert after["prompt_tokens_per_s"] == 0.0


def test_prompts_are_read_at_a_rate_and_answered_in_time(tmp_path: Path) -> None:
    single, several = bench(tmp_path, "--prefill", "1x600", "3x100", "--rounds", "2")
    assert (single["prefill"], several["prefill"]) == ("1x600", "3x100")
    for result, tokens in ((single, 600), (several, 300)):
        assert result["tokens_per_s"] == pytest.approx(tokens / result["seconds"])
        assert 1e3 * result["seconds"] < result["ttft_max_ms"] + 50.0
        assert 0.0 < result["ttft_ms"] <= result["ttft_max_ms"]
        assert result["rounds"] == 2
        assert "rows" not in result


def test_each_result_is_a_line_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = bench(tmp_path, "--rows", "2", "--prefill", "1x64", "--rounds", "1")
    assert capsys.readouterr().out.splitlines() == [line(result) for result in results]


def test_results_before_a_failure_are_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1 rows: the caller ended with code 1"):
        bench(tmp_path, "--prefill", "1x64", "1x2000000", "--rounds", "1")
    assert "a request failed" in capfd.readouterr().err
    assert [result["prefill"] for result in json.loads((tmp_path / "out.json").read_text())] == ["1x64"]


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"wkvm bench engine: .*'nothing'"):
        main(["--model", "counting", "--rows", "1", "--device", "nothing"])


def test_settings_reach_the_engine() -> None:
    given = ["--model", "random:1.5b", "--device", "cuda:1", "--dtype", "float16", "--state-dtype", "bfloat16"]
    given += ["--deterministic", "--threads", "3", "--rows", "64", "1", "--overlap", "2", "--slots", "99"]
    given += ["--step-tokens", "2048", "--chunk-tokens", "512", "--mixed-tokens", "128"]
    found = config(arguments(given))
    assert (found.model, found.device, found.dtype, found.state_dtype) == (
        "random:1.5b",
        "cuda:1",
        "float16",
        "bfloat16",
    )
    assert (found.deterministic, found.threads, found.overlap, found.slots) == (True, 3, 2, 99)
    assert (found.step_tokens, found.chunk_tokens, found.mixed_tokens) == (2048, 512, 128)
    assert (found.max_rows, found.buckets) == (64, (1, 64))


def test_an_engine_has_room_for_the_largest_of_all_runs() -> None:
    found = config(arguments(["--rows", "4", "8", "--flood", "0", "1000", "--prefill", "16x32"]))
    assert (found.max_rows, found.slots, found.buckets) == (16, 16, (4, 8))
    assert config(arguments(["--rows", "64", "--flood", "1000"])).max_rows == 65


def test_captured_sizes_can_be_told() -> None:
    assert config(arguments(["--rows", "64", "--buckets", "48", "16", "48"])).buckets == (16, 48)


def test_without_batch_sizes_the_usual_ones_are_run_unless_prompts_are_asked_for() -> None:
    assert arguments([]).rows == ROWS
    assert arguments(["--prefill", "1x8"]).rows == []


@pytest.mark.parametrize("given", [["--prefill", "16"], ["--prefill", "0x8"], ["--rows", "0"], ["--flood", "-1"]])
def test_nonsense_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(given)
    assert f"argument {given[0]}:" in capsys.readouterr().err
