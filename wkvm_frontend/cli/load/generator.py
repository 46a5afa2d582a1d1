"""One load process: begins conversations, times their requests, and writes down every failure by its kind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec

from wkvm_frontend.cli.load.answer import Answer
from wkvm_frontend.cli.load.connection import Broken, Connection
from wkvm_frontend.cli.load.conversation import Conversation
from wkvm_frontend.cli.load.job import Job, Progress, Result

PROGRESS_S = 0.2


class Generator:
    """Runs a job. Connections are kept and used again."""

    def __init__(self, job: Job, tell: Callable[[Progress], None]) -> None:
        self.job = job
        self._tell = tell
        self.results: list[Result] = []
        self._failures = 0
        self._tokens = 0
        self._idle: list[Connection] = []
        self._begun = 0
        route = "/v1/chat/completions" if job.endpoint == "chat" else "/v1/completions"
        auth = f"Authorization: Bearer {job.api_key}\r\n" if job.api_key else ""
        self._head = (
            f"POST {job.path}{route} HTTP/1.1\r\nHost: {job.authority}\r\nUser-Agent: wkvm-bench\r\n{auth}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: "
        ).encode()
        self._base: dict[str, Any] = {
            "model": job.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": job.output_tokens,
            "temperature": job.temperature,
        }
        if job.ignore_eos:
            self._base["ignore_eos"] = True

    async def warm_up(self) -> None:
        """Requests that do not count; their failures would come again and be counted then."""
        limit = asyncio.Semaphore(max(1, self.job.concurrency))

        async def one(number: int) -> None:
            async with limit:
                await self._converse(f"{self.job.seed}/warm-up/{number}", turns=1, count=lambda _: None)

        await asyncio.gather(*(one(number) for number in range(self.job.warmup)))

    async def run(self) -> list[Result]:
        """All of it; returns when the last answer ended."""
        ticker = asyncio.create_task(self._tick())
        try:
            if self.job.concurrency:
                await asyncio.gather(*(self._user() for _ in range(self.job.concurrency)))
            else:
                await self._arrivals()
        finally:
            ticker.cancel()
            for connection in self._idle:
                connection.close()
        return self.results

    async def _user(self) -> None:
        end = self._deadline()
        while time.monotonic() < end and self._may_begin():
            await self._converse(self._next_seed(), turns=self.job.turns, count=self._count)

    async def _arrivals(self) -> None:
        end = self._deadline()
        chance = random.Random(self.job.seed)  # noqa: S311 - arrival times, no secret
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while self._may_begin():
                due += chance.expovariate(self.job.rate)
                if due >= end:
                    break
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                seed = self._next_seed()
                group.create_task(self._converse(seed, turns=self.job.turns, count=self._count))

    def _deadline(self) -> float:
        return time.monotonic() + self.job.duration_s if self.job.duration_s else float("inf")

    def _may_begin(self) -> bool:
        return not self.job.conversations or self._begun < self.job.conversations

    def _next_seed(self) -> str:
        self._begun += 1
        return f"{self.job.seed}/{self._begun}"

    async def _converse(self, seed: str, *, turns: int, count: Callable[[Result], None]) -> None:
        conversation = Conversation(self.job.endpoint, self._base, self.job.words, seed)
        for turn in range(turns):
            last = turn == turns - 1
            answer = Answer(keep_text=not last)
            result = await self._request(conversation.next_body(), answer)
            count(result)
            if last or result.failure:
                return  # after a failure there is nothing to go on from
            conversation.answered(answer.text())

    async def _request(self, body: bytes, answer: Answer) -> Result:
        request = self._head + str(len(body)).encode() + b"\r\n\r\n" + body
        started = time.monotonic()
        failure, detail = "", ""
        try:
            async with asyncio.timeout(self.job.timeout_s):
                failure, detail = await self._exchange(request, answer)
        except TimeoutError:
            failure = "timeout"
        except Broken as error:
            failure = str(error)
        except OSError as error:
            failure, detail = "cannot connect", error.strerror or str(error)
        return Result(
            started=started,
            first=answer.first,
            last=answer.last,
            ended=time.monotonic(),
            tokens=answer.tokens,
            prompt_tokens=answer.prompt_tokens,
            gaps=answer.gaps.tobytes(),
            failure=failure,
            detail=detail[:300],
        )

    async def _exchange(self, request: bytes, answer: Answer) -> tuple[str, str]:
        """Kind and detail of the failure; both empty after a whole answer."""
        while self._idle:
            connection = self._idle.pop()
            try:
                status = await connection.exchange(request, answer)
                break
            except Broken:
                if connection.answered:
                    raise
                # The server closed it while it lay idle: that is no failure of this request.
        else:
            connection = await Connection.open(self.job.host, self.job.port, self.job.tls)
            status = await connection.exchange(request, answer)
        if connection.usable:
            self._idle.append(connection)
        if status != 200:
            code, message = error_of(connection.body)
            return f"http {status}" + (f" {code}" if code else ""), message
        if answer.error:
            line = answer.error[answer.error.find(b"{") :].split(b"\n")[0]
            code, message = error_of(line)
            return "error event" + (f" {code}" if code else ""), message
        if not answer.ended:
            return "stream without end", ""
        return "", ""

    def _count(self, result: Result) -> None:
        self.results.append(result)
        self._tokens += result.tokens
        self._failures += bool(result.failure)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._tell(Progress(len(self.results), self._failures, self._tokens))


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error = _Error()


def error_of(body: bytes) -> tuple[str, str]:
    """Code and message of an error answer; what is not such an answer is its own message."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "", body.decode("utf-8", "replace")
    return str(error.code or error.type or ""), error.message
