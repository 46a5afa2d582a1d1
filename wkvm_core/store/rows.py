"""Rows of the catalog's tables in SQLite, and the checksum that each carries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import apsw
import msgspec
from xxhash import xxh3_64_intdigest

from wkvm_core.errors import Refused
from wkvm_core.store.records import BadValue
from wkvm_proto.names import ErrorCode

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
SCHEMA = """
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


def verify(table: str, row: tuple[Any, ...]) -> None:
    """Raises Damaged unless a row, all columns in order, matches its seal."""
    if row[-1] != seal(table, *row[:-1]):
        raise Damaged(f"a row of {table}")


def as_bytes(cell: object) -> bytes:
    """The cell. Raises BadValue when it is something else."""
    if not isinstance(cell, bytes):
        raise BadValue("not bytes")
    return cell


def connect(path: str) -> apsw.Connection:
    """A connection to the file, made where it is missing, for its owner's eyes only. Refuses a SQLite that may lose
    pages; raises Damaged, OSError, apsw.Error."""
    found = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if found < SQLITE_MIN:
        raise Refused(ErrorCode.BAD_CONFIG, f"SQLite {apsw.sqlite_lib_version()}: 3.51.3 or later is needed")
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))  # its log inherits the mode
    connection = apsw.Connection(path, statementcachesize=256)
    try:
        with damage_told("its header"):
            connection.execute(_PRAGMAS).fetchall()
    except BaseException:
        connection.close()
        raise
    return connection
