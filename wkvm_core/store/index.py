"""The catalog's tables: SQLite through apsw, one connection, a checksum in every row that is verified when it is read.

What it holds follows from the changes applied to it and from nothing else, so a backup and the journal rebuild it.
Every version ever issued has a record or a tombstone: a row that went missing is told from one that never was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from wkvm_core.errors import Refused
from wkvm_core.store import records as values
from wkvm_core.store.records import Answered, Record, Tombstone
from wkvm_core.store.rows import SCHEMA, Cell, Damaged, as_bytes, connect, damage_told, seal, verify
from wkvm_proto.names import ErrorCode, StateHandle

FORMAT = 1


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


class Index:
    """One open catalog, for one thread. Writing methods belong between `begin` and `commit` or `roll_back`.

    Raises Damaged for what cannot be trusted, apsw.Error when the disk fails.
    """

    def __init__(self, path: str) -> None:
        """Opens or makes the file; reads none of its rows but one. Refuses a catalog of a later release, raises
        OSError."""
        self.connection = connect(path)
        try:
            with damage_told("its header"):
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
        self.run("UPDATE meta SET format=?, sequence=?, serial=?, seal=? WHERE id=1", *cells, seal("meta", *cells))
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

    def forget_answers(self, before_ms: int, limit: int) -> None:
        """Drops the oldest answers to idempotency keys, `limit` of them at most."""
        self.run(
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
                verify("tombstones", row)
                tombstone = values.decode_tombstone(as_bytes(row[3]))
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
                verify("names", row)
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
            verify("tenants", row)
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
            verify("refs", row)
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
            verify("answers", row)
            answer = values.decode_answer(as_bytes(row[3]))
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
        verify("states", row)
        record = values.decode_record(as_bytes(row[5]))
        handle = record.handle
        if (record.serial, record.tenant, handle.name, handle.version, record.due_ms) != row[:5]:
            raise Damaged(f"state {handle}")
        return record

    # -------------------------------------------------------------------------------------------------- inside

    def _make(self) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.execute(SCHEMA).fetchall()
        cells = (FORMAT, 0, 0)
        self.run("INSERT INTO meta VALUES (1,?,?,?,?)", *cells, seal("meta", *cells))
        self.connection.execute("COMMIT")

    def _meta(self) -> tuple[int, int]:
        row = self._row("SELECT format, sequence, serial, seal FROM meta WHERE id=1")
        if row is None or row[3] != seal("meta", *row[:3]):
            raise Damaged("its first row")
        if row[0] != FORMAT:
            raise Refused(ErrorCode.BAD_CONFIG, f"the catalog has format {row[0]}; this release reads {FORMAT}")
        return row[1], row[2]

    def _row(self, sql: str, *cells: Cell) -> tuple[Any, ...] | None:
        return self.connection.execute(sql, cells).fetchone()

    def run(self, sql: str, *cells: Cell) -> None:
        """A statement that answers nothing."""
        self.connection.execute(sql, cells)
