"""A crash after every operation on the disk: what was acknowledged is there, what was deleted is not."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.core.store.drafts import draft, open_store
from tests.fakes.files import CrashingFiles
from wkvm_core.errors import Refused
from wkvm_core.store.listing import Filter
from wkvm_core.store.store import StateStore
from wkvm_proto.names import ErrorCode, StateHandle

Contents = dict[str, str]

STORY: list[Callable[[StateStore], Future[object]]] = [
    lambda store: store.save("t", "a", draft(1)),
    lambda store: store.fork("t", "a", ("b", "b", "c")),
    lambda store: store.save("t", "a", draft(2, StateHandle("a", 1), verb="decay"), key="k"),
    lambda store: store.backup(),
    lambda store: store.delete("t", "b@1"),
    lambda store: store.save("u", "a", draft(3)),
    lambda store: store.delete("t", "a@2", key="d"),
    lambda store: store.backup(),
    lambda store: store.save("t", "a", draft(4, StateHandle("a", 2), verb="merge")),
    lambda store: store.backup(),
    lambda store: store.delete("t", "b", every=True),
    lambda store: store.pin("t", "c", True),
]


def contents(store: StateStore) -> Contents:
    """Everything that a store tells, by tenant and handle."""
    told = {}
    for tenant in ("t", "u"):
        page = store.list(tenant, Filter()).result()
        for record in page.records:
            assert store.get(tenant, str(record.handle)).result() == record
            head = store.get(tenant, record.handle.name).result().handle
            told[f"{tenant}/{record.handle}"] = f"{record} {head} {store.lineage(tenant, str(record.handle)).result()}"
        told[f"{tenant} holds"] = str(store.usage(tenant).result())
    return told


class Told:
    """The story on a disk, with the contents after each of its sentences."""

    def __init__(self, folder: Path) -> None:
        self.files = CrashingFiles()
        store = open_store(self.files, folder)
        self.states = [contents(store)]
        self.acknowledged_at = [0]
        self.catalogs = [self._catalog(store)]
        for sentence in STORY:
            sentence(store).result()
            self.states.append(contents(store))
            self.acknowledged_at.append(len(self.files.operations))
            self.catalogs.append(self._catalog(store))
        store.close()

    def acknowledged(self, point: int) -> int:
        """How many sentences were acknowledged before a crash after `point` operations."""
        return max(n for n, at in enumerate(self.acknowledged_at) if at <= point)

    @staticmethod
    def _catalog(store: StateStore) -> bytes:
        return store._committer.read(lambda index: index.connection.serialize("main")).result()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("told"))


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_lost_catalog_comes_back_from_journal_and_backup_after_any_crash(
    told: Told, tmp_path: Path, seed: int
) -> None:
    for point in told.files.crash_points():
        folder = tmp_path / str(point)
        folder.mkdir()
        store = open_store(told.files.after_crash(seed, point), folder)
        least = told.acknowledged(point)
        assert contents(store) in told.states[least : least + 2], f"after {told.files.operations[:point]}"
        store.save("t", "a", draft(9)).result()
        store.close()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_catalog_behind_its_journal_catches_up_after_any_crash(told: Told, tmp_path: Path, seed: int) -> None:
    for point in told.files.crash_points():
        folder = tmp_path / str(point)
        folder.mkdir()
        least = told.acknowledged(point)
        (folder / "catalog.db").write_bytes(told.catalogs[least])
        store = open_store(told.files.after_crash(seed, point), folder)
        assert contents(store) in told.states[least : least + 2], f"after {told.files.operations[:point]}"
        store.close()


def test_a_second_crash_right_after_the_recovery_loses_nothing(told: Told, tmp_path: Path) -> None:
    for point in told.files.crash_points()[::4]:
        files = told.files.after_crash(1, point)
        store = open_store(files, _made(tmp_path / f"{point}"))
        found = contents(store)
        store.save("t", "new", draft(9)).result()
        expected = contents(store)
        at = len(files.operations)
        store.close()
        for seed, crash in ((0, None), (2, None), (0, at)):
            again = open_store(files.after_crash(seed, crash), _made(tmp_path / f"{point}.{seed}.{crash}"))
            assert contents(again) == expected
            again.close()
        assert found != expected


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failing_disk_stops_writes_and_not_reads_and_loses_nothing(told: Told, tmp_path: Path, code: int) -> None:
    for number in range(0 if code == errno.EIO else 1, len(told.files.operations), 2):
        files = CrashingFiles()
        store = open_store(files, _made(tmp_path / str(number)))
        files.fail(number, code)
        before = contents(store)
        done = 0
        for sentence in STORY:
            error = sentence(store).exception()
            if isinstance(error, Refused):
                assert (error.code, store.failure is None) == (ErrorCode.STORE_READ_ONLY, False)
                break
            done += 1
            if error is None:
                before = contents(store)
            else:
                assert isinstance(error, OSError)  # of a backup: writes go on
        assert contents(store) == before
        files.heal()
        if store.failure is not None:
            with pytest.raises(Refused) as again:
                store.save("t", "a", draft(9)).result()
            assert again.value.code is ErrorCode.STORE_READ_ONLY
            assert contents(store) == before
        store.close()
        reopened = open_store(files.after_crash(0), _made(tmp_path / f"{number}.again"))
        assert contents(reopened) in told.states[done : done + 2]
        reopened.close()


def test_without_faults_the_whole_story_is_told(told: Told, tmp_path: Path) -> None:
    assert len(told.states[-1]) == 6  # four states, and what each tenant holds
    assert sum("backup/" in operation and "rename" in operation for operation in told.files.operations) == 3
    assert any(operation.startswith("unlink journal/") for operation in told.files.operations)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
