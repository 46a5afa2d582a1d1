"""`journal/NNNNNNNN.log`: every transaction of the catalog, in order, durable before anyone is told of it.

A file is a header (magic, first sequence, salt, checksum) and records (magic, length, sequence, `synced`, checksum,
payload), all little-endian. `synced` is the last sequence that was on the disk before this record was written: a
record that cannot be read is a torn tail unless a later one says that it was on the disk, and then it is damage. A new
file is begun at each start, so nothing is ever written behind a torn tail.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import struct
from collections.abc import Iterator, Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from wkvm_core.errors import Refused
from wkvm_core.store.files import Files, Writer
from wkvm_proto.names import ErrorCode

FOLDER = "journal"
MAX_FILE_BYTES = 64 * 2**20

_FILE = re.compile(r"([0-9]{8})\.log")
_FILE_MAGIC = b"WKVMJNL1"
_RECORD_MAGIC = b"\xf5WR1"
_HEADER = struct.Struct("<8sQQQ")
_RECORD = struct.Struct("<4sIQQQ")
_CHECKED = struct.Struct("<IQQ")


class JournalDamaged(Refused):
    """An acknowledged transaction cannot be read. Says where and which; whoever reads on would lose it silently."""

    def __init__(self, name: str, offset: int, sequence: int) -> None:
        super().__init__(
            ErrorCode.STORE_DAMAGED,
            f"journal file {name} is damaged at byte {offset}: transaction {sequence} is missing",
        )
        self.name = name
        self.offset = offset
        self.sequence = sequence


class Entry(msgspec.Struct, frozen=True):
    """One transaction as it stands in a file."""

    sequence: int
    payload: bytes


class Torn(msgspec.Struct, frozen=True):
    """Where a file was cut: what lies behind was never acknowledged."""

    name: str
    offset: int


class Journal:
    """The end of the journal. After an OSError it takes nothing more: what the disk holds is unknown then."""

    def __init__(self, files: Files, last: int) -> None:
        """Writes on after transaction `last`, the last one that `JournalReader` found or that the catalog holds."""
        self._files = files
        self._last = last
        self._writer: Writer | None = None
        self._salt = 0
        self._size = 0
        self._broken = False

    @property
    def last(self) -> int:
        """Sequence of the last durable transaction."""
        return self._last

    def append(self, payloads: Sequence[bytes]) -> int:
        """Transactions in order, all durable when this returns; the sequence of the last. Raises OSError."""
        assert not self._broken, "the journal has failed before"
        self._broken = True
        if self._writer is None or self._size >= MAX_FILE_BYTES:
            self._begin()
        assert self._writer is not None
        frames = b"".join(
            frame(payload, sequence, self._last, self._salt)
            for sequence, payload in enumerate(payloads, self._last + 1)
        )
        self._writer.write(frames)
        self._writer.sync()
        self._size += len(frames)
        self._last += len(payloads)
        self._broken = False
        return self._last

    def cut(self, upto: int) -> int:
        """Removes files whose transactions are all `upto` or older, never the newest; how many. Raises OSError."""
        names = _names(self._files)
        firsts = [_header(self._files, name) for name in names]
        gone = 0
        for name, following in zip(names, firsts[1:], strict=False):
            if following is None or following[0] > upto + 1:
                break
            self._files.unlink(name)
            self._files.sync_folder(FOLDER)  # one by one: a crash leaves no gap between those that stay
            gone += 1
        return gone

    def rotate(self) -> None:
        """The next transaction begins a new file."""
        self.close()

    def close(self) -> None:
        """Everything appended is durable already."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None

    def _begin(self) -> None:
        self.close()
        self._files.make_folders(FOLDER)
        names = _names(self._files)
        number = int(names[-1].rpartition("/")[2].partition(".")[0]) + 1 if names else 1
        self._salt = secrets.randbits(64)
        self._writer = self._files.create(f"{FOLDER}/{number:08d}.log")
        self._writer.write(_pack_header(self._last + 1, self._salt))
        self._writer.sync()
        self._files.sync_folder(FOLDER)
        self._size = _HEADER.size


