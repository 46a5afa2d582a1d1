"""One HTTP/1.1 connection that sends requests one after another and reads streamed answers."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import cast

import httptools

from wkvm_frontend.cli.load.answer import MAX_ERROR_BYTES, Answer


class Broken(Exception):
    """The connection or its answer broke off; the text is the kind of failure."""


class Connection(asyncio.Protocol):
    """Opened with `Connection.open`; one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None
        self._answer = Answer()
        self._chunks: list[bytes] = []
        self._status = 0
        self._keeps = False
        self.body = b""
        """The beginning of an answer other than 200."""
        self.usable = False
        """Another exchange may follow."""

    @classmethod
    async def open(cls, host: str, port: int, tls: bool) -> Connection:
        """Raises OSError (ssl.SSLError is one) when there is no connection to be had."""
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if tls else None
        _, protocol = await loop.create_connection(cls, host, port, ssl=context)
        return protocol

    @property
    def answered(self) -> bool:
        """The latest request got an answer's head at least."""
        return self._status > 0

    async def exchange(self, request: bytes, answer: Answer) -> int:
        """The status. The answer has been fed; of another status than 200, `body` holds the beginning.

        Raises Broken when the connection ends early or does not speak HTTP.
        """
        assert self._done is None, "one exchange at a time"
        self._parser = httptools.HttpResponseParser(self)
        self._answer, self._status, self._keeps, self.body = answer, 0, False, b""
        if self._transport is None or not self.usable:
            raise Broken("connection closed")
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._done = None
        if not self._keeps:
            self.close()
        return self._status

    def close(self) -> None:
        """At once; what is still to come is not read."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------------------------ asyncio and httptools

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.usable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            if self._status and self._answer.ended:  # an answer without length ends with its connection
                self._done.set_result(None)
            else:
                self._done.set_exception(Broken("connection lost" if exc else "connection closed"))

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._done is not None and not self._done.done():
                self._done.set_exception(Broken("not HTTP"))
            return
        if self._chunks:
            self._answer.feed(b"".join(self._chunks) if len(self._chunks) > 1 else self._chunks[0], now)
            self._chunks.clear()

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status == 200:
            self._chunks.append(body)
        elif len(self.body) < MAX_ERROR_BYTES:
            self.body += body

    def on_message_complete(self) -> None:
        self._keeps = self._parser.should_keep_alive()  # true only here: the parser forgets with the message
        if self._chunks:
            self._answer.feed(b"".join(self._chunks), time.monotonic())
            self._chunks.clear()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
