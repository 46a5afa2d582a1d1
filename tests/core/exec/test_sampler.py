from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.fakes import sampling as reference
from wkvm_core.exec.lanes import Lanes
from wkvm_core.exec.sampler import LOGPROB_FLOOR, Sampled, Sampler
from wkvm_core.sched.plan import FAULT, RAN, LaneImage
from wkvm_proto.columns import pack_f32, pack_u32
from wkvm_proto.sampling import Sampling

VOCAB = 20


def run(logits: torch.Tensor, images: Sequence[LaneImage]) -> Sampled:
    """One step of rows with these images on lanes of their own."""
    lanes = Lanes.open(len(images), logits.shape[1])
    for lane, image in enumerate(images):
        lanes.seat(lane, image)
    return Sampler(lanes).sample(logits, torch.arange(len(images)), torch.zeros(len(images), dtype=torch.bool))


def tokens_of(logits: Sequence[float], **fields: object) -> int:
    return int(run(torch.tensor([logits]), [image(**fields)]).tokens[0])


def image(**fields: object) -> LaneImage:
    own = {name: fields.pop(name) for name in ("prompt", "output", "sample") if name in fields}
    return LaneImage(Sampling(**{"max_tokens": 1000} | fields), **own)  # type: ignore[arg-type]


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


share = st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0])
ids = st.integers(0, VOCAB - 1)


@st.composite
def requests(draw: st.DrawFn) -> LaneImage:
    """Any combination of parameters over a vocabulary of 20, with some prompt and output."""
    biased = draw(st.lists(ids, max_size=4, unique=True))
    values = draw(
        st.lists(st.sampled_from([-100.0, -7.5, 0.5, 4.0, 100.0]), min_size=len(biased), max_size=len(biased))
    )
    sampling = Sampling(
        max_tokens=1000,
        seed=draw(st.integers(0, 2**63 - 1)),
        temperature=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.5, 10.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 19, 20, 1000])),
        top_p=draw(share),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        typical_p=draw(share),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -1.5, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.3, 0.7])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3, 100.0])),
        bias_ids=pack_u32(biased),
        bias_values=pack_f32(values),
        stop_ids=pack_u32(draw(st.lists(ids, max_size=3, unique=True))),
        min_tokens=draw(st.sampled_from([0, 0, 4, 100])),
    )
    return LaneImage(
        sampling,
        sample=draw(st.integers(0, 3)),
        prompt=pack_u32(draw(st.lists(ids, max_size=6))),
        output=pack_u32(draw(st.lists(ids, max_size=6))),
    )


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(requests(), st.integers(0, 10_000))
def test_a_draw_is_the_one_that_the_plain_reference_makes(row: LaneImage, seed: int) -> None:
    sampling = row.sampling
    logits = random_logits(1, VOCAB, seed)
    prompt, output = list(memoryview(row.prompt).cast("I")), list(memoryview(row.output).cast("I"))
    values = reference.shaped(logits[0].tolist(), sampling, prompt, output)
    token = int(run(logits, [row]).tokens[0])
    if sampling.temperature == 0.0:
        assert values[token] == pytest.approx(max(values), abs=1e-5)
        return
    expected = {
        reference.walk(
            reference.distribution(values, sampling, slack), reference.uniform(sampling.seed, row.sample, len(output))
        )
        for slack in (-1e-5, 0.0, 1e-5)
    }
    assume(len(expected) == 1 and None not in expected)
    assert {token} == expected


