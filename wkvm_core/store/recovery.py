"""The catalog at a start: what the journal holds beyond it is applied; without a catalog it is rebuilt."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec

from wkvm_core.errors import Refused
from wkvm_core.store.backup import backups, fetch_backup, remove_catalog
from wkvm_core.store.changes import apply
from wkvm_core.store.files import Files
from wkvm_core.store.index import Index
from wkvm_core.store.journal import FOLDER, Journal, JournalDamaged, JournalReader, Torn
from wkvm_core.store.records import BadValue, decode_transaction
from wkvm_core.store.rows import Damaged
from wkvm_core.store.scrub import scrub
from wkvm_proto.names import ErrorCode, StateHandle

GROUP = 1000


class Replayed(msgspec.Struct, frozen=True):
    """Transactions that the journal held beyond the catalog, and where it was torn."""

    transactions: int
    torn: tuple[Torn, ...]


class Rebuilt(msgspec.Struct, frozen=True):
    """How a catalog came back."""

    backup: int
    """Sequence of the backup it began with; 0 for none."""
    damaged_backups: tuple[int, ...]
    transactions: int
    """Applied from the journal."""
    torn: tuple[Torn, ...]
    without_blob: tuple[tuple[str, StateHandle], ...]
    """Tenant and handle of the records whose blob is not there: known and not readable."""


def replay(index: Index, files: Files) -> Replayed:
    """Applies what the journal holds beyond the catalog. Raises JournalDamaged rather than leave one out."""
    reader = JournalReader(files, index.sequence)
    reader.settle()
    before = index.sequence
    entries = iter(reader)
    while group := list(islice(entries, GROUP)):
        index.begin()
        for entry in group:
            try:
                changes = decode_transaction(entry.payload)
            except BadValue:
                message = f"transaction {entry.sequence} of the journal was written by a later release"
                raise Refused(ErrorCode.BAD_CONFIG, message) from None
            for change in changes:
                apply(index, change)
        index.commit(group[-1].sequence)
    if reader.last < index.sequence:
        raise JournalDamaged(reader.torn[-1].name if reader.torn else FOLDER, 0, reader.last + 1)
    return Replayed(index.sequence - before, tuple(reader.torn))


def open_journal(index: Index, files: Files) -> Journal:
    """The end of the journal, the catalog brought up to it."""
    replay(index, files)
    return Journal(files, index.sequence)


def rebuild(files: Files, path: str, has_blob: Callable[[str], bool]) -> Rebuilt:
    """A new catalog at `path` from the newest backup that is whole and the journal behind it: every acknowledged handle
    and no deleted one. What was at `path` is replaced at the end only. Raises JournalDamaged, OSError, apsw.Error."""
    building = path + ".new"
    damaged: list[int] = []
    for sequence in [*reversed(backups(files)), 0]:
        remove_catalog(building)
        if sequence:
            fetch_backup(files, sequence, building)
        try:
            index = Index(building)
        except Damaged:
            damaged.append(sequence)
            continue
        try:
            try:
                for _ in scrub(index):
                    pass
                if index.sequence != sequence:
                    raise Damaged("its sequence")
            except Damaged:
                damaged.append(sequence)
                continue
            replayed = replay(index, files)
            missing = _without_blob(index, has_blob)
        finally:
            index.close()
        remove_catalog(path)
        Path(building).replace(path)
        _sync_folder(Path(path).parent)
        return Rebuilt(sequence, tuple(damaged), replayed.transactions, replayed.torn, missing)
    raise AssertionError("an empty catalog is never damaged")


def _without_blob(index: Index, has_blob: Callable[[str], bool]) -> tuple[tuple[str, StateHandle], ...]:
    missing = []
    for row in index.connection.execute("SELECT * FROM states ORDER BY serial"):
        record = index.checked_record(row)
        if not has_blob(record.blob):
            missing.append((record.tenant, record.handle))
    return tuple(missing)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
