from __future__ import annotations

import pytest

from tests.fakes.files import CrashingFiles
from wkvm_core.store import journal as module
from wkvm_core.store.files import Files
from wkvm_core.store.journal import Journal, JournalDamaged, JournalReader

FIRST = "journal/00000001.log"
HEADER = 32
RECORD = 32


def written(*groups: list[bytes]) -> CrashingFiles:
    files = CrashingFiles()
    journal = Journal(files, 0)
    for group in groups:
        journal.append(group)
    journal.close()
    return files


def payloads(files: Files, after: int = 0) -> list[bytes]:
    return [entry.payload for entry in JournalReader(files, after)]


def flipped(files: CrashingFiles, bit: int, path: str = FIRST) -> CrashingFiles:
    again = files.after_crash(1)
    again.flip(path, bit)
    return again


def test_transactions_are_read_back_in_order_with_their_sequences() -> None:
    files = written([b"a"], [b"b", b""], [b"c" * 5000])
    assert [(entry.sequence, entry.payload) for entry in JournalReader(files, 1)] == [
        (2, b"b"),
        (3, b""),
        (4, b"c" * 5000),
    ]
    reader = JournalReader(files, 4)
    assert list(reader) == [] and reader.last == 4 and reader.torn == []


def test_a_journal_that_was_never_written_is_empty() -> None:
    reader = JournalReader(CrashingFiles(), 0)
    reader.settle()
    assert list(reader) == [] and reader.last == 0


def test_a_group_is_one_write_and_one_sync_before_it_is_acknowledged() -> None:
    files = written([b"a"])
    journal = Journal(files, 1)
    journal.append([b"b"])
    before = len(files.operations)
    assert journal.append([b"c", b"d"]) == 4
    assert [operation.split()[0] for operation in files.operations[before:]] == ["write", "sync"]


def test_every_start_writes_to_a_file_of_its_own() -> None:
    files = written([b"a"])
    Journal(files, 1).append([b"b"])
    assert files.list("journal") == ["00000001.log", "00000002.log"]
    assert payloads(files) == [b"a", b"b"]


def test_a_full_file_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 100)
    files = written([b"a" * 50], [b"b"], [b"c"])
    assert len(files.list("journal")) == 2
    assert payloads(files) == [b"a" * 50, b"b", b"c"]


@pytest.mark.parametrize("lost", range(1, RECORD + 6))
def test_a_torn_tail_is_cut_and_told(lost: int) -> None:
    whole = written([b"first"], [b"second"])
    data = whole.read(FIRST, 0, whole.size(FIRST))
    files = CrashingFiles()
    files.make_folders("journal")
    files.create(FIRST).write(data[:-lost])
    reader = JournalReader(files, 0)
    assert [entry.payload for entry in reader] == [b"first"]
    assert reader.last == 1 and [torn.name for torn in reader.torn] == [FIRST]
    Journal(files, reader.last).append([b"third"])
    assert payloads(files) == [b"first", b"third"]


def test_a_group_of_which_only_the_end_reached_the_disk_is_a_torn_tail() -> None:
    files = flipped(written([b"a"], [b"b", b"c"]), 8 * (HEADER + 2 * RECORD + 1))
    assert payloads(files) == [b"a"]


def test_any_flipped_bit_before_the_last_group_is_reported_and_never_read() -> None:
    files = written([b"first"], [b"second"], [b"third"])
    acknowledged_before_last = HEADER + 2 * RECORD + len(b"firstsecond")
    for bit in range(8 * acknowledged_before_last):
        with pytest.raises(JournalDamaged) as damage:
            payloads(flipped(files, bit))
        assert damage.value.name == FIRST
        assert damage.value.sequence == (1 if bit < 8 * (HEADER + RECORD + 5) else 2)


def test_a_flipped_bit_in_the_last_transaction_never_gives_a_wrong_one() -> None:
    files = written([b"first"], [b"second"])
    start = HEADER + RECORD + len(b"first")
    for bit in range(8 * start, 8 * files.size(FIRST)):
        assert payloads(flipped(files, bit)) == [b"first"]


def test_damage_at_the_end_of_a_file_is_told_by_the_next_file() -> None:
    files = written([b"a"], [b"b"])
    Journal(files, 2).append([b"c"])
    with pytest.raises(JournalDamaged) as damage:
        payloads(flipped(files, 8 * (files.size(FIRST) - 1)))
    assert damage.value.sequence == 2


def test_a_missing_file_is_damage_where_its_transactions_are_wanted() -> None:
    files = written([b"a"])
    for last in (1, 2):
        Journal(files, last).append([b"x"])
    files.unlink("journal/00000002.log")
    with pytest.raises(JournalDamaged):
        payloads(files)
    with pytest.raises(JournalDamaged):
        payloads(files, after=1)
    assert payloads(files, after=2) == [b"x"]


def test_a_payload_that_looks_like_a_record_is_not_taken_for_one() -> None:
    inner = module.frame(b"forged", 2, 1, salt=0)
    files = flipped(written([b"a"], [b"b" + inner]), 8 * (HEADER + 2 * RECORD + 1))
    assert payloads(files) == [b"a"]


def test_cutting_removes_only_files_that_a_backup_covers_and_never_the_newest() -> None:
    files = written([b"a", b"b"])
    second = Journal(files, 2)
    second.append([b"c"])
    second.rotate()
    second.append([b"d"])
    assert second.cut(1) == 0
    assert second.cut(2) == 1
    assert payloads(files, after=2) == [b"c", b"d"]
    assert second.cut(4) == 1
    assert second.cut(4) == 0
    assert JournalReader(files, 4).last == 0 and payloads(files, after=3) == [b"d"]


def test_a_file_whose_creation_was_cut_short_is_passed_over() -> None:
    files = written([b"a"])
    files.create("journal/00000002.log").write(b"WKVM")
    Journal(files, 1).append([b"b"])
    assert files.list("journal")[-1] == "00000003.log"
    assert payloads(files) == [b"a", b"b"]


def test_after_a_failed_sync_nothing_more_is_appended() -> None:
    files = written([b"a"])
    journal = Journal(files, 1)
    journal.append([b"b"])
    files.fail(1, 5)
    with pytest.raises(OSError, match="error"):
        journal.append([b"c"])
    with pytest.raises(AssertionError):
        journal.append([b"d"])
