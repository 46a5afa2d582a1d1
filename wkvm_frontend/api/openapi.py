"""GET /openapi.json and /docs: the description of this interface, made from the structs that decode it."""

from __future__ import annotations

import html
import re
from typing import Any, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from wkvm_frontend.api.chat import ChatFields
from wkvm_frontend.api.completions import CompletionFields
from wkvm_frontend.api.models import ModelEntry, ModelList
from wkvm_frontend.api.refused import REFUSED_FIELDS
from wkvm_frontend.api.reply import send_bytes
from wkvm_frontend.api.shapes import ChatCompletion, Completion
from wkvm_frontend.api.state_shapes import (
    AppendFields,
    CreateFields,
    Difference,
    ForkFields,
    MutateFields,
    StateEntry,
    StateList,
)
from wkvm_frontend.api.tokens import (
    DetokenizeAnswer,
    DetokenizeFields,
    RenderAnswer,
    TokenizeAnswer,
    TokenizeFields,
)
from wkvm_frontend.failure import ErrorBody
from wkvm_proto import __version__


class Operation(NamedTuple):
    """One route of the description; types None where the body is plain."""

    path: str
    method: str
    summary: str
    body: type[Any] | None = None
    answer: type[Any] | None = None


OPERATIONS = (
    Operation("/v1/chat/completions", "post", "Answer a conversation, streamed or whole", ChatFields, ChatCompletion),
    Operation("/v1/completions", "post", "Continue prompts, streamed or whole", CompletionFields, Completion),
    Operation("/v1/models", "get", "Served models", None, ModelList),
    Operation("/v1/models/{model}", "get", "One served model", None, ModelEntry),
    Operation("/v1/states", "get", "Named states, newest first", None, StateList),
    Operation("/v1/states", "post", "Make a state of what it reads, or of another one", CreateFields, StateEntry),
    Operation("/v1/states/{handle}", "get", "One state", None, StateEntry),
    Operation("/v1/states/{handle}/append", "post", "Let a state read on", AppendFields, StateEntry),
    Operation("/v1/states/{handle}", "delete", "Forget a state, or every version of its name"),
    Operation("/v1/states/{handle}/mutate", "post", "A new state of old ones, by a rule", MutateFields, StateEntry),
    Operation("/v1/states/{a}/diff/{b}", "get", "How far one state is from another", None, Difference),
    Operation("/v1/states/{handle}/fork", "post", "New names for a state", ForkFields, StateList),
    Operation("/v1/chat/render", "post", "The prompt that a conversation makes", ChatFields, RenderAnswer),
    Operation("/tokenize", "post", "Text or messages to token ids", TokenizeFields, TokenizeAnswer),
    Operation("/detokenize", "post", "Token ids to text", DetokenizeFields, DetokenizeAnswer),
    Operation("/live", "get", "Whether this process answers"),
    Operation("/health", "get", "Whether an engine is connected"),
    Operation("/ready", "get", "Whether an engine's step loop answers in time"),
    Operation("/version", "get", "Versions"),
    Operation("/metrics", "get", "Figures in the Prometheus text format"),
)
_REFERENCE = "#/components/schemas/{name}"


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    types = [kind for each in OPERATIONS for kind in (each.body, each.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=_REFERENCE)
    by_type = dict(zip([*types, ErrorBody], schemas, strict=True))
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        failed = {"description": "An error", "content": {"application/json": {"schema": by_type[ErrorBody]}}}
        answer: dict[str, Any] = {"description": "The answer"}
        if each.answer is not None:
            answer["content"] = {"application/json": {"schema": by_type[each.answer]}}
        operation: dict[str, Any] = {
            "summary": each.summary,
            "operationId": _operation_id(each),
            "responses": {
                "201" if each.method == "post" and each.path.startswith("/v1/states") else "200": answer,
                "default": failed,
            },
        }
        if each.body is not None:
            content = {"application/json": {"schema": by_type[each.body]}}
            operation["requestBody"] = {"required": True, "content": content}
        names = re.findall(r"{(\w+)}", each.path)
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        paths.setdefault(each.path, {})[each.method] = operation
    refused = ", ".join(REFUSED_FIELDS)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "wkvm",
            "version": __version__,
            "description": f"OpenAI-compatible inference. Refused by name, as they are not supported: {refused}.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation_id(each: Operation) -> str:
    name = each.path.strip("/").replace("/", "_").replace("{", "").replace("}", "")
    several = [other for other in OPERATIONS if other.path == each.path]
    return name if len(several) == 1 else f"{each.method}_{name}"


def page() -> str:
    """A page for people; it loads nothing from anywhere."""
    document = openapi()
    rows = "".join(
        f"<tr><td><code>{each.method.upper()}</code></td><td><code>{html.escape(each.path)}</code></td>"
        f"<td>{html.escape(each.summary)}</td></tr>"
        for each in OPERATIONS
    )
    bodies = "".join(_fields(each, document["components"]["schemas"]) for each in OPERATIONS if each.body is not None)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>wkvm HTTP interface</title>"
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{padding:.2rem .8rem;border-bottom:1px solid #ccc;text-align:left}</style>"
        f"<h1>wkvm HTTP interface</h1><p>{html.escape(document['info']['description'])}</p>"
        f"<table><tr><th>Method<th>Path<th></tr>{rows}</table>{bodies}"
        '<p>The whole description: <a href="/openapi.json">/openapi.json</a></p></html>'
    )


def _fields(operation: Operation, schemas: dict[str, Any]) -> str:
    assert operation.body is not None, "chosen so by the caller"
    schema = schemas[operation.body.__name__]
    required = set(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{'required' if name in required else ''}</td></tr>"
        for name in schema["properties"]
    )
    return f"<h2><code>{html.escape(operation.path)}</code></h2><table><tr><th>Field<th></tr>{rows}</table>"


class StaticRoute:
    """The same bytes for everyone."""

    def __init__(self, body: bytes, content_type: bytes) -> None:
        self._body = body
        self._content_type = content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        await send_bytes(send, 200, self._body, self._content_type)


def openapi_route() -> StaticRoute:
    """The document as a route."""
    return StaticRoute(msgspec.json.encode(openapi()), b"application/json")


def docs_route() -> StaticRoute:
    """The page as a route."""
    return StaticRoute(page().encode(), b"text/html; charset=utf-8")
