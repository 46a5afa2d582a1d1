from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.core.store.drafts import Clock, digest, draft, open_store
from tests.fakes.files import CrashingFiles
from wkvm_core.errors import Refused
from wkvm_core.store.committer import ANSWERS_KEPT_MS
from wkvm_core.store.index import Usage
from wkvm_core.store.listing import Filter
from wkvm_core.store.records import Tier
from wkvm_core.store.store import Outcome, Quota, StateStore, SteadyClock
from wkvm_proto.names import ErrorCode, StateHandle


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def files() -> CrashingFiles:
    return CrashingFiles()


@pytest.fixture
def store(files: CrashingFiles, tmp_path: Path, clock: Clock) -> Iterator[StateStore]:
    opened = open_store(files, tmp_path, clock, Quota(states=12, bytes=6000))
    yield opened
    opened.close()


def refusal(call: Callable[[], Future[object]]) -> ErrorCode:
    with pytest.raises(Refused) as refused:
        call().result()
    return refused.value.code


def handles(outcome: Outcome) -> list[str]:
    return [str(handle) for handle in outcome.handles]


def test_versions_count_from_1_and_are_never_reissued(store: StateStore) -> None:
    assert handles(store.save("t", "a", draft(1)).result()) == ["a@1"]
    assert handles(store.save("t", "a", draft(2)).result()) == ["a@2"]
    store.delete("t", "a", every=True).result()
    assert handles(store.save("t", "a", draft(3)).result()) == ["a@3"]


def test_a_save_without_a_name_gets_one_of_its_own(store: StateStore) -> None:
    first, second = (store.save("t", None, draft(1)).result().handles[0] for _ in range(2))
    assert first.name != second.name
    assert (first.version, second.version) == (1, 1)


def test_a_name_alone_means_its_head(store: StateStore) -> None:
    store.save("t", "a", draft(1)).result()
    store.save("t", "a", draft(2)).result()
    assert store.get("t", "a").result().tokens == 2
    store.set_head("t", "a@1").result()
    assert store.get("t", "a").result().tokens == 1
    store.delete("t", "a@1").result()
    assert store.get("t", "a").result().handle == StateHandle("a", 2)


def test_a_stale_head_is_refused_or_leaves_a_sibling(store: StateStore) -> None:
    assert store.save("t", "a", draft(1), if_head=0).result().is_head
    assert refusal(lambda: store.save("t", "a", draft(2), if_head=0)) is ErrorCode.STALE_HEAD
    sibling = store.save("t", "a", draft(2), if_head=0, or_sibling=True).result()
    assert (handles(sibling), sibling.is_head) == (["a@2"], False)
    assert store.get("t", "a").result().handle == StateHandle("a", 1)
    assert store.save("t", "a", draft(3), if_head=1).result().is_head


