"""One daemon per store and per socket: an flock taken before anything is opened or bound."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from wkvm_core.errors import Refused
from wkvm_proto.names import ErrorCode


class Lock:
    """Holds `path` locked until closed, or until the process ends however it ends."""

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        """Refuses with STORE_LOCKED when another process holds it; the message names `what`
        and the remedy."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Refused(ErrorCode.BAD_CONFIG, f"{what}: {path.parent}: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise Refused(ErrorCode.STORE_LOCKED, f"another wkvm-core holds the {what} {path}; {remedy}") from None

    def close(self) -> None:
        """Lets it go. The file stays: removing it would let two processes lock two files of one name."""
        os.close(self._fd)

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
