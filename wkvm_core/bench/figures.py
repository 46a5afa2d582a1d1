"""What the turns of a run come to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from wkvm_core.bench.parts import Turn

FEWEST_STEPS = 10
PARTS = ("inbox", "plan", "run", "launch", "wait", "commit", "deliver")


class TooShort(Exception):
    """There is too little to measure."""


def steady(turns: Sequence[Turn], rows: int, began: float, ended: float) -> list[Turn]:
    """The turns of a round, which lasted from `began` to `ended`, while all its rows decoded: from the first such turn
    to the last, less the first fifth. Raises TooShort."""
    within = [turn for turn in turns if began <= turn.started <= ended]
    full = [place for place, turn in enumerate(within) if turn.decoding >= rows]
    if len(full) < FEWEST_STEPS:
        raise TooShort(f"only {len(full)} full steps of {rows} rows: ask for more --tokens or --seconds")
    window = within[full[0] : full[-1] + 1]
    return window[len(window) // 5 :]


def decode_figures(window: Sequence[Turn]) -> dict[str, float]:
    """Rates and times of steady turns: what they delivered by the time from the first's start to the last's; medians
    of the parts of a turn, microseconds; gaps between turns."""
    wall = window[-1].started - window[0].started
    turns = window[:-1]
    tokens = sum(turn.tokens for turn in turns)
    medians = {part: 1e6 * statistics.median(getattr(turn, part) for turn in turns) for part in PARTS}
    mail = 1e6 * (window[-1].mail_cpu_s - window[0].mail_cpu_s) / len(turns)
    host = 1e6 * statistics.median(turn.plan + turn.commit + turn.deliver + turn.inbox for turn in turns)
    gaps = np.array([after.started - before.started for before, after in pairwise(window)])
    return {
        "tokens_per_s": tokens / wall,
        "prompt_tokens_per_s": sum(turn.prompt_tokens for turn in turns) / wall,
        "steps": len(turns),
        "seconds": wall,
        "tokens": tokens,
        "step_us": 1e6 * wall / len(turns),
        **{f"{part}_us": value for part, value in medians.items()},
        "mail_us": mail,
        "host_us": host + mail,
        **spread("gap", 1e6 * gaps),
    }


def prefill_seconds(turns: Sequence[Turn], began: float, ended: float) -> float:
    """From the first launch of a round to the result of its last step. Raises TooShort."""
    launches = [turn.launched_at for turn in turns if turn.launched_at and began <= turn.launched_at <= ended]
    results = [turn.collected_at for turn in turns if turn.collected_at and began <= turn.collected_at <= ended]
    if not launches or not results:
        raise TooShort("no step of the round was seen")
    return results[-1] - launches[0]


def spread(name: str, times_us: npt.NDArray[np.float64]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    middle, late = np.quantile(times_us, (0.5, 0.99))
    return {f"{name}_p50_us": float(middle), f"{name}_p99_us": float(late), f"{name}_max_us": float(times_us.max())}
