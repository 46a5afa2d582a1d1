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
