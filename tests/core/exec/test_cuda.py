"""A model in the engine on a card: what must be equal bit by bit, and what must not happen."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.exec.stories import REQUEST, SHAPE, check_story
from tests.fakes.core import Core
from wkvm_core.exec import graph_stepper
from wkvm_core.exec.graphs import as_it_is
from wkvm_core.models.open import open_model
from wkvm_core.models.protocol import Model
from wkvm_proto.names import ErrorCode

pytestmark = pytest.mark.gpu

NUMERICS = [("float16", "float16"), ("bfloat16", "float32"), ("float32", "float32")]


@pytest.fixture(scope="module", params=NUMERICS, ids="-".join)
def model(request: pytest.FixtureRequest) -> Model:
    compute, state = request.param
    return open_model("random:tiny", device="cuda", compute_dtype=compute, state_dtype=state)


@pytest.fixture(scope="module")
def invariant() -> Model:
    return open_model("random:tiny", device="cuda", compute_dtype="bfloat16", deterministic=True)


def opened(model: Model, **shape: Any) -> Core:
    vocabulary = [bytes([32 + token % 95]) for token in range(model.vocab_size)]
    whole = {"rows": 8, "slots": 12, "overlap": 1, "vocabulary": vocabulary} | shape
    return Core(model, device="cuda", graphs=True, **whole)


def lines(core: Core, numbers: list[int]) -> list[tuple[list[int], bytes]]:
    """Tokens and kept states."""
    return [(core.answers[number, 0].tokens, core.kept(number)) for number in numbers]


def load(core: Core, seed: int, count: int = 12) -> list[int]:
    """Requests of all kinds that the launch samples itself."""
    rng = random.Random(seed)
    vocab = core.model.vocab_size
    numbers = []
    for _ in range(count):
        sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 30), "temperature": rng.choice([0.0, 0.9])}
        sampling |= {"seed": rng.randrange(99), "top_p": rng.choice([1.0, 0.9]), "top_k": rng.choice([0, 7])}
        sampling |= {"presence_penalty": rng.choice([0.0, 1.0]), "repetition_penalty": rng.choice([1.0, 1.2])}
        prompt = [rng.randrange(1, vocab) for _ in range(rng.choice([1, 1, 3, 40, 150]))]
        numbers.append(core.submit(prompt, keep=True, **sampling))
        for _ in range(rng.randint(0, 3)):
            core.turn()
    return numbers


def test_graphs_give_the_bits_of_the_same_kernels_run_one_by_one(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for _ in range(2):
        core = opened(model)
        numbers = load(core, 1)
        core.run()
        found.append(lines(core, numbers))
        monkeypatch.setattr(graph_stepper, "CudaGraphs", lambda device: as_it_is)
    assert found[0] == found[1]


def test_neighbours_rows_and_slots_change_no_bit_inside_a_bucket(model: Model) -> None:
    """A prompt of one token is decoded from the first step on, always in the bucket of eight."""
    found = []
    for before in (0, 1, 5):
        core = opened(model, buckets=(8,), overlap=0)
        others = [core.submit([7 + k], max_tokens=40, temperature=1.0, seed=k) for k in range(before)]
        core.turn()
        number = core.submit([3], max_tokens=20, temperature=0.8, seed=5, keep=True)
        core.run()
        assert all(len(core.answers[other, 0].tokens) == 40 for other in others)
        found += lines(core, [number])
    assert found[0] == found[1] == found[2]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(story=st.lists(st.tuples(REQUEST, st.integers(0, 6)), min_size=2, max_size=5), shape=SHAPE)
def test_in_deterministic_mode_cut_batched_parked_and_forked_equals_alone(
    invariant: Model, story: Any, shape: dict[str, int]
) -> None:
    vocabulary = [bytes([32 + token % 95]) for token in range(invariant.vocab_size)]
    check_story(invariant, story, shape, vocabulary, device="cuda", graphs=True)


def test_a_state_that_was_parked_in_memory_is_the_one_that_never_left(invariant: Model) -> None:
    """Two slots for six requests that take turns of three tokens; then each alone."""
    core = opened(invariant, slots=2, rows=2, slice_tokens=3)
    prompts = [[1 + k] * (1 + 7 * k) for k in range(6)]
    numbers = [core.submit(prompt, max_tokens=15, temperature=0.7, seed=3, keep=True) for prompt in prompts]
    core.run()
    assert core.scheduler.counts.parks > 0
    for prompt, number in zip(prompts, numbers, strict=True):
        alone = opened(invariant)
        again = alone.submit(prompt, max_tokens=15, temperature=0.7, seed=3, keep=True)
        alone.run()
        assert lines(core, [number]) == lines(alone, [again])


def test_nothing_is_allocated_on_the_device_once_the_engine_runs(model: Model) -> None:
    core = opened(model, step_tokens=128, blocks=64)
    load(core, 2)
    core.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    load(core, 3, count=30)
    while core.scheduler.num_requests or core.scheduler.in_flight:
        core.turn()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.fixture
def poisoned() -> tuple[Model, int]:
    """A model that makes NaN of one token, and that token."""
    model: Any = open_model("random:tiny", device="cuda", compute_dtype="bfloat16")
    with torch.inference_mode():
        model._weights.embedding[77] = float("nan")
    return model, 77


def test_a_row_of_nan_fails_alone_and_its_neighbours_keep_every_bit(poisoned: tuple[Model, int]) -> None:
    model, poison = poisoned
    found = []
    for second in (poison, 78):
        core = opened(model, buckets=(4,), overlap=0, rows=4)
        good = core.submit([5], max_tokens=12, keep=True)
        other = core.submit([second], max_tokens=12)
        core.run()
        failure = core.answers[other, 0].failure
        assert (failure is not None and failure.code is ErrorCode.NUMERICAL_ERROR) == (second == poison)
        after = core.submit([6], max_tokens=3)  # the slot of the one that failed holds NaN
        core.run()
        assert len(core.answers[after, 0].tokens) == 3
        found += lines(core, [good])
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_three_minutes_of_random_load_leave_nothing_behind(invariant: Model) -> None:
    core = opened(invariant, slots=6, slice_tokens=5, step_tokens=128, blocks=64)
    rng = random.Random(0)
    held: list[int] = []
    until, rounds = time.monotonic() + 180.0, 0
    while time.monotonic() < until:
        numbers = load(core, rng.randrange(1 << 30), count=20)
        for number in rng.sample(numbers, 4):
            core.scheduler.cancel(number)
        while core.scheduler.num_requests or core.scheduler.in_flight:
            core.turn()
        for number in numbers:
            finish = core.answers[number, 0].finish
            if finish is not None and finish.snapshot is not None:
                core.blocks.release(finish.snapshot.block)
        core.answers.clear()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
        rounds += 1
        assert core.arena.used == 0
        assert core.blocks.free == core.blocks.num_blocks
        assert core.scheduler.num_running == core.scheduler.num_waiting == 0
        assert core.scheduler.free_lanes == core.scheduler.limits.max_rows
    assert rounds > 10
    assert held[-1] == held[1]
