"""The command `wkvm`: each sub-command is a file of its own, loaded when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "serve": "a model over HTTP on this machine",
    "bench": "of a server over HTTP, or of the engine alone",
    "convert": "weights of another format into a model folder",
    "doctor": "says what would keep `wkvm serve` from working, and what to do",
    "version": "of wkvm; --all: also of what it stands on",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The sub-command's exit code."""
    listing = "\n".join(f"  {name:10}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="wkvm",
        description="A hypervisor for model state.",
        epilog=f"commands:\n{listing}\n\n`wkvm COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    module = importlib.import_module(f"wkvm_frontend.cli.{given.command}")
    return int(module.main(given.rest))


if __name__ == "__main__":
    sys.exit(main())
