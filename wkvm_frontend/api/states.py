"""/v1/states: named states, made, listed, shown, forked, read on, mutated, compared and dropped."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from wkvm_frontend.api.body import BodyLimits, BodyReader
from wkvm_frontend.api.chat import OFFLOAD_BYTES, TENANT
from wkvm_frontend.api.completions import prompts_of
from wkvm_frontend.api.fields import TokenId
from wkvm_frontend.api.generation import Generation
from wkvm_frontend.api.reply import send_json
from wkvm_frontend.api.service import Service
from wkvm_frontend.failure import bad_request, from_core, internal_error, unavailable
from wkvm_frontend.wire.link import CoreGone, FrameTooLarge
from wkvm_proto.columns import pack_u32
from wkvm_proto.messages import (
    MAX_FORKS,
    MAX_LISTED_STATES,
    MAX_PARAMS_BYTES,
    DiffStates,
    Distances,
    DropState,
    Failed,
    Finished,
    ForkState,
    Generate,
    ListStates,
    MutateState,
    ShowState,
    StateCall,
    StateRecord,
    States,
)
from wkvm_proto.names import BadHandle, check_name, parse_handle
from wkvm_proto.sampling import Sampling

T = TypeVar("T", bound=msgspec.Struct)


class StateEntry(msgspec.Struct, frozen=True, omit_defaults=True):
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
    """What made it: save, fork, mutate."""
    parents: tuple[str, ...]
    tier: str
    rule: str = ""
    """Of a mutation."""
    params: dict[str, Any] = {}
    """Of that rule."""
    norms: dict[str, dict[str, float]] = {}
    """Of a mutation, by family: `before`, `after`, and the relative `distance` between."""


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


class CreateFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """Body of a new state: what it reads, `prompt` (text or token ids), after the zero state or after the state `from`;
    without a prompt it is a fork of that one. `name`: made up unless told."""

    name: str | None = None
    prompt: str | list[TokenId] | None = None
    source: str | None = None
    model: str | None = None


class AppendFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of an append: what the state reads next; the result is a new version of `name`, the state's own unless
    told."""

    prompt: str | list[TokenId]
    name: str | None = None
    model: str | None = None


class MutateFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a mutation: a rule and its parameters; the result is a new version of `name`, the state's own unless
    told."""

    rule: Annotated[str, Meta(min_length=1, max_length=100)]
    params: dict[str, Any] = {}
    name: str | None = None
    model: str | None = None


class Difference(msgspec.Struct, frozen=True):
    """Of each family and layer the norm of the difference of two states, relative to the first one's."""

    object: str
    a: str
    b: str
    families: dict[str, tuple[float, ...]]


