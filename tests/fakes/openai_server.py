"""A small OpenAI-compatible server whose answers are known: what the load generator is judged against."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OnePiece:
    """A writer that sends everything written before a drain at once."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._data = b""

    def write(self, data: bytes) -> None:
        self._data += data

    async def drain(self) -> None:
        self._writer.write(self._data)
        self._data = b""
        await self._writer.drain()


class FakeServer:
    """Answers `max_tokens` tokens, one event each. The model's name chooses how it misbehaves: `refuses` with 429,
    `breaks` with an error event after two tokens, `cuts` the connection after two, `silent` never answers, `closes`
    every connection after its answer, `together` sends all tokens in one piece, `uncounted` tells no usage."""

    def __init__(self) -> None:
        self.requests: list[dict[str, object]] = []
        self.heads: list[str] = []
        self.connections = 0
        self.url = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if head.startswith("GET"):
            await self._json(writer, 200, {"data": [{"id": "tiny"}]})
            return True
        length = next(int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        self.requests.append(body)
        chat = "/chat/" in head
        text = "".join(message["content"] for message in body["messages"]) if chat else body["prompt"]
        usage = {"prompt_tokens": 7 + 2 * len(text.split()), "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            await self._json(writer, 200, {"usage": None if body["model"] == "uncounted" else usage})
            return True
        return await self._stream(writer, body, chat, usage)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict, chat: bool, usage: dict) -> bool:  # type: ignore[type-arg]
        model, count = body["model"], body["max_tokens"]
        if model == "refuses":
            await self._json(writer, 429, {"error": {"message": "come later", "code": "queue_full"}})
            return True
        if model == "silent":
            await asyncio.sleep(30)
            return False
        if model == "together":
            writer = OnePiece(writer)  # type: ignore[assignment]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Connection: close\r\n" if model == "closes" else b"")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        if chat:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for place in range(count):
            if place == 2 and model == "cuts":
                await writer.drain()
                return False
            if place == 2 and model == "breaks":
                self._event(writer, {"error": {"message": "it broke", "code": "numerical_error"}})
                break
            word = f'w{place} "text": "content":"'  # looks like a key, but its quotes are escaped
            self._event(writer, {"choices": [{"delta": {"content": word}} if chat else {"text": word}]})
            if model != "together":
                await writer.drain()
                await asyncio.sleep(0.001)
        else:
            self._event(writer, {"choices": [{"delta": {}, "finish_reason": "length"}], "usage": None})
            if model != "uncounted":
                self._event(writer, {"choices": [], "usage": usage})
            self._chunk(writer, b"data: [DONE]\n\n")
        self._chunk(writer, b"")
        await writer.drain()
        return model != "closes"

    def _event(self, writer: asyncio.StreamWriter, event: object) -> None:
        self._chunk(writer, b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    @staticmethod
    async def _json(writer: asyncio.StreamWriter, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        await writer.drain()


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Running in a thread of its own."""
    fake = FakeServer()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(fake.start(), loop).result(5)
    try:
        yield fake
    finally:

        async def stop() -> None:
            server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()
