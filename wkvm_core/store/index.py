"""The catalog's tables: SQLite through apsw, one connection, a checksum in every row that is verified when it is read.

What it holds follows from the changes applied to it and from nothing else, so a backup and the journal rebuild it.
Every version ever issued has a record or a tombstone: a row that went missing is told from one that never was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import apsw
import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from wkvm_core.errors import Refused
from wkvm_core.store import records as values
from wkvm_core.store.records import Answered, BadValue, Change, Record, Tombstone
from wkvm_proto.names import ErrorCode, StateHandle

FORMAT = 1
SQLITE_MIN = (3, 51, 3)

Cell: TypeAlias = "str | int | float | bytes | None"

_PRAGMAS = """
PRAGMA locking_mode=EXCLUSIVE;
PRAGMA journal_mode=WAL;
PRAGMA synchronous=FULL;
PRAGMA trusted_schema=OFF;
PRAGMA cell_size_check=ON;
PRAGMA cache_size=-65536;
PRAGMA temp_store=MEMORY;
"""
_SCHEMA = """
CREATE TABLE meta(id INTEGER PRIMARY KEY CHECK (id = 1), format INTEGER, sequence INTEGER, serial INTEGER,
    seal INTEGER);
CREATE TABLE tenants(tenant TEXT PRIMARY KEY, names INTEGER, states INTEGER, tombstones INTEGER, bytes INTEGER,
    seal INTEGER) WITHOUT ROWID;
CREATE TABLE names(tenant TEXT, name TEXT, last INTEGER, head INTEGER, seal INTEGER, PRIMARY KEY (tenant, name))
    WITHOUT ROWID;
CREATE TABLE states(serial INTEGER PRIMARY KEY, tenant TEXT, name TEXT, version INTEGER, due INTEGER, record BLOB,
    seal INTEGER);
CREATE UNIQUE INDEX states_by_handle ON states(tenant, name, version);
CREATE INDEX states_by_age ON states(tenant, serial, name);
CREATE INDEX states_by_due ON states(due) WHERE due IS NOT NULL;
CREATE TABLE tombstones(tenant TEXT, name TEXT, version INTEGER, tombstone BLOB, seal INTEGER,
    PRIMARY KEY (tenant, name, version)) WITHOUT ROWID;
CREATE TABLE facets(tenant TEXT, facet TEXT, serial INTEGER, PRIMARY KEY (tenant, facet, serial)) WITHOUT ROWID;
CREATE TABLE refs(tenant TEXT, digest TEXT, refs INTEGER, bytes INTEGER, seal INTEGER, PRIMARY KEY (tenant, digest))
    WITHOUT ROWID;
CREATE TABLE answers(tenant TEXT, key TEXT, at INTEGER, answer BLOB, seal INTEGER, PRIMARY KEY (tenant, key))
    WITHOUT ROWID;
CREATE INDEX answers_by_age ON answers(at);
CREATE INDEX answers_by_key ON answers(key, tenant);
"""


class Damaged(Refused):
    """A row does not match its checksum or is missing. What it held is not served; a rebuild brings it back."""

    def __init__(self, what: str) -> None:
        super().__init__(ErrorCode.STORE_DAMAGED, f"the catalog is damaged at {what}; it has to be rebuilt")


class Name(msgspec.Struct, frozen=True):
    """A name's counters: the last version ever issued, and the head; 0 when no version is left."""

    last: int = 0
    head: int = 0


class Usage(msgspec.Struct, frozen=True):
    """What a tenant holds. `bytes` counts a blob once, however many states share it."""

    names: int = 0
    states: int = 0
    tombstones: int = 0
    bytes: int = 0


def facets(record: Record) -> list[str]:
    """What a record can be found by, besides its name."""
    found = {f"tag:{tag}" for tag in record.tags} | {f"tier:{tier}" for tier in record.tiers}
    found |= {f"digest:{digest}" for digest in (record.blob, record.segment) if digest is not None}
    return sorted(found | {f"parent:{parent}" for parent in record.lineage.parents})