def test_of_many_appends_to_one_head_exactly_one_wins(store: StateStore) -> None:
    store.save("t", "a", draft(1)).result()
    barrier = threading.Barrier(8)
    outcomes: list[BaseException | None] = []

    def append(number: int) -> None:
        barrier.wait()
        outcomes.append(store.save("t", "a", draft(1), if_head=1).exception())

    threads = [threading.Thread(target=append, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(None) == 1
    assert store.get("t", "a").result().handle.version == 2


def test_forks_share_bytes_and_lineage_and_nothing_else(store: StateStore) -> None:
    store.save("t", "a", draft(1, tags=("x",), pinned=True)).result()
    assert handles(store.fork("t", "a", ("b", "a", "b")).result()) == ["b@1", "a@2", "b@2"]
    fork = store.get("t", "b@2").result()
    assert (fork.blob, fork.tags, fork.pinned) == (digest(1), ("x",), False)
    assert fork.lineage.verb == "fork" and fork.lineage.parents == (StateHandle("a", 1),)
    assert store.usage("t").result() == Usage(names=2, states=4, tombstones=0, bytes=1000)
    store.delete("t", "a@1").result()
    assert store.get("t", "b@1").result().blob == digest(1)


def test_a_delete_tells_which_bytes_nobody_needs_any_more(store: StateStore) -> None:
    store.save("t", "a", draft(1)).result()
    store.fork("t", "a", ("b",)).result()
    assert store.delete("t", "a").result().freed == ()
    assert store.references("t", digest(1)).result() == 1
    assert store.delete("t", "b").result().freed == (digest(1), digest(10**6 + 1))
    assert store.references("t", digest(1)).result() == 0


def test_ancestry_outlives_deleted_parents(store: StateStore) -> None:
    store.save("t", "a", draft(1)).result()
    store.save("t", "a", draft(2, StateHandle("a", 1), verb="decay")).result()
    store.fork("t", "a", ("b",)).result()
    store.save("t", "m", draft(3, StateHandle("b", 1), StateHandle("a", 2), verb="merge")).result()
    store.delete("t", "a", every=True).result()
    told = store.lineage("t", "m").result()
    assert [(str(one.handle), one.lineage.verb, one.tokens, one.deleted) for one in told] == [
        ("b@1", "fork", 2, False),
        ("a@2", "decay", 2, True),
        ("a@1", "create", 1, True),
    ]


def test_a_parent_that_never_was_is_refused(store: StateStore) -> None:
    store.save("u", "a", draft(1)).result()
    assert refusal(lambda: store.save("t", "b", draft(1, StateHandle("a", 1)))) is ErrorCode.STATE_NOT_FOUND


@pytest.mark.parametrize(
    "call",
    [
        lambda store, handle: store.get("t", handle),
        lambda store, handle: store.fork("t", handle, ("b",)),
        lambda store, handle: store.delete("t", handle),
        lambda store, handle: store.delete("t", handle, every=True),
        lambda store, handle: store.pin("t", handle, True),
        lambda store, handle: store.tag("t", handle, ("x",)),
        lambda store, handle: store.set_ttl("t", handle, 5),
        lambda store, handle: store.set_head("t", handle),
        lambda store, handle: store.place("t", handle, (Tier.HOST,)),
        lambda store, handle: store.lineage("t", handle),
    ],
)
@pytest.mark.parametrize("handle", ["mine", "mine@1"])
def test_a_foreign_state_is_missing_in_every_call(
    store: StateStore, call: Callable[[StateStore, str], Future[object]], handle: str
) -> None:
    foreign = call(store, handle).exception()
    store.save("u", "mine", draft(1)).result()
    error = call(store, handle).exception()
    assert isinstance(error, Refused) and isinstance(foreign, Refused)
    assert (error.code, error.message, error.param) == (foreign.code, foreign.message, foreign.param)
    assert error.code is ErrorCode.STATE_NOT_FOUND
    assert store.list("t", Filter()).result().records == ()
    assert store.usage("t").result() == Usage()
    assert store.get("u", "mine").result().tags == ()


def test_one_idempotency_key_does_one_thing_once(store: StateStore, files: CrashingFiles, tmp_path: Path) -> None:
    first = store.save("t", "a", draft(1), key="k").result()
    again = [store.save("t", "a", draft(1), key="k") for _ in range(5)]
    assert {future.result() for future in again} == {Outcome(first.handles, replayed=True)}
    assert store.usage("t").result().states == 1
    assert not store.save("u", "a", draft(1), key="k").result().replayed
    assert refusal(lambda: store.save("t", "b", draft(1), key="k")) is ErrorCode.KEY_REUSED
    assert refusal(lambda: store.delete("t", "a", key="k")) is ErrorCode.KEY_REUSED


def test_retries_sent_at_once_happen_once(store: StateStore) -> None:
    outcomes = [future.result() for future in [store.save("t", "a", draft(1), key="k") for _ in range(8)]]
    assert sorted(outcome.replayed for outcome in outcomes) == [False] + [True] * 7
    assert {outcome.handles for outcome in outcomes} == {(StateHandle("a", 1),)}


def test_a_refused_write_uses_up_no_key(store: StateStore) -> None:
    assert refusal(lambda: store.delete("t", "a", key="k")) is ErrorCode.STATE_NOT_FOUND
    store.save("t", "a", draft(1)).result()
    assert not store.delete("t", "a", key="k").result().replayed


def test_keys_are_kept_for_a_day_and_not_for_ever(store: StateStore, clock: Clock) -> None:
    store.save("t", "a", draft(1), key="k").result()
    clock.now += ANSWERS_KEPT_MS
    store.save("t", "b", draft(1)).result()
    assert store.save("t", "a", draft(1), key="k").result().replayed
    clock.now += 1
    store.save("t", "b", draft(1)).result()
    assert not store.save("t", "a", draft(1), key="k").result().replayed


def test_a_state_is_gone_when_its_time_has_come(store: StateStore, clock: Clock) -> None:
    store.save("t", "a", draft(1, ttl_ms=10)).result()
    store.save("t", "pinned", draft(2, ttl_ms=10, pinned=True)).result()
    store.save("t", "kept", draft(2)).result()
    clock.now += 9
    assert store.get("t", "a").result().expires_ms == clock.now + 1
    assert store.expire().result() == ()
    clock.now += 1
    assert refusal(lambda: store.get("t", "a")) is ErrorCode.STATE_NOT_FOUND
    assert [r.handle.name for r in store.list("t", Filter()).result().records] == ["kept", "pinned"]
    ((tenant, outcome),) = store.expire().result()
    assert (tenant, handles(outcome), outcome.freed) == ("t", ["a@1"], (digest(1), digest(10**6 + 1)))
    store.pin("t", "pinned", False).result()
    assert refusal(lambda: store.get("t", "pinned")) is ErrorCode.STATE_NOT_FOUND
    assert [handles(outcome) for _, outcome in store.expire().result()] == [["pinned@1"]]


def test_a_time_to_live_can_be_set_and_taken_back(store: StateStore, clock: Clock) -> None:
    store.save("t", "a", draft(1)).result()
    store.set_ttl("t", "a", 5).result()
    assert store.get("t", "a").result().expires_ms == clock.now + 5
    store.set_ttl("t", "a", None).result()
    clock.now += 10
    assert store.get("t", "a").result().expires_ms is None


def test_quotas_bound_states_and_bytes_and_a_refusal_leaves_no_trace(store: StateStore) -> None:
    for number in range(6):
        store.save("t", "a", draft(number)).result()
    before = store.usage("t").result()
    assert refusal(lambda: store.save("t", "a", draft(7), key="k")) is ErrorCode.QUOTA_FULL
    assert refusal(lambda: store.fork("t", "a", ("b",) * 7)) is ErrorCode.QUOTA_FULL
    assert store.usage("t").result() == before
    assert handles(store.fork("t", "a", ("b",) * 6).result())[-1] == "b@6"
    assert refusal(lambda: store.save("t", "a", draft(1))) is ErrorCode.QUOTA_FULL
    store.save("u", "a", draft(7)).result()
    store.delete("t", "b@1").result()
    assert handles(store.save("t", "a", draft(1)).result()) == ["a@7"]


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.save("t", "../a", draft(1)),
        lambda store: store.save("t", "a" * 129, draft(1)),
        lambda store: store.save("t", "", draft(1)),
        lambda store: store.save("t", "a", draft(-1)),
        lambda store: store.save("t", "a", draft(1, tags=("",))),
        lambda store: store.save("t", "a", draft(1, tags=("x",) * 65)),
        lambda store: store.save("t", "a", draft(1, tags=("\ud800",))),
        lambda store: store.save("t", "a", draft(1, ttl_ms=0)),
        lambda store: store.save("t", "a", draft(2**80)),
        lambda store: store.save("t", "a", draft(1), key=""),
        lambda store: store.save("t", "a", draft(1), key="\ud800"),
        lambda store: store.get("t", "a@0"),
        lambda store: store.get("t", "a@x"),
        lambda store: store.fork("t", "a", ()),
        lambda store: store.fork("t", "a", ("b",) * 4097),
        lambda store: store.fork("t", "a", ("b/c",)),
        lambda store: store.tag("t", "a", ("x" * 257,)),
        lambda store: store.set_ttl("t", "a", 0),
        lambda store: store.list("t", Filter(), limit=0),
        lambda store: store.list("t", Filter(), limit=1001),
        lambda store: store.list("t", Filter(), after=-1),
        lambda store: store.list("t", Filter(), after=2**63),
        lambda store: store.list("t", Filter(prefix="é")),
        lambda store: store.list("t", Filter(name="a/b")),
        lambda store: store.list("t", Filter(tag="\ud800")),
    ],
)
def test_bad_input_is_refused_by_name(store: StateStore, call: Callable[[StateStore], Future[object]]) -> None:
    store.save("t", "a", draft(1)).result()
    assert refusal(lambda: call(store)) is ErrorCode.BAD_REQUEST
    assert store.failure is None
    assert store.usage("t").result().states == 1


