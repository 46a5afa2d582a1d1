"""Settings of `wkvm-api`."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec

from wkvm_proto.settings import BadSettings, setting

Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]


class ApiSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Resolved once at start; see wkvm_proto.settings for where values come from."""

    core: Annotated[
        tuple[str, ...],
        setting("Socket of a core, as ipc:///run/wkvm/core.sock; may be given again", group="cores", metavar="URI"),
    ] = ()
    host: Annotated[str, setting("Address to listen on; loopback only", group="http")] = "127.0.0.1"
    port: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=65535)], setting("Port to listen on; 0 takes a free one", group="http")
    ] = 8000
    fd: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        setting("File descriptor of an inherited listening socket, in place of host and port", group="http"),
    ] = None
    reuse_port: Annotated[
        bool, setting("Share the port with other processes that ask for it too (SO_REUSEPORT)", group="http")
    ] = False
    backlog: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=65535)], setting("Connections that may wait to be accepted", group="http")
    ] = 2048
    allowed_hosts: Annotated[
        tuple[str, ...],
        setting(
            "Name accepted in the Host header besides the loopback ones; may be given again",
            group="http",
            metavar="NAME",
        ),
    ] = ()
    access_log: Annotated[bool, setting("Log one line a request", group="log")] = False
    log_level: Annotated[str, setting("debug, info, warning or error", group="log")] = "info"

    max_body_bytes: Annotated[
        Annotated[int, msgspec.Meta(ge=1024, le=2**30)], setting("Largest request body", group="limits")
    ] = 8 * 2**20
    max_header_bytes: Annotated[
        Annotated[int, msgspec.Meta(ge=1024, le=2**20)], setting("Largest request head", group="limits")
    ] = 64 * 2**10
    max_headers: Annotated[
        Annotated[int, msgspec.Meta(ge=8, le=10_000)], setting("Most header fields of a request", group="limits")
    ] = 100
    max_sequences: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=100_000)], setting("Most prompts times n in one request", group="limits")
    ] = 256
    max_stream_bytes: Annotated[
        Annotated[int, msgspec.Meta(ge=4096, le=2**30)],
        setting("Bytes that wait for a slow reader before its stream is ended", group="limits"),
    ] = 256 * 2**10
    default_chat_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=1)],
        setting(
            "Tokens of a chat answer when the request names no maximum; the model's own bound if that is lower",
            group="limits",
        ),
    ] = 4096

    header_timeout_s: Annotated[Seconds, setting("For the whole head of a request", group="times")] = 10.0
    body_timeout_s: Annotated[Seconds, setting("For the whole body of a request", group="times")] = 30.0
    request_timeout_s: Annotated[
        Seconds, setting("For a whole generation; then it fails with `deadline`", group="times")
    ] = 3600.0
    accept_timeout_s: Annotated[Seconds, setting("For the core to queue or refuse a request", group="times")] = 10.0
    keep_alive_s: Annotated[
        Seconds, setting("Silence in a stream after which a comment line is sent", group="times")
    ] = 15.0
    slow_client_s: Annotated[
        Seconds, setting("A client that reads nothing for so long is disconnected", group="times")
    ] = 60.0
    idle_connection_s: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=86_400)], setting("An idle connection is closed after", group="times")
    ] = 75
    ready_timeout_s: Annotated[
        Seconds, setting("For the round trip of /ready through the core's step loop", group="times")
    ] = 1.0
    core_wait_s: Annotated[
        Annotated[float, msgspec.Meta(ge=0.0, le=1e9)],
        setting("A request that finds no engine ready waits so long for one", group="times"),
    ] = 1.0
    core_silence_s: Annotated[Seconds, setting("A silent core is taken for dead after", group="times")] = 2.0
    drain_s: Annotated[Seconds, setting("At SIGTERM, for open streams to finish", group="times")] = 30.0


def check(settings: ApiSettings) -> None:
    """Raises BadSettings for values that fit their type and still cannot be used."""
    if not settings.core:
        raise BadSettings("--core: give the socket of at least one core, as ipc:///run/wkvm/core.sock")
    for uri in settings.core:
        if not uri.startswith(("ipc://", "tcp://127.0.0.1:", "tcp://[::1]:")):
            raise BadSettings(f"--core: {uri!r} is neither ipc:// nor on loopback")
    if settings.log_level not in ("debug", "info", "warning", "error"):
        raise BadSettings(f"--log-level: {settings.log_level!r} is not debug, info, warning or error")
    if not is_loopback(settings.host):
        raise BadSettings(
            f"--host: {settings.host!r} is not a loopback address; without keys this server listens there only"
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address, without port, is this machine's loopback."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
