"""The frontends that are connected: who they are, when they were last heard of, what waits to be sent to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from wkvm_core.daemon.caller import Tray
from wkvm_proto.messages import Metrics
from wkvm_proto.metrics import merged

MAX_OUTBOX_BYTES = 16 * 2**20
MAX_BAD_FRAMES = 16


class Frontend:
    """One connection. Its identity is new for each start of the process, so it never comes back."""

    __slots__ = ("bad_frames", "bound", "identity", "last_heard", "metrics", "name", "outbox", "outbox_bytes", "tray")

    def __init__(self, identity: bytes, now: float) -> None:
        self.identity = identity
        self.name = ""
        """Empty until it has said hello."""
        self.bound = False
        """Its vocabulary is the one that binds: it may generate."""
        self.last_heard = now
        self.bad_frames = 0
        self.metrics = Metrics()
        self.outbox: deque[bytes] = deque()
        """Frames that the socket did not take yet."""
        self.outbox_bytes = 0
        self.tray = Tray(identity)

    @property
    def banned(self) -> bool:
        """It sent so many frames that are no messages that it is not listened to any more."""
        return self.bad_frames >= MAX_BAD_FRAMES


class Frontends:
    """All connections, and the metrics of those that went away: totals never go back."""

    def __init__(self) -> None:
        self._known: dict[bytes, Frontend] = {}
        self._departed = Metrics()

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Frontend]:
        return iter(list(self._known.values()))

    def get(self, identity: bytes) -> Frontend | None:
        """The connection, if it is known."""
        return self._known.get(identity)

    def meet(self, identity: bytes, now: float) -> Frontend:
        """The connection; a new one if it is not known."""
        frontend = self._known.get(identity)
        if frontend is None:
            frontend = self._known[identity] = Frontend(identity, now)
        return frontend

    def forget(self, frontend: Frontend) -> None:
        """It is gone."""
        del self._known[frontend.identity]
        gone = frontend.metrics
        self._departed = merged([self._departed, Metrics(gone.counters, {}, gone.histograms)])

    def silent(self, since: float) -> list[Frontend]:
        """Those that were not heard of since a moment on the monotonic clock."""
        return [frontend for frontend in self._known.values() if frontend.last_heard < since]

    def metrics(self) -> Metrics:
        """The sum over all frontends, those gone included."""
        return merged([self._departed, *(frontend.metrics for frontend in self._known.values())])
