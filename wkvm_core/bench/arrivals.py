"""When the tokens of a round came, as the process that asked for them saw it."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from wkvm_proto.messages import Tokens

Times: TypeAlias = npt.NDArray[np.float64]


class Arrivals:
    """One round of requests numbered from 0. All work on a frame is on columns: a process that keeps up with a hundred
    thousand tokens a second must not touch each."""

    def __init__(self, rows: int) -> None:
        self.tokens = 0
        self.finished = 0
        self.sent: Times = np.zeros(rows)
        """Moments, seconds on the monotonic clock, [rows]; set by whoever sends."""
        self.first: Times = np.zeros(rows)
        """Moments of the first tokens, [rows]."""
        self.last: Times = np.zeros(rows)
        self._missing = rows
        self._gaps: list[Times] = []

    def take(self, frame: Tokens, now: float) -> None:
        """A frame came."""
        self.tokens += len(frame.ids) // 4
        requests = np.frombuffer(frame.requests, dtype="<u4")
        if self._missing:
            new = requests[self.first[requests] == 0.0]
            self.first[new] = now
            self._missing -= len(new)
        elif not self.finished:
            self._gaps.append(now - self.last[requests])
        self.last[requests] = now

    def finish(self) -> None:
        """A request ended."""
        self.finished += 1

    @property
    def ttft(self) -> Times:
        """Seconds from sending to the first token, [rows]."""
        return self.first - self.sent

    @property
    def itl(self) -> Times:
        """Seconds between the frames that brought a request tokens, while all requests ran, less the first fifth: a
        value for each request and frame. Empty when there was no such time."""
        later = self._gaps[len(self._gaps) // 5 :]
        return np.concatenate(later) if later else np.zeros(0)
