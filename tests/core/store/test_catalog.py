from __future__ import annotations

import pytest

from wkvm_core.errors import Refused
from wkvm_core.state.arena import Blocks
from wkvm_core.state.cursor import Cursor
from wkvm_core.state.layout import Fingerprint
from wkvm_core.state.snapshot import Snapshot
from wkvm_core.store.catalog import Catalog
from wkvm_core.store.host import HostArena
from wkvm_proto.names import ErrorCode


def snapshot(blocks: Blocks) -> Snapshot:
    return Snapshot(blocks.acquire(), Cursor(3), Fingerprint("m", "l", "n"))


def test_versions_count_from_1_and_are_not_reissued_after_a_drop() -> None:
    blocks = Blocks(4)
    catalog = Catalog(blocks)
    assert str(catalog.save("t", "a", snapshot(blocks))) == "a@1"
    assert str(catalog.save("t", "a", snapshot(blocks))) == "a@2"
    catalog.drop("t", "a@2")
    assert str(catalog.save("t", "a", snapshot(blocks))) == "a@3"
    catalog.drop("t", "a")
    assert catalog.load("t", "a") is catalog.load("t", "a@1")
    catalog.drop("t", "a@1")
    assert blocks.free == 4
    assert len(catalog) == 0
    assert str(catalog.save("t", "a", snapshot(blocks))) == "a@4"


@pytest.mark.parametrize("handle", ["b", "a@2", "a@1"])
def test_unknown_and_foreign_handles_are_refused_alike(handle: str) -> None:
    blocks = Blocks(4)
    catalog = Catalog(blocks)
    catalog.save("t", "a", snapshot(blocks))
    with pytest.raises(Refused) as refused:
        catalog.load("other", handle)
    assert refused.value.code is ErrorCode.STATE_NOT_FOUND
    assert refused.value.message == f"there is no state {handle!r}"


def test_blocks_of_the_host_arena_do_not_overlap() -> None:
    host = HostArena(3, 4096)
    for block in range(3):
        host.view(block)[:] = bytes([block + 1]) * 4096
    assert [set(host.view(block)) for block in range(3)] == [{1}, {2}, {3}]
    host.close()


def test_a_page_is_newest_first_and_says_where_the_next_begins() -> None:
    blocks = Blocks(8)
    catalog = Catalog(blocks, clock=lambda: 7.0)
    for name in ("a", "b", "a", "c"):
        catalog.save("t", name, snapshot(blocks))
    catalog.save("other", "a", snapshot(blocks))
    first, after = catalog.page("t", limit=3)
    rest, end = catalog.page("t", after=after, limit=3)
    assert [str(named.handle) for named in first + rest] == ["c@1", "a@2", "b@1", "a@1"]
    assert end == 0
    assert {named.created for named in first} == {7.0}
    assert [str(named.handle) for named in catalog.page("t", name="a")[0]] == ["a@2", "a@1"]
    assert catalog.page("t", prefix="b")[0] == [catalog.find("t", "b")]
    assert catalog.page("nobody") == ([], 0)
    assert catalog.page("t", limit=4)[1] == 0


def test_a_fork_shares_the_block_until_the_last_name_is_gone() -> None:
    blocks = Blocks(2)
    catalog = Catalog(blocks)
    catalog.save("t", "a", snapshot(blocks))
    made = catalog.fork("t", "a", ["b", "b", "a"])
    assert [(str(named.handle), named.origin.verb, named.origin.parents) for named in made] == [
        ("b@1", "fork", ("a@1",)),
        ("b@2", "fork", ("a@1",)),
        ("a@2", "fork", ("a@1",)),
    ]
    assert blocks.free == 1
    assert [str(named.handle) for named in catalog.drop("t", "a", every=True)] == ["a@2", "a@1"]
    catalog.drop("t", "b")
    assert blocks.free == 1
    catalog.drop("t", "b@1")
    assert blocks.free == 2


def test_a_fork_with_one_bad_name_makes_none() -> None:
    blocks = Blocks(2)
    catalog = Catalog(blocks)
    catalog.save("t", "a", snapshot(blocks))
    with pytest.raises(Refused) as refused:
        catalog.fork("t", "a", ["b", "../c"])
    assert refused.value.param == "names"
    assert len(catalog) == 1
