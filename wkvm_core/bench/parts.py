"""Times the parts of each turn of the step loop, from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the caller's process reads turns without loading torch
    from wkvm_core.daemon.boot import Engine
    from wkvm_core.sched.plan import Row


@dataclass(slots=True)
class Turn:
    """One turn: what it launched and delivered, and the wall time of its parts, seconds. Moments are on the monotonic
    clock, which all processes of a machine share; 0 = it did not happen."""

    started: float
    rows: int = 0
    """Of the step that was launched."""
    decoding: int = 0
    """Those of them that consume the token sampled last."""
    prompt_tokens: int = 0
    """What the others consume."""
    tokens: int = 0
    """Delivered: with overlap, of an older step than the one launched."""
    launched_at: float = 0.0
    """When the launch began."""
    collected_at: float = 0.0
    """When a result was there."""
    inbox: float = 0.0
    plan: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    """For the oldest result."""
    commit: float = 0.0
    deliver: float = 0.0
    mail_cpu_s: float = 0.0
    """Processor time of the mail thread so far."""

    @property
    def run(self) -> float:
        """Launch and wait."""
        return self.launch + self.wait


class Parts:
    """Collects turns."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.now = Turn(time.monotonic())
        self._rows: tuple[Row, ...] = ()
        self._counts = (0, 0)

    def end_turn(self, mail_cpu_s: float) -> None:
        """The turn is over."""
        self.now.mail_cpu_s = mail_cpu_s
        self.turns.append(self.now)
        self.now = Turn(time.monotonic())

    def clear(self) -> None:
        """Forgets everything: another run begins."""
        self.turns = []
        self.now = Turn(time.monotonic())

    def launched(self, rows: tuple[Row, ...]) -> None:
        """Notes what is launched now. Rows that decode on come again as the same objects: comparing them is cheap."""
        if rows != self._rows:
            decoding = sum(row.feed for row in rows)
            self._rows = rows
            self._counts = decoding, sum(len(row.tokens) for row in rows) // 4
        self.now.rows = len(rows)
        self.now.decoding, self.now.prompt_tokens = self._counts
        self.now.launched_at = time.monotonic()

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, its time added to a part of the current turn."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            try:
                return call(*args, **kwargs)
            finally:
                setattr(self.now, part, getattr(self.now, part) + time.monotonic() - started)

        return run


def measured(engine: Engine) -> Parts:
    """Puts a clock around what the loop calls. The engine is good for nothing but measuring afterwards."""
    parts = Parts()
    scheduler, runner, door, loop = engine.scheduler, engine.runner, engine.door, engine.loop
    launch = parts.timed("launch", runner.launch)
    collect = parts.timed("wait", runner.collect)
    deliver = parts.timed("deliver", door.deliver)

    def noted_launch(plan: Any) -> None:
        parts.launched(plan.rows)
        launch(plan)

    def noted_collect() -> Any:
        result = collect()
        parts.now.collected_at = time.monotonic()
        return result

    def noted_deliver(outcomes: Any, step: int, now: float) -> None:
        parts.now.tokens += len(outcomes.ids)
        deliver(outcomes, step, now)

    for owner, name, call in (
        (scheduler, "plan", parts.timed("plan", scheduler.plan)),
        (runner, "launch", noted_launch),
        (runner, "collect", noted_collect),
        (scheduler, "commit", parts.timed("commit", scheduler.commit)),
        (door, "deliver", noted_deliver),
        (loop, "_take_inbox", parts.timed("inbox", loop._take_inbox)),
    ):
        setattr(owner, name, call)
    return parts
