"""`wkvm bench serve`: load on any OpenAI-compatible server, and what it makes of it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from tqdm import tqdm

from wkvm_frontend.cli.load.figures import Figures, figures, table
from wkvm_frontend.cli.load.job import Job, Result
from wkvm_frontend.cli.load.server import BenchFailed, Server
from wkvm_frontend.cli.load.worker import run_jobs
from wkvm_proto.settings import BadSettings, resolve, setting

Positive = Annotated[int, Meta(ge=1, le=10_000_000)]
Amount = Annotated[float, Meta(ge=0.0, le=1e7)]


class BenchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of `wkvm bench serve`."""

    url: Annotated[str, setting("Server, with or without /v1", group="server")] = "http://127.0.0.1:8000"
    model: Annotated[str, setting("Model to ask for; the server's first one unless told", group="server")] = ""
    api_key: Annotated[str, setting("Bearer token", group="server")] = ""
    endpoint: Annotated[Literal["chat", "completions"], setting("chat or completions", group="server")] = "chat"
    concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        setting("Conversations at a time (16 unless --rate is given)", group="load"),
    ] = None
    rate: Annotated[
        Amount, setting("Conversations a second instead, arriving at random (Poisson); 0: none", group="load")
    ] = 0.0
    requests: Annotated[
        Annotated[int, Meta(ge=1, le=10_000_000)] | None,
        setting("Conversations in all (10 a concurrent one, or 100, unless --duration is given)", group="load"),
    ] = None
    duration: Annotated[Amount, setting("No conversation begins after so many seconds; 0: no limit", group="load")] = (
        0.0
    )
    input_tokens: Annotated[Positive, setting("Tokens of a prompt or message", group="load")] = 128
    output_tokens: Annotated[Positive, setting("Most tokens of an answer", group="load")] = 128
    turns: Annotated[Positive, setting("Requests of a conversation, each with all before it", group="load")] = 1
    ignore_eos: Annotated[
        bool, setting("Ask for exactly --output-tokens (the server must know the field)", group="load")
    ] = False
    temperature: Annotated[Annotated[float, Meta(ge=0.0, le=100.0)], setting("Of sampling", group="load")] = 0.0
    seed: Annotated[Annotated[int, Meta(ge=0)], setting("Of prompts and arrivals", group="load")] = 0
    timeout: Annotated[Annotated[float, Meta(gt=0.0, le=1e6)], setting("Seconds for a request", group="load")] = 600.0
    warmup: Annotated[
        Annotated[int, Meta(ge=0, le=100_000)], setting("Requests before the clock starts", group="load")
    ] = 4
    workers: Annotated[Annotated[int, Meta(ge=1, le=256)], setting("Load processes", group="load")] = 1
    json: Annotated[str, setting("Write the figures there too", group="report", metavar="FILE")] = ""


def main(argv: Sequence[str]) -> int:
    """0; 1 when the server cannot be used or every request failed; 2 for bad settings."""
    try:
        settings = resolve(BenchSettings, "wkvm bench serve", argv, os.environ, description="Benchmark of a server.")
        if settings.concurrency and settings.rate:
            raise BadSettings("--concurrency and --rate: give one of them")
        server = Server(settings.url, settings.api_key, settings.timeout)
    except (BadSettings, ValueError) as error:
        print(f"wkvm bench serve: {error}", file=sys.stderr)
        return 2
    try:
        model = settings.model or server.first_model()
        words = server.words_for(settings.input_tokens, model, settings.endpoint)
        jobs = _jobs(settings, server, model, words or settings.input_tokens)
        print(_about(settings, model, words, jobs), file=sys.stderr)
        results = asyncio.run(_measure(settings, jobs))
    except BenchFailed as error:
        print(f"wkvm bench serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if not results:
        print("wkvm bench serve: no request was begun", file=sys.stderr)
        return 1
    found = figures(results)
    print(table(found))
    if settings.json:
        _write(settings, model, found)
    return 0 if found.completed else 1


def _about(settings: BenchSettings, model: str, words: int | None, jobs: Sequence[Job]) -> str:
    load = f"{settings.rate:g} conversations a second"
    if not settings.rate:
        load = f"{sum(job.concurrency for job in jobs)} conversations at a time"
    size = f"{settings.input_tokens} tokens in"
    size += f" ({words} words)" if words else " (one a word: the server does not count them)"
    return (
        f"{model} at {settings.url}, {settings.endpoint}: {load}, {settings.turns} turn(s), {size}, "
        f"up to {settings.output_tokens} out, {len(jobs)} load process(es)"
    )


def _write(settings: BenchSettings, model: str, found: Figures) -> None:
    asked = msgspec.structs.asdict(settings) | {"model": model}
    del asked["api_key"]
    document = {"settings": asked, "figures": found}
    Path(settings.json).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def _jobs(settings: BenchSettings, server: Server, model: str, words: int) -> list[Job]:
    """The load, split evenly."""
    concurrency = 0 if settings.rate else settings.concurrency or 16
    conversations = settings.requests or 0
    if not conversations and not settings.duration:
        conversations = 10 * concurrency or 100
    workers = min(settings.workers, concurrency or settings.workers, conversations or settings.workers)

    def part(whole: int, worker: int) -> int:
        return whole // workers + (worker < whole % workers)

    return [
        Job(
            host=server.host,
            port=server.port,
            tls=server.tls,
            authority=server.authority,
            path=server.path,
            api_key=settings.api_key,
            endpoint=settings.endpoint,
            model=model,
            concurrency=part(concurrency, worker),
            rate=settings.rate / workers,
            conversations=part(conversations, worker),
            duration_s=settings.duration,
            turns=settings.turns,
            warmup=part(settings.warmup, worker),
            words=words,
            output_tokens=settings.output_tokens,
            ignore_eos=settings.ignore_eos,
            temperature=settings.temperature,
            seed=settings.seed * 1000 + worker,
            timeout_s=settings.timeout,
        )
        for worker in range(workers)
    ]


async def _measure(settings: BenchSettings, jobs: Sequence[Job]) -> list[Result]:
    total = sum(job.conversations for job in jobs) * settings.turns
    with tqdm(total=total or None, unit="req", dynamic_ncols=True, disable=None) as bar:

        def advanced(requests: int) -> None:
            bar.update(requests)

        return await run_jobs(jobs, advanced)
