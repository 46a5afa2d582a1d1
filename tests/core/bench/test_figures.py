from __future__ import annotations

import numpy as np
import pytest

from wkvm_core.bench.figures import TooShort, decode_figures, prefill_seconds, spread, steady
from wkvm_core.bench.parts import Turn

STEP = 0.25


def story(*decoding: int, tokens: int = 3) -> list[Turn]:
    """A turn every quarter of a second from 10 s on, with so many rows that decode."""
    return [
        Turn(10.0 + STEP * place, rows=rows, decoding=rows, tokens=tokens, mail_cpu_s=0.001 * place)
        for place, rows in enumerate(decoding)
    ]


def test_the_window_is_what_is_full_less_its_first_fifth() -> None:
    turns = story(0, 1, 2, *[3] * 20, 2, 0)
    assert [turns.index(turn) for turn in steady(turns, 3, 0.0, 100.0)] == list(range(7, 23))


def test_a_step_that_lacks_a_row_stays_in_the_window() -> None:
    turns = story(*[3] * 10, 2, *[3] * 9)
    assert turns[10] in steady(turns, 3, 0.0, 100.0)


def test_turns_of_another_round_do_not_count() -> None:
    turns = story(*[3] * 50)
    window = steady(turns, 3, turns[20].started, turns[39].started)
    assert [turns.index(turn) for turn in window] == list(range(24, 40))


def test_too_few_full_steps_are_no_measurement() -> None:
    with pytest.raises(TooShort, match="only 9 full steps of 3 rows"):
        steady(story(*[3] * 9, *[2] * 50), 3, 0.0, 100.0)


def test_a_rate_is_the_tokens_delivered_by_the_time() -> None:
    window = story(*[3] * 12)
    window[5].tokens = 0  # the result of a step that came late,
    window[6].tokens = 6  # and with the next one's
    window[-1].tokens = 1000  # after the window
    figures = decode_figures(window)
    assert figures["tokens_per_s"] == pytest.approx(3 / STEP)
    assert (figures["steps"], figures["tokens"], figures["seconds"]) == (11, 33, 11 * STEP)
    assert figures["step_us"] == pytest.approx(1e6 * STEP)


def test_a_prompt_that_loads_meanwhile_has_its_own_rate() -> None:
    window = story(*[3] * 12)
    for turn in window:
        turn.prompt_tokens = 100
    assert decode_figures(window)["prompt_tokens_per_s"] == pytest.approx(100 / STEP)


def test_parts_are_medians_and_the_run_is_launch_and_wait() -> None:
    window = story(*[3] * 12)
    for turn in window:
        turn.inbox, turn.plan, turn.launch, turn.wait, turn.commit, turn.deliver = 1e-6, 2e-6, 4e-6, 8e-6, 16e-6, 32e-6
    window[3].plan = window[4].launch = 1.0
    figures = decode_figures(window)
    parts = {name: figures[f"{name}_us"] for name in ("inbox", "plan", "launch", "wait", "run", "commit", "deliver")}
    expected = {"inbox": 1, "plan": 2, "launch": 4, "wait": 8, "run": 12, "commit": 16, "deliver": 32}
    assert parts == pytest.approx(expected)
    assert figures["mail_us"] == pytest.approx(1000)
    assert figures["host_us"] == pytest.approx(1000 + 1 + 2 + 16 + 32)


def test_gaps_lie_between_the_starts_of_turns() -> None:
    window = story(*[3] * 12)
    window[-1].started += 1.0
    figures = decode_figures(window)
    assert figures["gap_p50_us"] == pytest.approx(1e6 * STEP)
    assert figures["gap_max_us"] == pytest.approx(1e6 * (1.0 + STEP))


def test_a_prefill_lasts_from_the_first_launch_to_the_last_result() -> None:
    turns = story(0, 0, 0, 0)
    turns[1].launched_at, turns[1].collected_at = 10.26, 10.27
    turns[2].launched_at, turns[2].collected_at = 10.5, 10.7
    turns[3].launched_at, turns[3].collected_at = 10.8, 10.9  # the next round
    assert prefill_seconds(turns, 10.25, 10.75) == pytest.approx(0.44)


def test_a_round_without_steps_is_no_prefill() -> None:
    with pytest.raises(TooShort):
        prefill_seconds(story(0, 0), 0.0, 100.0)


def test_a_spread_names_median_late_and_latest() -> None:
    times = np.arange(101, dtype=np.float64)
    assert spread("itl", times) == {"itl_p50_us": 50.0, "itl_p99_us": 99.0, "itl_max_us": 100.0}
