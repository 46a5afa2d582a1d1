"""`backup/<sequence>.db`: copies of the catalog, taken in steps. The two newest are kept and the journal reaches back
to the older one, so that one damaged copy loses nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import apsw

from wkvm_core.store.files import Files
from wkvm_core.store.index import Index
from wkvm_core.store.journal import Journal
from wkvm_core.store.scrub import scrub

FOLDER = "backup"
KEPT = 2
PAGES_A_STEP = 256
CHUNK_BYTES = 2**20
WAIT_S = 0.002

_FILE = re.compile(r"([0-9]{20})\.db")


def take_backup(index: Index, journal: Journal, files: Files, scratch: str) -> Iterator[None]:
    """Copies the catalog by way of the file `scratch`, checks every row of the copy, stores it, and cuts the journal.

    Each step takes milliseconds; writes between them are in the copy or in the journal behind it. Raises Damaged when
    the copy is, OSError and apsw.Error when the disk fails; backups before it are untouched then.
    """
    remove_catalog(scratch)
    try:
        copy = apsw.Connection(scratch)
        try:
            copy.execute("PRAGMA synchronous=OFF")
            with copy.backup("main", index.connection, "main") as steps:
                while not steps.step(PAGES_A_STEP):
                    yield
        finally:
            copy.close()
        with ThreadPoolExecutor(1, "wkvm-store-backup") as aside:
            checking = aside.submit(_check, scratch)
            while not checking.done():
                wait([checking], WAIT_S)
                yield
        sequence = checking.result()
        yield from _store(scratch, files, sequence)
    finally:
        remove_catalog(scratch)
    sequences = backups(files)
    for old in sequences[:-KEPT]:
        files.unlink(_path(old))
        files.sync_folder(FOLDER)
    yield
    if len(sequences) >= KEPT:
        journal.rotate()
        journal.cut(sequences[-KEPT])


def sweep(files: Files) -> None:
    """Removes backups that a crash left unfinished. Raises OSError."""
    if files.exists(FOLDER):
        for name in files.list(FOLDER):
            if name.endswith(".tmp"):
                files.unlink(f"{FOLDER}/{name}")


def backups(files: Files) -> list[int]:
    """Sequences of the backups there are, oldest first."""
    try:
        names = files.list(FOLDER)
    except FileNotFoundError:
        return []
    return sorted(int(found[1]) for name in names if (found := _FILE.fullmatch(name)))


def fetch_backup(files: Files, sequence: int, path: str) -> None:
    """Copies a backup to a file outside the store's operations, where SQLite can open it. Raises OSError."""
    remove_catalog(path)
    with Path(path).open("xb") as target:
        offset = 0
        while chunk := files.read(_path(sequence), offset, CHUNK_BYTES):
            target.write(chunk)
            offset += len(chunk)
        target.flush()
        os.fsync(target.fileno())


def _check(scratch: str) -> int:
    """The sequence of a copy that is whole. Raises Damaged."""
    copy = Index(scratch)
    try:
        for _ in scrub(copy):
            pass
        return copy.sequence
    finally:
        copy.close()


def _store(scratch: str, files: Files, sequence: int) -> Iterator[None]:
    files.make_folders(FOLDER)
    temporary = f"{FOLDER}/{sequence:020d}.tmp"
    if files.exists(temporary):
        files.unlink(temporary)
    writer = files.create(temporary)
    try:
        with Path(scratch).open("rb") as source:
            while chunk := source.read(CHUNK_BYTES):
                writer.write(chunk)
                yield
        writer.sync()
    finally:
        writer.close()
    files.rename(temporary, _path(sequence))
    files.sync_folder(FOLDER)


def _path(sequence: int) -> str:
    return f"{FOLDER}/{sequence:020d}.db"


def remove_catalog(path: str) -> None:
    """Removes a SQLite file and what SQLite keeps beside it."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(path + suffix).unlink(missing_ok=True)
