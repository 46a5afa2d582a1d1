from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from tests.fakes.files import CrashingFiles
from wkvm_core.store import files as module
from wkvm_core.store.files import Files, RealFiles


@pytest.fixture(params=["real", "crashing"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return RealFiles(str(tmp_path / "store")) if request.param == "real" else CrashingFiles()


@pytest.fixture
def real(tmp_path: Path) -> RealFiles:
    return RealFiles(str(tmp_path / "store"))


def put(files: Files, path: str, data: bytes) -> None:
    writer = files.create(path)
    writer.write(data)
    writer.sync()
    writer.close()


def test_what_is_written_is_read_back_from_any_offset(files: Files) -> None:
    files.make_folders("a/b")
    put(files, "a/b/x", b"0123456789")
    assert files.read("a/b/x", 0, 10) == b"0123456789"
    assert files.read("a/b/x", 4, 3) == b"456"
    assert files.read("a/b/x", 8, 100) == b"89"
    assert files.read("a/b/x", 11, 1) == b""
    assert files.size("a/b/x") == 10


def test_bytes_are_read_into_the_callers_memory(files: Files) -> None:
    put(files, "x", b"0123456789")
    block = bytearray(b"_" * 12)
    assert files.read_into("x", 2, memoryview(block)[1:5]) == 4
    assert bytes(block) == b"_2345_______"
    assert files.read_into("x", 7, memoryview(block)) == 3
    assert bytes(block[:3]) == b"789"


def test_a_path_is_created_once_only(files: Files) -> None:
    put(files, "x", b"first")
    with pytest.raises(FileExistsError):
        files.create("x")
    assert files.read("x", 0, 9) == b"first"


def test_appending_goes_on_at_the_end_of_a_file_that_is_there(files: Files) -> None:
    put(files, "x", b"ab")
    writer = files.append("x")
    writer.write(b"cd")
    writer.close()
    writer.close()
    assert files.read("x", 0, 9) == b"abcd"
    with pytest.raises(FileNotFoundError):
        files.append("y")


def test_renaming_takes_the_place_of_what_was_there(files: Files) -> None:
    put(files, "x.tmp", b"new")
    put(files, "x", b"old")
    files.rename("x.tmp", "x")
    files.sync_folder("")
    assert files.list("") == ["x"]
    assert files.read("x", 0, 9) == b"new"


def test_files_and_folders_are_listed_and_removed_by_name(files: Files) -> None:
    files.make_folders("b")
    files.make_folders("b")
    put(files, "a", b"")
    assert files.list("") == ["a", "b"]
    assert (files.exists("a"), files.exists("b"), files.exists("c"), files.exists("c/d")) == (True, True, False, False)
    files.unlink("a")
    assert files.list("") == ["b"]
    for missing in (
        lambda: files.unlink("a"),
        lambda: files.size("a"),
        lambda: files.list("z"),
        lambda: files.read("a", 0, 1),
    ):
        with pytest.raises(FileNotFoundError):
            missing()


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a//b", "a/./b", "a\0b", ".x", "a/"])
def test_a_path_that_the_store_cannot_have_built_is_a_fault(files: Files, path: str) -> None:
    with pytest.raises(AssertionError):
        files.create(path)


def test_files_are_their_owners_alone(real: RealFiles, tmp_path: Path) -> None:
    real.make_folders("a")
    put(real, "a/x", b"")
    assert stat.S_IMODE((tmp_path / "store/a/x").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "store/a").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700


def test_a_link_is_followed_neither_as_a_file_nor_as_a_folder(real: RealFiles, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"theirs")
    (tmp_path / "store/folder").symlink_to(outside)
    (tmp_path / "store/file").symlink_to(outside / "x")
    for attempt in (
        lambda: real.read("folder/x", 0, 9),
        lambda: real.create("folder/y"),
        lambda: real.append("file"),
        lambda: real.read("file", 0, 1),
        lambda: real.list("folder"),
    ):
        with pytest.raises(OSError, match=r"links|directory") as raised:
            attempt()
        assert raised.value.errno in (errno.ELOOP, errno.ENOTDIR)
    assert sorted(path.name for path in outside.iterdir()) == ["x"]
    assert (outside / "x").read_bytes() == b"theirs"


def test_short_writes_are_carried_on(real: RealFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(module.os, "write", lambda descriptor, data: whole(descriptor, data[:3]))
    put(real, "x", b"0123456789")
    assert real.read("x", 0, 99) == b"0123456789"


def test_a_file_whose_sync_failed_is_never_synced_again(real: RealFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fail(descriptor: int) -> None:
        calls.append(descriptor)
        raise OSError(errno.EIO, "the disk")

    writer = real.create("x")
    writer.write(b"x")
    monkeypatch.setattr(module.os, "fsync", fail)
    for again in (writer.sync, writer.sync, lambda: writer.write(b"y")):
        with pytest.raises(OSError, match=r"disk|earlier"):
            again()
    assert len(calls) == 1
    writer.close()


def test_an_error_of_closing_counts(real: RealFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = real.create("x")
    closed = os.close

    def fail(descriptor: int) -> None:
        closed(descriptor)
        raise OSError(errno.EIO, "the disk")

    monkeypatch.setattr(module.os, "close", fail)
    with pytest.raises(OSError, match="the disk"):
        writer.close()
    writer.close()


def test_a_folder_that_was_there_is_synced_before_it_is_relied_on(
    real: RealFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store/a").mkdir()
    synced: list[int] = []
    monkeypatch.setattr(module.os, "fsync", synced.append)
    real.make_folders("a")
    real.make_folders("a")
    assert len(synced) == 1


def torn(files: CrashingFiles, path: str, seeds: range) -> set[bytes | None]:
    """What a path may hold after a crash now; None when it is not there."""
    found: set[bytes | None] = set()
    for seed in seeds:
        after = files.after_crash(seed)
        found.add(after.read(path, 0, after.size(path)) if after.exists(path) else None)
    return found


def test_a_crash_loses_tears_and_reorders_what_was_not_synced() -> None:
    files = CrashingFiles()
    writer = files.create("x")
    files.sync_folder("")
    writer.write(b"a" * 512 + b"b" * 512)
    assert torn(files, "x", range(1)) == {b""}
    assert torn(files, "x", range(1, 2)) == {b"a" * 512 + b"b" * 512}
    found = torn(files, "x", range(200))
    for first in (b"a", b"\0"):
        assert first * 512 in found
        for second in (b"b", b"\0"):
            assert first * 512 + second * 512 in found
    writer.sync()
    assert torn(files, "x", range(200)) == {b"a" * 512 + b"b" * 512}


def test_a_crash_keeps_synced_bytes_under_a_torn_appendix() -> None:
    files = CrashingFiles()
    put(files, "x", b"s" * 700)
    files.sync_folder("")
    writer = files.append("x")
    writer.write(b"n" * 700)
    found = torn(files, "x", range(200))
    assert all(data is not None and data.startswith(b"s" * 700) for data in found)
    assert {b"s" * 700, b"s" * 700 + b"n" * 700, b"s" * 700 + b"n" * 324} <= found


def test_a_crash_loses_or_keeps_names_one_by_one_until_their_folder_is_synced() -> None:
    files = CrashingFiles()
    put(files, "x.tmp", b"new")
    put(files, "y", b"other")
    files.rename("x.tmp", "x")
    found = {tuple(files.after_crash(seed).list("")) for seed in range(100)}
    assert {(), ("x", "y"), ("x",), ("x.tmp",), ("y",), ("x.tmp", "y")} <= found
    files.sync_folder("")
    assert {tuple(files.after_crash(seed).list("")) for seed in range(100)} == {("x", "y")}
    files.unlink("y")
    assert {tuple(files.after_crash(seed).list("")) for seed in range(100)} == {("x", "y"), ("x",)}


def test_a_crash_may_come_after_every_operation_and_again_in_what_it_left() -> None:
    files = CrashingFiles()
    files.make_folders("a")
    put(files, "a/x", b"1")
    files.sync_folder("a")
    assert files.operations == [
        "mkdir a",
        "sync_folder ",
        "create a/x",
        "write a/x",
        "sync a/x",
        "close a/x",
        "sync_folder a",
    ]
    assert [files.after_crash(0, point).exists("a") for point in files.crash_points()] == [False] * 2 + [True] * 6
    assert [files.after_crash(0, point).exists("a/x") for point in files.crash_points()] == [False] * 7 + [True]
    after = files.after_crash(0)
    after.unlink("a/x")
    assert after.after_crash(0).read("a/x", 0, 9) == b"1"
    assert not after.after_crash(1).exists("a/x")


def test_a_fault_comes_at_its_operation_and_a_failed_sync_is_never_made_good() -> None:
    files = CrashingFiles()
    files.fail(1, errno.ENOSPC)
    files.fail(3, errno.EIO)
    writer = files.create("x")
    with pytest.raises(OSError, match="No space") as raised:
        writer.write(b"1234")
    assert raised.value.errno == errno.ENOSPC
    assert files.read("x", 0, 9) == b"12"
    writer = files.append("x")
    with pytest.raises(OSError, match="Input/output") as raised:
        writer.sync()
    assert raised.value.errno == errno.EIO
    writer = files.append("x")
    writer.sync()
    files.sync_folder("")
    assert torn(files, "x", range(20)) == {b"\0\0"}


def test_a_disk_may_fail_for_good_and_be_mended() -> None:
    files = CrashingFiles()
    files.fail(0, errno.EROFS, forever=True)
    for _ in range(3):
        with pytest.raises(OSError, match="Read-only"):
            files.create("x")
    files.heal()
    put(files, "x", b"1")
    assert files.list("") == ["x"]


def test_a_flipped_bit_stays_flipped_after_a_crash() -> None:
    files = CrashingFiles()
    put(files, "x", b"\0\0")
    files.sync_folder("")
    files.flip("x", 9)
    assert files.read("x", 0, 2) == b"\0\2"
    assert files.after_crash(0).read("x", 0, 2) == b"\0\2"
