"""/v1/states: named states, made, listed, shown, forked, read on, mutated, compared and dropped."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from wkvm_frontend.api.body import BodyLimits, BodyReader
from wkvm_frontend.api.chat import TENANT
from wkvm_frontend.api.reply import send_json
from wkvm_frontend.api.service import Service
from wkvm_frontend.api.state_calls import answer_of, ask, read
from wkvm_frontend.api.state_shapes import (
    AppendFields,
    CreateFields,
    Difference,
    ForkFields,
    ListFields,
    MutateFields,
    OneFields,
    StateList,
    entry,
)
from wkvm_frontend.failure import bad_request, internal_error
from wkvm_proto.messages import (
    MAX_PARAMS_BYTES,
    DiffStates,
    Distances,
    DropState,
    ForkState,
    ListStates,
    MutateState,
    ShowState,
)
from wkvm_proto.names import BadHandle, check_name, parse_handle

T = TypeVar("T", bound=msgspec.Struct)


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
