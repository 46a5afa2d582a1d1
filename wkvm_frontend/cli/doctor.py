"""`wkvm doctor`: what would keep `wkvm serve` from working, and what to do about it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence

from wkvm_frontend.cli import checks, device
from wkvm_frontend.cli.checks import Finding, Level, Needs
from wkvm_frontend.cli.local_http import LocalHttp
from wkvm_frontend.cli.serve import ServeSettings, config_of, core_flags, split_flags
from wkvm_frontend.settings import ApiSettings
from wkvm_proto.settings import PREFIX, BadSettings, resolve
from wkvm_proto.survey import Survey

DESCRIPTION = "Looks before `wkvm serve`, with the same flags, those that it hands on to its programs included."


def main(argv: Sequence[str]) -> int:
    """0 when nothing is wrong, 1 when something is, 2 for bad settings."""
    try:
        own, for_core, for_api = split_flags(argv)
        settings = resolve(ServeSettings, "wkvm doctor", own, os.environ, description=DESCRIPTION)
        environment = os.environ | {PREFIX + "CONFIG": config_of(own) or os.environ.get(PREFIX + "CONFIG", "")}
        resolve(ApiSettings, "wkvm-api", for_api, environment)
    except BadSettings as error:
        print(f"wkvm doctor: {error}", file=sys.stderr)
        return 2
    wrong = 0
    for finding in findings(settings, [*core_flags(settings), *for_core], environment):
        print(f"{finding.level:5}{finding.subject:10}{finding.text}", flush=True)
        if finding.remedy and finding.level is not Level.GOOD:
            print(f"{'':15}-> {finding.remedy}", flush=True)
        wrong += finding.level is Level.BAD
    if wrong:
        print(f"{wrong} thing(s) to put right", file=sys.stderr)
    return 1 if wrong else 0


def findings(settings: ServeSettings, flags: Sequence[str], environment: dict[str, str]) -> Iterator[Finding]:
    """One after another, as each is found. flags: the core's."""
    yield checks.python_version()
    yield checks.packages()
    found = device.survey(flags, environment)
    if isinstance(found, Finding):
        yield found
    else:
        yield device.torch(found)
        yield device.device(found, device.driver_version())
        if found.card is not None:
            yield device.gpu_packages()
    yield checks.model_files(settings.model)
    if isinstance(found, Survey):
        yield from _memory(settings, found)
    store = found.store if isinstance(found, Survey) else settings.store
    yield checks.store(checks.store_folder(store, os.environ))
    yield checks.sockets(os.environ)
    server = LocalHttp(settings.host.strip("[]"), settings.port)
    ready = asyncio.run(server.ready()) if settings.port else False
    served = asyncio.run(server.model()) if ready else None
    yield checks.port(settings.host, settings.port, served, ready)


def _memory(settings: ServeSettings, found: Survey) -> Iterator[Finding]:
    place = checks.model_folder(settings.model)
    if place is None:
        needs = Needs(found.weight_bytes, found.slot_bytes)
    else:
        needs = checks.needs_of_files(place, found.state_dtype)
    if found.card is not None:
        where = "of the GPU to use, of which lanes and graphs take some"
        yield checks.memory(needs, found.slots, device.usable_bytes(found), where)
        return
    available = checks.available_memory()
    if available is not None:
        yield checks.memory(needs, found.slots, available)
