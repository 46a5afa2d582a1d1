"""Chains of token ids: how a line of tokens is named by hash, so that only equal lines are ever taken for equal."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from blake3 import blake3

ZERO_ORIGIN = "zero"
"""Origin of lines that began at the zero state."""


def chain_root(tenant: str, fingerprint: str, adapter: int, cache_salt: str, origin: str = ZERO_ORIGIN) -> bytes:
    """32 bytes that key every hash of a line. `origin` is `zero`, or the digest of the snapshot at which the line last
    ceased to be a pure function of its ids."""
    return blake3(msgspec.msgpack.encode(("wkvm chain 1", tenant, fingerprint, adapter, cache_salt, origin))).digest()


def chain_digests(root: bytes, ids: bytes, lengths: Iterable[int]) -> list[bytes]:
    """Digests (16 bytes) of the first n ids for each n of `lengths`, ascending; `ids` is a u32 column.

    One pass over the ids; the hashing releases the interpreter lock.
    """
    digests = []
    hasher = blake3(key=root)
    view, done = memoryview(ids), 0
    for length in lengths:
        assert done <= 4 * length <= len(ids), f"length {length} is not ascending or beyond the ids"
        hasher.update(view[done : 4 * length])
        done = 4 * length
        digests.append(hasher.copy().digest(length=16))
    return digests
