from __future__ import annotations

from array import array

import pytest

from tests.core.store.test_objects import names
from tests.fakes.files import CrashingFiles
from wkvm_core.errors import Refused
from wkvm_core.state.snapshot import Segment
from wkvm_core.store.objects import Swept
from wkvm_core.store.segments import MAX_LINKS, Segments
from wkvm_core.store.tier import DiskTier
from wkvm_proto.names import ErrorCode


def chain(links: int, salt: int = 0) -> Segment:
    """A chain of `links` links; link n holds n + 1 ids."""
    segment: Segment | None = None
    for number in range(links):
        segment = Segment(array("I", [1000 * salt + 10 * number + i for i in range(number + 1)]).tobytes(), segment)
    assert segment is not None
    return segment


@pytest.fixture
def files() -> CrashingFiles:
    return CrashingFiles()


@pytest.fixture
def segments(files: CrashingFiles) -> Segments:
    return Segments(files, DiskTier())


@pytest.mark.parametrize("links", range(1, 27))
def test_the_ids_of_a_chain_come_back_and_no_chain_on_disk_is_longer_than_8(segments: Segments, links: int) -> None:
    digest = segments.put("a", chain(links))
    assert segments.get("a", digest) == chain(links).flatten()
    assert len(segments.chain(digest)) == (links - 1) % MAX_LINKS + 1


def test_the_bytes_of_the_format_stay_as_they_are(segments: Segments) -> None:
    assert segments.put("a", chain(10)) == "22269d517041925676eba51ef591335e6f33634b11435090aad2c00af378a3fc"


def test_forks_share_the_links_before_them(segments: Segments, files: CrashingFiles) -> None:
    trunk = chain(3)
    forks = [Segment(bytes([n, 0, 0, 0]), trunk) for n in range(4)]
    digests = [segments.put("a", fork) for fork in forks]
    assert len(names(files, "segments")) == 3 + 4
    for fork, digest in zip(forks, digests, strict=True):
        assert segments.get("a", digest) == fork.flatten()
    assert len({segments.chain(digest)[1:] for digest in digests}) == 1


def test_a_line_that_grows_writes_only_its_new_link(segments: Segments, files: CrashingFiles) -> None:
    for links in range(1, 20):
        segments.put("a", chain(links))
        assert len(names(files, "segments")) == links


def test_equal_chains_have_equal_digests_and_a_link_without_ids_is_one(segments: Segments) -> None:
    assert segments.put("a", chain(5)) == segments.put("a", chain(5))
    assert segments.put("a", chain(5)) != segments.put("b", chain(5))
    empty = segments.put("a", Segment(b""))
    assert segments.get("a", empty) == b""
    assert segments.get("a", segments.put("a", Segment(b"", chain(2)))) == chain(2).flatten()


def test_a_flipped_bit_in_any_link_is_found(segments: Segments, files: CrashingFiles) -> None:
    digest = segments.put("a", chain(4))
    for link in segments.chain(digest):
        path = f"segments/{link[:2]}/{link[2:4]}/{link}.ids"
        for bit in range(0, 8 * files.size(path), 5):
            files.flip(path, bit)
            with pytest.raises(Refused) as raised:
                segments.get("a", digest)
            assert raised.value.code is ErrorCode.STATE_DAMAGED
            assert not files.exists(path)
            segments.put("a", chain(4))
    assert segments.get("a", digest) == chain(4).flatten()


def test_a_sweep_keeps_every_link_of_a_referenced_chain(segments: Segments, files: CrashingFiles) -> None:
    kept = segments.put("a", chain(12))
    segments.put("a", chain(5, salt=1))
    assert segments.sweep({kept}) == Swept(temporaries=0, orphans=5)
    assert len(names(files, "segments")) == 4  # links 9 to 12, the ninth with all ids before it
    assert segments.get("a", kept) == chain(12).flatten()


def test_a_sweep_keeps_everything_while_a_referenced_chain_is_cut_off(segments: Segments, files: CrashingFiles) -> None:
    kept = segments.put("a", chain(4))
    middle = segments.chain(kept)[1]
    path = f"segments/{middle[:2]}/{middle[2:4]}/{middle}.ids"
    files.unlink(path)
    assert segments.sweep({kept}) == Swept(0, 0)
    segments.put("a", chain(4))
    assert segments.get("a", kept) == chain(4).flatten()


def test_a_chain_cut_off_is_damaged(segments: Segments, files: CrashingFiles) -> None:
    digest = segments.put("a", chain(3))
    root = segments.chain(digest)[-1]
    files.unlink(f"segments/{root[:2]}/{root[2:4]}/{root}.ids")
    for look in (lambda: segments.get("a", digest), lambda: segments.chain(digest)):
        with pytest.raises(Refused, match="missing"):
            look()


def test_after_any_crash_an_acknowledged_chain_is_whole() -> None:
    files = CrashingFiles()
    segments = Segments(files, DiskTier())
    acknowledged = [(segments.put("a", chain(links)), links, len(files.operations)) for links in (2, 8, 9)]
    for point in files.crash_points():
        after = Segments(files.after_crash(point, point), DiskTier())
        held = [(digest, links) for digest, links, number in acknowledged if number <= point]
        after.sweep({digest for digest, _ in held})
        for digest, links in held:
            assert after.get("a", digest) == chain(links).flatten()
