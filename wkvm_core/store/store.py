"""StateStore: states by name, for every tenant, on the disk. Its callers are threads; each call answers by a Future.

A write is answered when it is durable. A foreign handle and one that does not exist are refused alike.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_128_digest

from wkvm_core.errors import Refused
from wkvm_core.store import backup
from wkvm_core.store.committer import Committer, Writing
from wkvm_core.store.files import Files
from wkvm_core.store.index import Index, Usage
from wkvm_core.store.listing import MAX_PAGE, Ancestor, Filter, Page, ancestry, list_records
from wkvm_core.store.records import (
    MAX_FORKS,
    Answered,
    Deleted,
    Draft,
    Expiring,
    Forked,
    HeadMoved,
    Lineage,
    Pinned,
    Placed,
    Record,
    Saved,
    Tagged,
    Tier,
    Tombstone,
)
from wkvm_core.store.recovery import open_journal, rebuild
from wkvm_core.store.scrub import scrub
from wkvm_proto.names import BadHandle, ErrorCode, StateHandle, check_name, parse_handle

T = TypeVar("T")


class Quota(msgspec.Struct, frozen=True):
    """What one tenant may hold; `bytes` counts a blob once, however many states share it."""

    states: int = 2**62
    bytes: int = 2**62


class Outcome(msgspec.Struct, frozen=True):
    """What came of a write."""

    handles: tuple[StateHandle, ...]
    is_head: bool = True
    """Whether a saved version became its name's head."""
    replayed: bool = False
    """True when the idempotency key had been used: nothing was done again."""
    freed: tuple[str, ...] = ()
    """Digests that no record of the tenant refers to any more."""


