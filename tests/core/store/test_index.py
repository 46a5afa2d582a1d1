from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from random import Random

import apsw
import pytest

from tests.core.store.drafts import digest, record
from wkvm_core.errors import Refused
from wkvm_core.store import index as module
from wkvm_core.store.changes import apply
from wkvm_core.store.index import Index, Name, Usage
from wkvm_core.store.listing import Filter, ancestry, list_records
from wkvm_core.store.records import Answered, Change, Deleted, Forked, HeadMoved, Lineage, Saved, Tagged, Tombstone
from wkvm_core.store.rows import Damaged
from wkvm_core.store.scrub import scrub
from wkvm_proto.names import ErrorCode, StateHandle


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    opened = Index(str(tmp_path / "catalog.db"))
    yield opened
    opened.close()


def commit(index: Index, *changes: Change) -> None:
    index.begin()
    for change in changes:
        apply(index, change)
    index.commit(index.sequence + 1)


def raise_after(index: Index, change: Change) -> None:
    with index.savepoint():
        apply(index, change)
        raise KeyError


def buried(name: str, version: int) -> Deleted:
    return Deleted(Tombstone(StateHandle(name, version), "t", Lineage("create"), 0, 1))


def test_it_is_durable_sqlite_with_one_owner(index: Index, tmp_path: Path) -> None:
    def pragma(name: str) -> object:
        return index.connection.execute(f"PRAGMA {name}").get

    assert (pragma("journal_mode"), pragma("synchronous"), pragma("locking_mode")) == ("wal", 2, "exclusive")
    commit(index, Saved(record()))
    with pytest.raises(apsw.BusyError):
        Index(str(tmp_path / "catalog.db"))
    assert not (tmp_path / "catalog.db-shm").exists()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("catalog.db", "catalog.db-wal")}
    assert modes == {0o600}


def test_an_older_sqlite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.2")
    with pytest.raises(Refused) as refused:
        Index(str(tmp_path / "catalog.db"))
    assert refused.value.code is ErrorCode.BAD_CONFIG


def test_a_catalog_of_a_later_format_is_refused_and_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "catalog.db"
    with monkeypatch.context() as later:
        later.setattr(module, "FORMAT", 2)
        Index(str(path)).close()
    before = path.read_bytes()
    with pytest.raises(Refused) as refused:
        Index(str(path))
    assert refused.value.code is ErrorCode.BAD_CONFIG
    assert path.read_bytes() == before


def test_a_file_that_is_no_catalog_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "catalog.db").write_bytes(b"something else entirely" * 100)
    with pytest.raises(Damaged):
        Index(str(tmp_path / "catalog.db"))


def test_names_count_versions_that_are_gone(index: Index) -> None:
    commit(index, Saved(record(1)), Saved(record(2, version=2)))
    assert index.name("t", "a") == Name(last=2, head=2)
    commit(index, buried("a", 2))
    assert index.name("t", "a") == Name(last=2, head=1)
    commit(index, buried("a", 1))
    assert index.name("t", "a") == Name(last=2, head=0)
    assert isinstance(index.find("t", StateHandle("a", 1)), Tombstone)
    assert index.find("t", StateHandle("a", 3)) is None


def test_names_are_case_sensitive(index: Index) -> None:
    commit(index, Saved(record(1, "a")), Saved(record(2, "A")))
    assert index.record("t", StateHandle("a", 1)) == record(1, "a")
    assert index.record("t", StateHandle("A", 1)) == record(2, "A")


def test_bytes_of_a_shared_blob_count_once_and_until_the_last_is_gone(index: Index) -> None:
    commit(index, Saved(record()), Forked(record(2, "b"), (StateHandle("b", 2),)))
    assert index.usage("t") == Usage(names=2, states=3, tombstones=0, bytes=1000)
    assert index.references("t", digest(0))[0] == 3
    commit(index, buried("a", 1), buried("b", 1))
    assert index.usage("t").bytes == 1000
    commit(index, buried("b", 2))
    assert index.usage("t") == Usage(names=2, states=0, tombstones=3, bytes=0)
    assert index.references("t", digest(0)) == (0, 0)


def test_a_savepoint_undoes_one_transaction_of_a_group(index: Index) -> None:
    index.begin()
    apply(index, Saved(record(1)))
    with pytest.raises(KeyError):
        raise_after(index, Saved(record(2, version=2)))
    assert index.serial == 1
    index.commit(1)
    assert index.name("t", "a").last == 1


def test_rolling_back_undoes_the_group(index: Index) -> None:
    index.begin()
    apply(index, Saved(record(5)))
    index.roll_back()
    assert (index.sequence, index.serial, index.usage("t")) == (0, 0, Usage())


def test_old_answers_are_forgotten_oldest_first(index: Index) -> None:
    commit(index, *(Answered("t", f"k{at}", b"", (), at) for at in (1, 2, 3)))
    index.begin()
    index.forget_answers(3, 1)
    index.commit(2)
    assert [index.answer("t", f"k{at}") is None for at in (1, 2, 3)] == [True, False, False]