class StatesRoute:
    """GET and POST /v1/states"""

    def __init__(self, service: Service, limits: BodyLimits) -> None:
        self._service = service
        self._bodies = BodyReader(CreateFields, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; 201 for a new state. Raises ApiError, ClientGone."""
        if scope["method"] == "POST":
            await self._create(scope, receive, send)
            return
        query = query_of(scope, ListFields)
        call = ListStates(0, TENANT, query.name, query.prefix, query.after, query.limit)
        found = await ask(self._service, query.model, call)
        entries = [entry(record) for record in found.records]
        more = bool(found.after)
        await send_json(send, StateList("list", entries, more, str(found.after) if more else None))

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, size = await self._bodies.read(scope, receive)
        source = body.source or ""
        if source:
            _checked(parse_handle, source, "from")
        name = body.name if body.name is not None else f"state-{uuid.uuid4().hex}"
        _checked(check_name, name, "name")
        if body.prompt is not None:
            made = await read(self._service, receive, body.model, body.prompt, size, state=source, save_as=name)
        elif source:
            made = (await ask(self._service, body.model, ForkState(0, TENANT, source, (name,)))).records[0]
        else:
            raise bad_request("prompt: give what the state reads, or the state that it comes from.", "prompt")
        await send_json(send, entry(made), status=201)


class AppendRoute:
    """POST /v1/states/{handle}/append"""

    def __init__(self, service: Service, limits: BodyLimits) -> None:
        self._service = service
        self._bodies = BodyReader(AppendFields, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request with 201. Raises ApiError, ClientGone."""
        handle = handle_of(scope)
        body, size = await self._bodies.read(scope, receive)
        name = body.name if body.name is not None else parse_handle(handle)[0]
        _checked(check_name, name, "name")
        made = await read(self._service, receive, body.model, body.prompt, size, state=handle, save_as=name)
        await send_json(send, entry(made), status=201)


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


class MutateRoute:
    """POST /v1/states/{handle}/mutate"""

    def __init__(self, service: Service, limits: BodyLimits) -> None:
        self._service = service
        self._bodies = BodyReader(MutateFields, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request with 201. Raises ApiError, ClientGone."""
        handle = handle_of(scope)
        body, _ = await self._bodies.read(scope, receive)
        if body.name is not None:
            _checked(check_name, body.name, "name")
        params = msgspec.msgpack.encode(body.params)
        if len(params) > MAX_PARAMS_BYTES:
            raise bad_request(f"params: more than {MAX_PARAMS_BYTES} bytes.", "params")
        call = MutateState(0, TENANT, handle, body.rule, params, body.name or "")
        made = await ask(self._service, body.model, call)
        await send_json(send, entry(made.records[0]), status=201)


class DiffRoute:
    """GET /v1/states/{a}/diff/{b}"""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ApiError."""
        a, b = handle_of(scope, "a"), handle_of(scope, "b")
        query = query_of(scope, OneFields)
        answer = await answer_of(self._service, query.model, DiffStates(0, TENANT, a, b))
        if not isinstance(answer, Distances):
            raise internal_error()
        await send_json(send, Difference("state.difference", a, b, answer.families))


async def read(
    service: Service,
    receive: Receive,
    model: str | None,
    prompt: str | list[int],
    size: int,
    *,
    state: str,
    save_as: str,
) -> StateRecord:
    """Lets a state (empty: the zero state) read a prompt of a body of `size` bytes, and keeps what comes of it. Raises
    ApiError, ClientGone."""
    settings = service.settings
    link = await service.fleet.reach(model, settings.core_wait_s)
    served = link.model
    assert served is not None, "a ready core has a model"
    if size > OFFLOAD_BYTES:
        (ids,) = await asyncio.to_thread(prompts_of, [prompt], served, continued=bool(state))
    else:
        (ids,) = prompts_of([prompt], served, continued=bool(state))
    generate = Generate(
        request=0,
        tenant=TENANT,
        prompt=pack_u32(ids),
        sampling=Sampling(max_tokens=0),
        timeout_s=settings.request_timeout_s,
        state=state,
        save_as=save_as,
    )
    generation = Generation(link, service.meter, None)
    try:
        await generation.start([generate], receive, settings.accept_timeout_s)
        saved = ""
        while not saved:
            for _, item in await generation.take():
                if isinstance(item, Failed):
                    raise from_core(item)
                if isinstance(item, Finished):
                    if not item.saved_as:
                        raise internal_error()
                    saved = item.saved_as
    finally:
        await generation.end()
    return (await ask(service, model, ShowState(0, TENANT, saved))).records[0]


async def ask(service: Service, model: str | None, call: StateCall) -> States:
    """The core's answer, records. Raises ApiError."""
    answer = await answer_of(service, model, call)
    if not isinstance(answer, States):
        raise internal_error()
    return answer


async def answer_of(service: Service, model: str | None, call: StateCall) -> States | Distances:
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
        bytes=record.size_bytes,
        created=record.created,
        verb=record.verb,
        parents=record.parents,
        tier=record.tier,
        rule=record.rule,
        params=msgspec.msgpack.decode(record.params) if record.params else {},
        norms=record.norms,
    )


def handle_of(scope: Scope, name: str = "handle") -> str:
    """The handle in the path. Raises ApiError 400."""
    handle: str = scope["path_params"][name]
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
