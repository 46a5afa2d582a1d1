"""What each change does to the rows of the catalog: the same when it is made, and when the journal is replayed."""

from __future__ import annotations

from typing import Any

import apsw
import msgspec
from msgspec.structs import replace

from wkvm_core.store import records as values
from wkvm_core.store.index import Index, Name, Usage
from wkvm_core.store.records import Answered, Change, Record, Tombstone
from wkvm_core.store.rows import Damaged, damage_told, seal
from wkvm_proto.names import StateHandle


def apply(index: Index, change: Change) -> None:
    """Makes a change without asking whether it may be made."""
    with damage_told("a change"):
        match change:
            case values.Saved(record=record, is_head=is_head):
                _insert(index, record, is_head)
            case values.Forked():
                for record in change.records():
                    _insert(index, record, is_head=True)
            case values.Deleted(tombstone=tombstone):
                _bury(index, tombstone)
            case values.HeadMoved(tenant=tenant, handle=handle):
                _set_name(index, tenant, handle.name, replace(index.name(tenant, handle.name), head=handle.version))
            case values.Pinned(tenant=tenant, handle=handle, pinned=pinned):
                _alter(index, tenant, handle, pinned=pinned)
            case values.Expiring(tenant=tenant, handle=handle, expires_ms=expires_ms):
                _alter(index, tenant, handle, expires_ms=expires_ms)
            case values.Tagged(tenant=tenant, handle=handle, tags=tags):
                _alter(index, tenant, handle, tags=tags)
            case values.Placed(tenant=tenant, handle=handle, tiers=tiers):
                _alter(index, tenant, handle, tiers=tiers)
            case values.Answered():
                _remember(index, change)


def _insert(index: Index, record: Record, is_head: bool) -> None:
    handle, tenant = record.handle, record.tenant
    name, usage = index.name(tenant, handle.name), index.usage(tenant)
    grown = _refer(index, tenant, record.blob, record.bytes, 1)
    if record.segment is not None:
        _refer(index, tenant, record.segment, 0, 1)
    index.serial = max(index.serial, record.serial)
    _put(index, record, "INSERT INTO states VALUES (?,?,?,?,?,?,?)")
    _add_facets(index, record, record.facets)
    head = handle.version if is_head or not name.head else name.head
    _set_name(index, tenant, handle.name, Name(max(name.last, handle.version), head))
    _count(index, tenant, usage, names=int(not name.last), states=1, bytes=grown)


def _bury(index: Index, tombstone: Tombstone) -> None:
    handle, tenant = tombstone.handle, tombstone.tenant
    record = _present(index, tenant, handle)
    index.run("DELETE FROM states WHERE serial=?", record.serial)
    _drop_facets(index, record, record.facets)
    cells = (tenant, handle.name, handle.version, values.encode(tombstone))
    index.run("INSERT INTO tombstones VALUES (?,?,?,?,?)", *cells, seal("tombstones", *cells))
    name = index.name(tenant, handle.name)
    if name.head == handle.version:
        _set_name(index, tenant, handle.name, replace(name, head=index.newest(tenant, handle.name)))
    shrunk = _refer(index, tenant, record.blob, record.bytes, -1)
    if record.segment is not None:
        _refer(index, tenant, record.segment, 0, -1)
    _count(index, tenant, index.usage(tenant), states=-1, tombstones=1, bytes=shrunk)


def _alter(index: Index, tenant: str, handle: StateHandle, **fields: Any) -> None:
    before = _present(index, tenant, handle)
    after = replace(before, **fields)
    _put(index, after, "REPLACE INTO states VALUES (?,?,?,?,?,?,?)")
    old, new = before.facets, after.facets
    _drop_facets(index, before, [facet for facet in old if facet not in new])
    _add_facets(index, after, [facet for facet in new if facet not in old])


def _present(index: Index, tenant: str, handle: StateHandle) -> Record:
    record = index.record(tenant, handle)
    if record is None:
        raise Damaged(f"state {handle}")
    return record


def _put(index: Index, record: Record, sql: str) -> None:
    handle = record.handle
    key = (record.serial, record.tenant, handle.name, handle.version, record.due_ms)
    cells = (*key, values.encode(record))
    try:
        index.run(sql, *cells, seal("states", *cells))
    except apsw.ConstraintError:
        raise Damaged(f"state {handle}") from None


def _add_facets(index: Index, record: Record, names: list[str]) -> None:
    rows = [(record.tenant, facet, record.serial) for facet in names]
    if rows:
        index.connection.executemany("INSERT OR IGNORE INTO facets VALUES (?,?,?)", rows)


def _drop_facets(index: Index, record: Record, names: list[str]) -> None:
    rows = [(record.tenant, facet, record.serial) for facet in names]
    if rows:
        index.connection.executemany("DELETE FROM facets WHERE tenant=? AND facet=? AND serial=?", rows)


def _set_name(index: Index, tenant: str, name: str, counters: Name) -> None:
    cells = (tenant, name, counters.last, counters.head)
    index.run("REPLACE INTO names VALUES (?,?,?,?,?)", *cells, seal("names", *cells))


def _refer(index: Index, tenant: str, digest: str, size: int, by: int) -> int:
    """Counts a reference; the bytes that the tenant holds more because of it."""
    refs, known = index.references(tenant, digest)
    if refs + by < 0:
        raise Damaged("the count of a blob")
    if refs + by == 0:
        index.run("DELETE FROM refs WHERE tenant=? AND digest=?", tenant, digest)
        return -known
    cells = (tenant, digest, refs + by, known if refs else size)
    index.run("REPLACE INTO refs VALUES (?,?,?,?,?)", *cells, seal("refs", *cells))
    return 0 if refs else size


def _count(index: Index, tenant: str, usage: Usage, **by: int) -> None:
    counts = [count + by.get(field, 0) for field, count in msgspec.structs.asdict(usage).items()]
    if min(counts) < 0:
        raise Damaged("the counts of a tenant")
    cells = (tenant, *counts)
    index.run("REPLACE INTO tenants VALUES (?,?,?,?,?,?)", *cells, seal("tenants", *cells))


def _remember(index: Index, answer: Answered) -> None:
    cells = (answer.tenant, answer.key, answer.answered_ms, values.encode(answer))
    index.run("REPLACE INTO answers VALUES (?,?,?,?,?)", *cells, seal("answers", *cells))
