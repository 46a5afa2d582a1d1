"""Questions about many records: a page of a tenant's states, and the ancestry of one."""

from __future__ import annotations

from collections import deque
from typing import Annotated

import msgspec
from msgspec import Meta

from wkvm_core.store.index import Index
from wkvm_core.store.records import Lineage, Record, Tag, Tier
from wkvm_core.store.rows import Damaged, damage_told
from wkvm_proto.names import StateHandle

MAX_PAGE = 1000
MAX_ANCESTORS = 10_000
FEW = 1000

_AFTER_NAMES = "\x7f"
"""Sorts behind every character of a name."""


class Filter(msgspec.Struct, frozen=True):
    """What a listed record must be; None asks nothing."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")] | None = None
    prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,128}\Z")] | None = None
    """The name begins so."""
    tag: Tag | None = None
    parent: StateHandle | None = None
    tier: Tier | None = None

    def admits(self, record: Record) -> bool:
        """Whether a record passes."""
        name = record.handle.name
        return (
            (self.name is None or name == self.name)
            and (self.prefix is None or name.startswith(self.prefix))
            and set(self.facets()) <= set(record.facets)
        )

    def facets(self) -> list[str]:
        """The facets asked for, those that fewest records are likely to have first."""
        asked = []
        if self.parent is not None:
            asked.append(f"parent:{self.parent}")
        if self.tag is not None:
            asked.append(f"tag:{self.tag}")
        if self.tier is not None:
            asked.append(f"tier:{self.tier}")
        return asked


class Page(msgspec.Struct, frozen=True):
    """Records, newest first, and the cursor after which the next page begins; None on the last page."""

    records: tuple[Record, ...]
    after: int | None


class Ancestor(msgspec.Struct, frozen=True):
    """A state in an ancestry, also when it was deleted since."""

    handle: StateHandle
    lineage: Lineage
    tokens: int
    deleted: bool


def list_records(index: Index, tenant: str, asked: Filter, limit: int, after: int | None, now_ms: int) -> Page:
    """A page of at most `limit` records that were made before the record with serial `after`. Pages do not shift when
    records are added or deleted between them."""
    with damage_told("a page of states"):
        few = asked.prefix is not None and _are_few(index, tenant, asked.prefix)
        sql, cells = _query(tenant, asked, few, 2**62 if after is None else after, now_ms, limit + 1)
        rows = index.connection.execute(sql, cells).fetchall()
        found = [index.checked_record(row) for row in rows]
    if any(record.tenant != tenant or not asked.admits(record) for record in found):
        raise Damaged("a page of states")
    more = len(found) > limit
    return Page(tuple(found[:limit]), found[limit - 1].serial if more else None)


def ancestry(index: Index, record: Record) -> tuple[Ancestor, ...]:
    """All states that a record descends from, nearest first, each once; MAX_ANCESTORS at most."""
    seen: set[StateHandle] = set()
    ancestors: list[Ancestor] = []
    waiting = deque(record.lineage.parents)
    while waiting and len(ancestors) < MAX_ANCESTORS:
        handle = waiting.popleft()
        if handle in seen:
            continue
        seen.add(handle)
        found = index.find(record.tenant, handle)
        if found is None:
            raise Damaged(f"state {handle}")
        ancestors.append(Ancestor(handle, found.lineage, found.tokens, not isinstance(found, Record)))
        waiting.extend(found.lineage.parents)
    return tuple(ancestors)


def _are_few(index: Index, tenant: str, prefix: str) -> bool:
    """Whether so few states have names that begin so that sorting them is less work than passing over the others."""
    sql = (
        "SELECT count(*) FROM (SELECT 1 FROM states INDEXED BY states_by_handle "
        "WHERE tenant = ? AND name >= ? AND name < ? LIMIT ?)"
    )
    found = index.connection.execute(sql, (tenant, prefix, prefix + _AFTER_NAMES, FEW + 1)).get
    return isinstance(found, int) and found <= FEW


def _query(tenant: str, asked: Filter, few: bool, before: int, now_ms: int, limit: int) -> tuple[str, list[str | int]]:
    """The statement is put together from literals here; everything that a caller gave is bound."""
    wanted = asked.facets()
    cells: list[str | int] = []
    if few:
        source, order = "states s INDEXED BY states_by_handle", "s.serial"
        where = ["s.tenant = ?", "s.serial < ?"]
        cells += [tenant, before]
    elif wanted:
        source = "facets f CROSS JOIN states s ON s.serial = f.serial"
        where = ["f.tenant = ?", "f.facet = ?", "f.serial < ?"]
        cells += [tenant, wanted[0], before]
        order = "f.serial"
        del wanted[0]
    elif asked.name is not None:
        source, order = "states s INDEXED BY states_by_handle", "s.version"
        where = ["s.tenant = ?", "s.serial < ?"]
        cells += [tenant, before]
    else:
        source, order = "states s INDEXED BY states_by_age", "s.serial"
        where = ["s.tenant = ?", "s.serial < ?"]
        cells += [tenant, before]
    for facet in wanted:
        where.append("EXISTS (SELECT 1 FROM facets g WHERE g.tenant = ? AND g.facet = ? AND g.serial = s.serial)")
        cells += [tenant, facet]
    if asked.name is not None:
        where.append("s.name = ?")
        cells.append(asked.name)
    if asked.prefix is not None:
        where.append("s.name >= ? AND s.name < ?")  # names are ASCII and compared byte by byte
        cells += [asked.prefix, asked.prefix + _AFTER_NAMES]
    where.append("(s.due IS NULL OR s.due > ?)")
    cells += [now_ms, limit]
    sql = f"SELECT s.* FROM {source} WHERE {' AND '.join(where)} ORDER BY {order} DESC LIMIT ?"  # noqa: S608
    return sql, cells
