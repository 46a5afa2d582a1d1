"""Load processes, from their parent's side."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

import msgspec

from wkvm_frontend.cli.lifeline import dies_with_parent
from wkvm_frontend.cli.load.job import Job, Progress, Ready, Result, Results, decode_report
from wkvm_frontend.cli.load.server import BenchFailed


async def run_jobs(jobs: Sequence[Job], advanced: Callable[[int], None]) -> list[Result]:
    """Each job in a process of its own, begun together once all are warm; `advanced` hears of requests that ended.

    Raises BenchFailed when a process ends without its results."""
    workers = [await _Worker.start(job) for job in jobs]
    try:
        await asyncio.gather(*(worker.until_ready() for worker in workers))
        for worker in workers:
            worker.go()
        parts = await asyncio.gather(*(worker.results(advanced) for worker in workers))
        return [result for part in parts for result in part]
    finally:
        for worker in workers:
            await worker.stop()


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(cls, job: Job) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "wkvm_frontend.cli.load"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=dies_with_parent(),
        )
        worker = cls(process)
        worker._stdin.write(msgspec.json.encode(job) + b"\n")
        return worker

    async def until_ready(self) -> None:
        while not isinstance(await self._next(), Ready):
            pass

    def go(self) -> None:
        self._stdin.write(b"go\n")

    async def results(self, advanced: Callable[[int], None]) -> tuple[Result, ...]:
        seen = 0
        while True:
            report = await self._next()
            if isinstance(report, Results):
                advanced(len(report.results) - seen)
                return report.results
            if isinstance(report, Progress):
                advanced(report.requests - seen)
                seen = report.requests

    async def _next(self) -> Ready | Progress | Results:
        try:
            size = int.from_bytes(await self._stdout.readexactly(4), "little")
            return decode_report(await self._stdout.readexactly(size))
        except asyncio.IncompleteReadError:
            raise BenchFailed(f"a load process ended with {await self._process.wait()}") from None

    async def stop(self) -> None:
        self._stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 1.0)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
