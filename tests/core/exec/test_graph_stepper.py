"""The GPU's stepper: on a card with graphs, and without one in Triton's interpreter, where work is run as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.exec.stories import REQUEST, SHAPE, check_story
from tests.fakes.core import Core
from tests.fakes.counting import CountingReference, greedy
from wkvm_core.models.counting import CountingModel
from wkvm_core.models.protocol import Model
from wkvm_proto.names import ErrorCode

WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STORY = st.lists(st.tuples(REQUEST, st.integers(0, 6)), min_size=1, max_size=6)


@pytest.fixture(scope="module", params=WHERE)
def counting(request: pytest.FixtureRequest) -> CountingModel:
    return CountingModel(device=request.param)


def opened(model: CountingModel, **shape: Any) -> Core:
    return Core(model, device=model.device, graphs=True, **shape)


def check(model: CountingModel, story: Any, shape: dict[str, int]) -> None:
    reference: Model = CountingModel()
    check_story(model, story, shape, reference=reference, device=model.device, graphs=True)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(story=STORY, shape=SHAPE)
def test_every_story_goes_as_on_the_cpu(story: Any, shape: dict[str, int]) -> None:
    check(CountingModel(), story, shape)


@pytest.mark.gpu
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(story=STORY, shape=SHAPE, overlap=st.integers(0, 2))
def test_every_story_goes_as_on_the_cpu_on_a_card(story: Any, shape: dict[str, int], overlap: int) -> None:
    check(CountingModel(device="cuda"), story, shape | {"overlap": overlap})


@pytest.mark.parametrize("overlap", [0, 2])
def test_rows_of_one_token_and_of_many_share_a_step(counting: CountingModel, overlap: int) -> None:
    core = opened(counting, rows=4, slots=4, step_tokens=40, chunk_tokens=30, overlap=overlap, buckets=(2, 4))
    prompts = [[1], [2] * 3, [3] * 70, [4] * 33]
    numbers = [core.submit(prompt, max_tokens=4) for prompt in prompts]
    core.run()
    assert [core.answers[number, 0].tokens for number in numbers] == [greedy(prompt, 4) for prompt in prompts]


def test_more_rows_than_the_largest_bucket_are_run_in_several_launches(counting: CountingModel) -> None:
    """Rows that end and are kept read their last token beside those that took their lanes."""
    core = opened(counting, rows=2, slots=8, step_tokens=32)
    numbers = [core.submit([k], max_tokens=1, keep=True) for k in range(8)]
    core.run()
    for k, number in enumerate(numbers):
        (token,) = greedy([k], 1)
        assert core.answers[number, 0].tokens == [token]
        words = torch.frombuffer(bytearray(core.kept(number)), dtype=torch.int64)[:2].tolist()
        assert tuple(words) == CountingReference().read([k, token]).words


def test_what_the_launch_leaves_over_is_sampled_as_on_the_cpu(counting: CountingModel) -> None:
    wishes = [{"typical_p": 0.6}, {"typical_p": 0.9, "logprobs": 3}, {"logprobs": 0}, {}]
    told = []
    for core in (opened(counting, rows=4, slots=4), Core(CountingModel())):
        numbers = [core.submit([9, k], max_tokens=4, temperature=1.2, seed=k, **wish) for k, wish in enumerate(wishes)]
        core.run()
        told.append([core.answers[number, 0] for number in numbers])
    for own, other in zip(*told, strict=True):
        assert own.tokens == other.tokens
        assert [row.top_ids for row in own.logprobs] == [row.top_ids for row in other.logprobs]
        assert len(own.logprobs) == len(other.logprobs)


class Poisoned(CountingModel):
    """Gives NaN logits to the rows that read byte 255."""

    def forward(self, batch: Any, families: Any) -> torch.Tensor:
        logits = super().forward(batch, families)
        is_poison = batch.tokens[batch.wanted] == 255
        return torch.where(is_poison[:, None], float("nan"), logits)


@pytest.mark.parametrize("where", WHERE)
def test_a_row_of_nan_fails_its_request_and_no_other(where: str) -> None:
    core = opened(Poisoned(device=where), rows=4, slots=4)
    good = core.submit([1, 2], max_tokens=6)
    bad = core.submit([1, 255], max_tokens=6)
    core.run()
    failure = core.answers[bad, 0].failure
    assert failure is not None
    assert failure.code is ErrorCode.NUMERICAL_ERROR
    assert core.answers[good, 0].tokens == greedy([1, 2], 6)
