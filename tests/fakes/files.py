"""Files in memory that tell every operation apart, and can be left as a crash may leave a disk."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from random import Random
from typing import Any

from wkvm_core.store.files import Data, Writer, components, parent

SECTOR = 512
"""A write is torn at these borders only, as on a disk."""


@dataclass
class File:
    """Bytes as a reader sees them, bytes on the disk, and the sectors in which they may differ."""

    data: bytearray = field(default_factory=bytearray)
    disk: bytearray = field(default_factory=bytearray)
    dirty: set[int] = field(default_factory=set)

    def write(self, data: bytes) -> None:
        start = len(self.data)
        self.data += data
        self.dirty.update(range(start // SECTOR, -(-len(self.data) // SECTOR)))

    def sync(self) -> None:
        self._carry(self.dirty, len(self.data))
        self.dirty.clear()

    def fail_sync(self) -> None:
        """As Linux does: what was not written counts as clean, so that no later sync writes it."""
        self.dirty.clear()

    def settled(self, random: Random | None, keep_all: bool) -> File:
        """As the disk has it after a crash: unsynced sectors lost or kept one by one, the length at any border."""
        after = File(disk=bytearray(self.disk))
        if keep_all:
            after.data, after.dirty = self.data, self.dirty
            after._carry(self.dirty, len(self.data))
        elif random is not None:
            borders = {len(self.disk), len(self.data)}
            borders.update(range(-(-len(self.disk) // SECTOR) * SECTOR, len(self.data), SECTOR))
            kept = {sector for sector in sorted(self.dirty) if random.random() < 0.5}
            after.data = self.data
            after._carry(kept, random.choice(sorted(borders)))
        return File(data=bytearray(after.disk), disk=after.disk)

    def _carry(self, sectors: set[int], length: int) -> None:
        if length > len(self.disk):
            self.disk += bytes(length - len(self.disk))
        for sector in sectors:
            start, end = sector * SECTOR, min((sector + 1) * SECTOR, length)
            if start < end:
                self.disk[start:end] = self.data[start:end]


@dataclass
class Folder:
    """Entries as a reader sees them, entries on the disk, and the changes between them, in the order they were made."""

    entries: dict[str, File | Folder] = field(default_factory=dict)
    disk: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def change(self, change: dict[str, File | Folder | None]) -> None:
        """Names that are set or, with None, removed, together."""
        self.changes.append(change)
        _apply(self.entries, change)

    def sync(self) -> None:
        self.disk = dict(self.entries)
        self.changes.clear()

    def settled(self, random: Random | None, keep_all: bool) -> Folder:
        entries = dict(self.disk)
        changes = list(self.changes) if keep_all else []
        if random is not None:
            changes = [change for change in self.changes if random.random() < 0.5]
            random.shuffle(changes)
        for change in changes:
            _apply(entries, change)
        after = {name: entries[name].settled(random, keep_all) for name in sorted(entries)}
        return Folder(entries=after, disk=dict(after))


class CrashingFiles:
    """`Files` in memory. Tell a story, then ask for the disk that a crash after any operation may leave:

        for point in files.crash_points():
            for seed in range(4):
                reopened = files.after_crash(seed, point)

    `len(files.operations)` at an acknowledgement tells after which points it must hold. `fail(n, errno)` makes the n-th
    operation from now on fail: a write after half of its bytes, a sync as Linux fails it.
    """

    def __init__(self, root: Folder | None = None) -> None:
        self.operations: list[str] = []
        """What was done, in words: `create a/x.tmp`. Reading is not recorded."""
        self._begin = root if root is not None else Folder()
        self._root = self._begin.settled(None, keep_all=False)
        self._log: list[tuple[Any, ...]] = []
        self._writers: list[File] = []
        self._faults: dict[int, int] = {}
        self._fails_from: tuple[int, int] | None = None
        self.read_error = 0
        """What every read of a file fails with; 0 for none."""

    def fail(self, operation: int, code: int, *, forever: bool = False) -> None:
        """The operation that comes `operation` operations from now (0 is the next) raises OSError(code); `forever`:
        every later one too."""
        at = len(self.operations) + operation
        self._faults[at] = code
        if forever:
            self._fails_from = (at, code)

    def heal(self) -> None:
        """No more faults."""
        self._faults.clear()
        self._fails_from = None

    def crash_points(self) -> range:
        """Numbers of operations after which a crash may come: before the first, after each."""
        return range(len(self._log) + 1)

    def after_crash(self, seed: int, point: int | None = None) -> CrashingFiles:
        """The disk after a crash, for a new process. Seed 0 loses everything that was not synced, seed 1 keeps it all,
        every other one draws what is lost, torn and reordered. Without a point the crash comes now."""
        again = CrashingFiles(self._begin)
        for entry in self._log[:point]:
            again._do(entry)
        random = Random(seed) if seed > 1 else None
        return CrashingFiles(again._root.settled(random, keep_all=seed == 1))

    def flip(self, path: str, bit: int) -> None:
        """Turns one bit of a file over, on the disk and for readers."""
        self.operations.append(f"flip {path} {bit}")
        self._log.append(("flip", path, bit))
        self._do(self._log[-1])

    def make_folders(self, path: str) -> None:
        made = ""
        for name in components(path):
            above, made = made, f"{made}/{name}" if made else name
            if name not in self._folder(above).entries:
                self._run("mkdir", made)
                self._run("sync_folder", above)
            self._folder(made)

    def create(self, path: str) -> Writer:
        self._absent(path)
        self._run("create", path)
        return _Writer(self, len(self._writers) - 1, path)

    def append(self, path: str) -> Writer:
        self._file(path)
        self._run("append", path)
        return _Writer(self, len(self._writers) - 1, path)

    def read(self, path: str, offset: int, size: int) -> bytes:
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        return bytes(self._file(path).data[offset : offset + size])

    def read_into(self, path: str, offset: int, view: memoryview) -> int:
        flat = view.cast("B")
        data = self.read(path, offset, len(flat))
        flat[: len(data)] = data
        return len(data)

    def size(self, path: str) -> int:
        return len(self._file(path).data)

    def exists(self, path: str) -> bool:
        try:
            self._node(path)
        except FileNotFoundError:
            return False
        return True

    def rename(self, old: str, new: str) -> None:
        assert parent(old) == parent(new), f"{old} to {new} leaves its folder"
        components(new)
        self._file(old)
        self._run("rename", old, new)

    def unlink(self, path: str) -> None:
        self._file(path)
        self._run("unlink", path)

    def sync_folder(self, path: str) -> None:
        self._folder(path)
        self._run("sync_folder", path)

    def list(self, path: str) -> list[str]:
        return sorted(self._folder(path).entries)

    def _run(self, verb: str, *arguments: Any, about: str = "") -> None:
        """Records an operation and does it, or fails it as `fail` said."""
        number = len(self.operations)
        self.operations.append(f"{verb} {about or ' '.join(arguments)}")
        code = self._faults.get(number)
        if code is None and self._fails_from is not None and number >= self._fails_from[0]:
            code = self._fails_from[1]
        if code is None:
            self._log.append((verb, *arguments))
            self._do(self._log[-1])
            return
        failed = ("nothing",)
        if verb == "write":
            failed = ("write", arguments[0], arguments[1][: len(arguments[1]) // 2])
        elif verb == "sync":
            failed = ("fail_sync", arguments[0])
        self._log.append(failed)
        self._do(failed)
        raise OSError(code, os.strerror(code))

    def _do(self, entry: tuple[Any, ...]) -> None:
        match entry:
            case ("mkdir", path):
                self._folder(parent(path)).change({_name(path): Folder()})
            case ("create", path):
                self._writers.append(File())
                self._folder(parent(path)).change({_name(path): self._writers[-1]})
            case ("append", path):
                self._writers.append(self._file(path))
            case ("write", writer, data):
                self._writers[writer].write(data)
            case ("sync", writer):
                self._writers[writer].sync()
            case ("fail_sync", writer):
                self._writers[writer].fail_sync()
            case ("rename", old, new):
                self._folder(parent(old)).change({_name(old): None, _name(new): self._file(old)})
            case ("unlink", path):
                self._folder(parent(path)).change({_name(path): None})
            case ("sync_folder", path):
                self._folder(path).sync()
            case ("flip", path, bit):
                for copy in (self._file(path).data, self._file(path).disk):
                    copy[bit // 8] ^= 1 << bit % 8
            case ("close" | "nothing", *_):
                pass
            case _:
                raise AssertionError(entry)

    def _node(self, path: str) -> File | Folder:
        node: File | Folder = self._root
        for name in components(path):
            if isinstance(node, File):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = node.entries[name]
        return node

    def _file(self, path: str) -> File:
        node = self._node(path)
        if isinstance(node, Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return node

    def _folder(self, path: str) -> Folder:
        node = self._node(path)
        if isinstance(node, File):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node

    def _absent(self, path: str) -> None:
        components(path)
        if _name(path) in self._folder(parent(path)).entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


class _Writer:
    def __init__(self, files: CrashingFiles, number: int, path: str) -> None:
        self._files = files
        self._number = number
        self._path = path
        self._failed = False
        self._closed = False

    def write(self, data: Data) -> None:
        self._run("write", bytes(data))

    def sync(self) -> None:
        self._run("sync")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._files._run("close", self._number, about=self._path)

    def _run(self, verb: str, *arguments: Any) -> None:
        assert not self._closed, "the file is closed"
        if self._failed:
            raise OSError(errno.EIO, "an earlier operation on this file failed")
        try:
            self._files._run(verb, self._number, *arguments, about=self._path)
        except OSError:
            self._failed = True
            raise


def _name(path: str) -> str:
    return components(path)[-1]


def _apply(entries: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node
