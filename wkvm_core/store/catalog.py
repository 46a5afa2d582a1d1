"""Handle -> snapshot, for every tenant, in memory."""

from __future__ import annotations

from wkvm_core.errors import Refused
from wkvm_core.state.arena import Blocks
from wkvm_core.state.snapshot import Snapshot
from wkvm_proto.names import BadHandle, ErrorCode, StateHandle, check_name, parse_handle


class Catalog:
    """Named snapshots. Versions count from 1 and are never reissued, also after a drop; a tenant sees its own only.

    The catalog holds one reference to the block of each snapshot it names.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._snapshots: dict[tuple[str, str], dict[int, Snapshot]] = {}
        self._last_version: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return sum(len(versions) for versions in self._snapshots.values())

    def save(self, tenant: str, name: str, snapshot: Snapshot) -> StateHandle:
        """Names a snapshot as the next version of `name`; takes over the caller's reference to its block."""
        key = (tenant, check_name(name))
        version = self._last_version.get(key, 0) + 1
        self._last_version[key] = version
        self._snapshots.setdefault(key, {})[version] = snapshot
        return StateHandle(name, version)

    def load(self, tenant: str, handle: str) -> Snapshot:
        """The snapshot of `name@version`, or the newest of `name`. Refuses an unknown and a foreign one alike."""
        key, version = self._key(tenant, handle)
        return self._snapshots[key][version]

    def drop(self, tenant: str, handle: str) -> None:
        """Forgets one version; forks and children are unaffected."""
        key, version = self._key(tenant, handle)
        snapshot = self._snapshots[key].pop(version)
        if not self._snapshots[key]:
            del self._snapshots[key]
        self._blocks.release(snapshot.block)

    def _key(self, tenant: str, handle: str) -> tuple[tuple[str, str], int]:
        try:
            name, version = parse_handle(handle)
        except BadHandle as error:
            raise Refused(ErrorCode.BAD_REQUEST, str(error), param="state") from None
        versions = self._snapshots.get((tenant, name), {})
        if version is None and versions:
            version = max(versions)
        if version is None or version not in versions:
            raise Refused(ErrorCode.STATE_NOT_FOUND, f"there is no state {handle!r}", param="state")
        return (tenant, name), version
