"""Rows for the samplers of both devices: requests of every kind, logits of every kind, and the reference beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from wkvm_core.exec.device_lanes import DeviceLanes
from wkvm_core.exec.gpu_sampler import GpuSampler
from wkvm_core.exec.lanes import Lanes
from wkvm_core.exec.sampler import Logprobs, Sampler
from wkvm_core.kernels.lane import COUNTED, EDGE, PAUSE, SAMPLE
from wkvm_core.sched.plan import LaneImage
from wkvm_proto.columns import pack_f32, pack_u32
from wkvm_proto.sampling import Sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_HALT_SETS = 3


class Pair:
    """The same lanes twice: on the CPU with the reference sampler, on the device with the launch."""

    def __init__(self, images: Sequence[LaneImage], vocab_size: int, block: int, num_warps: int = 4) -> None:
        self.vocab_size = vocab_size
        self.lanes = Lanes.open(len(images), vocab_size, num_halt_sets=NUM_HALT_SETS)
        self.device_lanes = DeviceLanes(len(images), vocab_size, DEVICE, NUM_HALT_SETS)
        for index in range(NUM_HALT_SETS):
            bitmap = bytes(random.Random(index).randrange(256) & 0x11 for _ in range(-(-vocab_size // 8)))
            self.lanes.set_halt_set(index, bitmap)
            self.device_lanes.set_halt_set(index, bitmap)
        for lane, image in enumerate(images):
            self.seat(lane, image)
        self.sampler = Sampler(self.lanes)
        self.gpu_sampler = GpuSampler(self.device_lanes, len(images) + 2, block=block, num_warps=num_warps)

    def seat(self, lane: int, image: LaneImage) -> None:
        self.lanes.seat(lane, image)
        self.device_lanes.seat(lane, image)

    def expected(
        self, logits: torch.Tensor, lanes: Sequence[int], pause: Sequence[bool]
    ) -> tuple[torch.Tensor, Logprobs | None]:
        sampled = self.sampler.sample(logits, torch.tensor(lanes), torch.tensor(pause))
        return sampled.packed.clone(), sampled.logprobs

    def launch(self, logits: torch.Tensor, lanes: Sequence[int], pause: Sequence[bool]) -> torch.Tensor:
        """Only the launch: int64 [2, rows]."""
        asks = torch.tensor([SAMPLE | PAUSE * bool(flag) for flag in pause])
        out = torch.full((2, len(lanes)), 77, device=DEVICE)
        with np.errstate(all="ignore"):  # the interpreter's infinities
            self.gpu_sampler.sample(logits.to(DEVICE), torch.tensor(lanes).to(DEVICE), asks.to(DEVICE), out)
        return out

    def sampled(
        self, logits: torch.Tensor, lanes: Sequence[int], pause: Sequence[bool]
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """The launch, and the rest."""
        out = self.launch(logits, lanes, pause)
        rows = self.gpu_sampler.left_over(lanes)
        logprobs = self.gpu_sampler.rest(
            logits.to(DEVICE), rows, [lanes[row] for row in rows], [pause[row] for row in rows], out
        )
        return out.cpu(), logprobs

    def assert_equal_tables(self) -> None:
        """Every lane has moved on alike, and holds alike what it was seated with."""
        own, other = self.lanes, self.device_lanes
        assert torch.equal(own.numbers, other.numbers.cpu())
        assert torch.equal(own.knobs[:, :EDGE], other.knobs.cpu()[:, :EDGE])
        assert torch.equal(own.marks, other.marks.cpu())
        assert torch.equal(own.bias, other.bias.cpu())
        assert torch.equal(own.counts, other.counts.cpu())
        lanes = torch.arange(own.num_lanes)
        assert own.needs(lanes).tolist() == other.needs(lanes).tolist()
        counted = own.needs(lanes) & COUNTED != 0
        assert not own.counts[:-2][~torch.from_numpy(counted)].any()


def random_image(rng: random.Random, vocab_size: int, *, typical: bool = True) -> LaneImage:
    """Any combination of parameters."""

    def ids(at_most: int) -> list[int]:
        return rng.sample(range(vocab_size), rng.randint(0, min(at_most, vocab_size)))

    biased = ids(5) if rng.random() < 0.3 else []
    if rng.random() < 0.06:
        biased = list(range(vocab_size))
    values = [rng.choice([-100.0, -100.0, -7.5, 0.5, 4.0, 100.0]) for _ in biased]
    if len(biased) == vocab_size and rng.random() < 0.5:
        values = [-100.0] * vocab_size
    penalties = rng.random() < 0.4
    stops = ids(4) if rng.random() < 0.8 else list(range(vocab_size))
    sampling = Sampling(
        max_tokens=rng.choice([1, 2, 1000, 1000]) + 6,
        seed=rng.randrange(2**63),
        temperature=rng.choice([0.0, 1e-30, 1e-6, 0.2, 0.7, 1.0, 1.0, 1.5, 100.0]),
        top_k=rng.choice([0, 0, 0, 1, 2, 7, vocab_size // 2, vocab_size, 1000]),
        top_p=rng.choice([1.0, 1.0, 0.0, 1e-9, 0.05, 0.3, 0.9, 0.95, 0.99, 1.0 - 2.0**-53]),
        min_p=rng.choice([0.0, 0.0, 0.0, 0.01, 0.3, 1.0]),
        typical_p=rng.choice([1.0] * 6 + [0.0, 0.6]) if typical else 1.0,
        presence_penalty=rng.choice([0.0, -1.5, 2.0]) if penalties else 0.0,
        frequency_penalty=rng.choice([0.0, -0.3, 0.7]) if penalties else 0.0,
        repetition_penalty=rng.choice([1.0, 0.5, 1.3, 100.0, 1e-30]) if penalties else 1.0,
        bias_ids=pack_u32(biased),
        bias_values=pack_f32(values),
        stop_ids=pack_u32(stops),
        min_tokens=rng.choice([0, 0, 4, 100]),
        logprobs=rng.choice([-1, -1, -1, 0, 3]),
    )
    return LaneImage(
        sampling,
        sample=rng.randint(0, 3),
        prompt=pack_u32([rng.randrange(vocab_size) for _ in range(rng.randint(0, 9))]),
        output=pack_u32([rng.randrange(vocab_size) for _ in range(rng.randint(0, 5))]),
        halt_set=rng.randint(-1, NUM_HALT_SETS - 1),
    )


def random_logits(rng: random.Random, rows: int, vocab_size: int) -> torch.Tensor:
    """Rows of all kinds: flat, sharp, with ties, with -inf, with equal values alone, and some that are not finite."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = torch.randn(rows, vocab_size, generator=generator)
    for row in logits:
        row *= rng.choice([0.01, 0.5, 1.0, 4.0, 20.0])
        kind = rng.random()
        if kind < 0.35:
            row.copy_((row * rng.choice([0.3, 2.0])).round())
        elif kind < 0.4:
            row.fill_(rng.choice([0.0, -3.25, 1e30]))
        elif kind < 0.45:
            row *= 1e37
        elif kind < 0.6:
            row[torch.rand(vocab_size, generator=generator) < rng.choice([0.3, 0.98])] = -torch.inf
            row[rng.randrange(vocab_size)] = -1.5
        elif kind < 0.64:
            row[rng.randrange(vocab_size)] = rng.choice([torch.nan, torch.inf])
        elif kind < 0.66:
            row.fill_(-torch.inf)
    return logits
