from __future__ import annotations

import torch

from tests.fakes import counting, sampling
from wkvm_core.kernels.splitmix import signed, splitmix64, splitmix64_int, stream_key, uniform

# The first outputs of the generator seeded with 1234567, as published with its reference implementation.
PUBLISHED = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)
GAMMA = 0x9E3779B97F4A7C15


def test_outputs_are_those_of_the_published_generator() -> None:
    seeds = [1234567 + GAMMA * step & (1 << 64) - 1 for step in range(5)]
    assert splitmix64(torch.tensor([signed(seed) for seed in seeds])).tolist() == [signed(x) for x in PUBLISHED]
    assert tuple(map(splitmix64_int, seeds)) == PUBLISHED
    assert tuple(map(counting.splitmix64, seeds)) == PUBLISHED


def test_the_uniforms_of_a_key_are_the_generators_outputs_in_order() -> None:
    numbers = uniform(torch.full((5,), 1234567), torch.arange(5))
    assert numbers.tolist() == [((x >> 12) + 0.5) / 2**52 for x in PUBLISHED]


def test_a_uniform_is_a_pure_function_of_seed_sample_position_and_draw() -> None:
    seeds = (0, 1, 2**63 - 1)
    cases = [(seed, sample, position) for seed in seeds for sample in (0, 1, 127) for position in (0, 1, 2**31 - 2)]
    keys = torch.tensor([stream_key(seed, sample) for seed, sample, _ in cases])
    positions = torch.tensor([position for *_, position in cases])
    numbers = uniform(keys, positions)
    assert numbers.tolist() == [sampling.uniform(*case) for case in cases]
    assert len(set(numbers.tolist())) == len(cases)
    again = uniform(keys, positions, draw=1)
    assert not set(again.tolist()) & set(numbers.tolist())


def test_uniforms_lie_inside_the_open_interval_at_both_ends() -> None:
    # The seeds whose output is 0 and all ones; splitmix64 is a bijection, so both exist.
    numbers = uniform(torch.tensor([signed((1 << 64) - GAMMA)]), torch.tensor([0]))
    assert numbers.tolist() == [2.0**-53]
    many = uniform(torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64))
    assert 0.0 < float(many.min()) < 1e-4
    assert 1.0 - 1e-4 < float(many.max()) < 1.0


def test_uniforms_fill_their_interval_evenly_along_positions_and_along_seeds() -> None:
    along_positions = uniform(torch.full((100_000,), stream_key(7, 0)), torch.arange(100_000))
    along_seeds = uniform(torch.tensor([stream_key(seed, 0) for seed in range(20_000)]), torch.zeros(20_000).long())
    for numbers in (along_positions, along_seeds):
        counts = torch.histc(numbers.float(), 100, 0.0, 1.0)
        expected = len(numbers) / 100
        assert float(((counts - expected) ** 2 / expected).sum()) < 170.0  # 99 degrees of freedom: p < 1e-5
