from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.core.store.drafts import Clock, record
from tests.fakes.files import CrashingFiles
from wkvm_core.errors import Refused
from wkvm_core.store.committer import Committer, Writing
from wkvm_core.store.index import Index
from wkvm_core.store.journal import Journal
from wkvm_core.store.records import Saved
from wkvm_core.store.recovery import open_journal
from wkvm_proto.names import ErrorCode


@pytest.fixture
def files() -> CrashingFiles:
    return CrashingFiles()


@pytest.fixture
def committer(files: CrashingFiles, tmp_path: Path) -> Iterator[Committer]:
    opened = Committer(lambda: Index(str(tmp_path / "catalog.db")), lambda index: open_journal(index, files), Clock())
    yield opened
    opened.close()


@pytest.fixture
def held(committer: Committer) -> Iterator[threading.Event]:
    """The thread waits for this event, so that what is submitted before it is set makes one batch."""
    go, waits = threading.Event(), threading.Event()

    def wait(index: Index) -> None:
        waits.set()
        go.wait()

    committer.read(wait)
    waits.wait()
    yield go
    go.set()


def save(version: int) -> Callable[[Writing], int]:
    def work(writing: Writing) -> int:
        writing.do(Saved(record(writing.index.serial + 1, version=version)))
        return version

    return work


def states(index: Index) -> int:
    return index.usage("t").states


def fail(writing: Writing) -> None:
    writing.do(Saved(record(99, version=99)))
    raise Refused(ErrorCode.BAD_REQUEST, "no")


def test_many_writes_share_one_sync_of_the_journal(
    committer: Committer, files: CrashingFiles, held: threading.Event
) -> None:
    futures = [committer.write(save(version)) for version in range(1, 101)]
    held.set()
    assert [future.result() for future in futures] == list(range(1, 101))
    syncs = [operation for operation in files.operations if operation.startswith("sync journal/")]
    assert len(syncs) == 2  # the new file's header, and the group
    assert committer.read(states).result() == 100


def test_a_read_in_the_batch_sees_nothing_that_is_not_durable(committer: Committer, held: threading.Event) -> None:
    write, read = committer.write(save(1)), committer.read(states)
    held.set()
    assert (write.result(), read.result()) == (1, 0)
    assert committer.read(states).result() == 1


def test_a_refused_write_leaves_its_neighbours_and_no_trace(committer: Committer, held: threading.Event) -> None:
    first, refused, second = committer.write(save(1)), committer.write(fail), committer.write(save(2))
    held.set()
    assert isinstance(refused.exception(), Refused)
    assert (first.result(), second.result()) == (1, 2)
    assert committer.read(lambda index: (states(index), index.serial)).result() == (2, 2)


def test_writes_without_changes_reach_no_disk(committer: Committer, files: CrashingFiles) -> None:
    before = len(files.operations)
    assert committer.write(lambda writing: "nothing").result() == "nothing"
    assert len(files.operations) == before


def test_when_the_journal_fails_all_of_the_group_is_refused_and_reads_go_on(
    committer: Committer, files: CrashingFiles, held: threading.Event
) -> None:
    files.fail(0, 28, forever=True)
    futures = [committer.write(save(1)), committer.write(save(2)), committer.write(fail)]
    held.set()
    for future in futures:
        error = future.exception()
        assert isinstance(error, Refused) and error.code is ErrorCode.STORE_READ_ONLY
    assert committer.read(states).result() == 0
    assert committer.failure is not None


def test_when_the_catalog_fails_behind_the_journal_nobody_waits_and_the_start_brings_it_back(
    committer: Committer, files: CrashingFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(index: Index, sequence: int) -> None:
        raise OSError(28, "full")

    with monkeypatch.context() as broken:
        broken.setattr(Index, "commit", commit)
        error = committer.write(save(1)).exception()
    assert isinstance(error, Refused) and error.code is ErrorCode.STORE_READ_ONLY
    assert committer.read(states).result() == 0
    committer.close()
    index = Index(str(tmp_path / "catalog.db"))
    journal: Journal = open_journal(index, files)
    assert (states(index), journal.last) == (1, 1)
    index.close()


def test_chores_take_turns_with_writes(committer: Committer) -> None:
    seen: list[int] = []

    def chore(index: Index, journal: Journal) -> Iterator[None]:
        while not seen or seen[-1] < 3:
            seen.append(states(index))
            yield

    done = committer.chore(chore)
    for version in (1, 2, 3):
        committer.write(save(version)).result()
    assert done.result() is None
    assert seen[-1] == 3


def test_a_chore_that_fails_tells_its_caller_alone(committer: Committer) -> None:
    def chore(index: Index, journal: Journal) -> Iterator[None]:
        yield
        raise KeyError("chore")

    assert isinstance(committer.chore(chore).exception(), KeyError)
    assert committer.write(save(1)).result() == 1


def test_closing_ends_a_chore_that_is_not_done(committer: Committer) -> None:
    def chore(index: Index, journal: Journal) -> Iterator[None]:
        while True:
            yield

    done = committer.chore(chore)
    committer.write(save(1)).result()
    committer.close()
    error = done.exception()
    assert isinstance(error, Refused) and error.code is ErrorCode.DRAINING


def test_what_opening_raises_reaches_the_caller(tmp_path: Path) -> None:
    def broken(index: Index) -> Journal:
        raise Refused(ErrorCode.BAD_CONFIG, "broken")

    with pytest.raises(Refused, match="broken"):
        Committer(lambda: Index(str(tmp_path / "catalog.db")), broken, Clock())
    Index(str(tmp_path / "catalog.db")).close()
