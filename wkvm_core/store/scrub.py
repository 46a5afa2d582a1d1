"""Reads the whole catalog in steps and compares it with itself: every seal, every count, every way to a record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wkvm_core.store.index import Index
from wkvm_core.store.records import decode_answer, decode_tombstone
from wkvm_core.store.rows import Damaged, damage_told, verify

ROWS_A_STEP = 2000

_KEYS = {
    "tenants": ("tenant",),
    "names": ("tenant", "name"),
    "states": ("serial",),
    "tombstones": ("tenant", "name", "version"),
    "refs": ("tenant", "digest"),
    "answers": ("tenant", "key"),
}


def scrub(index: Index) -> Iterator[None]:
    """Raises Damaged at the first thing that is wrong. Rows written between steps are right by themselves; counts are
    compared in one last step."""
    for table, key in _KEYS.items():
        yield from _seals(index, table, key)
    with damage_told("its pages"):
        if index.connection.execute("PRAGMA quick_check(1)").get != "ok":
            raise Damaged("its pages")
        _counts(index)
    yield


def _seals(index: Index, table: str, key: tuple[str, ...]) -> Iterator[None]:
    columns = ", ".join(key)
    marks = ", ".join("?" * len(key))
    first = f"SELECT * FROM {table} ORDER BY {columns} LIMIT {ROWS_A_STEP}"  # noqa: S608 - literals of this module
    later = f"SELECT * FROM {table} WHERE ({columns}) > ({marks}) ORDER BY {columns} LIMIT {ROWS_A_STEP}"  # noqa: S608
    at: tuple[Any, ...] | None = None
    while True:
        with damage_told(f"a row of {table}"):
            rows: list[tuple[Any, ...]] = index.connection.execute(later if at else first, at or ()).fetchall()
            for row in rows:
                verify(table, row)
                if table == "states":
                    _found(index, row)
                elif table == "tombstones":
                    decode_tombstone(row[3])
                elif table == "answers":
                    _answered(index, row)
        if len(rows) < ROWS_A_STEP:
            return
        last = rows[-1]
        at = tuple(last[: len(key)])
        yield


def _found(index: Index, row: tuple[Any, ...]) -> None:
    record = index.checked_record(row)
    tenant, name, serial = record.tenant, record.handle.name, record.serial
    ways: list[tuple[str, tuple[Any, ...]]] = [
        (
            "states INDEXED BY states_by_handle WHERE tenant=? AND name=? AND version=? AND serial=?",
            (*row[1:4], serial),
        ),
        ("states INDEXED BY states_by_age WHERE tenant=? AND serial=? AND name=?", (tenant, serial, name)),
        ("names WHERE tenant=? AND name=? AND last>=?", (tenant, name, record.handle.version)),
    ]
    ways += [("facets WHERE tenant=? AND facet=? AND serial=?", (tenant, facet, serial)) for facet in record.facets]
    ways += [
        ("refs WHERE tenant=? AND digest=?", (tenant, digest)) for digest in (record.blob, record.segment) if digest
    ]
    if record.due_ms is not None:
        ways.append(("states INDEXED BY states_by_due WHERE due=? AND serial=?", (record.due_ms, serial)))
    if any(index.connection.execute(f"SELECT 1 FROM {way}", cells).get is None for way, cells in ways):  # noqa: S608
        raise Damaged(f"the way to state {record.handle}")


def _answered(index: Index, row: tuple[Any, ...]) -> None:
    decode_answer(row[3])
    for way, cells in (
        ("answers_by_key WHERE key=? AND tenant=?", (row[1], row[0])),
        ("answers_by_age WHERE at=?", row[2:3]),
    ):
        if index.connection.execute(f"SELECT 1 FROM answers INDEXED BY {way}", cells).get is None:  # noqa: S608
            raise Damaged("the way to an idempotency key")


def _counts(index: Index) -> None:
    counted: dict[str, list[int]] = {}
    for column, table in enumerate(("names", "states", "tombstones")):
        sql = f"SELECT tenant, count(*) FROM {table} GROUP BY tenant"  # noqa: S608 - literals
        for tenant, count in _rows(index, sql):
            counted.setdefault(tenant, [0, 0, 0, 0])[column] = count
    for tenant, total in _rows(index, "SELECT tenant, sum(bytes) FROM refs GROUP BY tenant"):
        counted.setdefault(tenant, [0, 0, 0, 0])[3] = total
    said = {row[0]: list(row[1:5]) for row in _rows(index, "SELECT * FROM tenants")}
    if counted != said:
        raise Damaged("the counts of a tenant")


def _rows(index: Index, sql: str) -> list[tuple[Any, ...]]:
    return index.connection.execute(sql).fetchall()