class SteadyClock:
    """Milliseconds since 1970 that only grow: the wall clock is read once, so a jump of it expires nothing."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def __call__(self) -> int:
        return (self._offset_ns + time.monotonic_ns()) // 1_000_000


class StateStore:
    """The durable catalog of states. One for a folder: the caller holds its lock.

    Every method raises or answers with Refused: BAD_REQUEST, STATE_NOT_FOUND, STALE_HEAD, KEY_REUSED, QUOTA_FULL,
    STORE_READ_ONLY, STORE_DAMAGED, and DRAINING after close.
    """

    def __init__(
        self,
        files: Files,
        path: str,
        *,
        quota: Callable[[str], Quota] = lambda tenant: Quota(),
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        """Opens the catalog at `path` (SQLite's own file, on a local disk) with the journal and backups in `files`.
        Without a catalog it is rebuilt from them; what the journal holds beyond it is applied. Raises Refused,
        JournalDamaged, OSError, apsw.Error."""
        self._files = files
        self._path = path
        self._quota = quota
        self._now_ms = SteadyClock() if now_ms is None else now_ms
        backup.sweep(files)
        if not Path(path).exists():
            rebuild(files, path, lambda digest: True)
        self._committer = Committer(lambda: Index(path), lambda index: open_journal(index, files), self._now_ms)

    @property
    def failure(self) -> str | None:
        """Why the store takes no more writes; None while it does."""
        return self._committer.failure

    def close(self) -> None:
        """Finishes what was asked and closes the files."""
        self._committer.close()

    # -------------------------------------------------------------------------------------------------- writes

    def save(
        self,
        tenant: str,
        name: str | None,
        draft: Draft,
        *,
        if_head: int | None = None,
        or_sibling: bool = False,
        key: str | None = None,
    ) -> Future[Outcome]:
        """Names a snapshot as the next version of `name`, or of a new name. `if_head` is the version that the caller
        saw as head, 0 for none: when it is not the head any more the save is refused or, `or_sibling`, the new version
        leaves the head where it is."""
        _checked(check_name, "new" if name is None else name, "name")
        _valid(draft)

        def work(writing: Writing) -> Outcome:
            called = f"state-{secrets.token_hex(8)}" if name is None else name
            counters = writing.index.name(tenant, called)
            is_head = if_head is None or if_head == counters.head
            if not is_head and not or_sibling:
                raise Refused(
                    ErrorCode.STALE_HEAD, f"the head of {called!r} is version {counters.head}", param="if_match"
                )
            for parent in draft.lineage.parents:
                if writing.index.find(tenant, parent) is None:
                    raise _unknown(str(parent))
            record = self._record(writing, tenant, StateHandle(called, counters.last + 1), draft)
            writing.do(Saved(record, is_head))
            self._check_quota(writing, tenant)
            return Outcome((record.handle,), is_head)

        return self._write(tenant, key, ("save", name, if_head, or_sibling), draft, work)

    def fork(self, tenant: str, handle: str, names: tuple[str, ...], *, key: str | None = None) -> Future[Outcome]:
        """New versions of `names` with the same bytes as `handle`: rows and references, no copy. A name may come
        several times. Forks are neither pinned nor expiring."""
        _checked(parse_handle, handle, "state")
        for name in names:
            _checked(check_name, name, "names")
        if not 1 <= len(names) <= MAX_FORKS:
            raise Refused(
                ErrorCode.BAD_REQUEST, f"{len(names)} forks: 1 to {MAX_FORKS} are made at once", param="names"
            )

        def work(writing: Writing) -> Outcome:
            source = _load(writing.index, tenant, handle, writing.now_ms)
            last: dict[str, int] = {}
            handles = []
            for name in names:
                last[name] = last.get(name, writing.index.name(tenant, name).last) + 1
                handles.append(StateHandle(name, last[name]))
            record = replace(
                source,
                handle=handles[0],
                serial=writing.index.serial + 1,
                created_ms=writing.now_ms,
                lineage=Lineage("fork", (source.handle,)),
                pinned=False,
                expires_ms=None,
            )
            writing.do(Forked(record, tuple(handles[1:])))
            self._check_quota(writing, tenant)
            return Outcome(tuple(handles))

        return self._write(tenant, key, ("fork", handle, *names), None, work)

    def delete(self, tenant: str, handle: str, *, every: bool = False, key: str | None = None) -> Future[Outcome]:
        """Deletes a version, or `every` version of the handle's name. Children are unaffected; versions are not
        reissued."""
        name, _ = _checked(parse_handle, handle, "state")

        def work(writing: Writing) -> Outcome:
            doomed = [_load(writing.index, tenant, handle, writing.now_ms)]
            if every:
                doomed = writing.index.versions(tenant, name, MAX_FORKS)
            return _bury(writing, doomed)

        return self._write(tenant, key, ("delete", handle, every), None, work)

    def set_head(self, tenant: str, handle: str, *, key: str | None = None) -> Future[Outcome]:
        """Lets the name stand for this version."""
        return self._alter(tenant, handle, key, ("head",), lambda record: HeadMoved(record.tenant, record.handle))

    def pin(self, tenant: str, handle: str, pinned: bool, *, key: str | None = None) -> Future[Outcome]:
        """Exempts a state from eviction and expiry, or no longer."""
        return self._alter(
            tenant, handle, key, ("pin", pinned), lambda record: Pinned(record.tenant, record.handle, pinned)
        )

    def tag(self, tenant: str, handle: str, tags: tuple[str, ...], *, key: str | None = None) -> Future[Outcome]:
        """Other tags in place of those before."""
        _valid(tagged := Tagged(tenant, StateHandle("any", 1), tags))
        return self._alter(tenant, handle, key, ("tag", *tags), lambda record: replace(tagged, handle=record.handle))

    def set_ttl(self, tenant: str, handle: str, ttl_ms: int | None, *, key: str | None = None) -> Future[Outcome]:
        """Milliseconds to live from now on; None for ever."""
        if ttl_ms is not None and not 1 <= ttl_ms <= 2**53:
            raise Refused(ErrorCode.BAD_REQUEST, "a state lives for at least a millisecond", param="ttl")
        return self._alter(
            tenant,
            handle,
            key,
            ("ttl", ttl_ms),
            lambda record: Expiring(record.tenant, record.handle, None if ttl_ms is None else self._now_ms() + ttl_ms),
        )

    def place(self, tenant: str, handle: str, tiers: tuple[Tier, ...]) -> Future[Outcome]:
        """Where the bytes are now."""
        return self._alter(tenant, handle, None, ("place",), lambda record: Placed(record.tenant, record.handle, tiers))

    def expire(self, limit: int = 256) -> Future[tuple[tuple[str, Outcome], ...]]:
        """Deletes states whose time has come, `limit` at most; what was deleted, by tenant."""

        def work(writing: Writing) -> tuple[tuple[str, Outcome], ...]:
            by_tenant: dict[str, list[Record]] = {}
            for record in writing.index.due(writing.now_ms, limit):
                by_tenant.setdefault(record.tenant, []).append(record)
            return tuple((tenant, _bury(writing, doomed)) for tenant, doomed in by_tenant.items())

        return self._committer.write(work)

    # --------------------------------------------------------------------------------------------------- reads

    def get(self, tenant: str, handle: str) -> Future[Record]:
        """The record of `name@version`, or of the head of `name`."""
        _checked(parse_handle, handle, "state")
        return self._committer.read(lambda index: _load(index, tenant, handle, self._now_ms()))

    def list(self, tenant: str, asked: Filter, *, limit: int = 100, after: int | None = None) -> Future[Page]:
        """A page of the tenant's states, newest first; `after` is the cursor of the page before."""
        _valid(asked)
        if not 1 <= limit <= MAX_PAGE:
            raise Refused(ErrorCode.BAD_REQUEST, f"a page holds 1 to {MAX_PAGE} states", param="limit")
        if after is not None and not 1 <= after <= 2**62:
            raise Refused(ErrorCode.BAD_REQUEST, "no page gave this cursor", param="after")
        return self._committer.read(lambda index: list_records(index, tenant, asked, limit, after, self._now_ms()))

    def lineage(self, tenant: str, handle: str) -> Future[tuple[Ancestor, ...]]:
        """All that a state descends from, nearest first."""
        _checked(parse_handle, handle, "state")
        return self._committer.read(lambda index: ancestry(index, _load(index, tenant, handle, self._now_ms())))

    def usage(self, tenant: str) -> Future[Usage]:
        """What the tenant holds."""
        return self._committer.read(lambda index: index.usage(tenant))

    def references(self, tenant: str, digest: str) -> Future[int]:
        """How many of the tenant's records hold a blob or a segment."""
        return self._committer.read(lambda index: index.references(tenant, digest)[0])

    def backup(self) -> Future[None]:
        """Takes a backup between group commits and cuts the journal; done when it is durable."""
        return self._committer.chore(
            lambda index, journal: backup.take_backup(index, journal, self._files, self._path + ".copy")
        )

    def scrub(self) -> Future[None]:
        """Reads and verifies every row between group commits; Damaged at the first that is wrong."""
        return self._committer.chore(lambda index, journal: scrub(index))

    # -------------------------------------------------------------------------------------------------- inside

    def _record(self, writing: Writing, tenant: str, handle: StateHandle, draft: Draft) -> Record:
        return Record(
            handle=handle,
            tenant=tenant,
            serial=writing.index.serial + 1,
            created_ms=writing.now_ms,
            fingerprint=draft.fingerprint,
            tokens=draft.tokens,
            lineage=draft.lineage,
            bytes=draft.bytes,
            blob=draft.blob,
            segment=draft.segment,
            tiers=draft.tiers,
            pinned=draft.pinned,
            expires_ms=None if draft.ttl_ms is None else writing.now_ms + draft.ttl_ms,
            tags=draft.tags,
        )

    def _alter(
        self,
        tenant: str,
        handle: str,
        key: str | None,
        asked: tuple[object, ...],
        change: Callable[[Record], HeadMoved | Pinned | Tagged | Expiring | Placed],
    ) -> Future[Outcome]:
        _checked(parse_handle, handle, "state")

        def work(writing: Writing) -> Outcome:
            record = _load(writing.index, tenant, handle, writing.now_ms)
            writing.do(change(record))
            return Outcome((record.handle,))

        return self._write(tenant, key, (*asked, handle), None, work)

    def _write(
        self,
        tenant: str,
        key: str | None,
        asked: tuple[object, ...],
        draft: Draft | None,
        work: Callable[[Writing], Outcome],
    ) -> Future[Outcome]:
        if key is None:
            return self._committer.write(work)
        _valid(Answered(tenant, key, b"", (), 0))
        request = xxh3_128_digest(msgspec.msgpack.encode((asked, draft)))

        def once(writing: Writing) -> Outcome:
            before = writing.index.answer(tenant, key)
            if before is not None:
                if before.request != request:
                    raise Refused(ErrorCode.KEY_REUSED, "this key came with another request", param="idempotency_key")
                return Outcome(before.handles, before.is_head, replayed=True)
            outcome = work(writing)
            writing.do(Answered(tenant, key, request, outcome.handles, writing.now_ms, outcome.is_head))
            return outcome

        return self._committer.write(once)

    def _check_quota(self, writing: Writing, tenant: str) -> None:
        quota, usage = self._quota(tenant), writing.index.usage(tenant)
        if usage.states > quota.states:
            raise Refused(ErrorCode.QUOTA_FULL, f"{quota.states} states are allowed")
        if usage.bytes > quota.bytes:
            raise Refused(ErrorCode.QUOTA_FULL, f"{quota.bytes} bytes of states are allowed")


def _load(index: Index, tenant: str, handle: str, now_ms: int) -> Record:
    name, version = parse_handle(handle)
    if version is None:
        version = index.name(tenant, name).head
    record = index.record(tenant, StateHandle(name, version)) if version else None
    if record is None or (record.due_ms is not None and record.due_ms <= now_ms):
        raise _unknown(handle)
    return record


def _bury(writing: Writing, doomed: list[Record]) -> Outcome:
    for record in doomed:
        writing.do(
            Deleted(Tombstone(record.handle, record.tenant, record.lineage, record.tokens, deleted_ms=writing.now_ms))
        )
    held = {digest: record.tenant for record in doomed for digest in (record.blob, record.segment) if digest}
    freed = tuple(sorted(d for d, tenant in held.items() if not writing.index.references(tenant, d)[0]))
    return Outcome(tuple(record.handle for record in doomed), freed=freed)


def _unknown(handle: str) -> Refused:
    return Refused(ErrorCode.STATE_NOT_FOUND, f"there is no state {handle!r}", param="state")


def _checked(parse: Callable[[str], T], text: str, param: str) -> T:
    try:
        return parse(text)
    except BadHandle as error:
        raise Refused(ErrorCode.BAD_REQUEST, str(error), param=param) from None


def _valid(value: msgspec.Struct) -> None:
    """Structs are not checked when they are made: what the journal could not read back is refused here."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise Refused(ErrorCode.BAD_REQUEST, str(error)) from None
