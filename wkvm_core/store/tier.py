"""Whether the disk takes writes. One failed write closes it for writing; reading and generating go on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from wkvm_core.errors import Refused
from wkvm_core.store.files import Files
from wkvm_proto.names import ErrorCode

_PROBE = "probe.tmp"
_PROBE_BYTES = 1 << 16
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskTier:
    """Shared by everything of a store that writes, so that all of it stops at the first error: what a disk holds after
    one is unknown until it has been looked at."""

    def __init__(self) -> None:
        self.refusal: Refused | None = None
        """Why writes are refused; None while they are taken."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around every write. Refuses with `store_full` or `store_read_only` once an operation inside has raised
        OSError, that one included; nothing is tried twice."""
        if self.refusal is not None:
            raise Refused(self.refusal.code, self.refusal.message)
        try:
            yield
        except OSError as error:
            self.refusal = _refusal(error)
            raise Refused(self.refusal.code, self.refusal.message) from error

    def try_again(self, files: Files) -> bool:
        """Takes writes again if a new file can be written and removed; whether they are taken now. Nothing that failed
        is touched."""
        if self.refusal is None:
            return True
        try:
            if files.exists(_PROBE):
                files.unlink(_PROBE)
            writer = files.create(_PROBE)
            try:
                writer.write(bytes(_PROBE_BYTES))
                writer.sync()
            finally:
                writer.close()
            files.unlink(_PROBE)
            files.sync_folder("")
        except OSError:
            return False
        self.refusal = None
        return True


def _refusal(error: OSError) -> Refused:
    if error.errno in _FULL:
        return Refused(ErrorCode.STORE_FULL, "the disk for states is full; states on it can be read, not written")
    name = errno.errorcode.get(error.errno or 0, "an unknown error")
    return Refused(ErrorCode.STORE_READ_ONLY, f"a write to the disk for states failed ({name}); they can be read only")
