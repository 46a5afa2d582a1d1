"""The running server: listening sockets, signals, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Generator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from wkvm_frontend.api.service import Service
from wkvm_frontend.server.connection import HeadLimits, bounded
from wkvm_frontend.settings import ApiSettings
from wkvm_proto.names import ErrorCode
from wkvm_proto.settings import BadSettings

logger = logging.getLogger("wkvm.api")

DRAINED = "The server is shutting down, so this answer could not be finished. Please send the request again."
LAST_WORDS_S = 2


class ApiServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then finishes what is open within `drain_s`; the second signal ends at once."""

    def __init__(self, service: Service, app: ASGIApp) -> None:
        settings = service.settings
        limits = HeadLimits(settings.max_header_bytes, settings.max_headers, settings.header_timeout_s)
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=bounded(limits),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=settings.backlog,
            timeout_keep_alive=settings.idle_connection_s,
            timeout_graceful_shutdown=round(settings.drain_s) + LAST_WORDS_S,
        )
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Takes the signals while serving; a drained server has ended in good order, so none is raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, lets streams finish, and at the deadline ends the rest with an error event."""
        self._service.draining = True
        logger.info("shutting down; open streams have %.0f s", self._service.settings.drain_s)
        deadline = asyncio.get_running_loop().call_later(
            self._service.settings.drain_s, self._service.fleet.fail_all, ErrorCode.DRAINING, DRAINED
        )
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()


def listen(settings: ApiSettings) -> socket.socket:
    """The listening socket: inherited, or bound to host and port. Raises BadSettings."""
    try:
        if settings.fd is not None:
            return socket.socket(fileno=settings.fd)
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((settings.host.strip("[]"), settings.port))
        listener.listen(settings.backlog)
    except OSError as error:
        where = f"descriptor {settings.fd}" if settings.fd is not None else f"{settings.host}:{settings.port}"
        raise BadSettings(f"cannot listen on {where}: {error.strerror}") from None
    return listener


def address_of(listener: socket.socket) -> str:
    """`host:port` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
