from __future__ import annotations

import random

import pytest
import torch

from tests.core.exec.sampling_rows import DEVICE, Pair, random_image, random_logits
from tests.core.kernels.exps import device_exp
from wkvm_core.exec.lanes import Lanes
from wkvm_core.kernels import draw
from wkvm_core.kernels.lane import ASKS, DONE, EDGE, FEED, LEFT_OVER, POSITION, SAMPLE, STATUS
from wkvm_core.sched.plan import NO_LANE, RAN, LaneImage
from wkvm_proto.columns import pack_u32
from wkvm_proto.sampling import Sampling


@pytest.fixture(autouse=True)
def _one_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "share", device_exp)


def image(**fields: object) -> LaneImage:
    return LaneImage(Sampling(**{"max_tokens": 1000} | fields))  # type: ignore[arg-type]


def in_a_wider_buffer(logits: torch.Tensor, more: int) -> torch.Tensor:
    """The same values on the device, each row followed by columns that no row may read."""
    wide = torch.full((logits.shape[0], logits.shape[1] + more), torch.inf, device=DEVICE)
    wide[1::2] = torch.nan
    wide[:, : logits.shape[1]] = logits.to(DEVICE)
    return wide[:, : logits.shape[1]]


def compare(
    vocab_size: int, block: int, seed: int, *, num_lanes: int, steps: int, num_warps: int = 4, more: int = 0
) -> None:
    """Random requests on random logits, some steps, lanes seated anew when they are done. more: columns of the logits'
    buffer beyond the vocabulary."""
    rng = random.Random(seed)
    pair = Pair([random_image(rng, vocab_size) for _ in range(num_lanes)], vocab_size, block, num_warps)
    for _ in range(steps):
        lanes = [*rng.sample(range(num_lanes), num_lanes - 1), pair.lanes.idle, pair.lanes.idle]
        pause = [rng.random() < 0.1 for _ in lanes]
        logits = random_logits(rng, len(lanes), vocab_size)
        for knobs in pair.device_lanes.knobs:  # where top-p is looked for first says nothing of where it is
            if rng.random() < 0.5:
                knobs[EDGE] = rng.choice([0.0, -3.0, 2.5, 1e30, -1e38, float("inf"), float("-inf"), float("nan")])
        expected, expected_logprobs = pair.expected(logits, lanes, pause)
        actual, logprobs = pair.sampled(in_a_wider_buffer(logits, more), lanes, pause)
        assert torch.equal(actual, expected)
        assert (logprobs is None) == (expected_logprobs is None)
        if logprobs is not None and expected_logprobs is not None:
            told, wanted = logprobs.by_row(), expected_logprobs.by_row()
            for row in wanted:
                if expected[1, row] & RAN:
                    assert told[row].chosen == pytest.approx(wanted[row].chosen, abs=1e-5)
                    assert told[row].top_ids == wanted[row].top_ids
                    assert told[row].top == pytest.approx(wanted[row].top, abs=1e-5)
        pair.assert_equal_tables()
        for lane in range(num_lanes):
            if not pair.lanes.active(torch.tensor([lane]))[0] and rng.random() < 0.5:
                pair.seat(lane, random_image(rng, vocab_size))
        pair.assert_equal_tables()


@pytest.mark.parametrize(("vocab_size", "block", "seed"), [(97, 64, 1), (300, 64, 2), (300, 32, 3), (64, 64, 4)])
def test_tokens_flags_and_lanes_are_those_of_the_reference(vocab_size: int, block: int, seed: int) -> None:
    compare(vocab_size, block, seed, num_lanes=8, steps=2)


@pytest.mark.parametrize(("vocab_size", "more"), [(97, 1), (100, 28)])
def test_logits_may_be_the_first_columns_of_a_wider_buffer(vocab_size: int, more: int) -> None:
    compare(vocab_size, 64, 5, num_lanes=8, steps=1, more=more)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_tokens_flags_and_lanes_are_those_of_the_reference_many_times(seed: int) -> None:
    rng = random.Random(seed)
    compare(rng.choice([3, 64, 97, 257, 300]), rng.choice([16, 64]), seed, num_lanes=24, steps=4)


