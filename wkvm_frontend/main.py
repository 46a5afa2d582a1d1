"""`wkvm-api`: the stateless HTTP process."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Sequence

from wkvm_frontend.api.app import application
from wkvm_frontend.api.service import Service
from wkvm_frontend.metrics.meter import Meter
from wkvm_frontend.server.server import ApiServer, address_of, listen
from wkvm_frontend.settings import ApiSettings, check
from wkvm_frontend.wire.fleet import Fleet
from wkvm_frontend.wire.link import LinkTiming
from wkvm_proto.settings import BadSettings, resolve

BAD_CONFIG_EXIT = 78


def main(argv: Sequence[str] | None = None) -> None:
    """Runs until SIGTERM. Exit status 0 after an orderly end, 78 for bad settings."""
    try:
        settings = resolve(
            ApiSettings,
            "wkvm-api",
            sys.argv[1:] if argv is None else argv,
            os.environ,
            description="Serves the HTTP interface of one or several wkvm cores.",
        )
        check(settings)
        listener = listen(settings)
    except BadSettings as error:
        print(f"wkvm-api: {error}", file=sys.stderr)
        raise SystemExit(BAD_CONFIG_EXIT) from None
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    meter = Meter()
    name = f"api-{os.getpid()}-{secrets.token_hex(4)}"
    fleet = Fleet(settings.core, name, meter.snapshot, LinkTiming(settings.core_silence_s))
    service = Service(settings, fleet, meter)
    print(f"wkvm-api listening on http://{address_of(listener)}", flush=True)
    ApiServer(service, application(service)).run(sockets=[listener])