CASES = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.5},
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "typical": {"typical_p": 0.6},
    "all": {"temperature": 1.3, "top_k": 15, "top_p": 0.95, "typical_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("case", CASES)
def test_drawn_tokens_follow_the_reference_distribution(case: str) -> None:
    draws = 20_000
    logits = random_logits(1, VOCAB, seed=3, scale=1.5)
    lanes = Lanes.open(draws, VOCAB)
    fields = CASES[case]
    for lane in range(draws):
        lanes.seat(lane, image(seed=99, sample=lane, **fields))
    sampled = Sampler(lanes).sample(
        logits.expand(draws, VOCAB).contiguous(), torch.arange(draws), torch.zeros(draws).bool()
    )
    counts = Counter(sampled.tokens.tolist())
    expected = dict(reference.distribution(logits[0].tolist(), image(**fields).sampling))
    assert set(counts) <= set(expected)
    statistic = sum((counts[token] - draws * p) ** 2 / (draws * p) for token, p in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 5.0 * math.sqrt(2.0 * freedom) + 10.0


@settings(max_examples=60, deadline=None)
@given(st.lists(requests(), min_size=2, max_size=9), st.randoms(use_true_random=False), st.integers(0, 1000))
def test_a_row_alone_and_among_any_others_is_the_same_row(rows: list[LaneImage], random: object, seed: int) -> None:
    logits = random_logits(len(rows), VOCAB, seed)
    together = run(logits, rows).packed
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = run(logits[order], [rows[row] for row in order]).packed
    for place, row in enumerate(order):
        alone = run(logits[row : row + 1], [rows[row]]).packed
        assert torch.equal(alone[:, 0], together[:, row])
        assert torch.equal(alone[:, 0], shuffled[:, place])


def test_rows_over_a_large_vocabulary_do_not_feel_their_neighbours() -> None:
    vocab_size = 30_011
    kinds = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.9},  # the best few suffice for a sharp row, not for a flat one
        {"top_p": 0.999, "temperature": 5.0},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 5000},
        {"typical_p": 0.8},
        {"min_p": 0.2, "logprobs": 20},
        {"temperature": 0.0, "repetition_penalty": 1.2, "output": pack_u32([1, 2, 3]), "logprobs": 3},
        {"presence_penalty": 1.0, "output": pack_u32(range(500))},
    ]
    rows = [image(seed=seed, **dict(kind)) for seed in range(3) for kind in kinds]
    logits = random_logits(len(rows), vocab_size, seed=1)
    logits[::2] *= 3.0
    together = run(logits, rows)
    assert together.logprobs is not None
    for row, own in enumerate(rows):
        alone = run(logits[row : row + 1], [own])
        assert torch.equal(alone.packed[:, 0], together.packed[:, row])
        if alone.logprobs is not None:
            assert alone.logprobs.by_row()[0] == together.logprobs.by_row()[row]


@pytest.mark.parametrize("fields", [{"top_p": 0.97}, {"top_k": 3000, "top_p": 0.99}, {"typical_p": 0.9}, {"top_k": 20}])
def test_looking_at_the_best_few_first_changes_nothing(
    fields: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [image(seed=seed, **fields) for seed in range(40)]
    logits = random_logits(40, 6000, seed=8) * torch.linspace(0.2, 4.0, 40)[:, None]
    quick = run(logits, rows).packed
    monkeypatch.setattr("wkvm_core.exec.sampler.LOOKS", (6000,))
    monkeypatch.setattr("wkvm_core.exec.sampler.WIDEST_LOOK", 10**9)
    assert torch.equal(run(logits, rows).packed, quick)


@settings(max_examples=60, deadline=None)
@given(requests(), st.integers(1, 12), st.integers(0, 1000))
def test_a_lane_seated_again_from_its_image_goes_on_as_if_never_moved(row: LaneImage, moved_at: int, seed: int) -> None:
    steps = 14
    logits = random_logits(steps, VOCAB, seed, scale=1.0)
    stay, move = Lanes.open(2, VOCAB), Lanes.open(2, VOCAB)
    stay.seat(0, row)
    move.seat(0, row)
    output, moving = row.output, torch.tensor([0])
    for step in range(steps):
        if step == moved_at:
            moving = torch.tensor([1])
            move.seat(1, LaneImage(row.sampling, row.sample, row.prompt, output))
        pause = torch.tensor([False])
        expected = Sampler(stay).sample(logits[step : step + 1], torch.tensor([0]), pause)
        actual = Sampler(move).sample(logits[step : step + 1], moving, pause)
        assert torch.equal(actual.packed, expected.packed)
        if expected.flags[0] != RAN:
            break
        output += pack_u32(expected.tokens.tolist())


@pytest.mark.parametrize("fields", [{"top_k": 600}, {"top_p": 1.0 - 1e-15}, {"typical_p": 1.0 - 1e-15}])
def test_a_limit_that_cuts_nothing_changes_no_draw(fields: dict[str, float]) -> None:
    logits = random_logits(200, 600, seed=11)
    plain = run(logits, [image(seed=seed) for seed in range(200)])
    assert torch.equal(run(logits, [image(seed=seed, **fields) for seed in range(200)]).tokens, plain.tokens)


def test_the_draw_walks_the_kept_ids_in_their_order() -> None:
    logits = random_logits(1, 50, seed=12)
    best = logits[0].topk(5).indices.sort().values
    alone = run(logits[:, best].expand(200, 5).contiguous(), [image(seed=seed) for seed in range(200)]).tokens
    kept = run(logits.expand(200, 50).contiguous(), [image(seed=seed, top_k=5) for seed in range(200)]).tokens
    assert torch.equal(kept, best[alone])


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert tokens_of([1.0, 3.0, 3.0, 3.0, 0.0], temperature=0.0) == 1
    assert tokens_of([1.0, 3.0, 3.0, 3.0, 0.0], temperature=0.0, presence_penalty=0.5, output=pack_u32([1])) == 2
    assert tokens_of([-0.0, 0.0, -1.0], temperature=0.0) == 0


def test_top_k_of_equal_logits_keeps_the_lowest_ids() -> None:
    drawn = {tokens_of([2.0] * 8, top_k=3, seed=seed) for seed in range(60)}
    assert drawn == {0, 1, 2}
    assert {tokens_of([0.0, -0.0, 0.0, -1.0], top_k=2, seed=seed) for seed in range(40)} == {0, 1}


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-45, 1e-38, 1e-30, 1e-12, 1e-7, 1e-5, 1e-4])
@pytest.mark.parametrize(
    "fields", [{}, {"top_p": 1e-4}, {"top_p": 0.9}, {"top_k": 50}, {"typical_p": 0.5}, {"min_p": 0.1}]
)
def test_tiny_temperatures_equal_greedy(temperature: float, fields: dict[str, float]) -> None:
    logits = random_logits(64, 500, seed=4, scale=8.0)
    sampled = run(logits, [image(temperature=temperature, seed=row, **fields) for row in range(64)])
    assert torch.equal(sampled.tokens, logits.argmax(1))
    assert set(sampled.flags.tolist()) == {RAN}


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_the_tightest_cut_is_greedy_even_when_hot(fields: dict[str, float]) -> None:
    logits = random_logits(64, 500, seed=5)
    sampled = run(logits, [image(temperature=100.0, seed=row, **fields) for row in range(64)])
    assert torch.equal(sampled.tokens, logits.argmax(1))


