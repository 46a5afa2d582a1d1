from __future__ import annotations

import asyncio
import socket

from tests.fakes.openai_server import fake_server
from wkvm_frontend.cli.local_http import LocalHttp, status_line


def test_the_model_is_read_and_what_is_missing_is_none() -> None:
    with fake_server() as fake:
        port = int(fake.url.rpartition(":")[2])
        server = LocalHttp("127.0.0.1", port, timeout_s=0.5)
        answer = asyncio.run(server.get("/v1/models"))
        # It keeps the connection open, so this answer has no end: no answer in time.
        assert answer is None
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = LocalHttp("127.0.0.1", unused.getsockname()[1])
        assert asyncio.run(nobody.get("/ready")) is None
        assert asyncio.run(nobody.ready()) is False
        assert asyncio.run(nobody.model()) is None
        assert asyncio.run(nobody.metrics()) is None


def test_metrics_are_summed_over_their_labels() -> None:
    async def serve_once() -> dict[str, float] | None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            lines = b'# TYPE a counter\na{x="1"} 2\na{x="2"} 3.5\nb 1e3\nc NaN\nd{le="+Inf"} 4\nbroken\n'
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + lines)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            return await LocalHttp("127.0.0.1", server.sockets[0].getsockname()[1]).metrics()

    found = asyncio.run(serve_once())
    assert found is not None
    assert (found["a"], found["b"], found["d"]) == (5.5, 1000.0, 4.0)


def test_the_status_line_tells_the_load_and_is_silent_without_any() -> None:
    before = {"wkvm_generated_tokens_total": 1000.0}
    now = {
        "wkvm_generated_tokens_total": 16000.0,
        "wkvm_requests_running": 12.0,
        "wkvm_requests_waiting": 3.0,
        "wkvm_slots_used": 12.0,
        "wkvm_slots_free": 52.0,
    }
    assert status_line(before, now, 10.0) == "12 running, 3 waiting, 1,500 tokens/s, 12/64 slots"
    assert status_line(now, now | {"wkvm_requests_running": 0.0, "wkvm_requests_waiting": 0.0}, 10.0) is None
    assert status_line(now, before, 10.0) is None