def test_every_cut_finds_its_place_among_many_equal_and_many_different_logits() -> None:
    """Small blocks, so that the search copies, narrows its copy and halves a tile."""
    vocab_size = 220
    cuts = [{"top_k": 5}, {"top_k": 150}, {"top_p": 0.5}, {"top_p": 0.97}, {"top_k": 180, "top_p": 0.9, "min_p": 0.01}]
    images = [image(seed=seed, temperature=1.3, **cut) for seed, cut in enumerate(cuts)] * 2
    pair = Pair(images, vocab_size, 32)
    flat = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(5))
    logits = torch.cat((flat, flat.mul(2).round()))
    lanes, pause = list(range(10)), [False] * 10
    expected = pair.expected(logits, lanes, pause)[0]
    assert torch.equal(pair.launch(logits, lanes, pause).cpu(), expected)


def test_a_row_that_asks_for_nothing_runs_and_moves_no_lane() -> None:
    pair = Pair([image(), image(), image(typical_p=0.5)], 40, 64)
    pair.device_lanes.numbers[1, STATUS] = DONE
    before = pair.device_lanes.numbers.clone()
    lanes = torch.tensor([0, 1, NO_LANE, pair.lanes.idle, 2], device=DEVICE)
    asks = torch.tensor([0, 0, 0, 0, SAMPLE], device=DEVICE)
    out = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
    pair.gpu_sampler.sample(torch.randn(5, 40, device=DEVICE), lanes, asks, out)
    assert out.tolist() == [[-1, -1, -1, -1, LEFT_OVER], [RAN, 0, RAN, 0, 0]]
    assert torch.equal(pair.device_lanes.numbers, before)


def test_rows_with_typical_p_or_log_probabilities_are_left_over_and_no_others() -> None:
    images = [image(), image(typical_p=0.9), image(temperature=0.0, typical_p=0.9), image(logprobs=0), image(top_p=0.5)]
    pair = Pair(images, 40, 64)
    assert pair.gpu_sampler.left_over(range(5)) == (1, 3)
    assert pair.gpu_sampler.rest(torch.zeros(5, 40), (), (), (), torch.zeros(2, 5).long()) is None


def test_logits_are_not_changed() -> None:
    pair = Pair([image(top_k=3, presence_penalty=1.0, stop_ids=pack_u32([1]), min_tokens=3)], 97, 64)
    logits = torch.randn(1, 97)
    own = logits.to(DEVICE)
    out = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    pair.gpu_sampler.sample(own, torch.tensor([0], device=DEVICE), torch.tensor([SAMPLE], device=DEVICE), out)
    assert torch.equal(own.cpu(), logits)
    assert pair.device_lanes.numbers[0, POSITION] == 1


def test_memory_is_told_before_it_is_taken() -> None:
    pair = Pair([image()] * 3, 40, 64)
    lanes, sampler = pair.device_lanes, pair.gpu_sampler
    assert abs(lanes.device_bytes - type(lanes).bytes_for(3, 40, 3)) < 1 << 20
    assert abs(sampler.device_bytes - type(sampler).bytes_for(sampler.max_rows, 40)) < 1 << 20


# ------------------------------------------------------------------------------------------------- on a GPU


VOCAB = 65_536
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.95},
    {"top_k": 50},
    {"top_k": 40_000, "top_p": 0.999, "temperature": 3.0},
    {"top_k": 40, "top_p": 0.9},
    {"min_p": 0.05},
    {"presence_penalty": 1.0, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "top_p": 0.9},
]