@pytest.mark.parametrize(
    ("table", "ask"),
    [
        ("states", lambda index: index.find("t", StateHandle("a", 1))),
        ("names", lambda index: index.name("t", "a")),
        ("tombstones", lambda index: index.find("t", StateHandle("a", 2))),
        ("tenants", lambda index: index.usage("t")),
        ("refs", lambda index: index.references("t", digest(0))),
        ("answers", lambda index: index.answer("t", "k")),
    ],
)
def test_a_row_that_was_altered_is_not_served(index: Index, table: str, ask: object) -> None:
    assert callable(ask)
    commit(index, Saved(record()), Saved(record(2, version=2)), buried("a", 2), Answered("t", "k", b"", (), 1))
    ask(index)
    index.connection.execute(f"UPDATE {table} SET seal = seal + 1")
    with pytest.raises(Damaged):
        ask(index)


@pytest.mark.parametrize(("table", "version"), [("states", 1), ("tombstones", 2)])
def test_a_version_that_vanished_is_damage_and_not_absence(index: Index, table: str, version: int) -> None:
    commit(index, Saved(record()), Saved(record(2, version=2)), buried("a", 2))
    index.connection.execute(f"DELETE FROM {table}")
    with pytest.raises(Damaged):
        index.find("t", StateHandle("a", version))


def test_counters_that_vanished_are_damage_and_not_zero(index: Index) -> None:
    commit(index, Saved(record()))
    for table in ("refs", "tenants", "names"):
        index.connection.execute(f"DELETE FROM {table} WHERE tenant='t'")
        with pytest.raises(Damaged):
            counters(index, table)


def counters(index: Index, table: str) -> object:
    match table:
        case "refs":
            return index.references("t", digest(0))
        case "tenants":
            return index.usage("t")
        case _:
            return index.name("t", "a")


def test_a_name_whose_counters_vanished_reissues_no_version(index: Index) -> None:
    commit(index, Saved(record()), buried("a", 1))
    index.connection.execute("DELETE FROM names")
    index.begin()
    with pytest.raises(Damaged):
        apply(index, Saved(record(2)))
    index.roll_back()


def test_no_flipped_bit_gives_a_wrong_value(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    index = Index(str(path))
    child = record(2, "b")
    child = type(child)(**{f: getattr(child, f) for f in child.__struct_fields__} | {
        "lineage": Lineage("fork", (StateHandle("a", 1),)), "tags": ("x",)
    })  # fmt: skip
    changes: list[Change] = [Saved(record()), Saved(child), Forked(record(3, "c"), (StateHandle("c", 2),))]
    changes += [Saved(record(5, version=2)), buried("a", 2), Tagged("t", StateHandle("c", 1), ("x", "y"))]
    changes += [HeadMoved("t", StateHandle("c", 1)), Answered("t", "k", b"q", (StateHandle("a", 1),), 5)]
    commit(index, *changes)
    index.close()
    whole = path.read_bytes()
    truth = facts(Index(str(path)))
    assert not any(isinstance(fact, Exception) for fact in truth.values())
    random = Random(5)
    told = 0
    used = [bit for bit in range(8 * len(whole)) if whole[bit // 8] or whole[bit // 8 - 1]]
    for bit in random.sample(used, 1500):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        try:
            index = Index(str(path))
        except (Refused, apsw.Error):
            told += 1
            continue
        seen = facts(index)
        try:
            for _ in scrub(index):
                pass
            scrubbed = True
        except (Damaged, apsw.Error):
            scrubbed = False
        index.close()
        for question, fact in seen.items():
            if isinstance(fact, Exception):
                assert not scrubbed or isinstance(fact, apsw.Error), (bit, question, fact)
                told += 1
            elif question.startswith("list"):
                # a page may lack a record that an index does not lead to any more; then the scrub tells
                assert set(fact) <= set(truth[question]), (bit, question)  # type: ignore[call-overload]
                assert not scrubbed or fact == truth[question], (bit, question)
            else:
                assert fact == truth[question], (bit, question)
    assert told > 200


def facts(index: Index) -> dict[str, object]:
    """Answers to every question, or the refusal."""
    questions = {
        f"find {name}@{version}": lambda n=name, v=version: index.find("t", StateHandle(n, v))
        for name in "abc"
        for version in (1, 2)
    }
    questions |= {f"name {name}": lambda n=name: index.name("t", n) for name in "abcd"}
    asked = {"all": Filter(), "tag": Filter(tag="x"), "name": Filter(name="c"), "prefix": Filter(prefix="b")}
    asked["parent"] = Filter(parent=StateHandle("a", 1))
    for label, filter_ in asked.items():
        questions[f"list {label}"] = lambda f=filter_: [
            str(found) for found in list_records(index, "t", f, 10, None, 0).records
        ]
    questions["ancestry"] = lambda: ancestry(index, index.record("t", StateHandle("b", 1)))  # type: ignore[arg-type]
    questions["answer"] = lambda: index.answer("t", "k")
    questions["usage"] = lambda: index.usage("t")
    questions["references"] = lambda: index.references("t", digest(0))
    questions["foreign"] = lambda: index.find("u", StateHandle("a", 1))
    told: dict[str, object] = {}
    for question, ask in questions.items():
        try:
            told[question] = ask()
        except (Refused, apsw.Error) as refused:
            told[question] = refused
    return told
