"""Stands in for wkvm-core under a supervisor: its socket is a plain file, `--model` says how it behaves: `steady`,
`refuses` with exit code 78, `crashes` with 70 at once, `stubborn` about SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
print("flags", *sys.argv[1:], file=sys.stderr, flush=True)
model = flags["--model"]
if model == "refuses":
    print("error: no such model", file=sys.stderr)
    sys.exit(78)
if model == "crashes":
    sys.exit(70)
place = Path(flags["--socket"])
place.write_text(model)


def end(*_: object) -> None:
    if model != "stubborn":
        place.unlink(missing_ok=True)
        sys.exit(0)


signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, signal.SIG_IGN)

print("pid", os.getpid(), file=sys.stderr, flush=True)
while True:
    time.sleep(0.05)
