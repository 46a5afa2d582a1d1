from __future__ import annotations

from pathlib import Path

from wkvm_core.state.layout import Fingerprint
from wkvm_core.store.files import Files
from wkvm_core.store.records import Draft, Lineage, Record, Tier
from wkvm_core.store.store import Quota, StateStore
from wkvm_proto.names import StateHandle


def digest(number: int) -> str:
    return f"{number:064x}"


def draft(
    number: int = 0,
    *parents: StateHandle,
    verb: str = "create",
    ttl_ms: int | None = None,
    tags: tuple[str, ...] = (),
    pinned: bool = False,
    tiers: tuple[Tier, ...] = (Tier.DISK,),
) -> Draft:
    return Draft(
        fingerprint=Fingerprint("m", "l", "n"),
        tokens=number,
        lineage=Lineage(verb, parents),
        bytes=1000,
        blob=digest(number),
        segment=digest(10**6 + number),
        ttl_ms=ttl_ms,
        tags=tags,
        pinned=pinned,
        tiers=tiers,
    )


def record(serial: int = 1, name: str = "a", version: int = 1, tenant: str = "t", number: int = 0) -> Record:
    made = draft(number)
    return Record(
        handle=StateHandle(name, version),
        tenant=tenant,
        serial=serial,
        created_ms=5,
        fingerprint=made.fingerprint,
        tokens=made.tokens,
        lineage=made.lineage,
        bytes=made.bytes,
        blob=made.blob,
        segment=made.segment,
    )


class Clock:
    """Milliseconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now


def open_store(files: Files, folder: Path, clock: Clock | None = None, quota: Quota | None = None) -> StateStore:
    allowed = Quota() if quota is None else quota
    return StateStore(files, str(folder / "catalog.db"), quota=lambda tenant: allowed, now_ms=clock or Clock())
