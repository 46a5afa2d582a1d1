"""`wkvm serve`: a model over HTTP on this machine, in one command."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from wkvm_frontend.cli.child import Child
from wkvm_frontend.cli.local_http import LocalHttp
from wkvm_frontend.cli.runtime_folder import SOCKET_NAME, runtime_folder
from wkvm_frontend.cli.supervisor import EXIT_USAGE, Supervisor
from wkvm_frontend.settings import ApiSettings
from wkvm_proto.settings import PREFIX, BadSettings, resolve, setting

DESCRIPTION = (
    "Serves a model over HTTP: one wkvm-core and its wkvm-api processes, started and restarted. Every other flag goes "
    "to the program that knows it; see `wkvm-core --help` and `wkvm-api --help`."
)
_OURS_TO_SET = {"core", "fd", "reuse_port", "socket"}
BACKLOG = 2048


class ServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of `wkvm serve` itself."""

    model: Annotated[str, setting("`demo`, `counting`, `random:1.5b`, a folder, a .pth or .safetensors file")] = "demo"
    host: Annotated[str, setting("Address to listen on")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], setting("Port to listen on; 0 takes a free one")] = 8000
    frontends: Annotated[Annotated[int, Meta(ge=1, le=256)], setting("wkvm-api processes")] = 1
    store: Annotated[str, setting("Folder of the states; the core's own choice unless told", metavar="DIR")] = ""
    slots: Annotated[
        Annotated[int, Meta(ge=1, le=2**24)] | None, setting("States on the device; as many as fit unless told")
    ] = None
    drain_s: Annotated[
        Annotated[float, Meta(ge=0.0, le=86_400.0)], setting("Seconds for open answers to finish at the end")
    ] = 10.0


class Programs(msgspec.Struct, frozen=True):
    """What is started; flags follow."""

    core: tuple[str, ...] = (sys.executable, "-m", "wkvm_core")
    frontend: tuple[str, ...] = (sys.executable, "-m", "wkvm_frontend")


def main(argv: Sequence[str], programs: Programs | None = None) -> int:
    """0 after Ctrl-C or SIGTERM; 1 when the port or the runtime folder cannot be had; 2 for bad settings; otherwise
    the exit code of the program that gave up."""
    try:
        own, for_core, for_api = split_flags(argv)
        settings = resolve(ServeSettings, "wkvm serve", own, os.environ, description=DESCRIPTION)
    except BadSettings as error:
        print(f"wkvm serve: {error}", file=sys.stderr)
        return EXIT_USAGE
    config = config_of(own)
    if config:
        os.environ[PREFIX + "CONFIG"] = config  # the programs read their own tables of it
    try:
        listener = _listen(settings)
        with listener, runtime_folder(os.environ) as folder:
            return asyncio.run(_serve(settings, listener, folder, for_core, for_api, programs or Programs()))
    except BadSettings as error:
        print(f"wkvm serve: {error}", file=sys.stderr)
    except OSError as error:
        print(f"wkvm serve: {error.strerror or error}", file=sys.stderr)
    return 1


async def _serve(
    settings: ServeSettings,
    listener: socket.socket,
    folder: Path,
    for_core: Sequence[str],
    for_api: Sequence[str],
    programs: Programs,
) -> int:
    host, port = listener.getsockname()[:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    address = folder / SOCKET_NAME
    flags = ["--socket", str(address), *core_flags(settings)]
    api_flags = ["--core", f"ipc://{address}", "--host", settings.host, "--fd", str(listener.fileno())]
    api_flags += ["--drain-s", str(settings.drain_s)]
    core = Child("core", (*programs.core, *flags, *for_core), _say_line, ())
    frontends = [
        Child(f"api-{number}", (*programs.frontend, *api_flags, *for_api), _say_line, (listener.fileno(),))
        for number in range(1, settings.frontends + 1)
    ]
    _say(f"starting {settings.model}: one core, {settings.frontends} frontend(s), http://{where}, sockets in {folder}")
    supervisor = Supervisor(
        core,
        frontends,
        LocalHttp(host, port),
        url=f"http://{where}",
        drain_s=settings.drain_s,
        say=_say,
        close_listener=listener.close,
    )
    return await supervisor.run()


def core_flags(settings: ServeSettings) -> list[str]:
    """What the core is told of the settings of `wkvm serve`."""
    flags = ["--model", settings.model, "--drain-s", str(settings.drain_s)]
    if settings.store:
        flags += ["--store", settings.store]
    if settings.slots is not None:
        flags += ["--slots", str(settings.slots)]
    return flags


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The flags of `wkvm serve` itself, of the core and of the frontends. Raises BadSettings for those that only
    `wkvm serve` may set, and for what is no flag."""
    ours = {field.name for field in msgspec.structs.fields(ServeSettings)} | {"config", "help"}
    apis = {field.name for field in msgspec.structs.fields(ApiSettings)}
    parts: dict[str, list[str]] = {"own": [], "core": [], "api": []}
    part: list[str] | None = None
    for word in argv:
        if word == "-h":
            parts["own"].append(word)
        elif word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            if name.removeprefix("no_") in _OURS_TO_SET:
                raise BadSettings(f"{word.partition('=')[0]} is set by wkvm serve itself")
            known = {name, name.removeprefix("no_")}
            part = parts["own" if known & ours else "api" if known & apis else "core"]
            part.append(word)
        elif part is None:
            raise BadSettings(f"{word!r} is no flag")
        else:
            part.append(word)
            part = None
    return parts["own"], parts["core"], parts["api"]


def config_of(own: Sequence[str]) -> str | None:
    """The file that `--config` names; the programs read their own tables of it."""
    for place, word in enumerate(own):
        if word.startswith("--config="):
            return word.partition("=")[2]
        if word == "--config":
            return own[place + 1]
    return None


def _listen(settings: ServeSettings) -> socket.socket:
    """One socket for all frontends: connections wait in it while a frontend starts again."""
    host = settings.host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {settings.port} of {host} is taken by another program; choose one with --port"
            raise BadSettings(message) from None
        raise BadSettings(f"cannot listen on {host} port {settings.port}: {error.strerror or error}") from None
    return listener


def _say(text: str) -> None:
    _say_line(f"wkvm | {text}")


def _say_line(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        return  # whoever read it is gone; the server goes on
