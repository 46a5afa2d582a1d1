from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.device import EMPTY
from tests.fakes.engine import VOCABULARY, Engine, expected
from wkvm_core.errors import Refused
from wkvm_core.sched.plan import StepPlan
from wkvm_core.sched.request import Request
from wkvm_proto.names import ErrorCode, FinishReason

IDS = st.integers(0, len(VOCABULARY) - 1)
STOPS = st.sampled_from([(), (b"ab",), (b"aab",), (b"\n\n",), (b"bab", b"c"), (b"ba", b"abab"), (b"aaba", b"b\n")])


def check(engine: Engine, requests: dict[int, Request], starts: dict[int, tuple[int, int]] | None = None) -> int:
    """Every answer is what the request gets alone; returns how many snapshots were kept."""
    saved = 0
    for number, request in requests.items():
        answer = engine.answers[number]
        if answer.failure is not None or any(f.reason is FinishReason.CANCELLED for f in answer.finishes.values()):
            for sample in range(request.n):
                want = expected(request, sample, (starts or {}).get(number, EMPTY))
                got = answer.tokens.get(sample, [])
                assert got == want.delivered[: len(got)]
            continue
        assert sorted(answer.finishes) == list(range(request.n))
        for sample in range(request.n):
            want, finish = expected(request, sample, (starts or {}).get(number, EMPTY)), answer.finishes[sample]
            assert answer.tokens.get(sample, []) == want.delivered
            assert finish.reason is want.reason
            assert (finish.tail, finish.stop_text, finish.generated) == (want.tail, want.stop_text, want.generated)
            assert finish.delivered == len(want.delivered)
            if request.keep:
                snapshot = finish.snapshot
                assert snapshot is not None
                assert engine.device.blocks[snapshot.block] == want.kept
                assert snapshot.cursor.tokens == want.kept[0] == finish.consumed
                assert snapshot.cursor.tail == want.tail
                assert snapshot.segment is not None
                assert snapshot.segment.tokens == want.kept[0]
                saved += 1
    return saved


def requests_of(engine: Engine) -> dict[int, Request]:
    return {number: group.request for number, group in engine.scheduler._groups.items()}


REQUEST = st.fixed_dictionaries(
    {
        "prompt": st.lists(IDS, min_size=1, max_size=30),
        "max_tokens": st.integers(0, 25),
        "stop": STOPS,
        "stop_ids": st.sampled_from([(), (0,), (6, 7)]),
        "min_tokens": st.integers(0, 6),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "n": st.integers(1, 5),
        "keep": st.booleans(),
        "priority": st.integers(-1, 1),
        "tenant": st.sampled_from(["a", "b", "c"]),
        "deadline": st.one_of(st.none(), st.integers(1, 60).map(float)),
    }
)
ACTION = st.one_of(
    REQUEST.map(lambda kwargs: ("submit", kwargs)),
    st.integers(1, 12).map(lambda turns: ("turn", turns)),
    st.integers(0, 30).map(lambda which: ("cancel", which)),
)


def play(actions: list[tuple[str, object]], **shape: int) -> None:
    """Runs a story and checks every answer and that nothing is left."""
    engine = Engine(**shape)
    requests: dict[int, Request] = {}
    for verb, what in actions:
        if verb == "submit":
            kwargs = dict(what)  # type: ignore[call-overload]
            if kwargs["n"] > 1:
                kwargs["keep"] = False
            if kwargs["deadline"] is not None:
                kwargs["deadline"] += engine.now
            with suppress(Refused):  # no block for a kept state, or one slot only
                engine.submit(**kwargs)
            requests |= requests_of(engine)
        elif verb == "turn":
            for _ in range(what):  # type: ignore[call-overload]
                engine.turn()
                engine.now += 1.0
        elif requests:
            engine.scheduler.cancel(sorted(requests)[what % len(requests)])  # type: ignore[operator]
            engine.gather()
    engine.run()
    engine.assert_idle(saved=check(engine, requests))


SHAPE = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 6),
        "blocks": st.integers(0, 6),
        "rows": st.integers(1, 8),
        "step_tokens": st.integers(1, 24),
        "chunk_tokens": st.integers(1, 10),
        "depth": st.integers(0, 2),
        "slice_tokens": st.sampled_from([0, 0, 1, 3, 8]),
        "mixed_tokens": st.sampled_from([1, 4, 1 << 62]),
    }
)


