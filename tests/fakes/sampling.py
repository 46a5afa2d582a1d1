"""How one row is sampled, in plain Python and float64, step by step as the sampling parameters are documented."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.fakes.counting import MASK, splitmix64
from wkvm_proto.columns import unpack_f32, unpack_u32
from wkvm_proto.sampling import Sampling


def uniform(seed: int, sample: int, position: int) -> float:
    """The random number of a draw."""
    key = splitmix64(splitmix64(seed) ^ sample)
    bits = splitmix64((key + position * 0x9E3779B97F4A7C15) & MASK)
    return ((bits >> 12) + 0.5) / 2**52


def shaped(logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Logits after penalties, bias and bans."""
    stops = set(unpack_u32(sampling.stop_ids)) if len(output) < sampling.min_tokens else set()
    bias = dict(zip(unpack_u32(sampling.bias_ids), unpack_f32(sampling.bias_values), strict=True))
    values, allowed = [], []
    for token, logit in enumerate(logits):
        value = logit
        if token in prompt or token in output:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        times = list(output).count(token)
        value -= sampling.presence_penalty * (times > 0) + sampling.frequency_penalty * times
        value += bias.get(token, 0.0)
        values.append(value)
        allowed.append(value > -math.inf and bias.get(token, 0.0) > -100.0 and token not in stops)
    if not any(allowed):
        return values
    return [value if may else -math.inf for value, may in zip(values, allowed, strict=True)]


def distribution(values: Sequence[float], sampling: Sampling, slack: float = 0.0) -> list[tuple[int, float]]:
    """(id, probability) of every id that may be drawn, by id, the order in which the draw walks them. `slack` moves
    every threshold, to find the cases that rounding decides."""
    top = max(values)
    by_rank = sorted(range(len(values)), key=lambda token: (-values[token], token))
    share = {token: math.exp((values[token] - top) / sampling.temperature) for token in by_rank}
    kept = by_rank[: sampling.top_k] if sampling.top_k else by_rank
    if sampling.top_p < 1.0:
        kept = _until(kept, share, sampling.top_p + slack)
    if sampling.typical_p < 1.0:
        mass = sum(share[token] for token in kept)
        p = {token: share[token] / mass for token in kept if share[token] > 0.0}
        entropy = -sum(value * math.log(value) for value in p.values())
        nearest = sorted(p, key=lambda token: abs(-math.log(p[token]) - entropy))
        chosen = set(_until(nearest, share, sampling.typical_p + slack))
        kept = [token for token in kept if token in chosen]
    best = max(share[token] for token in kept)
    kept = sorted(token for token in kept if share[token] >= min(1.0, sampling.min_p + slack) * best)
    mass = sum(share[token] for token in kept)
    return [(token, share[token] / mass) for token in kept]


def walk(pairs: Sequence[tuple[int, float]], u: float) -> int | None:
    """The id at which the sum of probabilities passes u; None when rounding might decide."""
    total = 0.0
    for token, p in pairs:
        if abs(total + p - u) < 1e-5 and total + p < 1.0 - 1e-9:
            return None
        total += p
        if total > u:
            return token
    return pairs[-1][0]


def _until(tokens: Sequence[int], share: dict[int, float], limit: float) -> list[int]:
    mass, total, kept = sum(share[token] for token in tokens), 0.0, []
    for token in tokens:
        if kept and total >= limit * mass:
            break
        kept.append(token)
        total += share[token]
    return kept
