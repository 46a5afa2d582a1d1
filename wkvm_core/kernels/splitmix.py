"""SplitMix64 on int64 tensors: counter-based random bits that are equal on every device and in every batch."""

from __future__ import annotations

import torch

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def signed(value: int) -> int:
    """The int64 with the bits of a u64."""
    return value - (1 << 64) if value >> 63 else value


def splitmix64(values: torch.Tensor) -> torch.Tensor:
    """First output of the generator seeded with each value (Steele, Lea, Flood 2014); int64 in and out, as bits."""
    x = values + signed(GAMMA)
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * signed(FIRST)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * signed(SECOND)
    return x ^ (x >> 31 & (1 << 33) - 1)


def splitmix64_int(value: int) -> int:
    """The same of one u64."""
    x = (value + GAMMA) & MASK
    x = ((x ^ (x >> 30)) * FIRST) & MASK
    x = ((x ^ (x >> 27)) * SECOND) & MASK
    return x ^ (x >> 31)


def stream_key(seed: int, sample: int) -> int:
    """Key of the random numbers of one sample of a request, as int64."""
    return signed(splitmix64_int(splitmix64_int(seed) ^ sample))


def uniform(keys: torch.Tensor, positions: torch.Tensor, draw: int = 0) -> torch.Tensor:
    """float64 in the open interval (0, 1), 52 bits: a pure function of key, position and draw number.

    The bits are output number `position + draw * 2**32` of the SplitMix64 generator seeded with the key.
    """
    bits = splitmix64(keys + (positions + (draw << 32)) * signed(GAMMA))
    return ((bits >> 12 & (1 << 52) - 1).to(torch.float64) + 0.5) * 2.0**-52