def test_a_fault_in_one_transaction_spares_its_neighbours(store: StateStore) -> None:
    def fault(writing: object) -> None:
        raise ZeroDivisionError

    futures = [store.save("t", "a", draft(1)), store._committer.write(fault), store.save("t", "a", draft(1))]
    assert isinstance(futures[1].exception(), ZeroDivisionError)
    assert handles(futures[0].result()) + handles(futures[2].result()) == ["a@1", "a@2"]  # type: ignore[arg-type]


def test_a_closed_store_takes_nothing_and_closes_again(store: StateStore) -> None:
    pending = store.save("t", "a", draft(1))
    store.close()
    assert handles(pending.result()) == ["a@1"]
    assert refusal(lambda: store.get("t", "a")) is ErrorCode.DRAINING
    store.close()


def test_what_was_written_is_there_when_opened_again(
    store: StateStore, files: CrashingFiles, tmp_path: Path, clock: Clock
) -> None:
    store.save("t", "a", draft(1), key="k").result()
    store.place("t", "a", (Tier.HOST, Tier.DISK)).result()
    before = store.get("t", "a").result()
    store.close()
    again = open_store(files, tmp_path, clock)
    assert again.get("t", "a").result() == before
    assert again.save("t", "a", draft(1), key="k").result().replayed
    again.close()


def test_the_clock_only_grows() -> None:
    clock = SteadyClock()
    first = clock()
    assert first <= clock() < first + 60_000
    assert first > 1_600_000_000_000
