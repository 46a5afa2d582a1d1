"""No exception's text reaches a client."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send

from wkvm_frontend.api.door import Door
from wkvm_frontend.api.service import Service
from wkvm_frontend.failure import INTERNAL_MESSAGE
from wkvm_frontend.metrics.meter import Meter
from wkvm_frontend.settings import ApiSettings
from wkvm_frontend.wire.fleet import Fleet
from wkvm_frontend.wire.link import LinkTiming

LEAKS = "0x7f00deadbeef /home/user/secret Traceback (most recent call last)"


def through_the_door(raised: BaseException, *, after_start: bool = False) -> list[Message]:
    """What the client of a route that raises gets to see."""
    meter = Meter()
    service = Service(ApiSettings(core=("ipc:///x",)), Fleet((), "f", meter.snapshot, LinkTiming()), meter)

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        if after_start:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise raised

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/x", "headers": []}
    asyncio.run(Door(service, route, [], [])(scope, receive, send))
    return sent


@pytest.mark.parametrize("kind", [ValueError, KeyError, RuntimeError, MemoryError, OSError])
def test_an_unknown_exception_is_answered_with_a_fixed_text(kind: type[Exception], caplog: Any) -> None:
    with caplog.at_level(logging.ERROR):
        start, body = through_the_door(kind(LEAKS))
    assert start["status"] == 500
    assert msgspec.json.decode(body["body"])["error"]["message"] == INTERNAL_MESSAGE
    assert not any(part.encode() in body["body"] for part in LEAKS.split())
    request_id = dict(start["headers"])[b"x-request-id"].decode()
    assert request_id in caplog.text
    assert "0x7f00deadbeef" in caplog.text


def test_an_exception_after_the_head_ends_the_connection_without_a_word() -> None:
    with pytest.raises(ValueError, match="0x7f"):  # the server closes the connection on it
        through_the_door(ValueError(LEAKS), after_start=True)
