"""Answers that are sent whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.types import Send

from wkvm_frontend.failure import ApiError

_encoder = msgspec.json.Encoder()


async def send_bytes(
    send: Send, status: int, body: bytes, content_type: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """One whole answer."""
    head: list[tuple[bytes, bytes]] = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(body)),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: Any, *, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """A struct or plain value as JSON."""
    await send_bytes(send, status, _encoder.encode(value), b"application/json", headers)


async def send_error(send: Send, error: ApiError, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """The answer that an error is."""
    await send_json(send, error.body, status=error.status, headers=[*error.headers, *headers])
