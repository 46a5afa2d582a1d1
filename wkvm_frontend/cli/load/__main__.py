"""`python -m wkvm_frontend.cli.load`: a job on standard input, reports on standard output."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import uvloop

from wkvm_frontend.cli.load.generator import Generator
from wkvm_frontend.cli.load.job import Job, Ready, Report, Results, framed


def main() -> int:
    """0 after the last report; 1 when the parent went away."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(job))


async def _run(job: Job) -> int:
    generator = Generator(job, _tell)
    await generator.warm_up()
    _tell(Ready())
    if not await asyncio.to_thread(sys.stdin.buffer.readline):
        return 1
    _tell(Results(tuple(await generator.run())))
    return 0


def _tell(report: Report) -> None:
    sys.stdout.buffer.write(framed(report))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
