"""What every route works with."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from wkvm_frontend.metrics.meter import Meter
from wkvm_frontend.settings import ApiSettings
from wkvm_frontend.wire.fleet import Fleet


class Beating(Protocol):
    """An open stream that wants to know of passing time."""

    def beat(self, now: float) -> None:
        """Called a few times per keep-alive period, with the monotonic time."""


class Pulse:
    """One clock for all open streams, in place of a timer for each token."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self.streams: set[Beating] = set()

    async def run(self) -> None:
        """Beats until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            now = time.monotonic()
            for stream in list(self.streams):
                stream.beat(now)


class Service:
    """The parts of one `wkvm-api` process, made once."""

    def __init__(self, settings: ApiSettings, fleet: Fleet, meter: Meter) -> None:
        self.settings = settings
        self.fleet = fleet
        self.meter = meter
        self.pulse = Pulse(min(1.0, settings.keep_alive_s / 4, settings.slow_client_s / 4))
        self.draining = False
