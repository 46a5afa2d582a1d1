from __future__ import annotations

import contextlib
import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.files import CrashingFiles
from wkvm_core.errors import Refused
from wkvm_core.store.files import RealFiles
from wkvm_core.store.objects import Objects, Swept, digest_of, tenant_key
from wkvm_core.store.tier import DiskTier
from wkvm_proto.names import ErrorCode

KEY = tenant_key("a")
SMALL, LARGE = b"small", b"l" * 1300


def objects_on(files: CrashingFiles) -> Objects:
    return Objects(files, DiskTier(), "things", ".bin")


def names(files: CrashingFiles, folder: str = "things") -> list[str]:
    """Names of all files below a folder."""
    if not files.exists(folder):
        return []
    return [
        name
        for first in files.list(folder)
        for second in files.list(f"{folder}/{first}")
        for name in files.list(f"{folder}/{first}/{second}")
    ]


@pytest.fixture
def files() -> CrashingFiles:
    return CrashingFiles()


@pytest.fixture
def objects(files: CrashingFiles) -> Objects:
    return objects_on(files)


def test_an_object_is_named_by_the_keyed_digest_of_its_bytes(objects: Objects, files: CrashingFiles) -> None:
    digest = objects.put(KEY, (b"sm", b"", b"all"))
    assert digest == digest_of(KEY, (SMALL,))
    assert objects.path(digest) == f"things/{digest[:2]}/{digest[2:4]}/{digest}.bin"
    assert names(files) == [f"{digest}.bin"]
    assert objects.read(KEY, digest, limit=100) == SMALL
    assert list(objects.digests()) == [digest]


def test_equal_content_is_kept_once_for_each_tenant(objects: Objects, files: CrashingFiles) -> None:
    mine = objects.put(KEY, (SMALL,))
    writes = sum(operation.startswith("write") for operation in files.operations)
    assert objects.put(KEY, (SMALL,)) == mine
    assert sum(operation.startswith("write") for operation in files.operations) == writes
    theirs = objects.put(tenant_key("b"), (SMALL,))
    assert sorted(names(files)) == sorted([f"{mine}.bin", f"{theirs}.bin"])
    assert mine != theirs


def test_the_order_of_writing_is_temporary_sync_rename_folder(objects: Objects, files: CrashingFiles) -> None:
    digest = objects.put(KEY, (SMALL,))
    path, folder = objects.path(digest), objects.path(digest).rpartition("/")[0]
    steps = [operation.split()[0] for operation in files.operations if path in operation or operation.endswith(folder)]
    assert steps == ["mkdir", "create", "write", "sync", "close", "rename", "sync_folder"]


def test_after_any_crash_an_acknowledged_object_is_whole_and_no_other_is_served() -> None:
    files = CrashingFiles()
    objects = objects_on(files)
    acknowledged: list[tuple[int, str]] = []
    for content in (SMALL, LARGE, SMALL):
        digest = objects.put(KEY, (content,))
        acknowledged.append((len(files.operations), digest))
    for point in files.crash_points():
        for seed in range(12):
            after = files.after_crash(seed, point)
            reopened = objects_on(after)
            held = {digest for number, digest in acknowledged if number <= point}
            reopened.sweep(held)
            assert all(name.endswith(".bin") for name in names(after))
            assert set(reopened.digests()) == held
            for digest in held:
                reopened.check(KEY, digest)
            for content in (SMALL, LARGE):  # the client tries again
                assert reopened.read(KEY, reopened.put(KEY, (content,)), limit=4096) == content


