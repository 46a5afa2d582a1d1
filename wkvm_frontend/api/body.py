"""Request bodies: read within limits, decoded to structs, every refusal a 4xx that names the field."""

from __future__ import annotations

import asyncio
import re
from typing import Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope

from wkvm_frontend.api.refused import check_refused
from wkvm_frontend.failure import ApiError, bad_request

T = TypeVar("T")

_PATH = re.compile(r" - at `\$\.?(.*)`$")


class ClientGone(Exception):
    """The client closed its connection before it had sent its request, or before it was answered."""


class BodyLimits(msgspec.Struct, frozen=True):
    """`max_bytes` of a body, to be there `timeout_s` after its head."""

    max_bytes: int
    timeout_s: float


class BodyReader(Generic[T]):
    """Bodies of one route."""

    def __init__(self, kind: type[T], limits: BodyLimits) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._limits = limits

    async def read(self, scope: Scope, receive: Receive) -> tuple[T, int]:
        """The decoded body and its size in bytes. Raises ApiError, ClientGone."""
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise ApiError(
                415, "The body is JSON: send `Content-Type: application/json`.", code="unsupported_media_type"
            )
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise ApiError(415, "A compressed body is not accepted.", code="unsupported_content_encoding")
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                data = await self._collect(headers.get(b"content-length", b""), receive)
        except TimeoutError:
            raise ApiError(408, "The body took too long to arrive.", code="slow_body") from None
        return self.decode(data), len(data)

    async def _collect(self, length: bytes, receive: Receive) -> bytes:
        limit = self._limits.max_bytes
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        data = bytearray()
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise ClientGone
            data += event.get("body", b"")
            if len(data) > limit:
                raise _too_large(limit)
            if not event.get("more_body", False):
                return bytes(data)

    def decode(self, data: bytes) -> T:
        """The struct. Raises ApiError 400."""
        try:
            body = self._decoder.decode(data)
            check_refused(data)
        except msgspec.ValidationError as error:
            text = str(error)
            found = _PATH.search(text)
            param = found[1] if found else None
            message = text[: found.start()] if found else text
            raise bad_request(f"{param}: {message}" if param else message, param) from None
        except msgspec.DecodeError as error:
            raise bad_request(_not_json(data, str(error)), code="invalid_json") from None
        except UnicodeDecodeError:
            raise bad_request("The body is not valid UTF-8.", code="invalid_json") from None
        except RecursionError:
            raise bad_request("The body is nested too deeply.", code="invalid_json") from None
        return body


def _not_json(data: bytes, reason: str) -> str:
    if data.startswith(b"\xef\xbb\xbf"):
        return "The body begins with a byte order mark; send plain UTF-8."
    if not data.strip():
        return "The body is empty; send a JSON object."
    try:
        data.decode()
    except UnicodeDecodeError:
        return "The body is not valid UTF-8."
    return f"The body is not valid JSON: {reason.removeprefix('JSON is malformed: ')}."


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes.", code="body_too_large")
