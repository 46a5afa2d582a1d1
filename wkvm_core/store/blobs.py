"""States on disk: one immutable file for each distinct content of a tenant."""

from __future__ import annotations

from collections.abc import Collection

from blake3 import blake3

from wkvm_core.errors import Refused
from wkvm_core.state.layout import StateLayout
from wkvm_core.store.blob import (
    BlobHeader,
    decode_header,
    encode_parts,
    header_size,
    packed_bytes,
    parse_header,
    spans,
)
from wkvm_core.store.files import Files
from wkvm_core.store.objects import PIECE, Objects, Swept, tenant_key
from wkvm_core.store.tier import DiskTier
from wkvm_proto.names import ErrorCode


class Blobs:
    """`blobs/ab/cd/<digest>.safetensors`. The digest is keyed by tenant; it is the file's name and its ETag."""

    def __init__(self, files: Files, tier: DiskTier) -> None:
        self._files = files
        self._objects = Objects(files, tier, "blobs", ".safetensors")

    def put(self, tenant: str, header: BlobHeader, block: memoryview) -> str:
        """Writes a state and returns its digest; durable when this returns, and only one file however often.

        `block`: the `slot_bytes` of a slot, not written to by others meanwhile; gaps between families are left out.
        Refuses with `store_full` or `store_read_only`.
        """
        return self._objects.put(tenant_key(tenant), encode_parts(header, block))

    def get(self, tenant: str, digest: str, layout: StateLayout, block: memoryview) -> BlobHeader:
        """Reads a state into `block` (writable, `slot_bytes`), gaps zero, and returns what its header says.

        What stands in `block` when this returns was compared with the digest there. Refuses with `state_damaged` (a
        file that differs is put aside) and with `fingerprint_mismatch` (another layout); then `block` is zero.
        """
        assert len(block) == layout.slot_bytes, f"{len(block)} bytes for a slot of {layout.slot_bytes}"
        try:
            with self._objects.reading(digest):
                return self._get(tenant_key(tenant), digest, layout, block)
        except BaseException:
            _zero(block, 0, len(block))
            raise

    def check(self, tenant: str, digest: str) -> None:
        """Reads a file through, for the scrub. Refuses with `state_damaged`, and puts it aside when it differs."""
        self._objects.check(tenant_key(tenant), digest)

    def exists(self, digest: str) -> bool:
        """Whether the file is there and was not found damaged."""
        return self._objects.exists(digest)

    def path(self, digest: str) -> str:
        """Where the file lies, in the folder of the store."""
        return self._objects.path(digest)

    def remove(self, digest: str) -> None:
        """Forgets a file, once the removal of its last reference is durable."""
        self._objects.remove(digest)

    def sweep(self, referenced: Collection[str]) -> Swept:
        """At the start: removes temporaries and the files that are not among the digests `referenced`."""
        return self._objects.sweep(referenced)

    def _get(self, key: bytes, digest: str, layout: StateLayout, block: memoryview) -> BlobHeader:
        path = self._objects.path(digest)
        size = self._files.size(path)
        try:
            begin = header_size(self._files.read(path, 0, 8), size)
        except Refused:
            raise self._objects.damaged(key, digest) from None
        if size - begin != packed_bytes(layout):
            self._objects.check(key, digest)
            raise _other_layout()
        head = self._files.read(path, 0, begin)
        hasher, end = blake3(head, key=key), 0
        for start, stop in spans(layout):
            _zero(block, end, start)
            family, end = block[start:stop], stop
            begin += self._files.read_into(path, begin, family)
            hasher.update(family)
        _zero(block, end, len(block))
        if hasher.hexdigest() != digest:
            raise self._objects.damaged(key, digest)
        header = decode_header(parse_header(head[8:]))
        if header.layout != layout:
            raise _other_layout()
        return header


def _other_layout() -> Refused:
    return Refused(ErrorCode.FINGERPRINT_MISMATCH, "the state belongs to a model of another layout", param="state")


def _zero(block: memoryview, begin: int, end: int) -> None:
    for start in range(begin, end, PIECE):
        stop = min(start + PIECE, end)
        block[start:stop] = bytes(stop - start)