def test_what_a_crash_left_without_its_name_being_durable_is_made_durable_by_the_next_put() -> None:
    files = CrashingFiles()
    objects = objects_on(files)
    digest = objects.put(KEY, (SMALL,))
    before_folder = len(files.operations) - 1
    killed = files.after_crash(1, before_folder)  # the process died, the disk kept everything
    objects_on(killed).put(KEY, (SMALL,))
    assert objects_on(killed.after_crash(0)).read(KEY, digest, limit=100) == SMALL


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        (errno.EIO, ErrorCode.STORE_READ_ONLY),
        (errno.EROFS, ErrorCode.STORE_READ_ONLY),
        (errno.ENOSPC, ErrorCode.STORE_FULL),
        (errno.EDQUOT, ErrorCode.STORE_FULL),
    ],
)
def test_any_failing_operation_closes_the_tier_for_writing_and_reads_go_on(code: int, refused: ErrorCode) -> None:
    story = CrashingFiles()
    objects_on(story).put(KEY, (LARGE,))
    before = len(story.operations)
    objects_on(story).put(KEY, (SMALL,))
    for number in range(len(story.operations) - before):
        files = CrashingFiles()
        objects = objects_on(files)
        kept = objects.put(KEY, (LARGE,))
        files.fail(number, code)
        with pytest.raises(Refused) as raised:
            objects.put(KEY, (SMALL,))
        assert raised.value.code is refused
        done = len(files.operations)
        with pytest.raises(Refused) as raised:
            objects.put(KEY, (b"another",))
        assert raised.value.code is refused
        assert len(files.operations) == done, "nothing is tried on a disk that failed"
        assert objects.read(KEY, kept, limit=4096) == LARGE
        assert not [name for name in names(files) if name.endswith(".tmp")]


def test_a_failed_sync_is_never_followed_by_another_of_that_file() -> None:
    story = CrashingFiles()
    objects_on(story).put(KEY, (SMALL,))
    number = next(n for n, operation in enumerate(story.operations) if operation.startswith("sync "))
    files = CrashingFiles()
    files.fail(number, errno.EIO)
    with pytest.raises(Refused):
        objects_on(files).put(KEY, (SMALL,))
    assert [operation.split()[0] for operation in files.operations[number:]] == ["sync", "close", "unlink"]
    assert names(files) == []


def test_a_damaged_object_is_put_aside_never_served_and_may_be_put_anew(objects: Objects, files: CrashingFiles) -> None:
    digest = objects.put(KEY, (SMALL,))
    files.flip(objects.path(digest), 3)
    for _ in range(2):
        with pytest.raises(Refused) as raised:
            objects.read(KEY, digest, limit=100)
        assert raised.value.code is ErrorCode.STATE_DAMAGED
        assert names(files) == [f"{digest}.damaged"]
    assert not objects.exists(digest)
    assert objects.put(KEY, (SMALL,)) == digest
    assert objects.read(KEY, digest, limit=100) == SMALL


def test_a_damaged_object_that_nobody_read_yet_is_mended_by_an_equal_put(
    objects: Objects, files: CrashingFiles
) -> None:
    digest = objects.put(KEY, (SMALL,))
    files.flip(objects.path(digest), 3)
    objects.put(KEY, (SMALL,))
    assert objects.read(KEY, digest, limit=100) == SMALL


def test_what_the_disk_cannot_read_is_refused_and_stays(objects: Objects, files: CrashingFiles) -> None:
    digest = objects.put(KEY, (SMALL,))
    files.read_error = errno.EIO
    for look in (lambda: objects.read(KEY, digest, limit=100), lambda: objects.check(KEY, digest)):
        with pytest.raises(Refused, match="cannot be read") as raised:
            look()
        assert raised.value.code is ErrorCode.STATE_DAMAGED
    assert objects.put(KEY, (SMALL,)) == digest, "what cannot be read is written anew"
    assert objects.damaged(KEY, digest).code is ErrorCode.STATE_DAMAGED
    objects.put(KEY, (LARGE,))
    files.read_error = 0
    assert objects.read(KEY, digest, limit=100) == SMALL


def test_an_object_that_was_mended_since_it_was_read_is_not_put_aside(objects: Objects) -> None:
    digest = objects.put(KEY, (SMALL,))
    assert objects.damaged(KEY, digest).code is ErrorCode.STATE_DAMAGED
    assert objects.read(KEY, digest, limit=100) == SMALL


def test_finding_damage_twice_or_removing_twice_closes_nothing() -> None:
    files, tier = CrashingFiles(), DiskTier()
    objects = Objects(files, tier, "things", ".bin")
    digest = objects.put(KEY, (SMALL,))
    files.flip(objects.path(digest), 0)
    for _ in range(2):
        objects.damaged(KEY, digest)
    for _ in range(2):
        objects.remove(digest)
    assert tier.refusal is None
    assert names(files) == []


def test_damage_is_refused_also_where_nothing_can_be_put_aside(objects: Objects, files: CrashingFiles) -> None:
    digest = objects.put(KEY, (SMALL,))
    files.flip(objects.path(digest), 0)
    files.fail(0, errno.EROFS, forever=True)
    for _ in range(2):
        with pytest.raises(Refused, match="damaged"):
            objects.read(KEY, digest, limit=100)