def seal(*cells: Cell) -> int:
    """xxh3-64 over a row, as a signed integer. Cells of another type are another row."""
    return xxh3_64_intdigest(msgspec.msgpack.encode(cells)) - 2**63


@contextmanager
def damage_told(what: str) -> Iterator[None]:
    """SQLite's own discoveries, and cells that are not text any more, as Damaged."""
    try:
        yield
    except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError, UnicodeDecodeError, BadValue):
        raise Damaged(what) from None


class Index:
    """One open catalog, for one thread. Writing methods belong between `begin` and `commit` or `roll_back`.

    Raises Damaged for what cannot be trusted, apsw.Error when the disk fails.
    """

    def __init__(self, path: str) -> None:
        """Opens or makes the file; reads none of its rows but one. Refuses a catalog of a later release, raises
        OSError."""
        found = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
        if found < SQLITE_MIN:
            raise Refused(ErrorCode.BAD_CONFIG, f"SQLite {apsw.sqlite_lib_version()}: 3.51.3 or later is needed")
        os.close(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        )  # its log inherits the mode
        self.connection = apsw.Connection(path, statementcachesize=256)
        try:
            with damage_told("its header"):
                self.connection.execute(_PRAGMAS).fetchall()
                if not self.connection.execute("SELECT count(*) FROM sqlite_schema").get:
                    self._make()
                self.sequence, self.serial = self._meta()
        except BaseException:
            self.connection.close()
            raise

    def close(self) -> None:
        """Closes the file; a second close does nothing."""
        self.connection.close()

    # -------------------------------------------------------------------------------------------- transactions

    def begin(self) -> None:
        """Starts a group of transactions."""
        self.connection.execute("BEGIN IMMEDIATE")

    def commit(self, sequence: int) -> None:
        """The group is durable when this returns; `sequence` is that of its last transaction."""
        cells = (FORMAT, sequence, self.serial)
        self._run("UPDATE meta SET format=?, sequence=?, serial=?, seal=? WHERE id=1", *cells, seal("meta", *cells))
        self.connection.execute("COMMIT")
        self.sequence = sequence

    def roll_back(self) -> None:
        """Undoes the group."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")
        self.sequence, self.serial = self._meta()

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undoes what is inside, alone, when it raises; the group goes on."""
        serial = self.serial
        self.connection.execute("SAVEPOINT one")
        try:
            yield
        except BaseException:
            self.serial = serial
            if self.connection.in_transaction:  # a full disk has rolled back everything already
                self.connection.execute("ROLLBACK TO one")
                self.connection.execute("RELEASE one")
            raise
        self.connection.execute("RELEASE one")

    def apply(self, change: Change) -> None:
        """Makes a change without asking whether it may be made."""
        with damage_told("a change"):
            match change:
                case values.Saved(record=record, is_head=is_head):
                    self._insert(record, is_head)
                case values.Forked():
                    for record in change.records():
                        self._insert(record, is_head=True)
                case values.Deleted(tombstone=tombstone):
                    self._bury(tombstone)
                case values.HeadMoved(tenant=tenant, handle=handle):
                    self._set_name(tenant, handle.name, replace(self.name(tenant, handle.name), head=handle.version))
                case values.Pinned(tenant=tenant, handle=handle, pinned=pinned):
                    self._alter(tenant, handle, pinned=pinned)
                case values.Expiring(tenant=tenant, handle=handle, expires_ms=expires_ms):
                    self._alter(tenant, handle, expires_ms=expires_ms)
                case values.Tagged(tenant=tenant, handle=handle, tags=tags):
                    self._alter(tenant, handle, tags=tags)
                case values.Placed(tenant=tenant, handle=handle, tiers=tiers):
                    self._alter(tenant, handle, tiers=tiers)
                case values.Answered():
                    self._remember(change)

    def forget_answers(self, before_ms: int, limit: int) -> None:
        """Drops the oldest answers to idempotency keys, `limit` of them at most."""
        self._run(
            "DELETE FROM answers WHERE (tenant, key) IN "
            "(SELECT tenant, key FROM answers WHERE at < ? ORDER BY at LIMIT ?)",
            before_ms,
            limit,
        )

    # --------------------------------------------------------------------------------------------------- reads

    def record(self, tenant: str, handle: StateHandle) -> Record | None:
        """The record, or None when there is none (any more)."""
        found = self.find(tenant, handle)
        return found if isinstance(found, Record) else None

    def find(self, tenant: str, handle: StateHandle) -> Record | Tombstone | None:
        """What became of a version; None when it was never issued."""
        with damage_told(f"state {handle}"):
            key = (tenant, handle.name, handle.version)
            row = self._row("SELECT * FROM states WHERE tenant=? AND name=? AND version=?", *key)
            if row is not None:
                record = self.checked_record(row)
                if (record.tenant, record.handle) != (tenant, handle):
                    raise Damaged(f"state {handle}")
                return record
            row = self._row("SELECT * FROM tombstones WHERE tenant=? AND name=? AND version=?", *key)
            if row is not None:
                self.verify("tombstones", row)
                tombstone = values.decode_tombstone(_blob(row[3]))
                if (tombstone.tenant, tombstone.handle) != (tenant, handle):
                    raise Damaged(f"state {handle}")
                return tombstone
            if 1 <= handle.version <= self.name(tenant, handle.name).last:
                raise Damaged(f"state {handle}")
            return None

    def name(self, tenant: str, name: str) -> Name:
        """Counters of a name, all zero for one never used."""
        with damage_told(f"name {name!r}"):
            row = self._row("SELECT * FROM names WHERE tenant=? AND name=?", tenant, name)
            if row is not None:
                self.verify("names", row)
                if row[:2] != (tenant, name) or not isinstance(row[2], int) or not isinstance(row[3], int):
                    raise Damaged(f"name {name!r}")
                return Name(row[2], row[3])
            for table in ("states", "tombstones"):
                sql = f"SELECT 1 FROM {table} WHERE tenant=? AND name=? LIMIT 1"  # noqa: S608 - two literals
                if self._row(sql, tenant, name) is not None:
                    raise Damaged(f"name {name!r}")
            return Name()

    def usage(self, tenant: str) -> Usage:
        """What a tenant holds."""
        with damage_told("the counts of a tenant"):
            row = self._row("SELECT * FROM tenants WHERE tenant=?", tenant)
            if row is None:
                if self._row("SELECT 1 FROM names WHERE tenant=? LIMIT 1", tenant) is not None:
                    raise Damaged("the counts of a tenant")
                return Usage()
            self.verify("tenants", row)
            if row[0] != tenant:
                raise Damaged("the counts of a tenant")
            return msgspec.convert(dict(zip(Usage.__struct_fields__, row[1:5], strict=True)), Usage)

    def references(self, tenant: str, digest: str) -> tuple[int, int]:
        """How many records hold a blob or segment, and its bytes."""
        with damage_told("the count of a blob"):
            row = self._row("SELECT * FROM refs WHERE tenant=? AND digest=?", tenant, digest)
            if row is None:
                sql = "SELECT 1 FROM facets WHERE tenant=? AND facet=? LIMIT 1"
                if self._row(sql, tenant, f"digest:{digest}") is not None:
                    raise Damaged("the count of a blob")
                return 0, 0
            self.verify("refs", row)
            if row[:2] != (tenant, digest) or not isinstance(row[2], int) or not isinstance(row[3], int):
                raise Damaged("the count of a blob")
            return row[2], row[3]

    def answer(self, tenant: str, key: str) -> Answered | None:
        """What came of the write that carried this idempotency key."""
        with damage_told("an idempotency key"):
            row = self._row("SELECT * FROM answers WHERE tenant=? AND key=?", tenant, key)
            if row is None:
                sql = "SELECT 1 FROM answers INDEXED BY answers_by_key WHERE key=? AND tenant=?"
                if self._row(sql, key, tenant) is not None:
                    raise Damaged("an idempotency key")
                return None
            self.verify("answers", row)
            answer = values.decode_answer(_blob(row[3]))
            if (answer.tenant, answer.key) != (tenant, key):
                raise Damaged("an idempotency key")
            return answer

    def due(self, now_ms: int, limit: int) -> list[Record]:
        """Records whose time has come, oldest first."""
        with damage_told("a state that is due"):
            rows = self.connection.execute("SELECT * FROM states WHERE due <= ? ORDER BY due LIMIT ?", (now_ms, limit))
            found = [self.checked_record(row) for row in rows.fetchall()]
        if any(record.due_ms is None or record.due_ms > now_ms for record in found):
            raise Damaged("a state that is due")
        return found

    def newest(self, tenant: str, name: str) -> int:
        """The highest version that is left of a name; 0 for none."""
        sql = "SELECT version FROM states WHERE tenant=? AND name=? ORDER BY version DESC LIMIT 1"
        row = self._row(sql, tenant, name)
        version = 0 if row is None else row[0]
        if not isinstance(version, int) or (version and self.record(tenant, StateHandle(name, version)) is None):
            raise Damaged(f"name {name!r}")
        return version

    def versions(self, tenant: str, name: str, limit: int) -> list[Record]:
        """Versions of a name, oldest first."""
        with damage_told(f"name {name!r}"):
            sql = "SELECT * FROM states WHERE tenant=? AND name=? ORDER BY version LIMIT ?"
            found = [self.checked_record(row) for row in self.connection.execute(sql, (tenant, name, limit)).fetchall()]
        if any((record.tenant, record.handle.name) != (tenant, name) for record in found):
            raise Damaged(f"name {name!r}")
        return found

    def checked_record(self, row: tuple[Any, ...]) -> Record:
        """The record of a row of `states`, all columns in order."""
        self.verify("states", row)
        record = values.decode_record(_blob(row[5]))
        handle = record.handle
        if (record.serial, record.tenant, handle.name, handle.version, record.due_ms) != row[:5]:
            raise Damaged(f"state {handle}")
        return record

    def verify(self, table: str, row: tuple[Any, ...]) -> None:
        """Raises Damaged unless a row, all columns in order, matches its seal."""
        if row[-1] != seal(table, *row[:-1]):
            raise Damaged(f"a row of {table}")

    # -------------------------------------------------------------------------------------------------- inside

    def _make(self) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.execute(_SCHEMA).fetchall()
        cells = (FORMAT, 0, 0)
        self._run("INSERT INTO meta VALUES (1,?,?,?,?)", *cells, seal("meta", *cells))
        self.connection.execute("COMMIT")

    def _meta(self) -> tuple[int, int]:
        row = self._row("SELECT format, sequence, serial, seal FROM meta WHERE id=1")
        if row is None or row[3] != seal("meta", *row[:3]):
            raise Damaged("its first row")
        if row[0] != FORMAT:
            raise Refused(ErrorCode.BAD_CONFIG, f"the catalog has format {row[0]}; this release reads {FORMAT}")
        return row[1], row[2]

    def _insert(self, record: Record, is_head: bool) -> None:
        handle, tenant = record.handle, record.tenant
        name, usage = self.name(tenant, handle.name), self.usage(tenant)
        grown = self._refer(tenant, record.blob, record.bytes, 1)
        if record.segment is not None:
            self._refer(tenant, record.segment, 0, 1)
        self.serial = max(self.serial, record.serial)
        self._put(record, "INSERT INTO states VALUES (?,?,?,?,?,?,?)")
        self._add_facets(record, facets(record))
        head = handle.version if is_head or not name.head else name.head
        self._set_name(tenant, handle.name, Name(max(name.last, handle.version), head))
        self._count(tenant, usage, names=int(not name.last), states=1, bytes=grown)

    def _bury(self, tombstone: Tombstone) -> None:
        handle, tenant = tombstone.handle, tombstone.tenant
        record = self._present(tenant, handle)
        self._run("DELETE FROM states WHERE serial=?", record.serial)
        self._drop_facets(record, facets(record))
        cells = (tenant, handle.name, handle.version, values.encode(tombstone))
        self._run("INSERT INTO tombstones VALUES (?,?,?,?,?)", *cells, seal("tombstones", *cells))
        name = self.name(tenant, handle.name)
        if name.head == handle.version:
            self._set_name(tenant, handle.name, replace(name, head=self.newest(tenant, handle.name)))
        shrunk = self._refer(tenant, record.blob, record.bytes, -1)
        if record.segment is not None:
            self._refer(tenant, record.segment, 0, -1)
        self._count(tenant, self.usage(tenant), states=-1, tombstones=1, bytes=shrunk)

    def _alter(self, tenant: str, handle: StateHandle, **fields: Any) -> None:
        before = self._present(tenant, handle)
        after = replace(before, **fields)
        self._put(after, "REPLACE INTO states VALUES (?,?,?,?,?,?,?)")
        old, new = facets(before), facets(after)
        self._drop_facets(before, [facet for facet in old if facet not in new])
        self._add_facets(after, [facet for facet in new if facet not in old])

    def _present(self, tenant: str, handle: StateHandle) -> Record:
        record = self.record(tenant, handle)
        if record is None:
            raise Damaged(f"state {handle}")
        return record

    def _put(self, record: Record, sql: str) -> None:
        handle = record.handle
        key = (record.serial, record.tenant, handle.name, handle.version, record.due_ms)
        cells = (*key, values.encode(record))
        try:
            self._run(sql, *cells, seal("states", *cells))
        except apsw.ConstraintError:
            raise Damaged(f"state {handle}") from None

    def _add_facets(self, record: Record, names: list[str]) -> None:
        rows = [(record.tenant, facet, record.serial) for facet in names]
        if rows:
            self.connection.executemany("INSERT OR IGNORE INTO facets VALUES (?,?,?)", rows)

    def _drop_facets(self, record: Record, names: list[str]) -> None:
        rows = [(record.tenant, facet, record.serial) for facet in names]
        if rows:
            self.connection.executemany("DELETE FROM facets WHERE tenant=? AND facet=? AND serial=?", rows)

    def _set_name(self, tenant: str, name: str, counters: Name) -> None:
        cells = (tenant, name, counters.last, counters.head)
        self._run("REPLACE INTO names VALUES (?,?,?,?,?)", *cells, seal("names", *cells))

    def _refer(self, tenant: str, digest: str, size: int, by: int) -> int:
        """Counts a reference; the bytes that the tenant holds more because of it."""
        refs, known = self.references(tenant, digest)
        if refs + by < 0:
            raise Damaged("the count of a blob")
        if refs + by == 0:
            self._run("DELETE FROM refs WHERE tenant=? AND digest=?", tenant, digest)
            return -known
        cells = (tenant, digest, refs + by, known if refs else size)
        self._run("REPLACE INTO refs VALUES (?,?,?,?,?)", *cells, seal("refs", *cells))
        return 0 if refs else size

    def _count(self, tenant: str, usage: Usage, **by: int) -> None:
        counts = [count + by.get(field, 0) for field, count in msgspec.structs.asdict(usage).items()]
        if min(counts) < 0:
            raise Damaged("the counts of a tenant")
        cells = (tenant, *counts)
        self._run("REPLACE INTO tenants VALUES (?,?,?,?,?,?)", *cells, seal("tenants", *cells))

    def _remember(self, answer: Answered) -> None:
        cells = (answer.tenant, answer.key, answer.answered_ms, values.encode(answer))
        self._run("REPLACE INTO answers VALUES (?,?,?,?,?)", *cells, seal("answers", *cells))

    def _row(self, sql: str, *cells: Cell) -> tuple[Any, ...] | None:
        return self.connection.execute(sql, cells).fetchone()

    def _run(self, sql: str, *cells: Cell) -> None:
        self.connection.execute(sql, cells)


def _blob(cell: object) -> bytes:
    if not isinstance(cell, bytes):
        raise BadValue("not bytes")
    return cell