class JournalReader:
    """Reads transactions in order. Iterate once; then `last` and `torn` are known."""

    def __init__(self, files: Files, after: int) -> None:
        """Entries from `after + 1` on. What is missing before that is missed by nobody."""
        self._files = files
        self._after = after
        self.last = 0
        """Sequence of the last entry; 0 for an empty journal."""
        self.torn: list[Torn] = []

    def __iter__(self) -> Iterator[Entry]:
        """Raises JournalDamaged in place of the first entry that is missing, OSError when the disk fails."""
        names = _names(self._files)
        expected: int | None = None
        for position, name in enumerate(names):
            is_last = position == len(names) - 1
            header = _header(self._files, name)
            if header is None:
                if is_last and self._files.size(name) > _HEADER.size:
                    raise JournalDamaged(name, 0, expected or self._after + 1)
                self.torn.append(Torn(name, 0))  # its creation was cut short; a file after it tells if it was not
                continue
            first, salt = header
            if first != expected and first > self._after + 1:
                raise JournalDamaged(name, 0, expected or self._after + 1)
            expected = first
            data = self._files.read(name, 0, self._files.size(name))
            offset = _HEADER.size
            while offset < len(data):
                found = _parse(data, offset, salt)
                if found is None or found[0].sequence != expected:
                    if is_last and _was_durable(data, offset + 1, salt, expected):
                        raise JournalDamaged(name, offset, expected)
                    self.torn.append(Torn(name, offset))
                    break
                entry = found[0]
                offset += _RECORD.size + len(entry.payload)
                expected += 1
                self.last = entry.sequence
                if entry.sequence > self._after:
                    yield entry
            self.last = max(self.last, expected - 1)

    def settle(self) -> None:
        """Makes what was read durable: after a killed process the end of the newest file may be in memory only."""
        names = _names(self._files)
        if names:
            writer = self._files.append(names[-1])
            try:
                writer.sync()
            finally:
                writer.close()
            self._files.sync_folder(FOLDER)


def frame(payload: bytes, sequence: int, synced: int, salt: int) -> bytes:
    """A record as it stands in a file."""
    check = xxh3_64_intdigest(_CHECKED.pack(len(payload), sequence, synced) + payload, seed=salt)
    return _RECORD.pack(_RECORD_MAGIC, len(payload), sequence, synced, check) + payload


def _pack_header(first: int, salt: int) -> bytes:
    head = _HEADER.pack(_FILE_MAGIC, first, salt, 0)[:-8]
    return head + struct.pack("<Q", xxh3_64_intdigest(head))


def _names(files: Files) -> list[str]:
    try:
        names = files.list(FOLDER)
    except FileNotFoundError:
        return []
    return [f"{FOLDER}/{name}" for name in sorted(names) if _FILE.fullmatch(name)]


def _header(files: Files, name: str) -> tuple[int, int] | None:
    """First sequence and salt of a file; None when its header cannot be read."""
    data = files.read(name, 0, _HEADER.size)
    if len(data) < _HEADER.size:
        return None
    magic, first, salt, check = _HEADER.unpack(data)
    if magic != _FILE_MAGIC or xxh3_64_intdigest(data[:-8]) != check:
        return None
    return first, salt


def _parse(data: bytes, offset: int, salt: int) -> tuple[Entry, int] | None:
    """The record at `offset` and its `synced`; None when there is no whole one."""
    if len(data) - offset < _RECORD.size:
        return None
    magic, length, sequence, synced, check = _RECORD.unpack_from(data, offset)
    start = offset + _RECORD.size
    if magic != _RECORD_MAGIC or length > len(data) - start:
        return None
    payload = data[start : start + length]
    if xxh3_64_intdigest(_CHECKED.pack(length, sequence, synced) + payload, seed=salt) != check:
        return None
    return Entry(sequence, payload), synced


def _was_durable(data: bytes, offset: int, salt: int, sequence: int) -> bool:
    """Whether a record from `offset` on says that `sequence` was on the disk before it."""
    while (offset := data.find(_RECORD_MAGIC, offset)) >= 0:
        found = _parse(data, offset, salt)
        if found is not None and found[1] >= sequence:
            return True
        offset += 1
    return False
