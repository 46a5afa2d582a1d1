"""`wkvm-core`: settings, locks, exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import ExitStack

from wkvm_core.daemon.config import CoreConfig, places
from wkvm_core.daemon.lock import Lock
from wkvm_core.errors import DeviceLost, Refused
from wkvm_proto.settings import BadSettings, resolve

EXIT_DEVICE_LOST = 70
EXIT_BAD_CONFIG = 78


def main() -> None:
    """Runs the daemon. Exit codes: 0 drained, 70 device lost, 78 bad configuration or a locked store."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """The same, with the exit code as its value."""
    # Waiting worker threads must not spin: frontends and mail live on the same cores. Read when the runtime is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        config = resolve(CoreConfig, "wkvm-core", argv, os.environ, description="The engine core of wkvm.")
        where = places(config)
        with ExitStack() as stack:
            stack.enter_context(Lock(where.store / "LOCK", "store", "choose another folder with --store"))
            stack.enter_context(
                Lock(where.socket.with_name(where.socket.name + ".lock"), "socket", "choose another with --socket")
            )
            _say("loading torch")
            # After the locks: a second daemon is told so at once, not after the seconds that torch takes to load.
            from wkvm_core.daemon.boot import serve

            serve(config, where, _say)
    except (BadSettings, Refused) as error:
        _say(f"error: {error}")
        return EXIT_BAD_CONFIG
    except DeviceLost as error:
        _say(f"error: {error}")
        return EXIT_DEVICE_LOST
    except KeyboardInterrupt:
        return 0
    except Exception:
        traceback.print_exc()
        return EXIT_DEVICE_LOST
    return 0


def _say(text: str) -> None:
    print(f"wkvm-core: {text}", file=sys.stderr, flush=True)
