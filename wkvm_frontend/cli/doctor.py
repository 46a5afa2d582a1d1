"""`wkvm doctor`: what would keep `wkvm serve` from working, and what to do about it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from wkvm_frontend.cli import checks
from wkvm_frontend.cli.checks import Finding, Level
from wkvm_frontend.cli.local_http import LocalHttp
from wkvm_proto.settings import BadSettings, resolve, setting


class DoctorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Those of `wkvm serve` that are looked at."""

    model: Annotated[str, setting("Model that is to be served")] = "demo"
    host: Annotated[str, setting("Address to listen on")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], setting("Port to listen on")] = 8000
    store: Annotated[str, setting("Folder of the states", metavar="DIR")] = ""
    slots: Annotated[Annotated[int, Meta(ge=1, le=2**24)] | None, setting("States wanted on the device")] = None


def main(argv: Sequence[str]) -> int:
    """0 when nothing is wrong, 1 when something is, 2 for bad settings."""
    try:
        settings = resolve(DoctorSettings, "wkvm doctor", argv, os.environ, description="Looks before `wkvm serve`.")
    except BadSettings as error:
        print(f"wkvm doctor: {error}", file=sys.stderr)
        return 2
    wrong = 0
    for finding in findings(settings):
        print(f"{finding.level:5}{finding.subject:10}{finding.text}", flush=True)
        if finding.remedy and finding.level is not Level.GOOD:
            print(f"{'':15}-> {finding.remedy}", flush=True)
        wrong += finding.level is Level.BAD
    if wrong:
        print(f"{wrong} thing(s) to put right", file=sys.stderr)
    return 1 if wrong else 0


def findings(settings: DoctorSettings) -> Iterator[Finding]:
    """One after another, as each is found."""
    yield checks.python_version()
    yield checks.packages()
    yield checks.device()
    yield checks.model_files(settings.model)
    available = checks.available_memory()
    if available is not None:
        yield checks.memory(settings.model, settings.slots, available)
    yield checks.store(checks.store_folder(settings.store, os.environ))
    yield checks.sockets(os.environ)
    server = LocalHttp(settings.host.strip("[]"), settings.port)
    ready = asyncio.run(server.ready()) if settings.port else False
    served = asyncio.run(server.model()) if ready else None
    yield checks.port(settings.host, settings.port, served, ready)
