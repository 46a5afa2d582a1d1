"""Requests with turns between them, in a tight core; then each alone in a wide one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from tests.fakes.core import Core
from wkvm_core.models.protocol import Model
from wkvm_core.sched.plan import RowLogprobs

LETTERS = tuple(bytes([byte]) for byte in b"aeiou!?0")
REQUEST = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 255), min_size=1, max_size=80),
        "max_tokens": st.integers(1, 40),
        "n": st.integers(1, 3),
        "keep": st.booleans(),
        "stop": st.sampled_from([(), (), LETTERS, (b"ab", b"cd", b"e", b"xyz", b"zz", b"1"), (b"\n",)]),
        "stop_ids": st.sampled_from([(), (40, 41, 42, 43)]),
        "min_tokens": st.integers(0, 10),
        "temperature": st.sampled_from([0.0, 0.7, 2.0]),
        "seed": st.integers(0, 5),
        "top_p": st.sampled_from([1.0, 0.8]),
        "top_k": st.sampled_from([0, 5]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logprobs": st.sampled_from([-1, 0, 2]),
        "priority": st.integers(-1, 1),
        "tenant": st.sampled_from("ab"),
    }
).map(
    lambda kwargs: (
        kwargs
        | {"keep": kwargs["keep"] and kwargs["n"] == 1, "min_tokens": min(kwargs["min_tokens"], kwargs["max_tokens"])}
    )
)
SHAPE = st.fixed_dictionaries(
    {
        "slots": st.integers(2, 6),
        "rows": st.integers(1, 8),
        "step_tokens": st.integers(1, 64),
        "chunk_tokens": st.integers(1, 40),
        "slice_tokens": st.sampled_from([0, 2, 7]),
        "overlap": st.integers(0, 1),
    }
)


def answers(core: Core, number: int, n: int) -> list[tuple[Any, ...]]:
    out = []
    for sample in range(n):
        answer = core.answers[number, sample]
        assert answer.finish is not None
        assert answer.failure is None
        finish = answer.finish
        out.append(
            (
                answer.tokens,
                answer.logprobs,
                finish.reason,
                finish.tail,
                finish.stop_text,
                finish.stop_id,
                finish.consumed,
            )
        )
    return out


def check_story(
    model: Model,
    story: list[tuple[dict[str, Any], int]],
    shape: dict[str, int],
    vocabulary: list[bytes] | None = None,
    *,
    reference: Model | None = None,
    **how: Any,
) -> None:
    """Equal in every token, log-probability and kept byte. how: of the tight core; reference: the model of the wide
    one, which runs op by op on the CPU; without it that is the same model, run in the same way."""
    core = Core(model, vocabulary=vocabulary, **shape, **how)
    numbers = []
    for request, turns in story:
        numbers.append(core.submit(**request))
        for _ in range(turns):
            core.turn()
    core.run()
    for (request, _), number in zip(story, numbers, strict=True):
        alone = Core(
            reference or model,
            step_tokens=1000,
            chunk_tokens=1000,
            vocabulary=vocabulary,
            **({} if reference is not None else how),
        )
        again = alone.submit(**request)
        alone.run()
        own, other = answers(core, number, request["n"]), answers(alone, again, request["n"])
        assert [part[:1] + part[2:] for part in own] == [part[:1] + part[2:] for part in other]
        for part, expected in zip(own, other, strict=True):
            assert_close(part[1], expected[1])
        if request["keep"]:
            assert core.kept(number) == alone.kept(again)


def assert_close(told: list[RowLogprobs], expected: list[RowLogprobs]) -> None:
    """The same ids, and log-probabilities up to the last bits of a device's own exp."""
    assert [row.top_ids for row in told] == [row.top_ids for row in expected]
    for row, other in zip(told, expected, strict=True):
        assert [row.chosen, *row.top] == pytest.approx([other.chosen, *other.top], abs=1e-5)
