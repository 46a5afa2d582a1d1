"""/v1/states: named states, listed, shown, forked and dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from wkvm_frontend.api.body import BodyLimits, BodyReader
from wkvm_frontend.api.chat import TENANT
from wkvm_frontend.api.reply import send_json
from wkvm_frontend.api.service import Service
from wkvm_frontend.failure import bad_request, from_core, unavailable
from wkvm_frontend.wire.link import CoreGone, FrameTooLarge
from wkvm_proto.messages import (
    MAX_FORKS,
    MAX_LISTED_STATES,
    DropState,
    Failed,
    ForkState,
    ListStates,
    ShowState,
    StateCall,
    StateRecord,
    States,
)
from wkvm_proto.names import BadHandle, check_name, parse_handle

T = TypeVar("T", bound=msgspec.Struct)


class StateEntry(msgspec.Struct, frozen=True):
    """A named state."""

    id: str
    """`name@version`"""
    object: str
    name: str
    version: int
    tokens: int
    """That it has read."""
    bytes: int
    created: float
    """Unix seconds."""
    verb: str
    parents: tuple[str, ...]
    tier: str


class StateList(msgspec.Struct, frozen=True):
    """A page of states, newest first; `after` asks for the next one."""

    object: str
    data: list[StateEntry]
    has_more: bool
    after: str | None


class ListFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query of a list."""

    name: Annotated[str, Meta(max_length=128)] = ""
    prefix: Annotated[str, Meta(max_length=128)] = ""
    after: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_STATES)] = 100
    model: str | None = None


class OneFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query of a call about one state; `all`: every version of the name."""

    all: bool = False
    model: str | None = None


class ForkFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a fork: `count` new versions of `name` (the state's own unless told), or one of each of `names`."""

    count: Annotated[int, Meta(ge=1, le=MAX_FORKS)] | None = None
    name: str | None = None
    names: Annotated[list[str], Meta(min_length=1, max_length=MAX_FORKS)] | None = None
    model: str | None = None


class StatesRoute:
    """GET /v1/states"""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ApiError."""
        query = query_of(scope, ListFields)
        call = ListStates(0, TENANT, query.name, query.prefix, query.after, query.limit)
        found = await ask(self._service, query.model, call)
        entries = [entry(record) for record in found.records]
        more = bool(found.after)
        await send_json(send, StateList("list", entries, more, str(found.after) if more else None))


class StateRoute:
    """GET and DELETE /v1/states/{handle}"""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ApiError."""
        handle = handle_of(scope)
        query = query_of(scope, OneFields)
        if scope["method"] == "DELETE":
            dropped = await ask(self._service, query.model, DropState(0, TENANT, handle, query.all))
            gone = [record.handle for record in dropped.records]
            await send_json(send, {"object": "state.deleted", "id": handle, "deleted": True, "states": gone})
            return
        found = await ask(self._service, query.model, ShowState(0, TENANT, handle))
        await send_json(send, entry(found.records[0]))


class ForkRoute:
    """POST /v1/states/{handle}/fork"""

    def __init__(self, service: Service, limits: BodyLimits) -> None:
        self._service = service
        self._bodies = BodyReader(ForkFields, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request with 201. Raises ApiError, ClientGone."""
        handle = handle_of(scope)
        body, _ = await self._bodies.read(scope, receive)
        if body.names is not None and (body.name is not None or body.count is not None):
            raise bad_request("names: not together with name or count.", "names")
        own = body.name if body.name is not None else parse_handle(handle)[0]
        names = body.names if body.names is not None else [own] * (body.count or 1)
        param = "names" if body.names is not None else "name"
        for name in names:
            _checked(check_name, name, param)
        made = await ask(self._service, body.model, ForkState(0, TENANT, handle, tuple(names)))
        entries = [entry(record) for record in made.records]
        await send_json(send, StateList("list", entries, has_more=False, after=None), status=201)


async def ask(service: Service, model: str | None, call: StateCall) -> States:
    """The core's answer. Raises ApiError."""
    settings = service.settings
    link = await service.fleet.reach(model, settings.core_wait_s)
    try:
        answer = await link.ask(call, settings.accept_timeout_s)
    except (CoreGone, TimeoutError):
        raise unavailable("The engine is not available right now. Please try again in a few seconds.") from None
    except FrameTooLarge:
        raise bad_request("names: too many bytes.", "names") from None
    if isinstance(answer, Failed):
        raise from_core(answer)
    return answer


def entry(record: StateRecord) -> StateEntry:
    """A record as clients see it."""
    name, version = parse_handle(record.handle)
    assert version is not None, record.handle
    return StateEntry(
        id=record.handle,
        object="state",
        name=name,
        version=version,
        tokens=record.tokens,
        bytes=record.bytes,
        created=record.created,
        verb=record.verb,
        parents=record.parents,
        tier=record.tier,
    )


def handle_of(scope: Scope) -> str:
    """The handle in the path. Raises ApiError 400."""
    handle: str = scope["path_params"]["handle"]
    _checked(parse_handle, handle, "state")
    return handle


def query_of(scope: Scope, kind: type[T]) -> T:
    """The query as a struct; an unknown or repeated key is refused. Raises ApiError 400."""
    try:
        pairs = parse_qsl(
            scope["query_string"].decode(), keep_blank_values=True, strict_parsing=True, max_num_fields=32
        )
    except ValueError:
        if scope["query_string"]:
            raise bad_request("The query is not of the form name=value&name=value.") from None
        pairs = []
    given = dict(pairs)
    if len(given) != len(pairs):
        raise bad_request("A name of the query is given twice.")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        param = where.rstrip("`") or None
        raise bad_request(f"{param}: {text}" if param else text, param) from None


def _checked(check: Callable[[str], object], value: str, param: str) -> None:
    try:
        check(value)
    except BadHandle as error:
        raise bad_request(f"{param}: {error}.", param) from None
