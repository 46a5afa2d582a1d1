"""Immutable files that are named by a keyed digest of their bytes."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Collection, Iterator, Sequence

import msgspec
from blake3 import blake3

from wkvm_core.errors import Refused
from wkvm_core.store.files import Data, Files, parent
from wkvm_core.store.tier import DiskTier
from wkvm_proto.names import ErrorCode

PIECE = 1 << 20
"""Bytes that are held at once where a file is only looked through."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY_CONTEXT = "wkvm store 1: digests of one tenant's objects"


def tenant_key(tenant: str) -> bytes:
    """32 bytes under which a tenant's objects are digested: equal bytes of two tenants have digests that tell nothing
    of each other, and are two files."""
    return blake3(tenant.encode(), derive_key_context=_KEY_CONTEXT).digest()


class Swept(msgspec.Struct, frozen=True):
    """Files that a sweep removed."""

    temporaries: int
    orphans: int


class Objects:
    """Files of one kind, `KIND/ab/cd/<digest><suffix>`; a digest is 64 hex digits, the keyed blake3 of the whole file.

    A file appears under its name whole and durable, and never changes. One that is found to differ from its digest is
    put aside as `<digest>.damaged` and never read again; the same content may then be put anew.
    """

    def __init__(self, files: Files, tier: DiskTier, kind: str, suffix: str) -> None:
        self._files = files
        self._tier = tier
        self._kind = kind
        self._suffix = suffix
        self._naming = threading.Lock()
        """Held while a file gets its name or loses it as damaged, so that a new one is never put aside for an old."""

    def path(self, digest: str) -> str:
        """Where the object lies."""
        return f"{self._folder(digest)}/{digest}{self._suffix}"

    def exists(self, digest: str) -> bool:
        """Whether the object is there and was not found damaged."""
        return self._files.exists(self.path(digest))

    def put(self, key: bytes, parts: Sequence[Data]) -> str:
        """Writes the parts as one object and returns its digest; durable when this returns. Equal content is kept once,
        and only after what is there was read and found whole. Refuses when the tier takes no writes."""
        digest = digest_of(key, parts)
        path = self.path(digest)
        with self._tier.writing():
            if self._files.exists(path) and self._reads_whole(key, digest):
                self._files.sync_folder(parent(path))
                return digest
            self._files.make_folders(parent(path))
            temporary = f"{path}.{secrets.token_hex(8)}.tmp"
            try:
                self._write(temporary, parts)
                with self._naming:
                    self._files.rename(temporary, path)
            except OSError:
                with contextlib.suppress(OSError):
                    self._files.unlink(temporary)
                raise
            self._files.sync_folder(parent(path))
        return digest

    def read(self, key: bytes, digest: str, *, limit: int) -> bytes:
        """A whole object of at most `limit` bytes. Refuses with `state_damaged` what is missing, longer or differs."""
        path = self.path(digest)
        with self.reading(digest):
            size = self._files.size(path)
            data = self._files.read(path, 0, size) if size <= limit else b""
        if digest_of(key, (data,)) != digest:
            raise self.damaged(key, digest)
        return data

    def check(self, key: bytes, digest: str) -> None:
        """Reads an object through in pieces of 1 MiB, for the scrub. Refuses with `state_damaged`."""
        with self.reading(digest):
            whole = self._is_whole(key, digest)
        if not whole:
            raise self.damaged(key, digest)

    @contextlib.contextmanager
    def reading(self, digest: str) -> Iterator[None]:
        """Around every read of an object: refuses with `state_damaged` what the disk does not give. The file stays
        where it is, it may be whole."""
        try:
            yield
        except FileNotFoundError:
            raise Refused(ErrorCode.STATE_DAMAGED, f"object {digest} is missing", param="state") from None
        except OSError as error:
            raise Refused(ErrorCode.STATE_DAMAGED, f"object {digest} cannot be read", param="state") from error

    def damaged(self, key: bytes, digest: str) -> Refused:
        """Puts an object aside if its bytes, read again, are still not those of its digest: what was read before may
        have been mended meanwhile. Returns the refusal to raise."""
        path = self.path(digest)
        with self._naming, contextlib.suppress(Refused, OSError):
            if not self._is_whole(key, digest):
                with self._tier.writing():
                    self._files.rename(path, f"{self._folder(digest)}/{digest}.damaged")
                    self._files.sync_folder(parent(path))
        return Refused(ErrorCode.STATE_DAMAGED, f"object {digest} is damaged", param="state")

    def remove(self, digest: str) -> None:
        """Forgets an object, once the removal of its last reference is durable. Nothing happens if it is gone."""
        with self._naming, self._tier.writing():
            for name in (f"{digest}{self._suffix}", f"{digest}.damaged"):
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(f"{self._folder(digest)}/{name}")

    def sweep(self, referenced: Collection[str]) -> Swept:
        """Removes temporaries and objects that nobody refers to. Only at the start, before anything is put: an object
        is unreferenced until its record is committed. Files with other names are left alone. Raises OSError when a
        folder cannot be listed, and refuses as every write does."""
        temporaries = orphans = 0
        for folder, name in self._names():
            digest = name[:64]
            rest = name[64:]
            if not _DIGEST.fullmatch(digest):
                continue
            if rest.endswith(".tmp"):
                temporaries += 1
            elif rest in (self._suffix, ".damaged") and digest not in referenced:
                orphans += 1
            else:
                continue
            with self._tier.writing():
                self._files.unlink(f"{folder}/{name}")
        return Swept(temporaries, orphans)

    def digests(self) -> Iterator[str]:
        """All objects that are there and were not found damaged, in order."""
        for _, name in self._names():
            if name[64:] == self._suffix and _DIGEST.fullmatch(name[:64]):
                yield name[:64]

    def _names(self) -> Iterator[tuple[str, str]]:
        """Folder and name of every file."""
        if not self._files.exists(self._kind):
            return
        for first in self._files.list(self._kind):
            for second in self._files.list(f"{self._kind}/{first}"):
                folder = f"{self._kind}/{first}/{second}"
                for name in self._files.list(folder):
                    yield folder, name

    def _folder(self, digest: str) -> str:
        assert _DIGEST.fullmatch(digest), f"{digest!r} is no digest"
        return f"{self._kind}/{digest[:2]}/{digest[2:4]}"

    def _write(self, path: str, parts: Sequence[Data]) -> None:
        writer = self._files.create(path)
        try:
            for part in parts:
                writer.write(part)
            writer.sync()
        except OSError:
            with contextlib.suppress(OSError):
                writer.close()
            raise
        writer.close()

    def _reads_whole(self, key: bytes, digest: str) -> bool:
        """Whether a file need not be written anew; one that cannot be read is no reason to end writing."""
        try:
            return self._is_whole(key, digest)
        except OSError:
            return False

    def _is_whole(self, key: bytes, digest: str) -> bool:
        hasher, path, offset = blake3(key=key), self.path(digest), 0
        while piece := self._files.read(path, offset, PIECE):
            hasher.update(piece)
            offset += len(piece)
        return hasher.hexdigest() == digest


def digest_of(key: bytes, parts: Sequence[Data]) -> str:
    """Hex keyed blake3 of the parts, one after the other."""
    hasher = blake3(key=key)
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
