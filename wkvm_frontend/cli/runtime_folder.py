"""A short private folder for the sockets of one `wkvm serve`, gone when it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

MAX_SOCKET_PATH = 107
"""Bytes that the kernel takes."""
SOCKET_NAME = "core.sock"
_PREFIX = "wkvm-"
_LOCK_NAME = "alive"
_YOUNG_S = 60.0


@contextmanager
def runtime_folder(environment: Mapping[str, str]) -> Iterator[Path]:
    """A new folder of mode 0700 in XDG_RUNTIME_DIR or the temporary folder, whichever keeps a socket's path short.

    Folders that a killed supervisor left behind are removed first. Raises OSError when none can be made.
    """
    base = base_folder(environment)
    _sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    lock = (folder / _LOCK_NAME).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def base_folder(environment: Mapping[str, str]) -> Path:
    """Where the folder is made."""
    for choice in (environment.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):  # noqa: S108 - mkdtemp inside
        example = Path(choice) / f"{_PREFIX}{'x' * 8}" / SOCKET_NAME
        if choice and os.access(choice, os.W_OK | os.X_OK) and len(os.fsencode(example)) <= MAX_SOCKET_PATH:
            return Path(choice)
    raise OSError("no folder for sockets: set XDG_RUNTIME_DIR or TMPDIR to a short path that can be written")


def _sweep(base: Path) -> None:
    """Removes folders of ours whose owner holds their lock no more."""
    for folder in base.glob(f"{_PREFIX}*"):
        lock = folder / _LOCK_NAME
        try:
            state = folder.lstat()
            # A folder just made may not be locked yet.
            if state.st_uid != os.getuid() or folder.is_symlink() or time.time() - state.st_mtime < _YOUNG_S:
                continue
            with lock.open("r+") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
