"""Handle -> snapshot, for every tenant, in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from wkvm_core.errors import Refused
from wkvm_core.state.arena import Blocks
from wkvm_core.state.snapshot import Snapshot
from wkvm_proto.names import BadHandle, ErrorCode, StateHandle, check_name, parse_handle

MOST_STATES = 1_000_000
"""Names cost little, but not nothing: forks share the bytes of their state."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What made a snapshot."""

    verb: str = "save"
    """`save`, `fork` or `mutate`"""
    parents: tuple[str, ...] = ()
    rule: str = ""
    """Of a mutation."""
    params: bytes = b""
    """Of that rule, a msgpack map."""
    norms: dict[str, dict[str, float]] = field(default_factory=dict)
    """See `wkvm_core.store.mutation.mutate`."""


@dataclass(frozen=True, slots=True)
class Named:
    """A snapshot under its name."""

    handle: StateHandle
    snapshot: Snapshot
    created: float
    """Unix seconds."""
    origin: Origin
    order: int
    """Grows with every new version, over all names."""


_SAVED = Origin()


class Catalog:
    """Named snapshots. Versions count from 1 and are never reissued, also after a drop; a tenant sees its own only.

    The catalog holds one reference to the block of each snapshot it names.
    """

    def __init__(self, blocks: Blocks, clock: Callable[[], float] = time.time) -> None:
        self._blocks = blocks
        self._clock = clock
        self._versions: dict[tuple[str, str], dict[int, Named]] = {}
        self._last_version: dict[tuple[str, str], int] = {}
        self._newest: dict[str, dict[int, Named]] = {}
        """Of each tenant, by order."""
        self._order = 0

    def __len__(self) -> int:
        return sum(map(len, self._newest.values()))

    def save(self, tenant: str, name: str, snapshot: Snapshot, origin: Origin = _SAVED) -> StateHandle:
        """Names a snapshot as the next version of `name`; takes over the caller's reference to its block."""
        return self._add(tenant, check_name(name), snapshot, origin).handle

    def find(self, tenant: str, handle: str) -> Named:
        """The version `name@version`, or the newest of `name`. Refuses an unknown and a foreign one alike."""
        key, version = self._key(tenant, handle)
        return self._versions[key][version]

    def load(self, tenant: str, handle: str) -> Snapshot:
        """The snapshot of what `find` gives."""
        return self.find(tenant, handle).snapshot

    def page(
        self, tenant: str, *, name: str = "", prefix: str = "", after: int = 0, limit: int = 100
    ) -> tuple[list[Named], int]:
        """Newest first, those of a name or with a prefix, older than `after` unless that is 0; and the `after` of the
        next page, 0 if there is none."""
        found: list[Named] = []
        for named in self._wanted(tenant, name, prefix, after):
            if len(found) == limit:
                return found, found[-1].order
            found.append(named)
        return found, 0

    def fork(self, tenant: str, handle: str, names: Sequence[str]) -> list[Named]:
        """The snapshot as the next version of each name, all of them or none."""
        source = self.find(tenant, handle)
        try:
            checked = [check_name(name) for name in names]
        except BadHandle as error:
            raise Refused(ErrorCode.BAD_REQUEST, str(error), param="names") from None
        self._check_room(len(checked))
        made = []
        for name in checked:
            self._blocks.retain(source.snapshot.block)
            made.append(self._add(tenant, name, source.snapshot, Origin("fork", (str(source.handle),))))
        return made

    def drop(self, tenant: str, handle: str, *, every: bool = False) -> list[Named]:
        """Forgets one version, or every version of the name; forks and children are unaffected. What was forgotten,
        newest first."""
        key, version = self._key(tenant, handle)
        chosen = sorted(self._versions[key], reverse=True) if every else [version]
        dropped = [self._versions[key].pop(each) for each in chosen]
        if not self._versions[key]:
            del self._versions[key]
        for named in dropped:
            del self._newest[tenant][named.order]
            self._blocks.release(named.snapshot.block)
        if not self._newest[tenant]:
            del self._newest[tenant]
        return dropped

    def _check_room(self, count: int) -> None:
        if len(self) + count > MOST_STATES:
            message = f"{MOST_STATES} states have names; drop some first"
            raise Refused(ErrorCode.NOT_ENOUGH_MEMORY, message, param="save_as")

    def _add(self, tenant: str, name: str, snapshot: Snapshot, origin: Origin) -> Named:
        key = (tenant, name)
        version = self._last_version.get(key, 0) + 1
        self._last_version[key] = version
        self._order += 1
        named = Named(StateHandle(name, version), snapshot, self._clock(), origin, self._order)
        self._versions.setdefault(key, {})[version] = named
        self._newest.setdefault(tenant, {})[named.order] = named
        return named

    def _wanted(self, tenant: str, name: str, prefix: str, after: int) -> Iterator[Named]:
        for named in reversed(self._newest.get(tenant, {}).values()):
            if after and named.order >= after:
                continue
            if (not name or named.handle.name == name) and named.handle.name.startswith(prefix):
                yield named

    def _key(self, tenant: str, handle: str) -> tuple[tuple[str, str], int]:
        try:
            name, version = parse_handle(handle)
        except BadHandle as error:
            raise Refused(ErrorCode.BAD_REQUEST, str(error), param="state") from None
        versions = self._versions.get((tenant, name), {})
        if version is None and versions:
            version = max(versions)
        if version is None or version not in versions:
            raise Refused(ErrorCode.STATE_NOT_FOUND, f"there is no state {handle!r}", param="state")
        return (tenant, name), version
