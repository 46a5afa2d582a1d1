"""`wkvm bench`: of a server over HTTP, or of the engine alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

USAGE = """usage: wkvm bench {serve,engine} ...

  serve    load on any OpenAI-compatible server
  engine   the engine core by itself, without HTTP"""


def main(argv: Sequence[str]) -> int:
    """The benchmark's exit code; 2 for a wrong call."""
    if argv[:1] == ["serve"]:
        from wkvm_frontend.cli import bench_serve

        return bench_serve.main(argv[1:])
    if argv[:1] == ["engine"]:
        os.execv(sys.executable, [sys.executable, "-m", "wkvm_core.bench", *argv[1:]])  # noqa: S606 - our own program
    wants_help = argv[:1] in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if wants_help else sys.stderr)
    return 0 if wants_help else 2