def test_presence_and_frequency_count_the_output_and_repetition_the_prompt_too() -> None:
    logits = [4.0, 3.9, 3.0, -9.0]
    prompt, output = pack_u32([0, 0, 0]), pack_u32([1, 1])
    greedy = {"temperature": 0.0, "prompt": prompt}
    assert tokens_of(logits, **greedy, output=output) == 0
    assert tokens_of(logits, **greedy, output=pack_u32([0]), presence_penalty=0.2) == 1
    assert tokens_of(logits, **greedy, presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert tokens_of(logits, **greedy, output=pack_u32([0, 0]), frequency_penalty=0.06) == 1
    assert tokens_of(logits, **greedy, output=pack_u32([0]), frequency_penalty=0.06) == 0
    assert tokens_of(logits, **greedy, repetition_penalty=1.1) == 1
    assert tokens_of(logits, **greedy, output=output, repetition_penalty=1.5) == 2
    assert tokens_of([-1.0, -1.1], temperature=0.0, prompt=pack_u32([0]), repetition_penalty=1.5) == 1


def test_penalties_count_what_the_lane_samples_itself() -> None:
    lanes = Lanes.open(1, 4)
    lanes.seat(0, image(temperature=0.0, frequency_penalty=0.5))
    sampler, logits = Sampler(lanes), torch.tensor([[2.0, 1.8, 1.6, -5.0]])
    drawn = [int(sampler.sample(logits, torch.tensor([0]), torch.tensor([False])).tokens[0]) for _ in range(7)]
    assert drawn == [0, 1, 2, 0, 1, 2, 0]


def test_penalties_that_leave_float32_still_give_a_token() -> None:
    logits = [3e38, 1.0, -3e38, -math.inf]
    for repetition in (1e-30, 100.0):
        token = tokens_of(logits, prompt=pack_u32([0, 1, 2, 3]), repetition_penalty=repetition, top_p=0.9)
        assert token in (0, 1, 2)


def test_a_bias_of_minus_100_bans_and_one_above_it_does_not() -> None:
    def biased(value: float) -> set[int]:
        bias = {"bias_ids": pack_u32([2]), "bias_values": pack_f32([value])}
        return {tokens_of([0.0, 0.0, 300.0], seed=seed, **bias) for seed in range(20)}

    assert biased(-100.0) == {0, 1}
    assert biased(-99.0) == {2}


def test_biases_at_both_edges_of_the_vocabulary_apply() -> None:
    for token in (0, VOCAB - 1):
        bias = {"bias_ids": pack_u32([token]), "bias_values": pack_f32([100.0])}
        assert tokens_of([0.0] * VOCAB, **bias) == token


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_when_everything_is_banned_the_biased_logits_decide(fields: dict[str, float]) -> None:
    values, logits = [-100.0] * VOCAB, [0.0] * VOCAB
    logits[5], logits[7] = 60.0, 60.5
    bias = {"bias_ids": pack_u32(range(VOCAB))}
    assert tokens_of(logits, **bias, bias_values=pack_f32(values), **fields) == 7
    values[7] = -101.0  # below 5 again once both biases are added
    assert tokens_of(logits, **bias, bias_values=pack_f32(values), **fields) == 5
    assert tokens_of(logits, stop_ids=pack_u32(range(VOCAB)), min_tokens=1, **fields) == 7


def test_when_everything_is_banned_the_draw_follows_the_biased_logits() -> None:
    ban = {"bias_ids": pack_u32(range(3)), "bias_values": pack_f32([-100.0, -100.0, -1000.0])}
    assert {tokens_of([0.0, 0.0, 0.0], seed=seed, **ban) for seed in range(40)} == {0, 1}


def test_ids_of_minus_infinity_and_banned_ids_together_never_give_an_impossible_id() -> None:
    logits = [-math.inf, 1.0, -math.inf, 2.0]
    ban = {"bias_ids": pack_u32([1, 3]), "bias_values": pack_f32([-100.0, -100.0])}
    assert {tokens_of(logits, seed=seed, **ban) for seed in range(40)} == {1, 3}
    assert {tokens_of(logits, seed=seed, top_k=4) for seed in range(40)} == {1, 3}


def test_stop_ids_are_banned_until_min_tokens_are_sampled() -> None:
    lanes = Lanes.open(1, 4)
    lanes.seat(0, image(temperature=0.0, stop_ids=pack_u32([3, 0]), min_tokens=3, max_tokens=9))
    sampler, logits = Sampler(lanes), torch.tensor([[3.0, 1.0, 2.0, 4.0]])
    drawn = [int(sampler.sample(logits, torch.tensor([0]), torch.tensor([False])).tokens[0]) for _ in range(5)]
    assert drawn == [2, 2, 2, 3, -1]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    rows = [image(seed=row, top_p=0.9, repetition_penalty=1.1, logprobs=2) for row in range(6)]
    logits = random_logits(6, VOCAB)
    healthy = run(logits, rows)
    sick = logits.clone()
    sick[2, 5], sick[4, 0] = math.nan, math.inf
    sampled = run(sick, rows)
    assert sampled.flags[[2, 4]].tolist() == [FAULT, FAULT]
    assert sampled.tokens[[2, 4]].tolist() == [-1, -1]
    others = [0, 1, 3, 5]
    assert torch.equal(sampled.packed[:, others], healthy.packed[:, others])
    assert sampled.logprobs is not None
    assert healthy.logprobs is not None
    for row in others:
        assert sampled.logprobs.by_row()[row] == healthy.logprobs.by_row()[row]


def test_logits_are_not_changed() -> None:
    logits = random_logits(4, VOCAB)
    before = logits.clone()
    run(logits, [image(), image(top_k=3), image(temperature=0.0, presence_penalty=1.0), image(logprobs=4)])
    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_raw_distribution_whatever_shapes_the_draw() -> None:
    logits = random_logits(3, 300, seed=6)
    shaping = {"temperature": 0.3, "top_k": 4, "bias_ids": pack_u32([9]), "bias_values": pack_f32([100.0])}
    rows = [image(logprobs=5, **shaping), image(temperature=0.0), image(temperature=0.0, logprobs=0)]
    sampled = run(logits, rows)
    assert sampled.logprobs is not None
    told = sampled.logprobs.by_row()
    raw = logits.double().log_softmax(1)
    assert set(told) == {0, 2}
    assert sampled.tokens[0] == 9
    assert told[0].chosen == pytest.approx(float(raw[0, 9]), abs=1e-5)
    best = raw[0].topk(5)
    assert told[0].top_ids == tuple(best.indices.tolist())
    assert told[0].top == pytest.approx(best.values.tolist(), abs=1e-5)
    assert told[2].chosen == pytest.approx(float(raw[2].max()), abs=1e-5)
    assert told[2].top_ids == ()


def test_logprobs_are_finite_numbers_even_of_impossible_ids() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 4], logits[0, 6] = 0.0, -3e38
    sampled = run(logits, [image(logprobs=4)])
    assert sampled.logprobs is not None
    told = sampled.logprobs.by_row()[0]
    assert told.chosen == 0.0
    assert told.top_ids == (4, 6, 0, 1)
    assert told.top == (0.0, LOGPROB_FLOOR, LOGPROB_FLOOR, LOGPROB_FLOOR)


def test_more_logprobs_than_ids_give_every_id() -> None:
    sampled = run(torch.tensor([[1.0, 2.0, 0.0]]), [image(logprobs=20)])
    assert sampled.logprobs is not None
    assert sampled.logprobs.by_row()[0].top_ids == (1, 0, 2)


def test_samples_of_one_request_differ_and_repeat() -> None:
    logits = torch.zeros(8, 1000)
    rows = [image(seed=5, sample=sample) for sample in range(8)]
    first = run(logits, rows).tokens.tolist()
    assert len(set(first)) == 8
    assert run(logits, rows).tokens.tolist() == first