@settings(max_examples=400, deadline=None)
@given(actions=st.lists(ACTION, max_size=14), shape=SHAPE)
def test_every_request_gets_what_it_gets_alone_and_nothing_is_left(actions, shape) -> None:
    play(actions, **shape)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=30_000, deadline=None)
@given(actions=st.lists(ACTION, max_size=40), shape=SHAPE)
def test_every_request_gets_what_it_gets_alone_at_length(actions, shape) -> None:
    play(actions, **shape)


KEPT_WITH_STOPS = REQUEST.map(
    lambda kwargs: ("submit", kwargs | {"n": 1, "keep": True, "stop": kwargs["stop"] or (b"ba",), "max_tokens": 40})
)


@settings(max_examples=300, deadline=None)
@given(
    actions=st.lists(st.one_of(KEPT_WITH_STOPS, ACTION), min_size=1, max_size=12),
    shape=SHAPE.map(lambda shape: shape | {"slots": max(shape["slots"], 2), "blocks": 12}),
)
def test_a_state_kept_across_text_stops_is_the_one_before_the_stop(actions, shape) -> None:
    play(actions, **shape)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_row_that_stops_by_id_does_not_run_on(depth: int) -> None:
    engine = Engine(depth=depth)
    number = engine.submit([1, 2, 3], max_tokens=50, stop_ids=(0, 5), keep=True)
    requests = requests_of(engine)
    engine.run()
    assert engine.answers[number].finishes[0].reason is FinishReason.STOP_TOKEN
    engine.assert_idle(saved=check(engine, requests))


@pytest.mark.parametrize("depth", [0, 1])
def test_cancelling_frees_the_slot_for_the_very_next_plan(depth: int) -> None:
    engine = Engine(slots=1, depth=depth)
    first = engine.submit([1, 2], max_tokens=1000)
    engine.turn()
    engine.turn()
    second = engine.submit([3], max_tokens=2)
    engine.scheduler.cancel(first)
    engine.gather()
    assert engine.answers[first].finishes[0].reason is FinishReason.CANCELLED
    plan = engine.turn()
    assert plan is not None
    assert [row.tokens for row in plan.rows] == [b"\x03\x00\x00\x00"]
    engine.run()
    assert len(engine.answers[second].tokens[0]) == 2


