from __future__ import annotations

from wkvm_core.bench.caller import Load
from wkvm_proto.columns import unpack_u32

VOCABULARY = 256


def test_requests_are_sampled_as_the_load_says_each_from_its_own_seed() -> None:
    load = Load(rows=3, tokens=24, prompt=8, temperature=0.8, top_p=0.95, seed=5)
    samplings = [load.request(number, VOCABULARY).sampling for number in range(load.rows)]
    assert {(one.max_tokens, one.temperature, one.top_p, one.stop_ids) for one in samplings} == {(24, 0.8, 0.95, b"")}
    assert [one.seed for one in samplings] == [5, 6, 7]


def test_prompts_are_as_long_as_asked_for_and_end_no_text() -> None:
    prompt = unpack_u32(Load(rows=1, tokens=1, prompt=1000).request(0, VOCABULARY).prompt)
    assert len(prompt) == 1000
    assert set(prompt) == set(range(1, VOCABULARY))


def test_prompts_differ_between_requests_and_between_rounds() -> None:
    prompts = {Load(8, 1, 16, seed=seed).request(number, VOCABULARY).prompt for seed in (1, 2) for number in range(8)}
    assert len(prompts) == 16
