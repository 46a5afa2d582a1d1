"""GET /live, /health, /ready, /version and /metrics"""

from __future__ import annotations

import asyncio
import platform

from starlette.types import Receive, Scope, Send

from wkvm_frontend.api.reply import send_bytes, send_json
from wkvm_frontend.api.service import Service
from wkvm_frontend.failure import unavailable
from wkvm_frontend.metrics.exposition import CONTENT_TYPE, exposition, with_label
from wkvm_proto import __version__
from wkvm_proto.messages import PROTOCOL
from wkvm_proto.metrics import merged


class LiveRoute:
    """200 as long as this process answers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        await send_json(send, {"status": "alive"})


class HealthRoute:
    """200 while an engine is connected, from what is known: no question is asked."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ApiError 503."""
        self._service.fleet.models()
        if self._service.draining:
            raise unavailable("The server is shutting down.")
        await send_json(send, {"status": "ok"})


class ReadyRoute:
    """200 when the step loop of an engine has just answered a no-op in time: a hung engine is not ready."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ApiError 503."""
        if self._service.draining:
            raise unavailable("The server is shutting down.")
        fleet = self._service.fleet
        fleet.models()
        links = [link for link in fleet.ready if not link.draining]
        timeout = self._service.settings.ready_timeout_s
        answers = await asyncio.gather(*(link.probe(timeout) for link in links))
        if not any(answers):
            raise unavailable("The engine does not answer at the moment.")
        await send_json(send, {"status": "ready", "cores": sum(answers)})


class VersionRoute:
    """Versions of the program and its protocol."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        version = __version__
        await send_json(send, {"version": version, "protocol": PROTOCOL, "python": platform.python_version()})


class MetricsRoute:
    """All series: the cores' own, and the sum of all frontends as the cores have it."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        known = [link.stats for link in self._service.fleet.links if link.stats is not None]
        parts = [
            with_label(link.stats.core, "core", link.uri) if len(known) > 1 else link.stats.core
            for link in self._service.fleet.links
            if link.stats is not None
        ]
        # Every frontend tells every core, so one core's sum is that of all; without a core, ours is all there is.
        parts.append(known[0].frontends if known else self._service.meter.snapshot())
        await send_bytes(send, 200, exposition(merged(parts)).encode(), CONTENT_TYPE.encode())
