"""Random stories of a store, reopened and rebuilt in between, against a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.core.store.drafts import Clock, draft, open_store
from tests.fakes.files import CrashingFiles
from wkvm_core.errors import Refused
from wkvm_core.store.index import Usage
from wkvm_core.store.listing import Filter
from wkvm_core.store.records import Record
from wkvm_proto.names import ErrorCode, StateHandle

TENANTS = st.sampled_from(["t", "u"])
NAMES = st.sampled_from(["a", "A", "ab", "b"])
VERSIONS = st.integers(1, 6)
NUMBERS = st.integers(0, 4)
TAGS = st.lists(st.sampled_from(["x", "y", "z"]), unique=True, max_size=2).map(tuple)


class Story(RuleBasedStateMachine):
    """`states` is what the store must hold, newest last; `issued` and `heads` count names."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.files = CrashingFiles()
        self.clock = Clock()
        self.store = open_store(self.files, self.folder, self.clock)
        self.states: dict[tuple[str, StateHandle], dict[str, Any]] = {}
        self.issued: dict[tuple[str, str], int] = {}
        self.heads: dict[tuple[str, str], int] = {}
        self.saves = 0
        self.last_key: tuple[Any, ...] | None = None

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    def issue(self, tenant: str, name: str, **facts: Any) -> StateHandle:
        version = self.issued.get((tenant, name), 0) + 1
        self.issued[tenant, name] = self.heads[tenant, name] = version
        handle = StateHandle(name, version)
        self.states[tenant, handle] = facts
        return handle

    def known(self, tenant: str, handle: StateHandle, call: Any) -> Any:
        """The call's outcome; None when it was refused, as it must be, for an unknown handle."""
        if (tenant, handle) in self.states:
            return call().result()
        with pytest.raises(Refused) as refused:
            call().result()
        assert (refused.value.code, refused.value.message) == (
            ErrorCode.STATE_NOT_FOUND,
            f"there is no state '{handle}'",
        )
        return None

    @rule(tenant=TENANTS, name=NAMES, number=NUMBERS, tags=TAGS, keyed=st.booleans())
    def save(self, tenant: str, name: str, number: int, tags: tuple[str, ...], keyed: bool) -> None:
        self.saves += 1
        key = f"key {self.saves}" if keyed else None
        outcome = self.store.save(tenant, name, draft(number, tags=tags), key=key).result()
        assert outcome.handles == (self.issue(tenant, name, number=number, tags=set(tags), parents=(), pinned=False),)
        if keyed:
            self.last_key = (tenant, name, number, tags, key, outcome.handles)

    @precondition(lambda self: self.last_key is not None)
    @rule()
    def retry(self) -> None:
        assert self.last_key is not None
        tenant, name, number, tags, key, handles = self.last_key
        outcome = self.store.save(tenant, name, draft(number, tags=tags), key=key).result()
        assert outcome.replayed and outcome.handles == handles

    @rule(tenant=TENANTS, name=NAMES, version=VERSIONS, child=NAMES, number=NUMBERS)
    def mutate(self, tenant: str, name: str, version: int, child: str, number: int) -> None:
        parent = StateHandle(name, version)
        if version > self.issued.get((tenant, name), 0):
            error = self.store.save(tenant, child, draft(number, parent)).exception()
            assert isinstance(error, Refused) and error.code is ErrorCode.STATE_NOT_FOUND
            return
        outcome = self.store.save(tenant, child, draft(number, parent)).result()
        made = self.issue(tenant, child, number=number, tags=set(), parents=(parent,), pinned=False)
        assert outcome.handles == (made,)

    @rule(tenant=TENANTS, name=NAMES, version=VERSIONS, names=st.lists(NAMES, min_size=1, max_size=3))
    def fork(self, tenant: str, name: str, version: int, names: list[str]) -> None:
        source = StateHandle(name, version)
        outcome = self.known(tenant, source, lambda: self.store.fork(tenant, str(source), tuple(names)))
        if outcome is not None:
            facts = self.states[tenant, source] | {"parents": (source,), "pinned": False}
            assert outcome.handles == tuple(self.issue(tenant, child, **facts) for child in names)

    @rule(tenant=TENANTS, name=NAMES, version=VERSIONS, every=st.booleans())
    def delete(self, tenant: str, name: str, version: int, every: bool) -> None:
        handle = StateHandle(name, version)
        outcome = self.known(tenant, handle, lambda: self.store.delete(tenant, str(handle), every=every))
        if outcome is not None:
            doomed = [h for t, h in self.states if t == tenant and h.name == name and (every or h == handle)]
            assert sorted(outcome.handles, key=str) == sorted(doomed, key=str)
            for gone in doomed:
                del self.states[tenant, gone]
            left = [h.version for t, h in self.states if t == tenant and h.name == name]
            if self.heads[tenant, name] not in left:
                self.heads[tenant, name] = max(left, default=0)

    @rule(tenant=TENANTS, name=NAMES, version=VERSIONS, pinned=st.booleans())
    def pin(self, tenant: str, name: str, version: int, pinned: bool) -> None:
        handle = StateHandle(name, version)
        if self.known(tenant, handle, lambda: self.store.pin(tenant, str(handle), pinned)) is not None:
            self.states[tenant, handle] = self.states[tenant, handle] | {"pinned": pinned}

    @rule(tenant=TENANTS, name=NAMES, version=VERSIONS, tags=TAGS)
    def tag(self, tenant: str, name: str, version: int, tags: tuple[str, ...]) -> None:
        handle = StateHandle(name, version)
        if self.known(tenant, handle, lambda: self.store.tag(tenant, str(handle), tags)) is not None:
            self.states[tenant, handle] = self.states[tenant, handle] | {"tags": set(tags)}

    @rule(tenant=TENANTS, name=NAMES, version=VERSIONS)
    def set_head(self, tenant: str, name: str, version: int) -> None:
        handle = StateHandle(name, version)
        if self.known(tenant, handle, lambda: self.store.set_head(tenant, str(handle))) is not None:
            self.heads[tenant, name] = version

    @rule()
    def back_up(self) -> None:
        self.store.backup().result()

    @rule()
    def scrub(self) -> None:
        self.store.scrub().result()

    @rule(seed=st.integers(0, 3), keeps_catalog=st.booleans())
    def crash_and_reopen(self, seed: int, keeps_catalog: bool) -> None:
        self.store.close()
        self.files = self.files.after_crash(seed)
        if not keeps_catalog:
            (self.folder / "catalog.db").unlink()
        self.store = open_store(self.files, self.folder, self.clock)

    @invariant()
    def the_store_tells_what_the_dictionary_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        for tenant in ("t", "u"):
            mine = {h: facts for (t, h), facts in self.states.items() if t == tenant}
            listed = self.store.list(tenant, Filter()).result().records
            assert [record.handle for record in listed] == list(reversed(mine))
            for record in listed:
                self.compare(record, mine[record.handle])
            for tag in ("x", "y"):
                found = self.store.list(tenant, Filter(tag=tag, prefix="a")).result().records
                assert {r.handle for r in found} == {
                    h for h, facts in mine.items() if tag in facts["tags"] and h.name.startswith("a")
                }
            blobs = {facts["number"] for facts in mine.values()}
            issued = [count for (t, _), count in self.issued.items() if t == tenant]
            assert self.store.usage(tenant).result() == Usage(
                len(issued), len(mine), sum(issued) - len(mine), 1000 * len(blobs)
            )
            for name in ("a", "A", "ab", "b"):
                head = self.store.get(tenant, name)
                if self.heads.get((tenant, name), 0):
                    assert head.result().handle.version == self.heads[tenant, name]
                else:
                    assert isinstance(head.exception(), Refused)

    def compare(self, record: Record, facts: dict[str, Any]) -> None:
        told = {
            "number": record.tokens,
            "tags": set(record.tags),
            "parents": record.lineage.parents,
            "pinned": record.pinned,
        }
        assert told == facts


TestStory = Story.TestCase
TestStory.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
