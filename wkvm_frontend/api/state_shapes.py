"""Bodies, queries and answers of /v1/states."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from wkvm_frontend.api.fields import TokenId
from wkvm_proto.messages import MAX_FORKS, MAX_LISTED_STATES, StateRecord
from wkvm_proto.names import parse_handle


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
