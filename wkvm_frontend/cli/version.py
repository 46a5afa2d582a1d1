"""`wkvm version`."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

PARTS = ("torch", "pyzmq", "msgspec", "starlette", "uvicorn", "tokenizers")


def main(argv: Sequence[str]) -> int:
    """Prints the version of wkvm; with --all also those of Python and what it stands on."""
    parser = argparse.ArgumentParser(prog="wkvm version", description="The version of wkvm.", allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help="also of Python and of what wkvm stands on")
    given = parser.parse_args(argv)
    print(f"wkvm {own_version()}")
    if given.all:
        print(f"python {platform.python_version()}")
        for part in PARTS:
            print(f"{part} {installed(part) or 'missing'}")
    return 0


def own_version() -> str:
    """Of the installed package."""
    return installed("wkvm") or "unknown"


def installed(package: str) -> str | None:
    """The version of a package; None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