def large(rows: int) -> tuple[list[LaneImage], torch.Tensor]:
    images = [image(seed=row, **KINDS[row % len(KINDS)]) for row in range(rows)]
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3))
    logits *= torch.tensor([0.3, 1.0, 4.0])[torch.arange(rows) % 3, None]
    logits[5::7] = (logits[5::7] * 4).round() / 4
    logits[3, 77], logits[9, 5] = torch.nan, torch.inf
    return images, logits


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "num_warps"), [(4096, 16), (4096, 32), (8192, 16), (1024, 8)])
def test_large_rows_on_the_gpu_are_those_of_the_reference(block: int, num_warps: int) -> None:
    images, logits = large(64)
    pair = Pair(images, VOCAB, block, num_warps)
    lanes, pause = list(range(64)), [row % 13 == 0 for row in range(64)]
    for _ in range(2):
        expected = pair.expected(logits, lanes, pause)[0]
        assert torch.equal(pair.launch(logits, lanes, pause).cpu(), expected)
        pair.assert_equal_tables()


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "seed"), [(97, 1), (300, 2), (50_257, 3), (65_536, 4), (151_936, 5)])
def test_random_requests_on_the_gpu_are_those_of_the_reference(vocab_size: int, seed: int) -> None:
    compare(vocab_size, 4096, seed, num_lanes=24, steps=3, num_warps=16)


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "more"), [(50_257, 47), (65_529, 7), (65_530, 1)])
def test_logits_on_the_gpu_may_be_the_first_columns_of_a_wider_buffer(vocab_size: int, more: int) -> None:
    compare(vocab_size, 4096, 6, num_lanes=24, steps=2, num_warps=16, more=more)


@pytest.mark.gpu
def test_a_row_on_the_gpu_alone_and_among_others_is_the_same_row() -> None:
    images, logits = large(64)
    lanes, pause = list(range(64)), [False] * 64
    together = Pair(images, VOCAB, 4096, 16).launch(logits, lanes, pause)
    order = list(range(64))
    random.Random(1).shuffle(order)
    shuffled = Pair(images, VOCAB, 4096, 16).launch(logits[order], order, pause)
    assert torch.equal(shuffled, together[:, order])
    alone = Pair(images, VOCAB, 4096, 16)
    for row in range(0, 64, 3):
        assert torch.equal(alone.launch(logits[row : row + 1], [row], [False])[:, 0], together[:, row])


@pytest.mark.gpu
def test_a_graph_holds_entering_and_sampling() -> None:
    images, logits = large(16)
    pair, other = Pair(images, VOCAB, 4096, 16), Pair(images, VOCAB, 4096, 16)
    own = logits.cuda()
    rows = torch.tensor([[2, 2, lane, 0, FEED | SAMPLE] for lane in range(16)]).cuda()
    tokens, read, write, lanes = (torch.zeros(16, dtype=torch.int64).cuda() for _ in range(4))
    out = torch.zeros(2, 16, dtype=torch.int64).cuda()

    def step(lanes_and_sampler: Pair) -> None:
        lanes_and_sampler.device_lanes.enter(rows, tokens, read, write, lanes)
        lanes_and_sampler.gpu_sampler.sample(own, lanes, rows[:, ASKS].contiguous(), out)

    step(other)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(pair)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out.cpu(), pair.expected(logits, list(range(16)), [False] * 16)[0])
    pair.assert_equal_tables()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_seating_waits_for_nothing_on_the_gpu() -> None:
    rng = random.Random(4)
    lanes = Lanes.open(8, VOCAB, "cuda")
    images = [random_image(rng, VOCAB) for _ in range(24)]
    for lane, own in enumerate(images[:8]):
        lanes.seat(lane, own)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for lane, own in enumerate(images[8:]):
            lanes.seat(lane % 8, own)
        lanes.set_halt_set(0, bytes(VOCAB // 8))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == held
    reference = Lanes.open(8, VOCAB)
    for lane, own in enumerate(images[16:]):
        reference.seat(lane, own)
    assert torch.equal(lanes.numbers.cpu(), reference.numbers)
    assert torch.equal(lanes.marks.cpu(), reference.marks)
    assert torch.equal(lanes.bias.cpu(), reference.bias)
    assert torch.equal(lanes.counts.cpu(), reference.counts)
