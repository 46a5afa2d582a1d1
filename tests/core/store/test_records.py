from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.core.store.drafts import draft, record
from wkvm_core.store.records import (
    Answered,
    BadValue,
    Deleted,
    Expiring,
    Forked,
    HeadMoved,
    Lineage,
    Pinned,
    Placed,
    Saved,
    Tagged,
    Tier,
    Tombstone,
    Transaction,
    decode_record,
    decode_tombstone,
    decode_transaction,
    encode,
)
from wkvm_proto.names import StateHandle

GOLDEN = Path(__file__).parent / "golden"
HANDLE = StateHandle("a", 1)
LINEAGE = Lineage("merge", (StateHandle("b", 2),), '{"weight":0.5}')
FULL = msgspec.structs.replace(
    record(), lineage=LINEAGE, tiers=(Tier.HOST, Tier.DISK), pinned=True, expires_ms=9, tags=("x", "y")
)
TRANSACTION: Transaction = (
    Saved(FULL, is_head=False),
    Saved(record(2, version=2)),
    Forked(record(3, "b"), (StateHandle("b", 2),)),
    Deleted(Tombstone(HANDLE, "t", LINEAGE, 3, 7)),
    HeadMoved("t", HANDLE),
    Pinned("t", HANDLE, True),
    Expiring("t", HANDLE, None),
    Tagged("t", HANDLE, ("x",)),
    Placed("t", HANDLE, (Tier.REMOTE,)),
    Answered("t", "key", b"digest", (HANDLE,), 11),
)


def test_every_change_survives_the_wire() -> None:
    assert decode_transaction(encode(TRANSACTION)) == TRANSACTION


def test_bytes_of_the_first_format_still_decode() -> None:
    assert decode_transaction((GOLDEN / "transaction.v1.bin").read_bytes()) == TRANSACTION


def test_the_golden_transaction_holds_every_change() -> None:
    tags = {cls.__struct_config__.tag for cls in map(type, TRANSACTION)}
    known = {"saved", "forked", "deleted", "head", "pinned", "expiring", "tagged", "placed", "answered"}
    assert tags == known


def test_a_field_of_a_later_release_is_skipped() -> None:
    later = msgspec.msgpack.decode(encode(FULL)) | {"colour": "red"}
    assert decode_record(msgspec.msgpack.encode(later)) == FULL


def test_a_change_of_a_later_release_is_refused() -> None:
    with pytest.raises(BadValue):
        decode_transaction(msgspec.msgpack.encode([{"type": "renamed"}]))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", encode(FULL)[:-1], b"\x81\xa6handle\xa1\xff"])
def test_bytes_that_are_no_value_are_refused(data: bytes) -> None:
    with pytest.raises(BadValue):
        decode_record(data)
    with pytest.raises(BadValue):
        decode_tombstone(data)


def test_forks_differ_in_handle_and_serial_alone() -> None:
    first, second, third = Forked(record(7, "b"), (StateHandle("b", 2), StateHandle("c", 1))).records()
    assert first == record(7, "b")
    assert second == record(8, "b", 2)
    assert third == record(9, "c")


def test_a_pinned_state_is_never_due() -> None:
    assert FULL.due_ms is None
    assert msgspec.structs.replace(FULL, pinned=False).due_ms == 9
    assert draft().ttl_ms is None
