"""A snapshot: the bytes of a slot at a cursor, with the ids that led there."""

from __future__ import annotations

import msgspec

from wkvm_core.state.cursor import Cursor
from wkvm_core.state.layout import Fingerprint


class Segment(msgspec.Struct, frozen=True):
    """A link of the chain of ids, shared by every snapshot that grew from it."""

    ids: bytes
    """u32 column."""
    parent: Segment | None = None

    @property
    def tokens(self) -> int:
        """Ids in this link and all before it."""
        total, link = 0, self
        while True:
            total += len(link.ids) // 4
            if link.parent is None:
                return total
            link = link.parent

    def flatten(self) -> bytes:
        """All ids of the chain in order, a u32 column."""
        links, link = [], self
        while True:
            links.append(link.ids)
            if link.parent is None:
                return b"".join(reversed(links))
            link = link.parent


class Snapshot(msgspec.Struct, frozen=True):
    """Immutable: a slot's bytes (in a host block), the cursor, what the bytes mean, and the last link of the ids.
    It holds no sampler."""

    block: int
    cursor: Cursor
    fingerprint: Fingerprint
    segment: Segment | None = None
    """None when the ids were left out; then repetition penalties and replay cannot see them."""
