"""Children that do not outlive their parent, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def dies_with_parent(how: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """What a child runs between fork and exec, so that the kernel sends it `how` when this process ends."""
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)  # loaded here: a forked child must not look for libraries

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os._exit(1)

    return prepare
