from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from wkvm_core.bench.parts import Parts, measured
from wkvm_core.sched.plan import Row
from wkvm_proto.columns import pack_u32


def decoding(number: int) -> Row:
    return Row(number, number, number, lane=number, feed=True, sample=True)


def reading(number: int, tokens: int) -> Row:
    return Row(number, 0, number, tokens=pack_u32(range(tokens)))


def test_rows_of_a_launch_are_told_apart_by_what_they_consume() -> None:
    parts = Parts()
    parts.launched((decoding(2), decoding(3), reading(4, 5), reading(5, 6)))
    assert (parts.now.rows, parts.now.decoding, parts.now.prompt_tokens) == (4, 2, 11)
    parts.end_turn(0.0)
    same = (decoding(2), decoding(3))
    for _ in range(2):
        parts.launched(same)
        assert (parts.now.rows, parts.now.decoding, parts.now.prompt_tokens) == (2, 2, 0)
        parts.end_turn(0.0)


def test_a_turn_holds_what_its_calls_did() -> None:
    calls: list[str] = []

    def called(name: str, value: Any = None) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            calls.append(name)
            return value

        return call

    engine = SimpleNamespace(
        scheduler=SimpleNamespace(plan=called("plan", "a plan"), commit=called("commit")),
        runner=SimpleNamespace(launch=called("launch"), collect=called("collect", "a result")),
        door=SimpleNamespace(deliver=called("deliver")),
        loop=SimpleNamespace(_take_inbox=called("inbox")),
    )
    parts = measured(engine)  # type: ignore[arg-type]
    engine.loop._take_inbox(wait=False)
    assert engine.scheduler.plan(0.0) == "a plan"
    engine.runner.launch(SimpleNamespace(rows=(decoding(2),)))
    assert engine.runner.collect() == "a result"
    engine.scheduler.commit("a result", 0.0)
    engine.door.deliver(SimpleNamespace(ids=[5, 6, 7]), 1, 0.0)
    parts.end_turn(0.125)
    (turn,) = parts.turns
    assert calls == ["inbox", "plan", "launch", "collect", "commit", "deliver"]
    assert (turn.tokens, turn.decoding, turn.mail_cpu_s) == (3, 1, 0.125)
    assert turn.started <= turn.launched_at <= turn.collected_at
    assert all(getattr(turn, name) > 0.0 for name in ("inbox", "plan", "launch", "wait", "commit", "deliver"))
    assert turn.run == turn.launch + turn.wait


def test_the_time_of_a_call_that_raises_counts_too() -> None:
    parts = Parts()

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - it is the one above
        parts.timed("plan", fail)()
    assert parts.now.plan > 0.0


def test_clearing_forgets_every_turn() -> None:
    parts = Parts()
    parts.launched((decoding(2),))
    parts.end_turn(0.0)
    parts.now.plan = 3.0
    parts.clear()
    assert parts.turns == []
    assert parts.now.plan == 0.0