def test_the_scrub_finds_damage_in_an_object_of_several_pieces(objects: Objects, files: CrashingFiles) -> None:
    digest = objects.put(KEY, (b"x" * (5 << 19),))
    objects.check(KEY, digest)
    files.flip(objects.path(digest), 8 * (5 << 19) - 1)
    with pytest.raises(Refused) as raised:
        objects.check(KEY, digest)
    assert raised.value.code is ErrorCode.STATE_DAMAGED


def test_a_missing_or_longer_object_is_damaged(objects: Objects, files: CrashingFiles) -> None:
    digest = objects.put(KEY, (SMALL,))
    writer = files.append(objects.path(digest))
    writer.write(b"more")
    with pytest.raises(Refused, match="damaged"):
        objects.read(KEY, digest, limit=5)
    with pytest.raises(Refused, match="missing"):
        objects.read(KEY, digest, limit=5)
    with pytest.raises(Refused, match="missing"):
        objects.check(KEY, digest)


def test_an_object_is_not_read_under_another_tenants_key(objects: Objects) -> None:
    digest = objects.put(KEY, (SMALL,))
    with pytest.raises(Refused):
        objects.read(tenant_key("b"), digest, limit=100)


def test_a_sweep_removes_temporaries_and_orphans_and_nothing_else(objects: Objects, files: CrashingFiles) -> None:
    kept, orphan = objects.put(KEY, (SMALL,)), objects.put(KEY, (LARGE,))
    folder = objects.path(kept).rpartition("/")[0]
    for name in (f"{kept}.bin.0011223344556677.tmp", "notes.txt"):
        files.create(f"{folder}/{name}").close()
    assert objects.sweep({kept}) == Swept(temporaries=1, orphans=1)
    assert sorted(names(files)) == sorted([f"{kept}.bin", "notes.txt"])
    assert objects.sweep({kept}) == Swept(0, 0)
    assert orphan not in set(objects.digests())


def test_a_sweep_of_a_new_store_finds_nothing(objects: Objects) -> None:
    assert objects.sweep(()) == Swept(0, 0)


def test_a_removed_object_is_gone_and_removing_it_again_is_nothing(objects: Objects, files: CrashingFiles) -> None:
    digest = objects.put(KEY, (SMALL,))
    objects.remove(digest)
    objects.remove(digest)
    assert names(files) == []


def test_equal_content_put_by_many_threads_at_once_is_one_whole_file(tmp_path: Path) -> None:
    files = RealFiles(str(tmp_path))
    objects = Objects(files, DiskTier(), "things", ".bin")
    with ThreadPoolExecutor(8) as pool:
        digests = set(pool.map(lambda number: objects.put(KEY, (LARGE, bytes([number % 2]))), range(32)))
    assert len(digests) == 2
    assert [path.name for path in sorted(tmp_path.rglob("*.*"))] == sorted(f"{digest}.bin" for digest in digests)
    for digest in digests:
        objects.check(KEY, digest)


STEP = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 3)),
    st.tuples(st.just("remove"), st.integers(0, 3)),
    st.tuples(st.just("fail"), st.integers(0, 12)),
    st.tuples(st.just("crash"), st.integers(0, 1000)),
)


@given(st.lists(STEP, max_size=14))
@settings(deadline=None, max_examples=150)
def test_any_story_of_puts_removals_faults_and_crashes_keeps_what_was_acknowledged(
    story: list[tuple[str, int]],
) -> None:
    contents = [bytes([number]) * (400 * number + 1) for number in range(4)]
    files, held = CrashingFiles(), set[str]()
    objects = objects_on(files)
    for verb, number in story:
        if verb == "put":
            with contextlib.suppress(Refused):
                held.add(objects.put(KEY, (contents[number],)))
        elif verb == "remove":
            digest = digest_of(KEY, (contents[number],))
            held.discard(digest)
            with contextlib.suppress(Refused):
                objects.remove(digest)
        elif verb == "fail":
            files.fail(number, errno.EIO)
        else:
            files = files.after_crash(number)
            objects = objects_on(files)
            objects.sweep(held)
            assert set(objects.digests()) == held
            assert not [name for name in names(files) if not name.endswith(".bin")]
        for digest in held:
            objects.check(KEY, digest)
