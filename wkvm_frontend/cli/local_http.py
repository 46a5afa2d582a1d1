"""A server on this machine, asked now and then: is it ready, what does it serve, what do its metrics say?"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import msgspec

_SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class LocalHttp:
    """Questions to one address. None of them raises: None means no answer in time."""

    def __init__(self, host: str, port: int, timeout_s: float = 3.0) -> None:
        self.host = host
        self.port = port
        self._timeout_s = timeout_s

    async def get(self, route: str) -> tuple[int, bytes] | None:
        """Status and body."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._get(route)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return None

    async def _get(self, route: str) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            name = f"[{self.host}]" if ":" in self.host else self.host
            # HTTP/1.0, so that the body ends with the connection and is not chunked.
            writer.write(f"GET {route} HTTP/1.0\r\nHost: {name}:{self.port}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            return int(head.split(b" ", 2)[1]), await reader.read(-1)
        finally:
            writer.close()

    async def ready(self) -> bool:
        """The next request would succeed."""
        answer = await self.get("/ready")
        return answer is not None and answer[0] == 200

    async def model(self) -> str | None:
        """The first model it lists."""
        answer = await self.get("/v1/models")
        try:
            return str(msgspec.json.decode(answer[1])["data"][0]["id"]) if answer is not None else None
        except (msgspec.DecodeError, LookupError, TypeError):
            return None

    async def metrics(self) -> dict[str, float] | None:
        """Counters and gauges by name, summed over their labels."""
        answer = await self.get("/metrics")
        if answer is None or answer[0] != 200:
            return None
        found: dict[str, float] = {}
        for name, value in _SAMPLE.findall(answer[1].decode("utf-8", "replace")):
            try:
                found[name] = found.get(name, 0.0) + float(value)
            except ValueError:
                continue
        return found


def status_line(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> str | None:
    """What happened between two readings of the metrics; None when nothing did."""
    running, waiting = now.get("wkvm_requests_running", 0.0), now.get("wkvm_requests_waiting", 0.0)

    def rate(name: str) -> float:
        return max(0.0, now.get(name, 0.0) - before.get(name, 0.0)) / seconds

    tokens = rate("wkvm_generated_tokens_total")
    if not (running or waiting or tokens):
        return None
    used, free = now.get("wkvm_slots_used", 0.0), now.get("wkvm_slots_free", 0.0)
    return f"{running:.0f} running, {waiting:.0f} waiting, {tokens:,.0f} tokens/s, {used:.0f}/{used + free:.0f} slots"
