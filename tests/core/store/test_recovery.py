from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.core.store.drafts import digest, draft, open_store, record
from tests.fakes.files import CrashingFiles
from wkvm_core.errors import Refused
from wkvm_core.store.backup import backups
from wkvm_core.store.journal import Journal, JournalDamaged, frame
from wkvm_core.store.listing import Filter
from wkvm_core.store.records import Saved, encode
from wkvm_core.store.recovery import rebuild
from wkvm_core.store.store import StateStore
from wkvm_proto.names import ErrorCode, StateHandle


@pytest.fixture
def files() -> CrashingFiles:
    return CrashingFiles()


@pytest.fixture
def store(files: CrashingFiles, tmp_path: Path) -> StateStore:
    """Closed again; transactions 1 and 2, a backup, 3, a backup, 4."""
    store = open_store(files, tmp_path)
    store.save("t", "a", draft(1)).result()
    store.save("t", "a", draft(2)).result()
    store.backup().result()
    store.delete("t", "a@1").result()
    store.backup().result()
    store.save("u", "b", draft(3)).result()
    store.close()
    return store


def held(files: CrashingFiles, tmp_path: Path) -> list[str]:
    store = open_store(files, tmp_path)
    found = [str(record.handle) for tenant in "tu" for record in store.list(tenant, Filter()).result().records]
    store.close()
    return found


def test_a_rebuild_begins_with_the_newest_backup(store: StateStore, files: CrashingFiles, tmp_path: Path) -> None:
    told = rebuild(files, str(tmp_path / "catalog.db"), lambda blob: blob != digest(3))
    assert (told.backup, told.damaged_backups, told.transactions) == (3, (), 1)
    assert told.without_blob == (("u", StateHandle("b", 1)),)
    assert held(files, tmp_path) == ["a@2", "b@1"]


def test_a_damaged_backup_is_told_and_the_one_before_it_serves(
    store: StateStore, files: CrashingFiles, tmp_path: Path
) -> None:
    path = f"backup/{3:020d}.db"
    at = files.read(path, 0, files.size(path)).index(digest(2).encode())
    files.flip(path, 8 * at)
    told = rebuild(files, str(tmp_path / "catalog.db"), lambda blob: True)
    assert (told.backup, told.damaged_backups, told.transactions) == (2, (3,), 2)
    assert held(files, tmp_path) == ["a@2", "b@1"]


def test_without_any_backup_the_whole_journal_is_read_or_its_gap_told(
    store: StateStore, files: CrashingFiles, tmp_path: Path
) -> None:
    for sequence in backups(files):
        files.unlink(f"backup/{sequence:020d}.db")
    assert rebuild(files, str(tmp_path / "catalog.db"), lambda blob: True).transactions == 4
    files.unlink(files_of(files)[0])
    before = (tmp_path / "catalog.db").read_bytes()
    with pytest.raises(JournalDamaged):
        rebuild(files, str(tmp_path / "catalog.db"), lambda blob: True)
    assert (tmp_path / "catalog.db").read_bytes() == before


def test_a_journal_that_ends_before_the_catalog_is_damage(
    store: StateStore, files: CrashingFiles, tmp_path: Path
) -> None:
    newest = files_of(files)[-1]
    files.flip(newest, 8 * (files.size(newest) - 1))
    with pytest.raises(JournalDamaged) as damage:
        open_store(files, tmp_path)
    assert damage.value.code is ErrorCode.STORE_DAMAGED


def test_a_transaction_of_a_later_release_stops_the_start(
    store: StateStore, files: CrashingFiles, tmp_path: Path
) -> None:
    Journal(files, 4).append([b"\x91\x81\xa4type\xa7renamed"])
    with pytest.raises(Refused) as refused:
        open_store(files, tmp_path)
    assert refused.value.code is ErrorCode.BAD_CONFIG


def test_backups_are_kept_by_twos_and_the_journal_reaches_back_to_the_older(
    store: StateStore, files: CrashingFiles, tmp_path: Path
) -> None:
    for _ in range(3):
        for backs_up in (False, True):  # each start has a journal file of its own
            again = open_store(files, tmp_path)
            again.save("t", "c", draft(1)).result()
            if backs_up:
                again.backup().result()
            again.close()
    everything = [*(f"c@{version}" for version in range(6, 0, -1)), "a@2", "b@1"]
    assert backups(files) == [8, 10]
    assert held(files, tmp_path) == everything
    assert len(files_of(files)) == 2
    newest = f"backup/{10:020d}.db"
    files.flip(newest, 8 * files.read(newest, 0, files.size(newest)).index(digest(2).encode()))
    told = rebuild(files, str(tmp_path / "catalog.db"), lambda blob: True)
    assert (told.backup, told.damaged_backups, told.transactions) == (8, (10,), 2)
    assert held(files, tmp_path) == everything


def test_writes_during_a_backup_go_on_and_are_kept(files: CrashingFiles, tmp_path: Path) -> None:
    store = open_store(files, tmp_path)
    for number in range(400):
        store.save("t", f"n{number}", draft(number))
    done = store.backup()
    saved = 0
    while not done.done():
        store.save("t", "during", draft(1)).result()
        saved += 1
    store.close()
    (tmp_path / "catalog.db").unlink()
    assert saved > 0
    again = open_store(files, tmp_path)
    assert again.get("t", "during").result().handle.version == saved
    assert again.usage("t").result().states == 400 + saved
    again.scrub().result()
    again.close()


def test_what_a_killed_process_left_in_memory_only_is_durable_before_it_is_shown(
    store: StateStore, files: CrashingFiles, tmp_path: Path
) -> None:
    newest = files_of(files)[-1]
    salt = struct.unpack_from("<Q", files.read(newest, 0, 32), 16)[0]
    saved = encode((Saved(record(4, "late")),))
    files.append(newest).write(frame(saved, 5, 4, salt))
    assert "late@1" in held(files, tmp_path)
    (tmp_path / "catalog.db").unlink()
    assert "late@1" in held(files.after_crash(0), tmp_path)


def test_an_unfinished_backup_is_swept_at_the_start(store: StateStore, files: CrashingFiles, tmp_path: Path) -> None:
    files.create("backup/00000000000000000009.tmp").write(b"half")
    assert held(files, tmp_path) == ["a@2", "b@1"]
    assert len(files.list("backup")) == 2


def files_of(files: CrashingFiles) -> list[str]:
    return [f"journal/{name}" for name in files.list("journal")]
