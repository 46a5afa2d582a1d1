"""Times the parts of each turn of the step loop, from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wkvm_core.daemon.boot import Engine


@dataclass(slots=True)
class Turn:
    """Wall time of one turn's parts, seconds."""

    started: float
    rows: int = 0
    inbox: float = 0.0
    plan: float = 0.0
    run: float = 0.0
    commit: float = 0.0
    deliver: float = 0.0
    mail_cpu_s: float = 0.0


class Parts:
    """Collects turns."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.now = Turn(time.perf_counter())

    def end_turn(self, mail_cpu_s: float) -> None:
        """The turn is over."""
        self.now.mail_cpu_s = mail_cpu_s
        self.turns.append(self.now)
        self.now = Turn(time.perf_counter())

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, its time added to a part of the current turn."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                setattr(self.now, part, getattr(self.now, part) + time.perf_counter() - started)

        return run


def measured(engine: Engine) -> Parts:
    """Puts a clock around what the loop calls. The engine is good for nothing but measuring afterwards."""
    parts = Parts()
    scheduler, runner, door, loop = engine.scheduler, engine.runner, engine.door, engine.loop

    def launch(plan: Any) -> None:
        parts.now.rows = len(plan.rows)
        real_launch(plan)

    real_launch = runner.launch
    for owner, name, call, part in (
        (scheduler, "plan", scheduler.plan, "plan"),
        (runner, "launch", launch, "run"),
        (runner, "collect", runner.collect, "run"),
        (scheduler, "commit", scheduler.commit, "commit"),
        (door, "deliver", door.deliver, "deliver"),
        (loop, "_take_inbox", loop._take_inbox, "inbox"),
    ):
        setattr(owner, name, parts.timed(part, call))
    return parts
