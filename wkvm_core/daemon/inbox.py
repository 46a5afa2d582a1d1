"""What the mail thread hands to the step loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from wkvm_core.daemon.caller import Caller
from wkvm_core.sched.request import Request
from wkvm_proto.messages import StateCall


@dataclass(frozen=True, slots=True)
class Submit:
    """A checked request, the handle to start it from and the name to keep its end under; both may be empty."""

    request: Request
    caller: Caller
    state: str
    save_as: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """A frontend cancels one of its requests."""

    client: bytes
    wire: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A frontend asks something of the named states, or changes them."""

    client: bytes
    call: StateCall


@dataclass(frozen=True, slots=True)
class Finish:
    """Work of the workshop is done: `then` takes the outcome, on the step loop."""

    then: Callable[[Any], None]
    outcome: Any


@dataclass(frozen=True, slots=True)
class Probe:
    """A frontend wants an answer by the step loop."""

    client: bytes
    nonce: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A frontend is dead, or cannot keep up (`slow`): its requests end."""

    client: bytes
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """Accept nothing more and stop when all is answered; `now`: do not wait."""

    now: bool = False


Item: TypeAlias = Submit | Withdraw | Ask | Finish | Probe | Gone | Drain


class Inbox:
    """A queue into the step loop that any thread may put into."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Item] = SimpleQueue()

    def put(self, item: Item) -> None:
        """Adds an item; wakes the loop when it waits."""
        self._queue.put(item)

    @property
    def waiting(self) -> int:
        """Items that were not taken yet."""
        return self._queue.qsize()

    def take(self, wait_s: float) -> Item | None:
        """The next item; None when none came within `wait_s` seconds (0 = do not wait)."""
        try:
            return self._queue.get(timeout=wait_s) if wait_s > 0.0 else self._queue.get_nowait()
        except Empty:
            return None
