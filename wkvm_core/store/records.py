"""What the catalog holds and how it changes: frozen values, in msgpack in its rows and in the journal.

They only grow, like the messages of wkvm_proto: a field is appended with a default, never reordered, retyped or reused;
a reader skips fields it does not know, and refuses a change it does not know.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from wkvm_core.state.layout import Fingerprint
from wkvm_proto.names import StateHandle

MAX_TAGS = 64
MAX_FORKS = 4096
MAX_PARAMETER_BYTES = 64 * 1024

Count = Annotated[int, Meta(ge=0, le=2**62)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Tenant = Annotated[str, Meta(max_length=128)]
Tag = Annotated[str, Meta(min_length=1, max_length=256)]
Tags = Annotated[tuple[Tag, ...], Meta(max_length=MAX_TAGS)]
Key = Annotated[str, Meta(min_length=1, max_length=256)]


class Tier(StrEnum):
    """Where a snapshot's bytes are."""

    SLOT = "slot"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


Tiers = Annotated[tuple[Tier, ...], Meta(max_length=4)]


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all values here."""


class Lineage(Value, frozen=True):
    """What made a snapshot. Parents belong to the same tenant and may have been deleted since."""

    verb: Annotated[str, Meta(min_length=1, max_length=64)]
    parents: Annotated[tuple[StateHandle, ...], Meta(max_length=256)] = ()
    parameters: Annotated[str, Meta(max_length=MAX_PARAMETER_BYTES)] = ""
    """JSON; not interpreted here."""


class Draft(Value, frozen=True):
    """A snapshot whose bytes are durable already and which has no name yet."""

    fingerprint: Fingerprint
    tokens: Count
    lineage: Lineage
    bytes: Count
    """Size of the blob."""
    blob: Digest
    segment: Digest | None = None
    """Last link of the chain of ids; None when the ids were left out."""
    tiers: Tiers = (Tier.DISK,)
    pinned: bool = False
    ttl_ms: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    """Milliseconds to live; a pinned state does not expire."""
    tags: Tags = ()


class Record(Value, frozen=True):
    """What is known of `name@version`. Only its tiers, pin, expiry and tags ever change."""

    handle: StateHandle
    tenant: Tenant
    serial: Annotated[int, Meta(ge=1, le=2**62)]
    """Counts records of the whole catalog in order of creation, never reissued."""
    created_ms: Count
    fingerprint: Fingerprint
    tokens: Count
    lineage: Lineage
    bytes: Count
    blob: Digest
    segment: Digest | None = None
    tiers: Tiers = (Tier.DISK,)
    pinned: bool = False
    expires_ms: Count | None = None
    """Milliseconds since 1970; None for never."""
    tags: Tags = ()

    @property
    def due_ms(self) -> int | None:
        """When it may be deleted for its age; None for never."""
        return None if self.pinned else self.expires_ms

    @property
    def facets(self) -> list[str]:
        """What it can be found by, besides its name."""
        found = {f"tag:{tag}" for tag in self.tags} | {f"tier:{tier}" for tier in self.tiers}
        found |= {f"digest:{digest}" for digest in (self.blob, self.segment) if digest is not None}
        return sorted(found | {f"parent:{parent}" for parent in self.lineage.parents})


class Tombstone(Value, frozen=True):
    """What is left of a deleted version: that it was issued, and what its children need for their ancestry."""

    handle: StateHandle
    tenant: Tenant
    lineage: Lineage
    tokens: Count
    deleted_ms: Count


# ------------------------------------------------------------------------------------------------------ changes


class Saved(Value, tag="saved", frozen=True):
    """A new version."""

    record: Record
    is_head: bool = True
    """Whether the name's head is this version now; a sibling leaves it where it is."""


class Forked(Value, tag="forked", frozen=True):
    """New versions that differ in handle and serial alone: `record` is the first, the serials count on from it."""

    record: Record
    others: Annotated[tuple[StateHandle, ...], Meta(max_length=MAX_FORKS)] = ()

    def records(self) -> list[Record]:
        """All of them, in order."""
        more = enumerate(self.others, self.record.serial + 1)
        return [self.record, *(msgspec.structs.replace(self.record, handle=h, serial=s) for s, h in more)]


class Deleted(Value, tag="deleted", frozen=True):
    """A version is gone. If it was the head, the newest one left is."""

    tombstone: Tombstone


class HeadMoved(Value, tag="head", frozen=True):
    """The name stands for this version now."""

    tenant: Tenant
    handle: StateHandle


class Pinned(Value, tag="pinned", frozen=True):
    """Exempt from eviction and expiry, or not."""

    tenant: Tenant
    handle: StateHandle
    pinned: bool


class Expiring(Value, tag="expiring", frozen=True):
    """Another time to live; None for ever."""

    tenant: Tenant
    handle: StateHandle
    expires_ms: Count | None


class Tagged(Value, tag="tagged", frozen=True):
    """Other tags in place of those before."""

    tenant: Tenant
    handle: StateHandle
    tags: Tags


class Placed(Value, tag="placed", frozen=True):
    """Other tiers in place of those before."""

    tenant: Tenant
    handle: StateHandle
    tiers: Tiers


class Answered(Value, tag="answered", frozen=True):
    """A write that carried an idempotency key, and what came of it."""

    tenant: Tenant
    key: Key
    request: bytes
    """Digest of what was asked: one key asks one thing."""
    handles: Annotated[tuple[StateHandle, ...], Meta(max_length=MAX_FORKS)]
    answered_ms: Count
    is_head: bool = True


Change: TypeAlias = Saved | Forked | Deleted | HeadMoved | Pinned | Expiring | Tagged | Placed | Answered
Transaction: TypeAlias = tuple[Change, ...]

T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()
_RECORD = msgspec.msgpack.Decoder(Record)
_TOMBSTONE = msgspec.msgpack.Decoder(Tombstone)
_ANSWER = msgspec.msgpack.Decoder(Answered)
_TRANSACTION = msgspec.msgpack.Decoder(tuple[Change, ...])


class BadValue(ValueError):
    """The bytes are not a value of this kind, or one of a later release."""


def encode(value: Value | Transaction) -> bytes:
    """Msgpack."""
    return _ENCODER.encode(value)


def decode_record(data: bytes) -> Record:
    """Raises BadValue."""
    return _decode(_RECORD, data)


def decode_tombstone(data: bytes) -> Tombstone:
    """Raises BadValue."""
    return _decode(_TOMBSTONE, data)


def decode_answer(data: bytes) -> Answered:
    """Raises BadValue."""
    return _decode(_ANSWER, data)


def decode_transaction(data: bytes) -> Transaction:
    """Raises BadValue."""
    return _decode(_TRANSACTION, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadValue(f"not a value of the catalog: {error}") from None