def test_decodes_get_their_token_in_every_step_while_a_long_prompt_is_read() -> None:
    engine = Engine(slots=4, step_tokens=10, chunk_tokens=8)
    short = engine.submit([1], max_tokens=20)
    engine.turn()
    engine.submit([2] * 500, max_tokens=1)
    for _ in range(10):
        before = len(engine.answers[short].tokens[0])
        plan = engine.turn()
        assert plan is not None
        assert len(engine.answers[short].tokens[0]) == before + 1
        assert sum(max(len(row.tokens) // 4, 1) for row in plan.rows) <= 10


def test_a_short_prompt_is_not_held_up_by_a_long_one() -> None:
    engine = Engine(slots=4, step_tokens=8, chunk_tokens=8)
    engine.submit([2] * 500, max_tokens=1)
    engine.turn()
    short = engine.submit([1, 2, 3], max_tokens=1)
    engine.turn()
    assert 0 in engine.answers[short].finishes


def test_tenants_with_one_request_do_not_wait_behind_a_tenant_with_many() -> None:
    engine = Engine(slots=1)
    flood = [engine.submit([1], max_tokens=10, tenant="flood") for _ in range(20)]
    for _ in range(12):
        engine.turn()
    single = engine.submit([2], max_tokens=10, tenant="single")
    while 0 not in engine.answers[single].finishes:
        engine.turn()
    assert sum(0 in engine.answers[number].finishes for number in flood) <= 3


def test_a_waiting_request_of_higher_priority_parks_a_running_one_which_goes_on_as_if_nothing_happened() -> None:
    engine = Engine(slots=1)
    low = engine.submit([1, 2, 3], max_tokens=20, temperature=1.0, seed=7, priority=-5)
    requests = requests_of(engine)
    for _ in range(5):
        engine.turn()
    high = engine.submit([4], max_tokens=3, priority=5)
    requests |= requests_of(engine)
    for _ in range(4):
        engine.turn()
    assert 0 in engine.answers[high].finishes
    assert 0 not in engine.answers[low].finishes
    engine.run()
    assert engine.scheduler.counts.parks == engine.scheduler.counts.resumes == 1
    engine.assert_idle(saved=check(engine, requests))


def test_with_one_slot_every_waiting_stream_gets_its_slice() -> None:
    engine = Engine(slots=1, slice_tokens=4)
    numbers = [engine.submit([1 + k], max_tokens=40) for k in range(3)]
    for _ in range(30):
        engine.turn()
    assert all(len(engine.answers[number].tokens[0]) >= 4 for number in numbers)
    engine.run()
    engine.assert_idle()


def test_samples_fork_from_one_reading_of_the_prompt() -> None:
    engine = Engine(slots=6, step_tokens=100, chunk_tokens=100)
    number = engine.submit([1, 2, 3, 4, 5, 6, 7], n=4, max_tokens=5, temperature=1.0)
    requests = requests_of(engine)
    engine.run()
    assert engine.scheduler.counts.prompt_tokens == 6 + 4
    assert len({tuple(engine.answers[number].tokens[sample]) for sample in range(4)}) > 1
    check(engine, requests)
    engine.assert_idle()


def test_a_deadline_fails_a_waiting_and_a_running_request() -> None:
    engine = Engine(slots=1)
    running = engine.submit([1], max_tokens=1000, deadline=5.0)
    waiting = engine.submit([1], max_tokens=1000, deadline=3.0)
    for _ in range(8):
        engine.turn()
        engine.now += 1.0
    for number in (running, waiting):
        failure = engine.answers[number].failure
        assert failure is not None
        assert failure.code is ErrorCode.DEADLINE
    engine.assert_idle()


def test_a_numerical_fault_fails_its_request_alone() -> None:
    engine = Engine(slots=4, depth=1)
    engine.device.poisoned = {7}
    bad = engine.submit([1, 7], max_tokens=20, n=2)
    good = engine.submit([1, 2], max_tokens=6, stop_ids=(7,))
    requests = {number: request for number, request in requests_of(engine).items() if number == good}
    engine.run()
    failure = engine.answers[bad].failure
    assert failure is not None
    assert failure.code is ErrorCode.NUMERICAL_ERROR
    check(engine, requests)
    engine.assert_idle()


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    engine = Engine(slots=1, max_queued=3)
    for _ in range(3):
        engine.submit([1], max_tokens=5)
    with pytest.raises(Refused, match="queue is full") as refused:
        engine.submit([1])
    assert refused.value.code is ErrorCode.QUEUE_FULL
    assert refused.value.retry_after_s >= 1.0
    engine.run()
    engine.assert_idle()


def test_the_queue_is_bounded_by_tokens_too_but_never_refuses_a_lone_request() -> None:
    engine = Engine(slots=1, max_queued_tokens=100)
    engine.submit([1] * 500, max_tokens=5)
    with pytest.raises(Refused, match="queue is full"):
        engine.submit([1] * 500, max_tokens=5)
    engine.run()


def test_a_line_that_starts_from_a_kept_state_goes_on_where_it_ended_and_the_parent_stays() -> None:
    engine = Engine(slots=3)
    first = engine.submit([1, 2, 3], max_tokens=5, keep=True)
    first_request = requests_of(engine)[first]
    engine.run()
    snapshot = engine.answers[first].finishes[0].snapshot
    assert snapshot is not None
    parent = engine.device.blocks[snapshot.block]
    children = [engine.submit([token], max_tokens=4, keep=True, origin=snapshot) for token in (4, 5)]
    requests = requests_of(engine)
    engine.run()
    want = expected(first_request, 0)
    saved = check(engine, requests, dict.fromkeys(children, want.kept))
    assert engine.device.blocks[snapshot.block] == parent == want.kept
    engine.assert_idle(saved=1 + saved)


def test_cancelled_waiters_do_not_pile_up_behind_a_stuck_head() -> None:
    engine = Engine(slots=1)
    engine.submit([1], max_tokens=10**6)
    engine.turn()
    engine.submit([1], max_tokens=1)
    for _ in range(500):
        engine.scheduler.cancel(engine.submit([1], deadline=1e9))
    lines = engine.scheduler._seating.queue._lines
    assert sum(len(line) for by_tenant in lines.values() for line in by_tenant.values()) < 80
    assert len(engine.scheduler._deadlines) < 80


def test_tenants_that_went_away_are_forgotten() -> None:
    engine = Engine(slots=4)
    for number in range(3000):
        engine.submit([1], max_tokens=1, tenant=f"tenant-{number}")
        engine.run()
    assert not engine.scheduler._seating.queue._served


# ---------------------------------------------------------------------------------------------- mixed steps


def decoding(count: int, **shape: int) -> Engine:
    """So many rows that decode, none that reads."""
    engine = Engine(slots=16, rows=16, **shape)
    for k in range(count):
        engine.submit([k % len(VOCABULARY)], max_tokens=1000)
    engine.turn()
    return engine


def lengths(plan: StepPlan | None) -> tuple[int, list[int]]:
    """Decode rows of a plan, and the tokens of each row that reads."""
    assert plan is not None
    return sum(row.feed for row in plan.rows), sorted(len(row.tokens) // 4 for row in plan.rows if not row.feed)


def test_no_decode_waits_behind_more_than_the_mixed_tokens_of_all_prompts_together() -> None:
    engine = decoding(2, step_tokens=200, chunk_tokens=100, mixed_tokens=12)
    for _ in range(3):
        engine.submit([1] * 90, max_tokens=1)
    for _ in range(10):
        rows, read = lengths(engine.turn())
        assert rows == 2
        assert 0 < sum(read) <= 12


def test_first_rows_of_one_token_are_not_put_off_by_a_prompt_and_come_on_top() -> None:
    engine = decoding(2, step_tokens=200, chunk_tokens=100, mixed_tokens=12)
    engine.submit([1] * 500, max_tokens=1)
    engine.turn()
    for token in range(5):
        engine.submit([token], max_tokens=3)
    assert lengths(engine.turn()) == (2, [1, 1, 1, 1, 1, 12])


def test_forks_start_together_beside_a_prompt_that_is_read() -> None:
    engine = decoding(2, step_tokens=200, chunk_tokens=100, mixed_tokens=4)
    engine.submit([1] * 500, max_tokens=1)
    engine.submit([1, 2, 3], n=8, max_tokens=9)
    for _ in range(4):
        _, read = lengths(engine.turn())
        if read.count(1) == 8:
            break
    assert read == [1] * 8 + [4]


def test_a_kept_state_that_lacks_nothing_leaves_the_budget_of_prompts_as_it_is() -> None:
    engine = decoding(2, step_tokens=200, chunk_tokens=100, mixed_tokens=12)
    engine.submit([1] * 500, max_tokens=1)
    for _ in range(5):
        engine.submit([1], max_tokens=0, keep=True)
    saved = 0
    for _ in range(6):
        plan = engine.turn()
        assert plan is not None
        saved += len(plan.moves)
        _, read = lengths(plan)
        assert sum(tokens for tokens in read if tokens > 1) <= 12
    assert saved == 5


def test_without_decodes_prompts_get_the_whole_budget() -> None:
    engine = Engine(slots=4, step_tokens=100, chunk_tokens=80, mixed_tokens=6)
    for _ in range(2):
        engine.submit([1] * 300, max_tokens=1)
    assert lengths(engine.turn()) == (0, [50, 50])


def test_prompts_get_two_tokens_a_decoding_row_at_least() -> None:
    engine = decoding(9, step_tokens=200, chunk_tokens=100, mixed_tokens=3)
    engine.submit([1] * 300, max_tokens=1)
    assert lengths(engine.turn()) == (9, [18])


def test_the_budget_of_a_step_bounds_a_mixed_one_too() -> None:
    engine = decoding(9, step_tokens=20, chunk_tokens=100, mixed_tokens=15)
    engine.submit([1] * 300, max_tokens=1)
    assert lengths(engine.turn()) == (9, [11])
