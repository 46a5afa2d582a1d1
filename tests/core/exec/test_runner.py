from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.exec.stories import REQUEST, SHAPE, check_story
from tests.fakes.core import Core
from tests.fakes.counting import CountingReference, greedy
from wkvm_core.models.counting import CountingModel
from wkvm_core.models.open import DEMO_MODEL, open_model
from wkvm_core.models.protocol import Model
from wkvm_proto.columns import pack_f32, pack_u32
from wkvm_proto.names import ErrorCode, FinishReason


@pytest.fixture(scope="module")
def counting() -> Model:
    return CountingModel()


@pytest.fixture(scope="module")
def invariant_demo() -> Model:
    return open_model(DEMO_MODEL, deterministic=True)


@settings(max_examples=80, deadline=None)
@given(story=st.lists(st.tuples(REQUEST, st.integers(0, 6)), min_size=1, max_size=8), shape=SHAPE)
def test_batched_chunked_parked_and_forked_equals_alone(counting: Model, story, shape) -> None:
    check_story(counting, story, shape, None)


@settings(max_examples=8, deadline=None)
@given(story=st.lists(st.tuples(REQUEST, st.integers(0, 6)), min_size=2, max_size=5), shape=SHAPE)
def test_in_deterministic_mode_a_real_model_does_too(invariant_demo: Model, story, shape) -> None:
    vocabulary = [bytes([32 + token % 95]) for token in range(invariant_demo.vocab_size)]
    check_story(invariant_demo, story, shape, vocabulary)


@pytest.mark.parametrize("overlap", [0, 1])
def test_greedy_tokens_are_those_of_the_reference(counting: Model, overlap: int) -> None:
    core = Core(counting, overlap=overlap, chunk_tokens=5)
    prompts = [[1 + k] * (3 * k + 1) for k in range(7)]
    numbers = [core.submit(prompt, max_tokens=20) for prompt in prompts]
    core.run()
    assert [core.answers[number, 0].tokens for number in numbers] == [greedy(prompt, 20) for prompt in prompts]


def test_exactly_max_tokens_come_and_the_kept_state_has_read_them_all(counting: Model) -> None:
    for max_tokens in (1, 2, 3, 5, 20):
        core = Core(counting)
        number = core.submit([9, 8, 7], max_tokens=max_tokens, keep=True)
        core.run()
        answer = core.answers[number, 0]
        assert answer.finish is not None
        assert len(answer.tokens) == answer.finish.generated == answer.finish.delivered == max_tokens
        assert answer.finish.consumed == 3 + max_tokens
        words = torch.frombuffer(bytearray(core.kept(number)), dtype=torch.int64)[:2].tolist()
        assert tuple(words) == CountingReference().read([9, 8, 7, *answer.tokens]).words


def test_the_kept_state_has_not_read_the_token_that_stopped_it(counting: Model) -> None:
    tokens = greedy([5], 30)
    core = Core(counting, overlap=1)
    number = core.submit([5], max_tokens=30, stop_ids=(tokens[6],), keep=True)
    core.run()
    answer = core.answers[number, 0]
    place = tokens.index(tokens[6])
    assert answer.tokens == tokens[:place]
    assert answer.finish is not None
    assert answer.finish.reason is FinishReason.STOP_TOKEN
    words = torch.frombuffer(bytearray(core.kept(number)), dtype=torch.int64)[:2].tolist()
    assert tuple(words) == CountingReference().read([5, *tokens[:place]]).words


def test_a_fork_and_its_parent_never_see_each_others_later_tokens(counting: Model) -> None:
    core = Core(counting)
    parent = core.submit([1, 2, 3], max_tokens=4, keep=True)
    core.run()
    finish = core.answers[parent, 0].finish
    assert finish is not None and finish.snapshot is not None
    before = core.kept(parent)
    line = [1, 2, 3, *core.answers[parent, 0].tokens]
    children = [core.submit([50 + k], max_tokens=10, origin=finish.snapshot) for k in range(12)]
    core.run()
    assert core.kept(parent) == before
    for k, child in enumerate(children):
        assert core.answers[child, 0].tokens == greedy([*line, 50 + k], 10)


def test_seeded_samples_repeat_and_differ_by_sample_index(counting: Model) -> None:
    runs = []
    for slots in (2, 8):
        core = Core(counting, slots=slots)
        number = core.submit([1, 2], n=4, max_tokens=12, temperature=1.5, seed=11)
        core.run()
        runs.append([core.answers[number, sample].tokens for sample in range(4)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4


class Poisoned(CountingModel):
    """Gives NaN logits to the rows that read byte 255."""

    def forward(self, batch: Any, families: Any) -> torch.Tensor:
        logits = super().forward(batch, families)
        logits[batch.tokens[batch.wanted] == 255] = float("nan")
        return logits


def test_a_row_of_nan_fails_its_request_and_no_other() -> None:
    core = Core(Poisoned())
    good = core.submit([1, 2], max_tokens=10)
    bad = core.submit([1, 255], max_tokens=10)
    core.run()
    failure = core.answers[bad, 0].failure
    assert failure is not None
    assert failure.code is ErrorCode.NUMERICAL_ERROR
    assert core.answers[bad, 0].tokens == []
    assert core.answers[good, 0].tokens == greedy([1, 2], 10)


def test_a_banned_token_gives_way_to_the_second_best(counting: Model) -> None:
    core = Core(counting)
    first = core.submit([1], max_tokens=1, logprobs=2)
    core.run()
    ranked = core.answers[first, 0].logprobs[0].top_ids
    second = core.submit([1], max_tokens=1, bias_ids=pack_u32([ranked[0]]), bias_values=pack_f32([-100.0]))
    core.run()
    assert core.answers[second, 0].tokens == [ranked[1]]
