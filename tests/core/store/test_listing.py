from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.core.store.drafts import record
from wkvm_core.store.changes import apply
from wkvm_core.store.index import Index
from wkvm_core.store.listing import Filter, ancestry, list_records
from wkvm_core.store.records import Deleted, Lineage, Placed, Saved, Tagged, Tier, Tombstone
from wkvm_core.store.rows import Damaged
from wkvm_proto.names import StateHandle

PARENT = StateHandle("root", 1)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """`root`, and 20 states: even ones tagged, every third a child of root, every fifth on host too."""
    opened = Index(str(tmp_path / "catalog.db"))
    opened.begin()
    apply(opened, Saved(record(1, "root")))
    for serial in range(2, 22):
        made = record(serial, f"n{serial % 4}", version=serial // 4 + 1)
        made = replace(
            made,
            tags=("even",) if serial % 2 == 0 else (),
            lineage=Lineage("fork", (PARENT,) if serial % 3 == 0 else ()),
            tiers=(Tier.HOST, Tier.DISK) if serial % 5 == 0 else (Tier.DISK,),
        )
        apply(opened, Saved(made))
    apply(opened, Saved(record(22, "root", tenant="u")))
    opened.commit(1)
    yield opened
    opened.close()


def serials(index: Index, asked: Filter, tenant: str = "t", now_ms: int = 0) -> list[int]:
    """All pages of three."""
    found: list[int] = []
    after = None
    while True:
        page = list_records(index, tenant, asked, 3, after, now_ms)
        found += [one.serial for one in page.records]
        assert len(page.records) == 3 or page.after is None
        if page.after is None:
            return found
        after = page.after


ALL = range(21, 0, -1)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (Filter(), list(ALL)),
        (Filter(name="n1"), [21, 17, 13, 9, 5]),
        (Filter(name="n"), []),
        (Filter(prefix="n"), list(range(21, 1, -1))),
        (Filter(prefix="root"), [1]),
        (Filter(prefix=""), list(ALL)),
        (Filter(tag="even"), list(range(20, 1, -2))),
        (Filter(tag="Even"), []),
        (Filter(parent=PARENT), [21, 18, 15, 12, 9, 6, 3]),
        (Filter(tier=Tier.HOST), [20, 15, 10, 5]),
        (Filter(tier=Tier.SLOT), []),
        (Filter(tag="even", parent=PARENT), [18, 12, 6]),
        (Filter(tag="even", parent=PARENT, name="n2", tier=Tier.DISK), [18, 6]),
        (Filter(tag="even", prefix="n0"), [20, 16, 12, 8, 4]),
    ],
)
def test_pages_are_newest_first_and_hold_what_passes_the_filter(
    index: Index, asked: Filter, expected: list[int]
) -> None:
    assert serials(index, asked) == expected


def test_another_tenant_sees_its_own_only(index: Index) -> None:
    assert serials(index, Filter(), tenant="u") == [22]
    assert serials(index, Filter(parent=PARENT), tenant="u") == []
    assert serials(index, Filter(), tenant="v") == []


def test_pages_do_not_shift_when_states_come_and_go(index: Index) -> None:
    first = list_records(index, "t", Filter(), 5, None, 0)
    index.begin()
    apply(index, Saved(record(23, "new")))
    apply(index, Deleted(Tombstone(StateHandle("n1", 6), "t", Lineage("create"), 0, 0)))  # the newest, serial 21
    apply(index, Deleted(Tombstone(StateHandle("n1", 5), "t", Lineage("create"), 0, 0)))  # the cursor itself
    index.commit(2)
    assert [one.serial for one in list_records(index, "t", Filter(), 5, first.after, 0).records] == [16, 15, 14, 13, 12]


def test_changed_tags_and_tiers_are_found_and_the_old_ones_are_not(index: Index) -> None:
    handle = StateHandle("root", 1)
    index.begin()
    apply(index, Tagged("t", handle, ("new", "new")))
    apply(index, Placed("t", handle, (Tier.REMOTE,)))
    index.commit(2)
    assert serials(index, Filter(tag="new")) == [1]
    assert serials(index, Filter(tier=Tier.REMOTE)) == [1]
    assert 1 not in serials(index, Filter(tier=Tier.DISK))


def test_a_state_that_is_due_is_not_listed(index: Index) -> None:
    index.begin()
    apply(index, Saved(replace(record(23, "due"), expires_ms=10)))
    index.commit(2)
    assert serials(index, Filter(prefix="due"), now_ms=9) == [23]
    assert serials(index, Filter(prefix="due"), now_ms=10) == []


def test_a_page_with_an_altered_record_is_refused_whole(index: Index) -> None:
    index.connection.execute("UPDATE states SET record = replace(record, 'n2', 'n3') WHERE serial = 18")
    with pytest.raises(Damaged):
        serials(index, Filter())
    assert serials(index, Filter(name="n1")) == [21, 17, 13, 9, 5]


def test_an_ancestry_holds_each_state_once_nearest_first(index: Index) -> None:
    left, right, bottom = (StateHandle(name, 1) for name in ("left", "right", "bottom"))
    index.begin()
    for serial, (handle, parents) in enumerate([(left, (PARENT,)), (right, (PARENT,)), (bottom, (left, right))], 23):
        apply(index, Saved(replace(record(serial), handle=handle, lineage=Lineage("merge", parents))))
    index.commit(2)
    found = index.record("t", bottom)
    assert found is not None
    assert [one.handle for one in ancestry(index, found)] == [left, right, PARENT]
