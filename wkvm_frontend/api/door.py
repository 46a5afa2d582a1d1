"""Where every request comes in: request id, Host, path, the one place where exceptions become answers, counting."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wkvm_frontend.api.body import ClientGone
from wkvm_frontend.api.reply import send_error
from wkvm_frontend.api.service import Service
from wkvm_frontend.failure import ApiError, internal_error
from wkvm_frontend.metrics.meter import labelled
from wkvm_frontend.settings import is_loopback
from wkvm_proto.names import ErrorCode

logger = logging.getLogger("wkvm.api")
access = logging.getLogger("wkvm.access")

_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_SLASHES = re.compile(r"/{2,}")
_PATTERN_OF = {"/v1/models": "/v1/models/{model}", "/v1/states": "/v1/states/{handle}"}
_CLOSE = (b"connection", b"close")


class Door:
    """The ASGI application around the router. No exception leaves it, and none of its text reaches a client."""

    def __init__(self, service: Service, router: ASGIApp, routes: Iterable[str], allowed_hosts: Iterable[str]) -> None:
        """`routes`: paths that get a metric of their own."""
        self._service = service
        self._router = router
        self._routes = frozenset(routes)
        self._hosts = frozenset(host.lower() for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the server's start and end."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            return
        began = time.monotonic()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-request-id", request_id))
            await send(message)

        path = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"
        scope["path"], scope["raw_path"] = path, path.encode()
        scope["app"] = self  # lets the router raise for an unknown path or method
        try:
            error = self._refusal(headers, path)
            if error is None:
                await self._router(scope, receive, answer)
                error = None
        except ApiError as raised:
            error = raised
        except HTTPException as raised:
            error = _of_router(raised.status_code, path)
        except ClientGone:
            error = None
            status = status or 499
        except asyncio.CancelledError:
            if status:
                raise
            error = ApiError(503, "The server is shutting down.", code=ErrorCode.DRAINING)
        except Exception:
            logger.exception("request %s failed", request_id.decode())
            error = internal_error()
            if status:
                raise  # too late for an answer: the connection is closed
        if error is not None and not status:
            closes = error.status in (408, 413, 415) or self._service.draining
            await send_error(answer, error, [_CLOSE] if closes else [])
        self._count(scope["method"], path, status, time.monotonic() - began)

    def _refusal(self, headers: dict[bytes, bytes], path: str) -> ApiError | None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if name and name not in self._hosts and not is_loopback(name):
            return ApiError(421, "This server does not answer for that host name.", code="wrong_host")
        if self._service.draining and path not in ("/live", "/health", "/ready", "/metrics"):
            return ApiError(
                503, "The server is shutting down. Please try again in a few seconds.", code=ErrorCode.DRAINING
            )
        return None

    def _count(self, method: str, path: str, status: int, seconds: float) -> None:
        route = path if path in self._routes else _PATTERN_OF.get("/".join(path.split("/")[:3]), "other")
        meter = self._service.meter
        meter.add(labelled("wkvm_http_requests_total", route=route, status=str(status)))
        meter.histogram(labelled("wkvm_http_request_seconds", route=route)).observe(seconds)
        if self._service.settings.access_log:
            access.info("%s %s %d %.1f ms", method, path, status, 1000 * seconds)

    async def _live(self, receive: Receive, send: Send) -> None:
        pulse: asyncio.Task[None] | None = None
        while True:
            event = await receive()
            if event["type"] == "lifespan.startup":
                await self._service.fleet.open()
                pulse = asyncio.create_task(self._service.pulse.run())
                await send({"type": "lifespan.startup.complete"})
            elif event["type"] == "lifespan.shutdown":
                if pulse is not None:
                    pulse.cancel()
                await self._service.fleet.close()
                await send({"type": "lifespan.shutdown.complete"})
                return


def _of_router(status: int, path: str) -> ApiError:
    if status == 405:
        return ApiError(405, "This path does not take that method.", code="method_not_allowed")
    if status == 404:
        return ApiError(404, f"There is nothing at {path[:200]!r}.", code="not_found")
    return internal_error()
