"""Chains of token ids on disk: links that forks share."""

from __future__ import annotations

import struct
from collections.abc import Collection

import msgspec

from wkvm_core.errors import Refused
from wkvm_core.state.snapshot import Segment
from wkvm_core.store.files import Files
from wkvm_core.store.objects import Objects, Swept, tenant_key
from wkvm_core.store.tier import DiskTier
from wkvm_proto.names import ErrorCode

MAX_LINKS = 8
"""Links from a file to the root of its chain; the one after them holds all ids so far and begins a new chain."""
MAX_TOKENS = 1 << 26
_MAGIC = b"wkvmids1"
_HEAD = struct.Struct("<8s32sIIQ8x")  # magic, digest of the parent, links, tokens here, tokens before
_NO_PARENT = bytes(32)


class _Link(msgspec.Struct, frozen=True):
    parent: str
    links: int
    here: int
    before: int


class Segments:
    """`segments/ab/cd/<digest>.ids`: a head of 64 bytes and a u32 column. A head holds its parent's digest, so that a
    digest stands for all ids up to the end of its link; the digest is keyed by tenant."""

    def __init__(self, files: Files, tier: DiskTier) -> None:
        self._files = files
        self._objects = Objects(files, tier, "segments", ".ids")

    def put(self, tenant: str, segment: Segment) -> str:
        """Writes the links of a chain that are not there yet and returns the digest of the last, durable. Equal chains
        give equal digests. Refuses with `store_full` or `store_read_only`.

        Every ninth link is written with all ids before it, so no chain on disk is longer than 8 links.
        """
        key, links = tenant_key(tenant), _links(segment)
        assert segment.tokens <= MAX_TOKENS, segment.tokens
        first = (len(links) - 1) // MAX_LINKS * MAX_LINKS
        before, parent, digest = 0, _NO_PARENT, ""
        for number, ids in enumerate([b"".join(links[: first + 1]), *links[first + 1 :]], 1):
            head = _HEAD.pack(_MAGIC, parent, number, len(ids) // 4, before)
            digest = self._objects.put(key, (head, ids))
            before, parent = before + len(ids) // 4, bytes.fromhex(digest)
        return digest

    def get(self, tenant: str, digest: str) -> bytes:
        """All ids up to the end of a link, a u32 column; every link is compared with its digest first. Refuses with
        `state_damaged`."""
        key, columns = tenant_key(tenant), []
        below: _Link | None = None
        while digest:
            data = self._objects.read(key, digest, limit=_HEAD.size + 4 * MAX_TOKENS)
            below = self._link(digest, data, len(data), below)
            columns.append(data[_HEAD.size :])
            digest = below.parent
        return b"".join(reversed(columns))

    def chain(self, digest: str) -> tuple[str, ...]:
        """The digests of a link and those before it. Refuses with `state_damaged` where it is cut off; the ids are not
        looked at."""
        found: list[str] = []
        below: _Link | None = None
        while digest:
            with self._objects.reading(digest):
                path = self._objects.path(digest)
                head, size = self._files.read(path, 0, _HEAD.size), self._files.size(path)
            below = self._link(digest, head, size, below)
            found.append(digest)
            digest = below.parent
        return tuple(found)

    def check(self, tenant: str, digest: str) -> None:
        """Reads one link through, for the scrub. Refuses with `state_damaged`."""
        self._objects.check(tenant_key(tenant), digest)

    def sweep(self, referenced: Collection[str]) -> Swept:
        """At the start: removes temporaries and links that no chain of the digests `referenced` goes through. While
        one of those chains is cut off, what lies beyond the cut is unknown, and every link is kept."""
        try:
            kept = {link for digest in referenced for link in self.chain(digest)}
        except Refused:
            kept = set(self._objects.digests())
        return self._objects.sweep({*kept, *referenced})

    def _link(self, digest: str, data: bytes, size: int, below: _Link | None) -> _Link:
        """The head of a link in a file of `size` bytes, the parent of `below`."""
        link = _parse(data, size)
        if link is None:
            raise Refused(ErrorCode.STATE_DAMAGED, f"object {digest} is no link of ids", param="state")
        if below is not None and (link.links, link.before + link.here) != (below.links - 1, below.before):
            raise Refused(ErrorCode.STATE_DAMAGED, f"object {digest} is not the parent of its child", param="state")
        return link


def _links(segment: Segment) -> list[bytes]:
    links: list[bytes] = []
    link: Segment | None = segment
    while link is not None:
        links.append(link.ids)
        link = link.parent
    return links[::-1]


def _parse(data: bytes, size: int) -> _Link | None:
    """The head of a link in a file of `size` bytes, None when it is none."""
    if len(data) < _HEAD.size:
        return None
    magic, parent, links, here, before = _HEAD.unpack_from(data)
    if magic != _MAGIC or size != _HEAD.size + 4 * here or not 1 <= links <= MAX_LINKS:
        return None
    if (links == 1) != (parent == _NO_PARENT):
        return None
    return _Link("" if parent == _NO_PARENT else parent.hex(), links, here, before)
