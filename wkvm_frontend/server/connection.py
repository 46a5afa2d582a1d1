"""HTTP/1.1 connections with bounded heads and a deadline for them."""

from __future__ import annotations

import asyncio
import http
from typing import Any

import msgspec
from uvicorn._types import ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from wkvm_frontend.api.stream import ABORT
from wkvm_frontend.failure import ApiError


class HeadLimits(msgspec.Struct, frozen=True):
    """Of one request's head: bytes, fields, seconds from the first byte (of a new connection: from its start)."""

    max_bytes: int
    max_fields: int
    timeout_s: float


class BoundedConnection(HttpToolsProtocol):
    """One client connection. A head beyond the limits is answered 431 or 408, and the connection closed."""

    limits: HeadLimits

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_bytes = 0
        self._field_bytes = 0
        self._in_head = True
        self._refused = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The clock of the first head starts at once, so that a silent connection ends too."""
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head are counted before they are parsed further."""
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not self._refused:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.max_bytes:
                self._refuse(431, f"The head of the request is larger than {self.limits.max_bytes} bytes.")

    def on_message_begin(self) -> None:
        """A new head begins."""
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"abort": self._abort}}
        self._head_bytes = self._field_bytes = 0
        self._in_head = True
        if self._deadline is None:
            self._start_clock()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One field of the head."""
        self._field_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there: hands the request on, unless it is beyond the limits."""
        self._in_head = False
        self._stop_clock()
        if self._refused:
            return
        if self._field_bytes + len(self.url) > self.limits.max_bytes:
            self._refuse(431, f"The head of the request is larger than {self.limits.max_bytes} bytes.")
        elif len(self.headers) > self.limits.max_fields:
            self._refuse(431, f"The request has more than {self.limits.max_fields} header fields.")
        else:
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0":
                _without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Bytes of a body; those of a refused request are dropped."""
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The bytes were no HTTP request."""
        self._refuse(400, "This is not a valid HTTP request.")

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(self.limits.timeout_s, self._too_slow)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self._in_head:
            self._refuse(408, "The head of the request took too long to arrive.")

    def _abort(self) -> None:
        self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        self._refused = True
        self._stop_clock()
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(ApiError(status, message, code="bad_http", retryable=False).body)
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: none\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _without_chunks(cycle: RequestResponseCycle) -> None:
    """Makes a body of unknown length end with the connection: an HTTP/1.0 client knows no chunks, and uvicorn sends
    them to it."""
    send = cycle.send

    async def send_plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = send_plain  # type: ignore[method-assign]


def bounded(limits: HeadLimits) -> type[BoundedConnection]:
    """The connection class with these limits: uvicorn makes connections from a class alone."""
    return type("BoundedConnection", (BoundedConnection,), {"limits": limits})
