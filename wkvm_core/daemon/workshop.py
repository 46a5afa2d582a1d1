"""Work on the bytes of states that takes longer than a step may wait: done on a thread of its own, in order."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

from wkvm_core.daemon.inbox import Finish, Inbox
from wkvm_core.errors import Refused
from wkvm_proto.names import ErrorCode

Work = Callable[[], Any]
Then = Callable[[Any], None]
"""Takes what the work gave, or the Refused that it raised."""


class Workshop:
    """Takes work from the step loop and gives the outcome back to it, through the inbox."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._queue: SimpleQueue[tuple[Work, Then] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def put(self, work: Work, then: Then) -> None:
        """work: runs on the thread, which begins with the first; then: runs on the step loop."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="workshop", daemon=True)
            self._thread.start()
        self._queue.put((work, then))

    def close(self) -> None:
        """Waits for what was put before."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, then = item
            try:
                outcome = work()
            except Refused as refused:
                outcome = refused
            except Exception:
                traceback.print_exc()
                outcome = Refused(ErrorCode.INTERNAL, "the engine could not do this")
            self._inbox.put(Finish(then, outcome))
