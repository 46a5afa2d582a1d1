"""The file operations of the store, and nothing else: what a disk promises is said here once."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import Protocol

Data = bytes | bytearray | memoryview

_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class Writer(Protocol):
    """An open file that only grows. After an error each further write or sync of it fails too: what the disk holds of
    it is unknown, and a second sync would report success for data that is gone."""

    def write(self, data: Data) -> None:
        """All of `data`, at the end of the file; durable after `sync`. Raises OSError."""

    def sync(self) -> None:
        """What was written is on the disk when this returns, the file's name is not: see `sync_folder`. Raises
        OSError."""

    def close(self) -> None:
        """Never syncs. Raises OSError; the file is closed then too. A second close does nothing."""


class Files(Protocol):
    """The files below one folder. Paths are relative to it, of components `[A-Za-z0-9][A-Za-z0-9._-]*` joined by `/`;
    the store builds them itself, never from a name that a caller gave. `""` is the folder itself.

    Everything raises OSError: FileNotFoundError, FileExistsError, and whatever the disk says.
    """

    def make_folders(self, path: str) -> None:
        """The folder and those above it, where they are missing; durable when this returns."""

    def create(self, path: str) -> Writer:
        """A new file, in a folder that exists. FileExistsError if the path is taken. Its name is durable after
        `sync_folder`."""

    def append(self, path: str) -> Writer:
        """Writes on at the end of a file that exists."""

    def read(self, path: str, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer only at the end of the file."""

    def read_into(self, path: str, offset: int, view: memoryview) -> int:
        """Fills `view` (writable, contiguous) from `offset`; the bytes read, fewer than it holds only at the end of the
        file."""

    def size(self, path: str) -> int:
        """Bytes in the file."""

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder."""

    def rename(self, old: str, new: str) -> None:
        """At once, in the place of what was at `new`, within one folder; durable after `sync_folder`."""

    def unlink(self, path: str) -> None:
        """Removes a file; durable after `sync_folder`."""

    def sync_folder(self, path: str) -> None:
        """Files created, renamed and removed in the folder are so on the disk when this returns; their bytes are not:
        see `Writer.sync`."""

    def list(self, path: str) -> list[str]:
        """Names in the folder, files and folders, sorted."""


def components(path: str) -> list[str]:
    """The parts of a store's path, none for the folder itself. A path that the store cannot have built is a fault."""
    if not path:
        return []
    parts = path.split("/")
    assert all(_COMPONENT.fullmatch(part) for part in parts), f"{path!r} is no path of the store"
    return parts


def parent(path: str) -> str:
    """The folder that a path lies in."""
    return path.rpartition("/")[0]


class RealFiles:
    """Files on the disk. Files are 0600, folders 0700; a symbolic link anywhere below the root is refused."""

    def __init__(self, root: str) -> None:
        """Makes the root folder where it is missing; links above it and at it are followed, the operator made them."""
        os.makedirs(root, mode=0o700, exist_ok=True)  # noqa: PTH103 - this module is the one on top of os
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._durable: set[str] = set()
        """Folders whose names are known to be on the disk; one that is merely there may not be."""

    def make_folders(self, path: str) -> None:
        made = ""
        for name in components(path):
            above, made = made, f"{made}/{name}" if made else name
            if made in self._durable:
                continue
            folder = self._folder(above)
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=folder)
                os.fsync(folder)
            finally:
                os.close(folder)
            self._durable.add(made)

    def create(self, path: str) -> Writer:
        return _RealWriter(self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))

    def append(self, path: str) -> Writer:
        return _RealWriter(self._open(path, os.O_WRONLY | os.O_APPEND))

    def read(self, path: str, offset: int, size: int) -> bytes:
        data = bytearray(max(0, min(size, self.size(path) - offset)))
        got = self.read_into(path, offset, memoryview(data))
        return bytes(data[:got])

    def read_into(self, path: str, offset: int, view: memoryview) -> int:
        descriptor = self._open(path, os.O_RDONLY)
        try:
            flat, done = view.cast("B"), 0
            while done < len(flat):
                got = os.preadv(descriptor, [flat[done:]], offset + done)
                if got == 0:
                    break
                done += got
            return done
        finally:
            os.close(descriptor)

    def size(self, path: str) -> int:
        folder, name = self._place(path)
        try:
            return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
        finally:
            os.close(folder)

    def exists(self, path: str) -> bool:
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def rename(self, old: str, new: str) -> None:
        assert parent(old) == parent(new), f"{old} to {new} leaves its folder"
        folder, name = self._place(old)
        try:
            os.rename(name, components(new)[-1], src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.close(folder)

    def unlink(self, path: str) -> None:
        folder, name = self._place(path)
        try:
            os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)

    def sync_folder(self, path: str) -> None:
        folder = self._folder(path)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def list(self, path: str) -> list[str]:
        folder = self._folder(path)
        try:
            return sorted(os.listdir(folder))  # noqa: PTH208 - of a descriptor
        finally:
            os.close(folder)

    def close(self) -> None:
        """Lets go of the root folder; open writers stay valid."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def _folder(self, path: str) -> int:
        """Descriptor of a folder, the caller's to close; each part is opened from the one above it."""
        folder = os.dup(self._root)
        for name in components(path):
            try:
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=folder)
            finally:
                os.close(folder)
            folder = below
        return folder

    def _place(self, path: str) -> tuple[int, str]:
        name = components(path)[-1]
        return self._folder(parent(path)), name

    def _open(self, path: str, flags: int) -> int:
        folder, name = self._place(path)
        try:
            return os.open(name, flags | _FLAGS, 0o600, dir_fd=folder)
        finally:
            os.close(folder)


class _RealWriter:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._failed = False

    def write(self, data: Data) -> None:
        self._check()
        rest = memoryview(data).cast("B")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self._failed = True
            raise

    def sync(self) -> None:
        self._check()
        try:
            os.fsync(self._descriptor)
        except OSError:
            self._failed = True
            raise

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _check(self) -> None:
        assert self._descriptor >= 0, "the file is closed"
        if self._failed:
            raise OSError(errno.EIO, "an earlier operation on this file failed")
