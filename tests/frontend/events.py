"""Reading event streams as the bytes they are."""

from __future__ import annotations

import json
import socket
import time
from typing import Any


def events(text: str) -> list[dict[str, Any]]:
    """The events before `[DONE]`, which is there and last. Every one ends with a blank line."""
    parts = text.split("\n\n")
    assert parts[-1] == "", "the stream ends with a blank line"
    assert parts[-2] == "data: [DONE]"
    found = [part for part in parts[:-2] if not part.startswith(":")]
    assert all(part.startswith("data: ") for part in found)
    return [json.loads(part.removeprefix("data: "), parse_constant=_no_constant) for part in found]


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def texts(found: list[dict[str, Any]], field: str = "content") -> dict[int, str]:
    """The joined deltas of each choice; `field` "text" for completions."""
    joined: dict[int, str] = {}
    for event in found:
        for choice in event["choices"]:
            piece = choice["text"] if field == "text" else choice["delta"].get(field)
            joined[choice["index"]] = joined.get(choice["index"], "") + (piece or "")
    return joined


def finish_reasons(found: list[dict[str, Any]]) -> dict[int, str]:
    """The one finish reason of each choice."""
    reasons: dict[int, str] = {}
    for event in found:
        for choice in event["choices"]:
            if choice["finish_reason"] is not None:
                assert choice["index"] not in reasons
                reasons[choice["index"]] = choice["finish_reason"]
    return reasons


def raw_request(
    address: tuple[str, int], body: bytes, *, path: str = "/v1/completions", version: str = "1.1", extra: str = "",
    host: str = "localhost", kind: str = "application/json",
) -> socket.socket:  # fmt: skip
    """A connection on which that request has been sent."""
    line = socket.create_connection(address, timeout=10)
    head = f"POST {path} HTTP/{version}\r\nHost: {host}\r\nContent-Type: {kind}\r\n"
    line.sendall(f"{head}Content-Length: {len(body)}\r\n{extra}\r\n".encode() + body)
    return line


def read_all(line: socket.socket, piece: int = 65536) -> bytes:
    """Everything until the other side closes."""
    data = bytearray()
    while part := line.recv(piece):
        data += part
    return bytes(data)


def eventually(condition: Any, seconds: float = 5.0) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
